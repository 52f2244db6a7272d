"""The fake of the language model, and the only fake: a real HTTP server that answers in vLLM's shape.

    with FakeEngine(lambda request: "SELECT 1") as engine:
        client = openai.OpenAI(base_url=engine.base_url, api_key="none")

The script gets the request's JSON and returns the reply: a text, an assistant message (`{"content": .., "tool_calls":
[{"name": .., "arguments": ..}]}`, short or OpenAI form, also with `reasoning_content`), or a `Fault`. It may be a coroutine function, and is called
once per choice. Ids come from the toy tokenizer, log-probabilities from `logprob(id, position)`.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agentlightning.schema import Endpoint, Route
from tests.fakes import tokenizer
from tests.fakes.http import Exchange, Server

Json = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, and the reply that it goes wrong with."""

    kind: str
    """`no_ids`, `no_prompt_ids`, `no_logprobs`, `short_logprobs`, `short_ids` (tool deltas without ids in streams),
    `wrong_usage`, `no_usage`, `nan_logprobs`, `empty`, `no_finish`, `bad_json`, `status`, `hang`, `cut`, `slow`,
    `error_chunk` (streams: an error in the middle)."""
    reply: str | Json = "hello"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0
    """`cut` and `error_chunk`: how many chunks of a stream go out before; otherwise before the answer."""
    delay: float = 0.05
    """`slow`: seconds before each chunk, or before the whole answer."""


Script = Callable[[Json], "str | Json | Fault | Awaitable[str | Json | Fault]"]


@dataclass
class Seen:
    """A request as the engine saw it."""

    body: Json
    headers: dict[str, str]
    path: str
    state: str = "open"
    """`open`, `answered`, or `aborted` (the client went away first)."""


def logprob(token: int, position: int) -> float:
    """The log-probability the engine reports for an id at a position of the response."""
    return -((token * 31 + position * 17) % 97 + 1) / 64


def echo(request: Json) -> str:
    """The default script: depends on the messages and the seed alone."""
    material = json.dumps([request.get("messages"), request.get("seed")], sort_keys=True)
    return f"reply {hashlib.sha256(material.encode()).hexdigest()[:12]}"


