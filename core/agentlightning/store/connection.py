"""A client's connections to a store's server: kept open, one call at a time on each, as many as threads call at once."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.store.requests import raised

PATIENCE_S = 30.0
"""Seconds that a call tries to reach a server that is away; `?timeout=` in the URL overrides it."""
ANSWER_S = 60.0
"""Seconds that a server may take for an answer: more than its database waits for a lock, or lets a call wait."""
_PASSING = frozenset({502, 504})
"""What proxies say while the server behind them is away."""
_MOST_IDLE = 32


class Connections:
    """To the server at `url`: `http[s]://host[:port][/prefix][?timeout=SECONDS&store=IDENTITY]`."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        try:
            self.patience_s = float(asked.pop("timeout", PATIENCE_S))
            self._port = parts.port
        except ValueError as error:
            raise StoreError(f"store {url}: {error}. Write http://host:port?timeout=SECONDS.") from error
        self.meant = asked.pop("store", "")
        if not parts.hostname or asked or parts.username:
            raise StoreError(
                f"store {url}: write http://host:port, with ?timeout=SECONDS or &store=IDENTITY and nothing else; the key "
                "comes from AGL_STORE_KEY or key=."
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._host, self._path, self._tls = parts.hostname, parts.path.rstrip("/"), parts.scheme == "https"
        self.headers = headers
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._pid = os.getpid()
        self.closed = False

    def call(
        self, verb: str, path: str, body: bytes | None, content_type: str, patience_s: float | None = None
    ) -> tuple[bytes, str]:
        """The body of the answer and its type. Must be safe to repeat. Raises what the server raised, and StoreUnavailable
        when it could not be reached in `patience_s`."""
        patience = self.patience_s if patience_s is None else patience_s
        headers = self.headers | {"Content-Type": content_type} if body is not None else self.headers
        give_up_at, pause = time.monotonic() + patience, 0.02
        while True:
            connection, used = self._take()
            try:
                status, answer, kind = self._ask(connection, verb, self._path + path, body, headers)
                if status == 200:
                    return answer, kind
                error = raised(status, answer)
                if error is not None:
                    raise error
                trouble: object = f"it answers with status {status}"
                if status not in _PASSING:
                    raise StoreError(f"{self.url} is no store's server ({trouble}): mend the URL.")
            except (OSError, http.client.HTTPException) as lost:
                self._check()
                trouble = lost
                if used and not isinstance(
                    lost, TimeoutError
                ):  # idle connections end when a server restarts: that is no outage yet
                    continue
            if time.monotonic() + pause > give_up_at:
                raise StoreUnavailable(
                    f"store {self.url} cannot be reached ({trouble or type(trouble).__name__}), tried for {patience:g} s: "
                    "start its server (`agl store serve`) or mend the URL, then call again; what was acknowledged is kept."
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
            self._check()

    def _ask(
        self, connection: http.client.HTTPConnection, verb: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes, str]:
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # a server may refuse a body before all of it is sent
                connection.request(verb, path, body, headers)
            answer = connection.getresponse()
            found = answer.status, answer.read(), answer.headers.get_content_type()
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(connection, not answer.will_close)
        return found

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection that is now ours, and whether it was used before."""
        self._check()
        with self._lock:
            used = bool(self._idle)
            connection = self._idle.pop() if used else self._new()
            self._busy.add(connection)
        return connection, used

    def _new(self) -> http.client.HTTPConnection:
        if self._tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=ANSWER_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_S)

    def _give_back(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if reusable and not self.closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def close(self) -> None:
        """Wakes whoever waits for an answer."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            with suppress(OSError, AttributeError):  # it may be connecting still, or have ended by itself
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _check(self) -> None:
        if self.closed:
            raise StoreError(f"store {self.url} is closed: open it again with open_store(url).")
        if self._pid != os.getpid():  # the parent goes on using its connections
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._idle, self._busy = [], set()
