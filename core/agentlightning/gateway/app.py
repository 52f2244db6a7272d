"""The gateway's doors as a Starlette application: from a request to a call that is ready to go."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentlightning.errors import ConfigError
from agentlightning.gateway.call import Call
from agentlightning.gateway.dialects import DIALECTS, Dialect, Memory, Speech
from agentlightning.gateway.directory import Directory, Place
from agentlightning.gateway.identity import Caller, identify
from agentlightning.gateway.problems import Problem, Receive, Scope, Send
from agentlightning.gateway.proxy import Proxy
from agentlightning.gateway.sampling import Keep, Seeds, overrides, seed_of, shape
from agentlightning.gateway.wire import dumps, loads
from agentlightning.schema import new_id

logger = logging.getLogger("agentlightning.gateway")

CHAT, TEXT = "chat/completions", "completions"
TWICE = ("/attempts/{attempt}/agents/{agent:path}/v1/v1", "/attempts/{attempt}/v1/v1", "/v1/v1")
"""Anthropic's clients add `/v1` to a base URL that has one already."""
PREFIXES = ("/attempts/{attempt}/agents/{agent:path}/v1", "/attempts/{attempt}/v1", "/v1")
REMEMBERED = 65536
"""Cancelled attempts, and addresses of stray calls, that are remembered."""


class Door:
    """The ASGI application, its calls in flight and the attempts that are refused."""

    def __init__(self, directory: Directory, proxy: Proxy, more: Sequence[Route] = ()) -> None:
        self.proxy = proxy
        self._directory, self._seeds, self._memory = directory, Seeds(), Memory()
        self._flying: defaultdict[str | None, set[Call]] = defaultdict(set)
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._strays: OrderedDict[str, None] = OrderedDict()
        self.app = Starlette(
            routes=[
                *more,
                *(Route(f"{prefix}/{path}", _Calls(self, path)) for prefix in PREFIXES for path in (CHAT, TEXT)),
                *(
                    Route(f"{prefix}/{d.PATH}", _Calls(self, CHAT, d))
                    for prefix in (*TWICE, *PREFIXES)
                    for d in DIALECTS
                ),
                *(Route(f"{prefix}/models", self._models) for prefix in PREFIXES),
                *(Route(f"{prefix}/models/{{model:path}}", self._models) for prefix in PREFIXES),
            ],
            exception_handlers={404: _not_spoken, 405: _wrong_method, Problem: _problem},
        )

    @property
    def in_flight(self) -> int:
        return sum(map(len, list(self._flying.values())))  # a copy: other threads ask too

    def refuse(self, attempt_id: str) -> None:
        """From now on calls of this attempt get 410. Any thread."""
        self._refused[attempt_id] = None
        while len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)

    def stop(self, attempt_id: str) -> None:
        """Aborts the calls of this attempt that are in flight. The loop's thread."""
        for call in list(self._flying.get(attempt_id, ())):
            call.stop("cancelled")

    def stop_all(self) -> None:
        for attempt_id in list(self._flying):
            for call in list(self._flying[attempt_id]):
                call.stop("cancelled")

    async def serve(self, scope: Scope, receive: Receive, send: Send, path: str, dialect: Dialect | None) -> None:
        """One model call, from the request to the end of the answer. `path`: what the engine is asked for."""
        call = await self._understand(scope, await _body(receive), path, dialect)
        flying = self._flying[call.attempt_id]
        flying.add(call)
        watcher = asyncio.create_task(_watch(call, receive))
        found: str | None = "gateway_error"
        try:
            found = await self.proxy.serve(call, send)
        finally:
            watcher.cancel()
            flying.discard(call)
            if not flying:
                self._flying.pop(call.attempt_id, None)
            if found and call.place and call.ticket:
                self._seeds.give_back(call.place, call.ticket)

    async def _understand(self, scope: Scope, body: bytes, path: str, dialect: Dialect | None) -> Call:
        request, call_id = _parsed(body), new_id()
        caller = identify(scope["path_params"], scope["headers"])
        speech = None
        if dialect is not None:
            speech = Speech(dialect, request, self._memory.of(caller.attempt_id), call_id)
            request = speech.chat
        question = _question(request, path)
        place = await self._directory.place(caller.attempt_id)
        self._refuse_if_over(caller, place)
        target = await self._directory.target(place, str(request.get("model", "")), caller.path)
        self._refuse_if_over(caller, place)  # again: it may have been cancelled while we looked
        self.proxy.stats["calls"] += 1
        if place is None:
            self._stray(caller, scope["path"])
        try:
            changes = overrides(place.rollout, target) if place else None
        except ConfigError as error:
            raise Problem(422, "bad_sampling", str(error)) from error
        seeded = place is not None and target.policy is not None
        ticket = self._seeds.take(place, caller.path, question) if place and seeded else None
        seed = seed_of(place, ticket) if place and ticket else None
        ids = target.policy is not None or self.proxy.knows_ids(target.base_url)
        asked = shape(request, target, changes, seed, ids)
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        keep = Keep.of(request) if speech is None else Keep(bool(request.get("logprobs")), False, True)
        size = len(body) if speech is None else len(dumps(request))
        return Call(
            call_id, caller, place, target, request, asked, keep, ticket, task, path=path, speech=speech, size=size
        )

    def _refuse_if_over(self, caller: Caller, place: Place | None) -> None:
        if caller.attempt_id in self._refused or (place is not None and place.over):
            self.proxy.stats["refused"] += 1
            raise Problem(
                410,
                "attempt_ended",
                f"attempt {caller.attempt_id} has ended, was cancelled or was replaced by a newer one: stop this program, and "
                "build its model client inside the rollout function, from the `policy` that each attempt is given.",
            )

    def _stray(self, caller: Caller, path: str) -> None:
        self.proxy.stats["unattributed"] += 1
        key = f"{path} {caller.source}"
        if key not in self._strays:
            self._strays[key] = None
            while len(self._strays) > REMEMBERED:
                self._strays.popitem(last=False)
            named = f"attempt {caller.attempt_id} is not in the store" if caller.attempt_id else "no attempt is named"
            logger.warning(
                "a call to %s is stored as unattributed and never trained: %s. Use `policy.base_url` inside a rollout, or "
                "pass the callback so that the trace context names the attempt.",
                path,
                named,
            )

    async def _models(self, request: Request) -> Response:
        caller = identify(request.path_params, request.scope["headers"])
        names = await self._directory.models(await self._directory.place(caller.attempt_id))
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"} for name in names]
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": cards})
        card = next((card for card in cards if card["id"] == wanted), None)
        if card is None:
            known = ", ".join(names) or "none"
            raise Problem(404, "unknown_model", f"there is no model {wanted!r}: ask for one of these: {known}.")
        return JSONResponse(card)


