"""The HTTP door of the embedded engine: OpenAI's paths for everybody, control paths for the trainer that holds the key.

Bodies of the control paths are MessagePack (`agentlightning.schema.encode`); a refusal there is a text, status 409.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentlightning.errors import AgentLightningError

from .chat import Chat, ChatError, StopFinder
from .openai_api import ApiError, Ask, ChoiceStream, head, parse, prompt_tokens, usage, whole
from .torch_job import Job
from .torch_sampling import Uniforms

VERSION_HEADER = "x-agl-version"


Control = Callable[[bytes], "Future[Any]"]


class Server:
    """Builds the ASGI application. Requests are parsed and rendered here, on the event loop's thread."""

    def __init__(
        self,
        engine: Any,
        chat: Chat,
        *,
        context: int,
        eos: frozenset[int],
        seed: int,
        api_key: str,
        control_key: str,
        control: dict[str, Control],
    ) -> None:
        self.engine, self.chat, self.context, self.eos, self.seed = engine, chat, context, eos, seed
        self._api_key, self._control_key, self._control = api_key, control_key, control
        self._asked = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/control/{verb}", self._command, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={AgentLightningError: _refusal})

    # ---- OpenAI

    async def _models(self, request: Request) -> Response:
        self._authorise(request)
        models = [{"id": name, "object": "model", "owned_by": "agentlightning"} for name in self.engine.served]
        return JSONResponse({"object": "list", "data": models})

    async def _chat(self, request: Request) -> Response:
        return await self._complete(request, is_chat=True)

    async def _tokenize(self, request: Request) -> Response:
        """Tokens of a request's prompt, as vLLM counts them."""
        self._authorise(request)
        body = await _body(request)
        return JSONResponse({"count": prompt_tokens(body, self.chat), "max_model_len": self.context})

    async def _completions(self, request: Request) -> Response:
        return await self._complete(request, is_chat=False)

    def _authorise(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {self._api_key}":
            raise ApiError("wrong API key: use the one of the policy's endpoint.", status=401, code="invalid_api_key")

    async def _complete(self, request: Request, *, is_chat: bool) -> Response:
        self._authorise(request)
        body = await _body(request)
        ask = parse(body, self.chat, models=list(self.engine.served), context=self.context, is_chat=is_chat)
        news = asyncio.Event()
        jobs = self._submit(ask, news)
        try:
            if ask.stream:
                await _until(request, news, lambda: any(job.out or job.finish for job in jobs))
            else:
                await _until(request, news, lambda: all(job.finish for job in jobs))
            _raise_failure(jobs)
        except BaseException:
            _cancel(jobs)
            raise
        key = uuid.uuid4().hex
        headers = {VERSION_HEADER: str(jobs[0].version)}
        if ask.stream:
            return StreamingResponse(
                self._events(ask, jobs, news, key), headers=headers, media_type="text/event-stream"
            )
        return _Json(whole(ask, jobs, self.chat, key), headers=headers)

    def _submit(self, ask: Ask, news: asyncio.Event) -> list[Job]:
        self._asked += 1
        seed = self.seed * 1_000_003 + self._asked if ask.seed is None else ask.seed
        jobs = [
            Job(
                prompt=ask.prompt,
                model=ask.model,
                max_tokens=ask.max_tokens,
                uniforms=Uniforms(seed, choice),
                temperature=ask.temperature,
                top_p=ask.top_p,
                top_k=ask.top_k,
                stop_ids=ask.stop_ids if ask.ignore_eos else self.eos | ask.stop_ids,
                stopped=StopFinder(self.chat, ask.stops) if ask.stops else None,
                streaming=ask.stream,
                wake=news.set,
            )
            for choice in range(ask.n)
        ]
        for job in jobs:
            self.engine.submit(job)
        return jobs

    async def _events(self, ask: Ask, jobs: list[Job], news: asyncio.Event, key: str) -> AsyncIterator[bytes]:
        """Server-sent events. Tokens that came while the last chunk was being sent share the next one."""
        try:
            shared = head(ask, key, jobs[0].version, chunk=True)
            streams = [ChoiceStream(ask, job, index, self.chat, key) for index, job in enumerate(jobs)]
            first: dict[str, Any] = {"prompt_token_ids": jobs[0].prompt} if ask.ids else {}
            while not all(stream.done for stream in streams):
                news.clear()
                for stream in streams:
                    for choice in stream.advance():
                        yield _event({**shared, "choices": [choice], **first})
                        first = {}
                if any(job.finish in ("error", "cancelled") for job in jobs):
                    yield _event(ApiError(next(job.error for job in jobs if job.error), status=500).body())
                    return
                if not all(stream.done for stream in streams):
                    await news.wait()
            if ask.usage:
                yield _event({**shared, "choices": [], "usage": usage(jobs)})
            yield b"data: [DONE]\n\n"
        finally:
            _cancel(jobs)

    # ---- control

    async def _command(self, request: Request) -> Response:
        if request.headers.get("x-agl-key") != self._control_key:
            raise ApiError("control paths are for the trainer that started this engine.", status=401)
        run = self._control.get(request.path_params["verb"])
        if run is None:
            raise ApiError(f"no control verb {request.path_params['verb']!r}.", status=404)
        try:
            result = await asyncio.wrap_future(run(await request.body()))
        except AgentLightningError as error:
            return Response(str(error), status_code=409, media_type="text/plain")
        return Response(result, media_type="application/msgpack")


async def _body(request: Request) -> Any:
    """The standard library's parser: it lets lone surrogates through, which tools do produce."""
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from error


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return JSONResponse(error.body(), status_code=error.status)
    status = 400 if isinstance(error, ChatError) else 500
    return JSONResponse(ApiError(str(error), status=status).body(), status_code=status)


def _cancel(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.cancelled = True


def _raise_failure(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if job.finish in ("error", "cancelled"):
            raise ApiError(f"the engine failed: {job.error or 'the request was cancelled'}", status=500)


async def _until(request: Request, news: asyncio.Event, condition: Callable[[], bool]) -> None:
    """Waits for the engine. Raises ApiError when the client goes away first (nobody reads it then)."""
    if condition():
        return
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        while not condition():
            news.clear()
            if condition():
                return
            waiting = asyncio.ensure_future(news.wait())
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if gone.done():
                raise ApiError("the client went away.", status=499)
    finally:
        gone.cancel()


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
