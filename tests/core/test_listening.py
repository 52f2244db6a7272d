"""What adapters listen with: put in place once, put back whole, and never in the way of the program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.listening import Installation, Patches, Trouble, guarded


class Framework:
    def say(self, text: str) -> str:
        return text


class Extended(Framework):
    pass


def loud(original: Callable[..., str]) -> Callable[..., str]:
    return lambda self, text: original(self, text).upper()


def listen(patches: Patches) -> None:
    patches.replace(Framework, "say", loud)


@pytest.fixture(autouse=True)
def untouched() -> Any:
    before = dict(vars(Framework)), dict(vars(Extended))
    yield
    assert (dict(vars(Framework)), dict(vars(Extended))) == before


def test_it_is_there_once_and_until_the_last_user_has_gone() -> None:
    installation = Installation(listen)
    first, second = installation.add(), installation.add()
    assert Framework().say("a") == "A"
    first()
    assert Framework().say("a") == "A"
    second()
    assert Framework().say("a") == "a"
    installation.add()()


def test_a_listener_that_fails_leaves_nothing_and_may_be_tried_again() -> None:
    tries: list[int] = []

    def sometimes(patches: Patches) -> None:
        listen(patches)
        tries.append(1)
        if len(tries) == 1:
            raise AttributeError("another release of the framework")

    installation = Installation(sometimes)
    with pytest.raises(AttributeError, match="another release"):
        installation.add()
    assert Framework().say("a") == "a"
    installation.add()()


def test_what_somebody_else_put_over_ours_stays() -> None:
    patches = Patches()
    listen(patches)
    ours = Framework.say
    Framework.say = theirs = lambda self, text: ours(self, text) + "!"  # type: ignore[method-assign]
    patches.close()
    assert Framework.say is theirs and not patches.active
    Framework.say = ours.__closure__[0].cell_contents  # type: ignore[method-assign,index]


def test_a_method_that_was_added_is_taken_away() -> None:
    patches = Patches()
    patches.add(Extended, "say", lambda self, text: "added")
    assert Extended().say("a") == "added"
    patches.close()
    assert Extended().say("a") == "a"


def test_our_own_failures_are_said_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @guarded
    def breaks(*, why: str) -> int:
        raise ValueError(why)

    monkeypatch.setattr(Trouble, "count", 0)
    with caplog.at_level(logging.ERROR):
        assert breaks(why="one") is None and breaks(why="two") is None
    assert Trouble.count == 2
    assert [record.getMessage().split()[0] for record in caplog.records] == ["breaks"]
