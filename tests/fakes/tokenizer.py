"""A toy byte-level tokenizer: every id but the special ones is one UTF-8 byte, so characters do split over tokens."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any

EOS, START, END = 0, 1, 2
SPECIAL = {START: "<|im_start|>", END: "<|im_end|>", EOS: "<|endoftext|>"}
OFFSET = len(SPECIAL)
VOCABULARY = OFFSET + 256


def encode(text: str) -> list[int]:
    """Ids of a text without special tokens; surrogates that UTF-8 cannot hold become `?`."""
    return [byte + OFFSET for byte in text.encode("utf-8", "replace")]


def decode(ids: Iterable[int]) -> str:
    """Text of ids; special tokens are left out, broken characters become U+FFFD."""
    return bytes(i - OFFSET for i in ids if i >= OFFSET).decode("utf-8", "replace")


def token_text(token: int) -> str:
    """What an engine prints for one token."""
    return SPECIAL.get(token) or decode([token])


def render(messages: Sequence[dict[str, Any]]) -> list[int]:
    """The chat template: `<|im_start|>role\\ncontent[tool calls]<|im_end|>\\n`, then the assistant's opening."""
    ids: list[int] = []
    for message in messages:
        ids += [START, *encode(f"{message.get('role', '?')}\n{message_text(message)}"), END, *encode("\n")]
    return [*ids, START, *encode("assistant\n")]


def message_text(message: dict[str, Any]) -> str:
    """What the model sampled or read for one message: the content, then each tool call as JSON in its tags."""
    content = message.get("content") or ""
    thought = reasoning_text(message)
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return (
        thought
        + content
        + "".join(
            f"<tool_call>{json.dumps({'name': c['name'], 'arguments': c['arguments']}, ensure_ascii=False)}</tool_call>"
            for c in calls
        )
    )


def reasoning_text(message: dict[str, Any]) -> str:
    """What was sampled before the content of a message that thinks; this template keeps it in the history."""
    thought = message.get("reasoning_content")
    return f"<think>{thought}</think>" if thought else ""


class StreamDecoder:
    """Text of ids as they arrive: a character appears when its last byte has come."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int], final: bool = False) -> str:
        return self._decoder.decode(bytes(i - OFFSET for i in ids if i >= OFFSET), final)
