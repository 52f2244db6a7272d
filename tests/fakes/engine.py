"""The fake of the language model, and the only fake: a real HTTP server that answers in vLLM's shape.

    with FakeEngine(lambda request: "SELECT 1") as engine:
        client = openai.OpenAI(base_url=engine.base_url, api_key="none")

The script gets the request's JSON and returns the reply: a text, an assistant message (`{"content": .., "tool_calls":
[{"name": .., "arguments": ..}]}`, short or OpenAI form, also with `reasoning_content`), or a `Fault`. It may be a coroutine function, and is
called once per choice. Ids come from the toy tokenizer, log-probabilities from `answers.logprob(id, position)`.
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
from dataclasses import dataclass
from typing import Any, Self

from agentlightning.schema import Endpoint, Route
from tests.fakes import responses
from tests.fakes.answers import Choice, Fault, as_text, prompt_ids, usage
from tests.fakes.http import Exchange, Server

Json = dict[str, Any]


Script = Callable[[Json], "str | Json | Fault | Awaitable[str | Json | Fault]"]


@dataclass
class Seen:
    """A request as the engine saw it."""

    body: Json
    headers: dict[str, str]
    path: str
    state: str = "open"
    """`open`, `answered`, or `aborted` (the client went away first)."""


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
        context: int | None = None,
        port: int = 0,
    ) -> None:
        """`models`: others are refused with 404; empty: all are served. `stamp`: `body`, `header`, `both`, `none`."""
        self.reply: Script = (lambda _: reply) if isinstance(reply, str) else reply or echo
        self.version, self.models, self.stamp, self.chunk_tokens = version, tuple(models), stamp, chunk_tokens
        self.context = context
        """Tokens that a prompt and its answer may have; None: any number."""
        self.counted = 0
        """Requests to `/tokenize`."""
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
        if exchange.path == "/tokenize":
            self.counted += 1
            return exchange.send(200, _json({"count": len(prompt_ids(json.loads(exchange.body)))}))
        if exchange.path not in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
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
        if (refusal := self._too_long(body)) is not None:
            return exchange.send(400, refusal)
        choices, fault = [], None
        for index in range(body.get("n") or 1):
            reply = self.reply(body)
            reply = await reply if inspect.isawaitable(reply) else reply
            if isinstance(reply, Fault):
                fault, reply = reply, reply.reply
            choices.append(Choice(index, reply, body, fault))
            if self.before_ids is not None:
                choices[-1].ids = self.before_ids(choices[-1].ids)
        version = self.version
        headers = {"x-agl-version": str(version)} if self.stamp in ("header", "both") and version is not None else {}
        if fault is not None and await _breaks(exchange, fault, streaming=bool(body.get("stream"))):
            return
        if "input" in body:
            await responses.send(exchange, body, choices[0].message, len(choices[0].ids), next(self._ids))
        elif body.get("stream"):
            await self._stream(exchange, body, choices, fault, headers, version)
        else:
            exchange.send(200, self._whole(body, choices, fault, version), headers)

    def _too_long(self, body: Json) -> bytes | None:
        """vLLM's refusal."""
        if self.context is None:
            return None
        prompt = len(prompt_ids(body))
        if prompt + (body.get("max_tokens") or 1) <= self.context:
            return None
        return _error(f"This model's maximum context length is {self.context} tokens; {prompt} in the messages", 400)

    def _head(self, body: Json, kind: str, version: int | None) -> Json:
        stamp = f"agl-{version}" if self.stamp in ("body", "both") and version is not None else None
        return {
            "id": f"chatcmpl-{next(self._ids)}",
            "object": kind,
            "created": 1_700_000_000,
            "model": body.get("model"),
            "system_fingerprint": stamp,
        }

    def _whole(self, body: Json, choices: list[Choice], fault: Fault | None, version: int | None) -> bytes:
        kind = fault.kind if fault else ""
        prompt = prompt_ids(body)
        answer = self._head(body, "chat.completion", version) | {"choices": [c.whole() for c in choices]}
        if "prompt" in body:
            answer["choices"] = [as_text(choice, prompt, body) for choice in answer["choices"]]
        if kind != "no_usage":
            answer["usage"] = usage(prompt, choices, kind)
        if body.get("return_token_ids") and kind not in ("no_ids", "no_prompt_ids") and "prompt" not in body:
            answer["prompt_token_ids"] = prompt
        return _json(answer)

    async def _stream(
        self,
        exchange: Exchange,
        body: Json,
        choices: list[Choice],
        fault: Fault | None,
        headers: dict[str, str],
        version: int | None,
    ) -> None:
        kind = fault.kind if fault else ""
        prompt = prompt_ids(body)
        head = self._head(body, "chat.completion.chunk", version)
        exchange.start_stream(headers)
        parts = [c.parts(self.chunk_tokens) for c in choices]
        for sent, choice in enumerate(c for together in itertools.zip_longest(*parts) for c in together if c):
            if fault and fault.kind in ("cut", "error_chunk") and sent >= fault.after:
                if kind == "cut":
                    return exchange.cut()
                exchange.chunk(b"data: " + _error("the engine broke", 500) + b"\n\n")
                break
            if fault and kind == "new_weights" and sent == fault.after:
                head["system_fingerprint"] = f"agl-{(version or 0) + 1}"
            if fault and kind == "slow":
                await asyncio.sleep(fault.delay)
            if self.before_chunk is not None:
                await self.before_chunk(sent)
            chunk = {**head, "choices": [choice]}
            if "prompt" in body:
                chunk["choices"] = [as_text(choice, prompt if sent == 0 else None, body)]
            elif sent == 0 and body.get("return_token_ids") and kind not in ("no_ids", "no_prompt_ids"):
                chunk["prompt_token_ids"] = prompt
            exchange.chunk(b"data: " + _json(chunk) + b"\n\n")
            await asyncio.sleep(0)
        if (body.get("stream_options") or {}).get("include_usage") and kind != "no_usage":
            exchange.chunk(b"data: " + _json({**head, "choices": [], "usage": usage(prompt, choices, kind)}) + b"\n\n")
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.end_stream()


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


def _json(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def _error(message: str, code: int) -> bytes:
    return _json({"error": {"message": message, "type": "fake", "code": code}})