class FakeEngine:
    """`version` is stamped on answers (`stamp`: where) and may be changed at any time."""

    def __init__(
        self,
        reply: Script | str | None = None,
        *,
        version: int | None = 0,
        models: Sequence[str] = (),
        stamp: str = "both",
        chunk_tokens: int = 4,
        port: int = 0,
    ) -> None:
        """`models`: others are refused with 404; empty: all are served. `stamp`: `body`, `header`, `both`, `none`."""
        self.reply: Script = (lambda _: reply) if isinstance(reply, str) else reply or echo
        self.version, self.models, self.stamp, self.chunk_tokens = version, tuple(models), stamp, chunk_tokens
        self.before_chunk: Callable[[int], Awaitable[None]] | None = None
        """Awaited before each chunk of a stream, with its number."""
        self.before_ids: Callable[[list[int]], list[int]] | None = None
        """Changes the ids that are told for an answer, and not its text."""
        self.requests: list[Seen] = []
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._server = Server(self._answer, port)

    def start(self) -> Self:
        self._server.start()
        return self

    def close(self) -> None:
        self._server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def base_url(self) -> str:
        return f"{self._server.url}/v1"

    @property
    def active(self) -> int:
        """Requests that are being answered now."""
        return self._server.active

    def endpoint(self, routes: Sequence[Route] = (), context: int = 4096) -> Endpoint:
        """How a policy back end would announce this engine; by default one route that serves all agents."""
        default = (Route("*", self.models[0] if self.models else "base", True),)
        return Endpoint(self.base_url, "engine-key", tuple(routes) or default, context)

    def wait(self, predicate: Callable[[FakeEngine], bool], timeout_s: float = 10.0) -> None:
        """Blocks until something is true of the engine; AssertionError when it does not become true."""
        end = time.monotonic() + timeout_s
        while not predicate(self):
            assert time.monotonic() < end, f"the engine never got there; requests: {[s.state for s in self.requests]}"
            time.sleep(0.002)

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": "fake"} for name in self.models or ("base",)]
            return exchange.send(200, _json({"object": "list", "data": data}))
        if exchange.path not in ("/v1/chat/completions", "/v1/completions"):
            return exchange.send(404, _error(f"no {exchange.path} here", 404))
        seen = Seen(json.loads(exchange.body), exchange.headers, exchange.path)
        with self._lock:
            self.requests.append(seen)
        try:
            await self._chat(exchange, seen.body)
            seen.state = "answered"
        except asyncio.CancelledError:
            seen.state = "aborted"
            raise

    async def _chat(self, exchange: Exchange, body: Json) -> None:
        if self.models and body.get("model") not in self.models:
            return exchange.send(404, _error(f"the model {body.get('model')} does not exist", 404))
        choices, fault = [], None
        for index in range(body.get("n") or 1):
            reply = self.reply(body)
            reply = await reply if inspect.isawaitable(reply) else reply
            if isinstance(reply, Fault):
                fault, reply = reply, reply.reply
            choices.append(_Choice(index, reply, body, fault))
            if self.before_ids is not None:
                choices[-1].ids = self.before_ids(choices[-1].ids)
        version = self.version
        headers = {"x-agl-version": str(version)} if self.stamp in ("header", "both") and version is not None else {}
        if fault is not None and await _breaks(exchange, fault, streaming=bool(body.get("stream"))):
            return
        if body.get("stream"):
            await self._stream(exchange, body, choices, fault, headers, version)
        else:
            exchange.send(200, self._whole(body, choices, fault, version), headers)

    def _head(self, body: Json, kind: str, version: int | None) -> Json:
        stamp = f"agl-{version}" if self.stamp in ("body", "both") and version is not None else None
        return {
            "id": f"chatcmpl-{next(self._ids)}",
            "object": kind,
            "created": 1_700_000_000,
            "model": body.get("model"),
            "system_fingerprint": stamp,
        }

    def _whole(self, body: Json, choices: list[_Choice], fault: Fault | None, version: int | None) -> bytes:
        kind = fault.kind if fault else ""
        prompt = _prompt(body)
        answer = self._head(body, "chat.completion", version) | {"choices": [c.whole() for c in choices]}
        if "prompt" in body:
            answer["choices"] = [_as_text(choice, prompt, body) for choice in answer["choices"]]
        if kind != "no_usage":
            answer["usage"] = _usage(prompt, choices, kind)
        if body.get("return_token_ids") and kind not in ("no_ids", "no_prompt_ids") and "prompt" not in body:
            answer["prompt_token_ids"] = prompt
        return _json(answer)

    async def _stream(
        self,
        exchange: Exchange,
        body: Json,
        choices: list[_Choice],
        fault: Fault | None,
        headers: dict[str, str],
        version: int | None,
    ) -> None:
        kind = fault.kind if fault else ""
        prompt = _prompt(body)
        head = self._head(body, "chat.completion.chunk", version)
        exchange.start_stream(headers)
        parts = [c.parts(self.chunk_tokens) for c in choices]
        for sent, choice in enumerate(c for together in itertools.zip_longest(*parts) for c in together if c):
            if fault and fault.kind in ("cut", "error_chunk") and sent >= fault.after:
                if kind == "cut":
                    return exchange.cut()
                exchange.chunk(b"data: " + _error("the engine broke", 500) + b"\n\n")
                break
            if fault and kind == "slow":
                await asyncio.sleep(fault.delay)
            if self.before_chunk is not None:
                await self.before_chunk(sent)
            chunk = {**head, "choices": [choice]}
            if "prompt" in body:
                chunk["choices"] = [_as_text(choice, prompt if sent == 0 else None, body)]
            elif sent == 0 and body.get("return_token_ids") and kind not in ("no_ids", "no_prompt_ids"):
                chunk["prompt_token_ids"] = prompt
            exchange.chunk(b"data: " + _json(chunk) + b"\n\n")
            await asyncio.sleep(0)
        if (body.get("stream_options") or {}).get("include_usage") and kind != "no_usage":
            exchange.chunk(b"data: " + _json({**head, "choices": [], "usage": _usage(prompt, choices, kind)}) + b"\n\n")
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.end_stream()


def _prompt(body: Json) -> list[int]:
    """The prompt's ids: of messages by the template, of a text as it is."""
    if "messages" in body:
        return tokenizer.render(body["messages"])
    prompt = body["prompt"]
    return tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _as_text(choice: Json, prompt: list[int] | None, body: Json) -> Json:
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


class _Choice:
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


async def _breaks(exchange: Exchange, fault: Fault, streaming: bool) -> bool:
    """Faults that leave no answer."""
    if fault.kind == "status":
        exchange.send(fault.status, _error("scripted fault", fault.status), fault.headers)
        return True
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "cut" and not (streaming and fault.after):
        exchange.cut()
        return True
    if fault.kind == "bad_json":
        exchange.send(200, b'{"choices": [')
        return True
    if fault.kind == "slow" and not streaming:
        await asyncio.sleep(fault.delay)
    return False


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


def _usage(prompt: list[int], choices: list[_Choice], fault: str) -> Json:
    sampled = sum(len(c.ids) for c in choices) + (3 if fault == "wrong_usage" else 0)
    return {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}


def _json(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def _error(message: str, code: int) -> bytes:
    return _json({"error": {"message": message, "type": "fake", "code": code}})
