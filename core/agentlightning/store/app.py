"""The store's doors as a Starlette application: `/store/<method>`, `/v1/traces`, health, and what Prometheus reads.

A store blocks, so it is called on threads. Keys are looked at before a body is read, and a body is checked whole before
anything is written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from agentlightning.errors import Forbidden
from agentlightning.schema import SCHEMA_VERSION
from agentlightning.store import requests
from agentlightning.store.base import Store
from agentlightning.store.bodies import JSON, MSGPACK, as_json, written
from agentlightning.store.calls import CALLS, FIRST_CALL, STORE_HEADER, Call, Hello
from agentlightning.store.groups import Group
from agentlightning.store.keys import Caller, caller
from agentlightning.store.meters import Meters
from agentlightning.store.otlp import Intake
from agentlightning.store.otlp_wire import PROTOBUF, heard, receipt
from agentlightning.store.requests import Receive, Refused, Scope, Send, answer, tell, type_of, wants_json, whole_body
from agentlightning.store.waits import LONGEST_S, Waits

logger = logging.getLogger(__name__)

THREADS = 16
ATTEMPT_BYTES = 32 * 2**20
"""Of a body that comes with an attempt's key."""

_Serve = Callable[[Scope, dict[bytes, bytes], Receive, Send], Awaitable[None]]


