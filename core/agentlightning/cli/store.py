"""`agl store serve`: a store for many machines; `agl store key`: what a program on one of them may be trusted with."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing

import typer

from agentlightning.errors import StoreError
from agentlightning.store import open_store
from agentlightning.store.keys import attempt_key


def serve(url: str, host: str, port: int, key: str, most_mb: int) -> None:
    """Serves the store at `url` until SIGINT or SIGTERM."""
    from agentlightning.store.server import StoreServer

    if url.startswith(("http://", "https://")):
        raise StoreError(f"{url} is a server already: serve a database, such as sqlite:///runs.db.")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with (
        closing(open_store(url)) as store,
        StoreServer(store, host=host, port=port, key=key, most_bytes=most_mb * 2**20) as server,
    ):
        asks = "asks for its key" if key else "asks for no key"
        typer.echo(f"store {server.identity} ({store.url}) is served at {server.url}; it {asks}.")
        while not stop.wait(3600):  # a bare wait would hide signals on some systems
            pass


def print_attempt_key(attempt_id: str) -> None:
    key = os.environ.get("AGL_STORE_KEY", "")
    if not key:
        raise StoreError("AGL_STORE_KEY is not set: an attempt's key is derived from the store's.")
    typer.echo(attempt_key(key, attempt_id))
