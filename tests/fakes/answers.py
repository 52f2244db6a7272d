"""What the fake engine says: messages with their ids and log-probabilities, whole or in parts, good or faulty."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and the reply that it goes wrong with."""

    kind: str
    """`no_ids`, `no_prompt_ids`, `no_logprobs`, `short_logprobs`, `short_ids` (tool deltas without ids in streams),
    `wrong_usage`, `no_usage`, `nan_logprobs`, `empty`, `no_finish`, `bad_json`, `status`, `hang`, `cut`, `slow`,
    `error_chunk` (streams: an error in the middle), `new_weights` (streams: another version from a chunk on)."""
    reply: str | Json = "hello"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0
    """`cut` and `error_chunk`: how many chunks of a stream go out before; otherwise before the answer."""
    delay: float = 0.05
    """`slow`: seconds before each chunk, or before the whole answer."""


def logprob(token: int, position: int) -> float:
    """The log-probability the engine reports for an id at a position of the response."""
    return -((token * 31 + position * 17) % 97 + 1) / 64


def prompt_ids(body: Json) -> list[int]:
    """The prompt's ids: of messages by the template, of a text as it is."""
    if "messages" in body:
        return tokenizer.render(body["messages"])
    prompt = body["prompt"]
    return tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def as_text(choice: Json, prompt: list[int] | None, body: Json) -> Json:
    """A choice, or a part of one, in the shape of text completions; vLLM puts the prompt's ids into the choice."""
    said = choice.pop("message", None) or choice.pop("delta", None) or {}
    content = (choice.get("logprobs") or {}).get("content")
    if content is not None:
        choice["logprobs"] = {
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
        }
    ids = {"prompt_token_ids": prompt} if prompt is not None and body.get("return_token_ids") else {}
    return choice | {"text": said.get("content") or ""} | ids


class Choice:
    """One sampled answer: its message, ids and log-probabilities, whole or in parts."""

    def __init__(self, index: int, reply: str | Json, body: Json, fault: Fault | None) -> None:
        self.index, self.body, self.fault = index, body, fault.kind if fault else ""
        self.message = _message(reply)
        self.finish: str | None = "tool_calls" if self.message.get("tool_calls") else "stop"
        text = tokenizer.message_text(self.message)
        for stop in _stops(body):
            if stop in text:
                self.message["content"] = text = text.partition(stop)[0]
        self.ids = [*tokenizer.encode(text), tokenizer.END]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit and len(self.ids) > limit:
            self.ids, self.finish = self.ids[:limit], "length"
            self.message = {"role": "assistant", "content": tokenizer.decode(self.ids)}
        if self.fault == "empty":
            self.ids, self.message = [], {"role": "assistant", "content": ""}
        if self.fault == "no_finish":
            self.finish = None

    def whole(self) -> Json:
        choice: Json = {"index": self.index, "message": self.message, "finish_reason": self.finish}
        return choice | self._tokens(0, len(self.ids))

    def parts(self, size: int) -> list[Json]:
        """Deltas of `size` tokens; the text of a tool call is its own kind of delta."""
        decoder = tokenizer.StreamDecoder()
        first = {"index": self.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        parts: list[Json] = [first]
        calls = self.message.get("tool_calls") or []
        thought = tokenizer.reasoning_text(self.message)
        start = len(tokenizer.encode(thought))
        content = start + len(tokenizer.encode(self.message.get("content") or ""))
        for a in range(0, start, size):
            cuts = [len(self.message["reasoning_content"]) * edge // start for edge in (a, min(a + size, start))]
            delta = {"reasoning_content": self.message["reasoning_content"][slice(*cuts)]}
            tokens = self._tokens(a, min(a + size, start))
            parts.append({"index": self.index, "delta": delta, "finish_reason": None} | tokens)
        spans = [(a, min(a + size, content)) for a in range(start, content, size)]
        for a, b in spans:
            delta = {"content": decoder.feed(self.ids[a:b], final=b == content)}
            parts.append({"index": self.index, "delta": delta, "finish_reason": None} | self._tokens(a, b))
        for delta, a, b in _call_deltas(calls, content, len(self.ids) - 1, size):
            tokens = {} if self.fault == "short_ids" else self._tokens(a, b)
            parts.append({"index": self.index, "delta": delta, "finish_reason": None} | tokens)
        told = sum(len(p.get("token_ids") or ()) for p in parts) if self.fault != "short_ids" else len(self.ids) - 1
        last = {"index": self.index, "delta": {}, "finish_reason": self.finish}
        told = len(self.ids) - 1 if not self.body.get("return_token_ids") or self.fault == "no_ids" else told
        return [*parts, last | self._tokens(told, len(self.ids))]

    def _tokens(self, a: int, b: int) -> Json:
        fields: Json = {"logprobs": None}
        if self.body.get("return_token_ids") and self.fault != "no_ids":
            fields["token_ids"] = self.ids[a:b]
        if self.body.get("logprobs") and self.fault != "no_logprobs":
            end = len(self.ids) - 1 if self.fault == "short_logprobs" else len(self.ids)
            fields["logprobs"] = {"content": [self._logprob(i) for i in range(a, min(b, end))]}
        return fields

    def _logprob(self, position: int) -> Json:
        token = self.ids[position]
        value = -9999.0 if self.fault == "nan_logprobs" and position == 0 else logprob(token, position)
        data = [token - tokenizer.OFFSET] if token >= tokenizer.OFFSET else None
        return {"token": tokenizer.token_text(token), "logprob": value, "bytes": data, "top_logprobs": []}


def _call_deltas(calls: list[Json], start: int, end: int, size: int) -> list[tuple[Json, int, int]]:
    """Tool calls as deltas with the ids they stand for: name first, then the arguments in pieces."""
    deltas: list[Json] = []
    for index, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": function}]})
        text = call["function"]["arguments"]
        for a in range(0, len(text), size):
            piece = {"index": index, "function": {"arguments": text[a : a + size]}}
            deltas.append({"tool_calls": [piece]})
    cuts = [start + (end - start) * i // max(len(deltas), 1) for i in range(len(deltas) + 1)]
    return [(delta, cuts[i], cuts[i + 1]) for i, delta in enumerate(deltas)]


def _message(reply: str | Json) -> Json:
    if isinstance(reply, str):
        return {"role": "assistant", "content": reply}
    message = {"role": "assistant", "content": reply.get("content")}
    if reply.get("reasoning_content"):
        message["reasoning_content"] = reply["reasoning_content"]
    if reply.get("tool_calls"):
        message["tool_calls"] = [_tool_call(i, call) for i, call in enumerate(reply["tool_calls"])]
    return message


def _tool_call(index: int, call: Json) -> Json:
    function = call.get("function", call)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id", f"call_{index}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _stops(body: Json) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


def usage(prompt: list[int], choices: list[Choice], fault: str) -> Json:
    sampled = sum(len(c.ids) for c in choices) + (3 if fault == "wrong_usage" else 0)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
