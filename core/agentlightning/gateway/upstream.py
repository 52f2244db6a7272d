"""The gateway's own HTTP/1.1 client: h11 on asyncio, keep-alive, whole and streamed answers.

httpx costs 0.65 ms of CPU for each call of 700 ids and httpcore 0.41 ms, this 0.15 ms. It also keeps the gateway's calls
out of reach of everything that wraps httpx, our own propagation included.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from functools import cache, lru_cache
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import h11

from agentlightning.errors import GatewayError

MAX_HEAD = 64 * 1024
"""Bytes that the head of an answer may have."""


class Unreachable(GatewayError):
    """No connection to the engine."""


class Cut(GatewayError):
    """The engine closed the connection, or broke the protocol, before its answer was complete."""


class Origin(NamedTuple):
    """Where connections go."""

    host: str
    port: int
    tls: bool


@lru_cache(maxsize=1024)
def split(url: str) -> tuple[Origin, bytes, bytes]:
    """Origin, `Host` header and request target of a URL."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    origin = Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return origin, parts.netloc.rpartition("@")[2].encode("idna"), target.encode()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Connection(asyncio.Protocol):
    """One socket; turns what arrives into h11 events for the one reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._events: deque[h11.Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lost: str | None = None
        self.heard = False
        """Whether any byte of the current answer has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = True
        self._receive(data)

    def eof_received(self) -> None:
        self._receive(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._lost or f"the engine closed the connection{f' ({exc})' if exc else ''}"
        self._wake()

    @property
    def usable(self) -> bool:
        return self._lost is None and not self.transport.is_closing() and self._http.our_state is h11.IDLE

    def ask(self, request: h11.Request, body: bytes) -> None:
        self.heard = False
        send = self._http.send
        self.transport.write((send(request) or b"") + (send(h11.Data(body)) or b"") + (send(h11.EndOfMessage()) or b""))

    async def event(self) -> h11.Event:
        """The next event. Raises Cut."""
        while not self._events:
            if self._lost is not None:
                raise Cut(f"{self._lost} before the answer was complete: see the engine's log.")
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._events.popleft()

    def rest(self) -> bool:
        """Makes the connection ready for the next request; False when it cannot be used again."""
        if self._lost is None and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return self.usable

    def _receive(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    break
                if not isinstance(event, h11.InformationalResponse):
                    self._events.append(event)  # type: ignore[arg-type]  # the sentinels are dealt with above
        except h11.RemoteProtocolError as error:
            self._lost = f"the engine broke the HTTP protocol or off ({error})"
            self.transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Answer:
    """An answer whose head has come. Leaving its block early aborts the request, which the engine notices."""

    def __init__(self, head: h11.Response, connection: _Connection, upstream: Upstream, origin: Origin) -> None:
        self.status = head.status_code
        self.headers: dict[bytes, bytes] = dict(head.headers)
        """Names in lower case."""
        self._connection, self._upstream, self._origin = connection, upstream, origin
        self._complete = False

    @property
    def is_stream(self) -> bool:
        return self.headers.get(b"content-type", b"").startswith(b"text/event-stream")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises Cut."""
        while True:
            event = await self._connection.event()
            if isinstance(event, h11.EndOfMessage):
                self._complete = True
                return
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def read(self) -> bytes:
        """The whole body. Raises Cut."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._complete and self._connection.rest():
            self._upstream.rest(self._origin, self._connection)
        else:
            self._connection.transport.abort()


class Upstream:
    """Connections to all engines. `idle`: how many unused ones are kept for each; there may be any number in use."""

    def __init__(self, *, connect_s: float = 10.0, idle: int = 512) -> None:
        self._connect_s, self._idle = connect_s, idle
        self._resting: defaultdict[Origin, list[_Connection]] = defaultdict(list)
        self._closed = False

    async def post(self, url: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Sends, and returns when the head of the answer is there. Raises Unreachable or Cut."""
        origin, host, target = split(url)
        head = [(b"host", host), *headers, (b"content-length", b"%d" % len(body))]
        request = h11.Request(method=b"POST", target=target, headers=head)
        while True:
            connection, used = self._rested(origin), True
            if connection is None:
                connection, used = await self._connect(origin), False
            try:
                connection.ask(request, body)
                event = await connection.event()
                assert isinstance(event, h11.Response)
                return Answer(event, connection, self, origin)
            except BaseException as error:
                connection.transport.abort()
                # A server may close an idle connection at the moment we use it: that says nothing about this request.
                if not (isinstance(error, Cut) and used and not connection.heard):
                    raise

    def rest(self, origin: Origin, connection: _Connection) -> None:
        """Keeps a connection for later."""
        resting = self._resting[origin]
        if self._closed or len(resting) >= self._idle:
            connection.transport.abort()
        else:
            resting.append(connection)

    def close(self) -> None:
        self._closed = True
        for resting in self._resting.values():
            for connection in resting:
                connection.transport.abort()
        self._resting.clear()

    def _rested(self, origin: Origin) -> _Connection | None:
        resting = self._resting[origin]
        while resting:
            connection = resting.pop()
            if connection.usable:
                return connection
            connection.transport.abort()
        return None

    async def _connect(self, origin: Origin) -> _Connection:
        host, port, tls = origin
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop), host, port, ssl=_tls() if tls else None
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {self._connect_s:g} s"
            raise Unreachable(f"no connection to the engine at {host}:{port}: {reason}. Is it running?") from error
        return connection
