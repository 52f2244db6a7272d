"""A look at values of a user's program: bounded, and never in its way."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.plain import brief


@pytest.mark.parametrize(
    ("value", "look"),
    [
        ({1: "a", "b": [2.5, None]}, {"1": "a", "b": [2.5, None]}),
        ("x" * 4001, "x" * 4000 + "... (4001 characters)"),
        (list(range(52)), [*range(50), "... (52 items)"]),
        ({i: i for i in range(60)}, {str(i): i for i in range(50)}),
        ([[[[["deep"]]]]], [[[["['deep']"]]]]),
        (b"bytes", "b'bytes'"),
        (float("nan"), "nan"),
    ],
)
def test_a_look_is_bounded(value: object, look: object) -> None:
    assert brief(value) == look


def test_a_framework_says_what_matters_in_its_own_values() -> None:
    class Message:
        def __init__(self, text: str) -> None:
            self.text = text

    def convert(value: Any) -> Any:
        return {"said": value.text} if isinstance(value, Message) else value

    assert brief({"messages": [Message("a"), Message("b" * 5000)]}, convert=convert) == {
        "messages": [{"said": "a"}, {"said": "b" * 4000 + "... (5000 characters)"}]
    }
