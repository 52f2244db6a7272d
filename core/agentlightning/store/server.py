"""A store as a server: `agl store serve`, or `with StoreServer(store) as server:` in a program's own process."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from typing import Self

from agentlightning.errors import StoreError
from agentlightning.serving import listen, url_of, uvicorn_server
from agentlightning.store import requests
from agentlightning.store.app import Service
from agentlightning.store.base import Store


class StoreServer:
    """Serves `store` over HTTP until it is closed; the store itself stays open.

    `key`: every caller must bring it, or a key that `agentlightning.store.keys.attempt_key` derives from it. Without one,
    only this machine is served. `most_bytes`: of one request's body.
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str = "",
        most_bytes: int = requests.MOST_BYTES,
    ) -> None:
        if not key and not _on_this_machine(host):
            raise StoreError(
                f"{host} can be reached by others: give the server a key (--key or AGL_STORE_KEY), or serve 127.0.0.1."
            )
        self._host, self._port = host, port
        self._service = Service(store, key, most_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agl-store-server", daemon=True)

    @property
    def url(self) -> str:
        """What `open_store` takes."""
        return url_of(self._host, self._port)

    @property
    def identity(self) -> str:
        """The identity of the store that is served."""
        return self._service.identity

    def start(self) -> Self:
        """Serves from now on, on a thread of its own. Raises StoreError when another has the address."""
        self._socket = listen(self._host, self._port, "the store's server", StoreError)
        self._port = self._socket.getsockname()[1]
        self._thread.start()
        self._ready.wait()
        return self

    def close(self) -> None:
        """Answers what is in flight, and frees the address; safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(self._end)
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        self._service.end()
        self._server.should_exit = True

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = uvicorn_server(self._service.app)
        self._ready.set()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._service.close()
            for _ in range(3):  # a transport closes its socket some rounds after it was told to
                await asyncio.sleep(0)


def _on_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
