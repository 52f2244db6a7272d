"""Chat completions to OpenAI Responses: whole answers, and streams with the API's sequence of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from agentlightning.gateway.dialects.base import Json
from agentlightning.gateway.dialects.blocks import Block, Cut, Cutter, blocks_of
from agentlightning.gateway.problems import Problem

ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""What a response repeats of its request, with what stands for absent keys."""

PREFIXES = {"reasoning": "rs", "text": "msg", "refusal": "msg", "tool": "fc"}
DELTAS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "refusal": "response.refusal",
    "tool": "response.function_call_arguments",
}


def answer(request: Json, call_id: str, chat: Json) -> Json:
    choice = chat["choices"][0]
    blocks = blocks_of(choice["message"], (choice.get("logprobs") or {}).get("content") or [], call_id)
    return _response(request, call_id, chat) | _ending(choice.get("finish_reason"), blocks, call_id, chat.get("usage"))


class ResponseEvents:
    """One stream; see `base.Events`."""

    def __init__(self, request: Json, call_id: str) -> None:
        self._request, self._id = request, call_id
        self._cutter, self._blocks = Cutter(call_id), list[Block]()
        self._base: Json = {}
        self._finish: str | None = None
        self._usage: Json | None = None
        self._sent = 0

    def feed(self, chunk: Json) -> Iterator[Json]:
        yield from self._begin(chunk)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            for cut in self._cutter.feed(choice.get("delta") or {}, logprobs):
                yield from self._cut(cut)
            self._finish = choice.get("finish_reason") or self._finish

    def end(self) -> Iterator[Json]:
        yield from self._begin({})
        for cut in self._cutter.end():
            yield from self._cut(cut)
        if not self._blocks:
            empty = Block("text")
            yield from self._cut(Cut("open", empty))
            yield from self._cut(Cut("close", empty))
        ending = _ending(self._finish, self._blocks, self._id, self._usage)
        yield self._event(f"response.{ending['status']}", response=self._base | ending)

    def fail(self, problem: Problem) -> Iterator[Json]:
        """The `error` within the event is what the SDK raises from."""
        yield from self._begin({})
        told = {"code": problem.code, "message": problem.detail}
        yield self._event("error", param=None, error=told, **told)
        yield self._event("response.failed", response=self._base | {"status": "failed", "error": told})

    def _begin(self, chunk: Json) -> Iterator[Json]:
        if not self._base:
            self._base = _response(self._request, self._id, chunk)
            yield self._event("response.created", response=self._base)
            yield self._event("response.in_progress", response=self._base)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _cut(self, cut: Cut) -> Iterator[Json]:
        block = cut.block
        where = {"item_id": _item_id(block, self._id), "output_index": block.place}
        part = where | {"content_index": 0}
        if cut.what == "open":
            self._blocks.append(block)
            item = _item(block, self._id, "in_progress")
            yield self._event("response.output_item.added", output_index=block.place, item=item)
            if block.kind != "tool":
                yield self._event("response.content_part.added", part=_part(block), **part)
        elif cut.what == "more":
            yield self._event(f"{DELTAS[block.kind]}.delta", delta=cut.piece, **self._place(block, part, cut.logprobs))
        else:
            key = {"tool": "arguments", "refusal": "refusal"}.get(block.kind, "text")
            more = {"name": block.name} if block.kind == "tool" else {}
            done = self._place(block, part, block.logprobs)
            yield self._event(f"{DELTAS[block.kind]}.done", **{key: block.text}, **more, **done)
            if block.kind != "tool":
                yield self._event("response.content_part.done", part=_part(block), **part)
            item = _item(block, self._id, "completed")
            yield self._event("response.output_item.done", output_index=block.place, item=item)

    def _place(self, block: Block, part: Json, logprobs: Sequence[Json]) -> Json:
        if block.kind == "tool":
            return {key: value for key, value in part.items() if key != "content_index"}
        return part | ({"logprobs": logprobs} if block.kind == "text" else {})


def _response(request: Json, call_id: str, chat: Json) -> Json:
    said = {key: request[key] if request.get(key) is not None else default for key, default in ECHOED.items()}
    return {
        "id": f"resp_{call_id}",
        "object": "response",
        "created_at": chat.get("created") or int(time.time()),
        "model": chat.get("model") or request.get("model"),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **said,
    }


def _ending(finish: str | None, blocks: list[Block], call_id: str, usage: Json | None) -> Json:
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(finish or "")
    status = "incomplete" if reason else "completed"
    items = [_item(block, call_id, "completed") for block in blocks]
    if reason and items:
        items[-1]["status"] = "incomplete"
    return {
        "status": status,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": items,
        "usage": _usage(usage) if usage else None,
    }


def _usage(usage: Json) -> Json:
    read, written = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    prompt, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": written.get("reasoning_tokens") or 0},
        "total_tokens": prompt + sampled,
    }


def _item_id(block: Block, call_id: str) -> str:
    return f"{PREFIXES[block.kind]}_{call_id}_{block.place}"


def _item(block: Block, call_id: str, status: str) -> Json:
    item: Json = {"id": _item_id(block, call_id), "status": status}
    if block.kind == "tool":
        return item | {"type": "function_call", "call_id": block.id, "name": block.name, "arguments": block.text}
    content = [] if status == "in_progress" else [_part(block)]
    if block.kind == "reasoning":
        return item | {"type": "reasoning", "summary": [], "content": content}
    return item | {"type": "message", "role": "assistant", "content": content}


def _part(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    if block.kind == "refusal":
        return {"type": "refusal", "refusal": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
