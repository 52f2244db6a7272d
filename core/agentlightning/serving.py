"""What our servers share: an address that is ours or an error at once, and uvicorn without its noise."""

from __future__ import annotations

import os
import socket

import uvicorn

from agentlightning.errors import AgentLightningError

KEEP_ALIVE_S = 300
"""Longer than clients keep idle connections, so that it is never us who close one that a client is about to use."""


def listen(host: str, port: int, what: str, error: type[AgentLightningError]) -> socket.socket:
    """A listening socket; `port` 0: any free one. Raises `error` when the address cannot be used."""
    # The protocol must be named: asyncio sets TCP_NODELAY only then, and without it each answer waits 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as trouble:
        listener.close()
        raise error(f"{what} cannot listen on {host}:{port} ({trouble}): choose another, or port 0.") from trouble
    return listener


def url_of(host: str, port: int) -> str:
    """The root, without a slash at its end."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def uvicorn_server(app: object) -> uvicorn.Server:
    """For sockets of `listen`."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
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
    return uvicorn.Server(config)
