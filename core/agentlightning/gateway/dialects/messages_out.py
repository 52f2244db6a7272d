"""Chat completions to Anthropic Messages: whole answers, streams with the API's sequence of events, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from agentlightning.gateway.dialects.base import Json
from agentlightning.gateway.dialects.blocks import Block, Cut, Cutter, blocks_of
from agentlightning.gateway.problems import Problem

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
DELTAS = {"reasoning": ("thinking_delta", "thinking"), "tool": ("input_json_delta", "partial_json")}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def answer(request: Json, call_id: str, chat: Json) -> Json:
    choice = chat["choices"][0]
    blocks = blocks_of(choice["message"], [], call_id)
    if not any(block.text for block in blocks) and blocks[0].kind == "text":
        blocks = []
    return _message(request, call_id, chat) | {
        "content": [_block(block, whole=True) for block in blocks],
        **_stopped(choice),
        "usage": _usage(chat.get("usage") or {}),
    }


class MessageEvents:
    """One stream; see `base.Events`."""

    def __init__(self, request: Json, call_id: str) -> None:
        self._request, self._id = request, call_id
        self._cutter = Cutter(call_id)
        self._begun = False
        self._last: Json = {}
        self._usage: Json = {}

    def feed(self, chunk: Json) -> Iterator[Json]:
        yield from self._begin(chunk)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            for cut in self._cutter.feed(choice.get("delta") or {}, []):
                yield self._cut(cut)
            if choice.get("finish_reason"):
                self._last = choice

    def end(self) -> Iterator[Json]:
        yield from self._begin({})
        for cut in self._cutter.end():
            yield self._cut(cut)
        yield {"type": "message_delta", "delta": _stopped(self._last), "usage": _usage(self._usage)}
        yield {"type": "message_stop"}

    def fail(self, problem: Problem) -> Iterator[Json]:
        yield error(problem)

    def _begin(self, chunk: Json) -> Iterator[Json]:
        """The prompt's length is not known yet; the last event but one tells it."""
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": _message(self._request, self._id, chunk)}

    def _cut(self, cut: Cut) -> Json:
        block, where = cut.block, {"index": cut.block.place}
        if cut.what == "open":
            return {"type": "content_block_start", **where, "content_block": _block(block, whole=False)}
        if cut.what == "close":
            return {"type": "content_block_stop", **where}
        kind, key = DELTAS.get(block.kind, ("text_delta", "text"))
        return {"type": "content_block_delta", **where, "delta": {"type": kind, key: cut.piece}}


def error(problem: Problem) -> Json:
    """The status decides the type. A full context has the words that Anthropic's own error begins with."""
    detail = problem.detail
    if problem.code == "context_length_exceeded":
        detail = f"prompt is too long: {detail}"
    kind = ERRORS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": detail, "code": problem.code}}


def parsed(arguments: str) -> Any:
    """Sampled arguments as the object that the API gives; what is no JSON object stands under `arguments`, whole."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _message(request: Json, call_id: str, chat: Json) -> Json:
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": chat.get("model") or request.get("model"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _stopped(choice: Json) -> Json:
    """Servers of vLLM's kind tell the stop string that ended a choice as its `stop_reason`."""
    text = choice.get("stop_reason")
    if isinstance(text, str) and text and choice.get("finish_reason") == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": text}
    return {"stop_reason": REASONS.get(choice.get("finish_reason") or "stop", "end_turn"), "stop_sequence": None}


def _usage(usage: Json) -> Json:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": (usage.get("prompt_tokens") or 0) - cached,
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _block(block: Block, *, whole: bool) -> Json:
    text = block.text if whole else ""
    if block.kind == "tool":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": parsed(text)}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}
