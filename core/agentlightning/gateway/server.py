"""The gateway as a server: uvicorn on a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import uvicorn

from agentlightning.errors import GatewayError
from agentlightning.gateway.app import Door
from agentlightning.gateway.directory import Directory
from agentlightning.gateway.proxy import Proxy
from agentlightning.gateway.writer import Writer
from agentlightning.store.base import Store

KEEP_ALIVE_S = 300
"""Longer than clients keep idle connections, so that it is never us who close one that a client is about to use."""


class Gateway:
    """An OpenAI-compatible proxy that records the tokens of each call under the attempt and agent that made it.

    with Gateway(store) as gateway:
        Runner(store, program, gateway_url=gateway.url, barrier=gateway.flush, on_cancel=gateway.cancel, ...)
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        refresh_s: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`port` 0: any free one. `refresh_s`: for how long an attempt is believed to be still running.
        `sleep`: awaited before a request to the engine is tried again."""
        self._host, self._port = host, port
        self._writer = Writer(store)
        self._directory = Directory(store, refresh_s=refresh_s)
        self._door = Door(self._directory, Proxy(self._writer, sleep=sleep))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="agl-gateway", daemon=True)

    def start(self) -> Self:
        """Serves from now on. Raises GatewayError when the address cannot be used."""
        self._socket = _listen(self._host, self._port)
        self._port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self._door.app,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            loop="asyncio",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self._writer.start()
        self._thread.start()
        self._ready.wait()
        return self

    @property
    def url(self) -> str:
        """The root, without a slash at its end."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def stats(self) -> dict[str, int]:
        """Counts since the start: `calls`, `completions`, `unattributed`, `refused`, `upstream_retries`, `defect:...`."""
        return dict(self._door.proxy.stats)

    @property
    def in_flight(self) -> int:
        """Calls that are being answered now."""
        return self._door.in_flight

    def flush(self) -> None:
        """Barrier: every call whose answer a client has read is committed. Raises GatewayError when one cannot be."""
        self._writer.flush()

    def cancel(self, attempt_id: str) -> None:
        """Aborts the attempt's calls and refuses later ones with 410. Never blocks; any thread, any number of times."""
        self._door.refuse(attempt_id)
        if self._loop is not None:
            with suppress(RuntimeError):  # a loop that is closed has no calls left
                self._loop.call_soon_threadsafe(self._door.stop, attempt_id)

    def pause(self) -> None:
        """From now on calls of the policy wait at the door, until `resume`. Calls of frozen endpoints go on."""
        self._on_loop(self._door.proxy.gate.close)

    def drain(self, timeout_s: float | None = None) -> None:
        """Returns when every call of the policy that was let in has been answered; `pause` first. Raises GatewayError
        when some still run after `timeout_s`."""
        if self._loop is None or self._closed:
            return
        gate = self._door.proxy.gate
        waiting = asyncio.run_coroutine_threadsafe(gate.drained(), self._loop)
        try:
            waiting.result(timeout_s)
        except TimeoutError:
            waiting.cancel()
            raise GatewayError(
                f"{gate.inside} calls of the policy still run after {timeout_s:g} s: give `drain` more time, cancel their "
                "attempts, or limit `response` in the budget."
            ) from None

    def resume(self) -> None:
        """Lets in those who wait, and all who come. Safe to call at any time."""
        self._on_loop(self._door.proxy.gate.open)

    @contextmanager
    def paused(self, timeout_s: float | None = None) -> Iterator[None]:
        """No call of the policy runs within this block: the place to change its weights."""
        self.pause()
        try:
            self.drain(timeout_s)
            yield
        finally:
            self.resume()

    def _on_loop(self, work: Callable[[], None]) -> None:
        """Runs `work` on the loop, and returns when that is done."""
        if self._loop is None or self._closed:
            return work()

        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def close(self) -> None:
        """Aborts what is in flight, stores what is known of it, and ends all threads; safe to call twice."""
        if self._closed or self._loop is None:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._begin_end)
        self._thread.join()
        self._directory.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_end(self) -> None:
        self._door.stop_all()
        self._server.should_exit = True

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._door.proxy.close()
            for _ in range(3):  # a transport closes its socket some rounds after it was told to
                await asyncio.sleep(0)


def _listen(host: str, port: int) -> socket.socket:
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it each answer waits 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise GatewayError(
            f"the gateway cannot listen on {host}:{port} ({error}): choose another, or port 0."
        ) from error
    return listener
