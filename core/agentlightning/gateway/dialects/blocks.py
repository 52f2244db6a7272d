"""An assistant's message as blocks: reasoning, text, refusal, one for each tool call.

Responses and Messages tell an answer block after block, one open at a time. Chat deltas may mix them. So the first tool
call closes what was open, streams as it comes and is held open; whatever else comes meanwhile waits for the end. Nothing
is ever lost or told twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

Json = dict[str, Any]

REASONING_KEYS = ("reasoning_content", "reasoning")
"""What servers call it; where one sends both, the first counts."""


class Block(msgspec.Struct, eq=False):
    """A part of an answer, as far as it has come."""

    kind: Literal["reasoning", "text", "refusal", "tool"]
    text: str = ""
    """Of a tool call: its arguments."""
    id: str = ""
    """Of a tool call."""
    name: str = ""
    logprobs: list[Json] = []
    place: int = 0
    """Where it stands in the answer; set when it opens."""


class Cut(NamedTuple):
    """One step of a stream of blocks."""

    what: Literal["open", "more", "close"]
    block: Block
    piece: str = ""
    logprobs: Sequence[Json] = ()


def blocks_of(message: Json, logprobs: list[Json], key: str) -> list[Block]:
    """The blocks of a whole message; a text block where it has nothing at all. `key` makes ids for tool calls that have
    none."""
    cutter = Cutter(key)
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or ())]
    found = [*cutter.feed({**message, "tool_calls": calls}, logprobs), *cutter.end()]
    blocks = [cut.block for cut in found if cut.what == "close"]
    return blocks or [Block("text")]


class Cutter:
    """Feed it deltas; see the module."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._open: Block | None = None
        self._waiting: list[Block] = []
        self._known: dict[Hashable, Block] = {}
        self._opened = 0

    def feed(self, delta: Json, logprobs: Sequence[Json]) -> Iterator[Cut]:
        reasoning = next((delta[key] for key in REASONING_KEYS if delta.get(key)), None)
        if reasoning:
            yield from self._add("reasoning", Block("reasoning"), reasoning)
        if delta.get("content"):
            yield from self._add("text", Block("text"), _text(delta["content"]), logprobs)
        if delta.get("refusal"):
            yield from self._add("refusal", Block("refusal"), delta["refusal"])
        for call in delta.get("tool_calls") or ():
            function, index = call.get("function") or {}, call.get("index") or 0
            fresh = Block("tool", "", call.get("id") or f"call_{self._key}_{index}", function.get("name") or "")
            yield from self._add(index, fresh, function.get("arguments") or "")

    def end(self) -> Iterator[Cut]:
        """Closes what is open, then tells what had to wait."""
        yield from self._close()
        for block in self._waiting:
            text, block.text = block.text, ""
            yield from self._begin(block)
            yield from self._more(block, text, block.logprobs)
            yield from self._close()
        self._waiting = []

    def _add(self, key: Hashable, fresh: Block, piece: str, logprobs: Sequence[Json] = ()) -> Iterator[Cut]:
        waits = self._open is not None and self._open.kind == "tool"
        block = self._known.get(key)
        if block is None or (block is not self._open and block not in self._waiting):
            block = self._known[key] = fresh
            if waits:
                self._waiting.append(block)
        if block in self._waiting:
            block.text += piece
            block.logprobs = [*block.logprobs, *logprobs]
            return
        if block is not self._open:
            yield from self._close()
            yield from self._begin(block)
        yield from self._more(block, piece, logprobs)

    def _begin(self, block: Block) -> Iterator[Cut]:
        self._open, block.place = block, self._opened
        self._opened += 1
        yield Cut("open", block)

    def _more(self, block: Block, piece: str, logprobs: Sequence[Json]) -> Iterator[Cut]:
        if piece:
            block.text += piece
            if logprobs is not block.logprobs:
                block.logprobs = [*block.logprobs, *logprobs]
            yield Cut("more", block, piece, logprobs)

    def _close(self) -> Iterator[Cut]:
        block, self._open = self._open, None
        if block is not None:
            yield Cut("close", block)


def _text(content: Any) -> str:
    """Content as text, also where a server sends it in parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
