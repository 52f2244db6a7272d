"""A tiny HTTP/1.1 server on a thread that can do what real servers do when they break: hang, cut, answer slowly.

It notices at once when the client has gone, which is what tests of cancellation need to see.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping


class Exchange:
    """One request and the means to answer it."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes, transport: asyncio.Transport):
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self._transport = transport

    def send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        """The whole answer."""
        lines = {"content-type": kind, "content-length": str(len(body)), **(headers or {})}
        self._transport.write(_head(status, lines) + body)

    def start_stream(self, headers: Mapping[str, str] | None = None) -> None:
        """The head of a chunked answer; `chunk`s follow, then `end_stream`."""
        lines = {"content-type": "text/event-stream", "transfer-encoding": "chunked", **(headers or {})}
        self._transport.write(_head(200, lines))

    def chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self._transport.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """Closes the socket in the middle of whatever was going on."""
        self._transport.abort()


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    return (f"HTTP/1.1 {status} x\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n").encode()


Handler = Callable[[Exchange], Awaitable[None]]


class _Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, tasks: set[asyncio.Task[None]], open_: set[asyncio.Transport]) -> None:
        self._handler, self._tasks, self._open = handler, tasks, open_
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open.add(transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self._transport)
        if self._task is not None:
            self._task.cancel()

    def _next(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if self._task is not None or end < 0:
            return
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        stop = end + 4 + int(headers.get("content-length", "0"))
        if len(self._buffer) < stop:
            return
        method, path, _ = first.split(" ")
        exchange = Exchange(method, path, headers, self._buffer[end + 4 : stop], self._transport)
        self._buffer = self._buffer[stop:]
        self._task = asyncio.get_running_loop().create_task(self._run(exchange))
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        finally:
            self._task = None
        self._next()


class Server:
    """`handler(exchange)` for each request; `.url` without a slash at the end."""

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler, self._wanted = handler, port
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fake-http", daemon=True)
        self._ready = threading.Event()
        self.port = 0

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def active(self) -> int:
        """Requests that are being answered now."""
        return len(self._tasks)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        loop = self._loop
        server = loop.run_until_complete(
            loop.create_server(
                lambda: _Connection(self._handler, self._tasks, self._open), "127.0.0.1", self._wanted, backlog=512
            )
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        loop.run_forever()
        server.close()
        for transport in list(self._open):
            transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        for _ in range(3):  # a transport closes its socket some rounds after it was told to
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