class _Calls:
    """A class, so that Starlette hands over the raw connection: its own requests and responses cost 0.1 ms."""

    def __init__(self, door: Door, path: str, dialect: Dialect | None = None) -> None:
        self._door, self._path, self._dialect = door, path, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] != "POST":
                raise Problem(405, "wrong_method", "model calls are made with POST.")
            await self._door.serve(scope, receive, send, self._path, self._dialect)
        except Problem as problem:
            await self._refuse(problem, send)
        except Exception as error:  # a store may fail in its own ways; the client must hear of it
            logger.exception("a model call could not be served")
            await self._refuse(Problem(500, "gateway_error", f"the call could not be served: {error}"), send)

    async def _refuse(self, problem: Problem, send: Send) -> None:
        await problem.answer(send, dumps(self._dialect.error(problem)) if self._dialect else None)


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "client_disconnected", "the request ended before its body was complete: send it again.")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = loads(body)
    except ValueError as error:
        raise Problem(400, "bad_request", f"the body is no JSON ({error}): send a chat completion request.") from error
    if not isinstance(request, dict):
        raise Problem(400, "bad_request", "the body must be a JSON object: send a chat completion request.")
    return request


def _question(request: dict[str, Any], path: str) -> Any:
    """What the model is to go on from."""
    if path == CHAT:
        if not isinstance(request.get("messages"), list):
            raise Problem(400, "bad_request", "the body must be an object with a list `messages`: send a chat request.")
        return request["messages"]
    prompt = request.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)):
        return prompt
    raise Problem(
        400, "bad_request", "`prompt` must be one text or one list of token ids: make a call for each prompt."
    )


async def _watch(call: Call, receive: Receive) -> None:
    """Ends the call when its client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.stop("client_disconnected")


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return Response(error.body(), error.status, media_type="application/problem+json")


async def _not_spoken(request: Request, error: Exception) -> Response:
    detail = (
        f"the gateway does not serve {request.url.path}: it speaks OpenAI chat completions, Responses and completions, "
        "Anthropic Messages, and models. Point the client's base URL at `policy.base_url` (it ends in /v1) and use one of these."
    )
    return await _problem(request, Problem(404, "unknown_dialect", detail))


async def _wrong_method(request: Request, error: Exception) -> Response:
    return await _problem(request, Problem(405, "wrong_method", f"{request.url.path} is read with GET."))
