"""Deltas become blocks, one open at a time, and nothing is lost however they are mixed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.capture import merge
from agentlightning.gateway.dialects import Memory
from agentlightning.gateway.dialects.blocks import Cutter, blocks_of

PIECES = st.one_of(
    st.tuples(st.sampled_from(["reasoning_content", "content", "refusal"]), st.text(max_size=3)),
    st.tuples(st.integers(0, 2), st.text(max_size=3)),
)


def delta_of(key: Any, text: str) -> dict[str, Any]:
    if isinstance(key, str):
        return {key: text}
    return {"tool_calls": [{"index": key, "id": f"c{key}", "function": {"name": f"f{key}", "arguments": text}}]}


@given(st.lists(PIECES, max_size=12))
def test_any_mixture_of_deltas_is_told_whole_and_one_block_at_a_time(pieces: list[tuple[Any, str]]) -> None:
    cutter = Cutter("key")
    cuts = [cut for key, text in pieces for cut in cutter.feed(delta_of(key, text), [])] + list(cutter.end())
    opened: list[Any] = []
    texts: dict[Any, str] = {}
    for cut in cuts:
        if cut.what == "open":
            assert not opened and cut.block.place == len(texts)
            opened, texts[cut.block.place] = [cut.block], ""
        elif cut.what == "more":
            assert opened == [cut.block]
            texts[cut.block.place] += cut.piece
        else:
            assert opened == [cut.block] and texts[cut.block.place] == cut.block.text
            opened = []
    assert not opened
    told: dict[Any, str] = {}
    for cut in cuts:
        if cut.what == "close":
            name = cut.block.name or cut.block.kind
            told[name] = told.get(name, "") + cut.block.text
    names = {"reasoning_content": "reasoning", "content": "text", "refusal": "refusal"}
    for key in {key for key, _ in pieces}:
        whole = "".join(text for other, text in pieces if other == key)
        assert told.get(names.get(key, f"f{key}"), "") == whole
    calls = [cut.block.name for cut in cuts if cut.what == "close" and cut.block.kind == "tool"]
    assert len(calls) == len(set(calls))


@given(st.lists(PIECES, max_size=8))
def test_a_whole_message_has_the_blocks_of_its_stream_merged(pieces: list[tuple[Any, str]]) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for key, text in pieces:
        merge(message, delta_of(key, text))
    blocks = blocks_of(message, [], "key")
    for kind, key in (("reasoning", "reasoning_content"), ("text", "content"), ("refusal", "refusal")):
        assert "".join(block.text for block in blocks if block.kind == kind) == (message.get(key) or "")
    tools = [block.text for block in blocks if block.kind == "tool"]
    assert tools == [call["function"]["arguments"] for call in message.get("tool_calls", ())]


def test_a_tool_call_without_an_id_gets_one_of_its_own() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}, {"function": {"name": "g", "arguments": "{}"}}]
    assert [block.id for block in blocks_of({"tool_calls": calls}, [], "k")] == ["call_k_0", "call_k_1"]


def test_content_in_parts_is_a_text() -> None:
    (block,) = blocks_of({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [], "k")
    assert block.text == "ab"


def test_b100_the_memory_is_bounded_and_apart_for_each_attempt() -> None:
    memory = Memory(size=2)
    for name in ("a", "b", "c"):
        memory.of("one").put("response", name, name)
    assert [memory.of("one").get("response", name) for name in "abc"] == [None, "b", "c"]
    assert memory.of("two").get("response", "c") is None
