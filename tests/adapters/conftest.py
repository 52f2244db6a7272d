"""Fixtures of the adapter tests. Each framework's tests have a folder; a session runs those of what it installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    "tests.conformance", "tests.adapters.replay"
)  # else a broken contract says AssertionError and no more

from tests.adapters import replay
from tests.adapters.world import World
from tests.fakes.engine import Script


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """`world(reply)` gives a running world."""
    with ExitStack() as stack:

        def make(reply: Script | str | None = None) -> World:
            return stack.enter_context(World(tmp_path, reply))

        yield make


@pytest.fixture
def recorded(shared_data: Path) -> Callable[..., replay.Recording]:
    """`recorded(name, run, of)`: a recorded run by its file's name, or one of several runs in a file."""
    return lambda name, *part: replay.Recording(shared_data / replay.FOLDER / f"{name}.json", *part)