class Service:
    """A store behind HTTP. `key`: asked of everyone, unless it is empty. `most_bytes`: of one request's body."""

    def __init__(self, store: Store, key: str = "", most_bytes: int = requests.MOST_BYTES) -> None:
        self.store, self.identity = store, store.identity
        self._key, self._most_bytes = key, most_bytes
        self.pool = ThreadPoolExecutor(THREADS, "agl-store")
        self.waits = Waits(store, self.pool)
        self.meters = Meters()
        self._adds: Group[dict[str, Any]] = Group(self.pool, self._add_all, lambda call: sum(map(len, call.values())))
        self._enqueues: Group[list[Any]] = Group(
            self.pool, lambda calls: store.enqueue(list(chain.from_iterable(calls))), len
        )
        self._intake, self._one_intake = Intake(store), asyncio.Lock()
        doors: list[tuple[str, str, _Serve]] = [
            (f"/store/{FIRST_CALL}", "GET", self._hello),
            ("/store/{method}", "POST", self._method),
            ("/v1/traces", "POST", self._traces),
            ("/metrics", "GET", self._metrics),
            ("/healthz", "GET", self._healthy),
            ("/readyz", "GET", self._ready),
        ]
        routes = [Route(path, _Door(self, verb, serve)) for path, verb, serve in doors]
        self.app = Starlette(routes=[*routes, Route("/{path:path}", _Door(self, "GET", _nothing_here))])

    def who(self, headers: dict[bytes, bytes]) -> Caller:
        try:
            return caller(self._key, headers.get(b"authorization", b"").decode("latin-1"))
        except Forbidden as error:
            raise Refused(401, str(error), "Forbidden") from None

    def only_store_key(self, headers: dict[bytes, bytes]) -> None:
        who = self.who(headers)
        if who.attempt_id is not None:
            raise Refused(
                403,
                f"the key of attempt {who.attempt_id} only writes that attempt's spans, completions and rewards (/store/add, /v1/traces): use the store's key.",
                "Forbidden",
            )

    async def body(self, who: Caller, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        most = self._most_bytes if who.attempt_id is None else min(ATTEMPT_BYTES, self._most_bytes)
        body = await whole_body(receive, headers, most)
        self.meters.received += len(body)
        return body

    async def add(self, arguments: dict[str, Any], who: Caller) -> None:
        """Appends records, which must be of the caller's attempt where its key is one of an attempt."""
        if who.attempt_id is not None and any(
            record.attempt_id != who.attempt_id for record in chain(*arguments.values())
        ):
            raise Refused(403, f"this key only writes attempt {who.attempt_id}: use that attempt's own.", "Forbidden")
        await self._adds.put(arguments)
        self.waits.wake("add")

    def _add_all(self, calls: Any) -> None:
        names = ("spans", "completions", "rewards")
        self.store.add(**{name: list(chain.from_iterable(call[name] for call in calls)) for name in names})

    async def _method(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        name: str = scope["path_params"]["method"]
        if name != "add":
            self.only_store_key(headers)
        who, call = self.who(headers), CALLS.get(name)
        if call is None:
            raise Refused(404, f"the store has no method {name!r}: it has {', '.join(CALLS)}.")
        self._refuse_mistaken(headers)
        sent = type_of(headers, (MSGPACK, JSON))
        body = await self.body(who, headers, receive)
        try:
            asked = call.arguments.read(body or b"\x80", sent if body else MSGPACK)
        except ValueError as error:
            raise Refused(400, f"{name} does not take this: {error}.") from error
        arguments = {name: getattr(asked, name) for name in call.names}
        result = await self._result(call, arguments, who, receive)
        if wants_json(headers, sent):
            await answer(send, 200, as_json(result), JSON)
        else:
            await answer(send, 200, *written(result))

    async def _result(self, call: Call, arguments: dict[str, Any], who: Caller, receive: Receive) -> Any:
        if call.name == "add":
            return await self.add(arguments, who)
        if call.waits:
            return await self.waits.answer(call.name, arguments, lambda: requests.gone(receive))
        if call.name == "enqueue":
            await self._enqueues.put(arguments["rollouts"])
            result = None
        else:
            work = getattr(self.store, call.name)
            result = await asyncio.get_running_loop().run_in_executor(self.pool, lambda: work(**arguments))
        if call.writes:
            self.waits.wake(call.name)
        return result

    def _refuse_mistaken(self, headers: dict[bytes, bytes]) -> None:
        meant = headers.get(STORE_HEADER.encode(), b"").decode("latin-1")
        if meant and meant != self.identity:
            raise Refused(
                409,
                f"this server now serves the store {self.identity}, not {meant}: start the server of your own store at "
                "another port, and mend the URL; nothing was written here.",
            )

    async def _hello(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        self.who(headers)
        self._refuse_mistaken(headers)
        hello = Hello(self.identity, SCHEMA_VERSION, LONGEST_S)
        await answer(send, 200, *((as_json(hello), JSON) if wants_json(headers, JSON) else written(hello)))

    async def _traces(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        who = self.who(headers)
        kind = type_of(headers, (PROTOBUF, JSON))
        found = heard(await self.body(who, headers, receive), kind)
        async with self._one_intake:
            loop = asyncio.get_running_loop()
            spans, rewards, refused = await loop.run_in_executor(self.pool, self._intake.take, found, who)
        if spans:
            await self.add({"spans": spans, "completions": [], "rewards": rewards}, who)
        self.meters.left_out += sum(refused.values())
        await answer(send, 200, receipt(kind, sum(refused.values()), "; ".join(refused)), kind)

    async def _metrics(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        self.only_store_key(headers)
        backlog = await asyncio.get_running_loop().run_in_executor(self.pool, self.store.backlog)
        gauges = {f"agl_rollouts_{state}": count for state, count in backlog.items()}
        gauges["agl_store_waiting_calls"] = self.waits.waiting
        gauges["agl_store_add_transactions"] = self._adds.transactions
        text = self.meters.text(gauges).encode()
        await answer(send, 200, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _healthy(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        await answer(send, 200, b"ok\n", "text/plain")

    async def _ready(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        await asyncio.get_running_loop().run_in_executor(self.pool, self.store.backlog)
        await answer(send, 200, b"ready\n", "text/plain")

    def end(self) -> None:
        """Waiting calls are answered at once, so that their clients ask again. The loop's thread."""
        self.waits.close()

    def close(self) -> None:
        """When no call runs any more."""
        self.pool.shutdown()


class _Door:
    """A class, so that Starlette hands over the raw connection: its own requests and responses cost 0.1 ms."""

    def __init__(self, service: Service, verb: str, serve: _Serve) -> None:
        self._service, self._verb, self._serve = service, verb, serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status = time.perf_counter(), 200
        try:
            if scope["method"] != self._verb and self._serve is not _nothing_here:
                raise Refused(405, f"{scope['path']} takes {self._verb}.")
            await self._serve(scope, dict(scope["headers"]), receive, send)
        except Exception as error:
            refusal = requests.refused(error)
            status = refusal.status
            if status == 500:
                logger.exception("%s %s failed", scope["method"], scope["path"])
            await tell(send, refusal)
        name = scope["path"].rpartition("/")[2] if self._serve is not _nothing_here else "unknown"
        if "method" in scope["path_params"] and name not in CALLS:
            name = "unknown"  # a label for each would let strangers fill the memory
        waited = name in CALLS and CALLS[name].waits
        self._service.meters.count(name, status, None if waited else time.perf_counter() - begun)


async def _nothing_here(scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
    raise Refused(
        404,
        f"nothing is at {scope['path']}: this is a store's server, with POST /store/<method>, POST /v1/traces, GET "
        "/healthz, /readyz and /metrics. Model calls go to the gateway (`policy.base_url`).",
    )
