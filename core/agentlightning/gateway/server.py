"""The gateway as a server: uvicorn on a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from agentlightning.errors import GatewayError
from agentlightning.gateway.app import Door
from agentlightning.gateway.control import Control
from agentlightning.gateway.directory import Directory
from agentlightning.gateway.proxy import Proxy
from agentlightning.gateway.writer import Sink, Writer
from agentlightning.schema import new_id
from agentlightning.serving import listen, url_of, uvicorn_server
from agentlightning.store.base import Store


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
        sink: Sink | None = None,
    ) -> None:
        """`port` 0: any free one. `refresh_s`: for how long an attempt is believed to be still running.
        `sleep`: awaited before a request to the engine is tried again. `sink`: what records are written to, if not `store`."""
        self._host, self._port = host, port
        self._writer = Writer(sink or store)
        self._directory = Directory(store, refresh_s=refresh_s)
        self.secret = new_id()
        """Opens what runners on other machines may ask (`control.py`)."""
        control = Control(
            self.secret,
            refuse=lambda attempt_id: self._door.refuse(attempt_id),
            stop=lambda attempt_id: self._door.stop(attempt_id),
            flush=self._writer.flush,
        )
        self._door = Door(self._directory, Proxy(self._writer, sleep=sleep), control.routes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="agl-gateway", daemon=True)

    def start(self) -> Self:
        """Serves from now on. Raises GatewayError when the address cannot be used."""
        self._socket = listen(self._host, self._port, "the gateway", GatewayError)
        self._port = self._socket.getsockname()[1]
        self._server = uvicorn_server(self._door.app)
        self._writer.start()
        self._thread.start()
        self._ready.wait()
        return self

    @property
    def url(self) -> str:
        """The root, without a slash at its end."""
        return url_of(self._host, self._port)

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
