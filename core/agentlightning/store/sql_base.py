"""What the parts of the SQL store share: an open database, a clock, the statements that add rows, and how to wait."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from agentlightning.store import queue
from agentlightning.store import tables as t
from agentlightning.store.codec import Codec
from agentlightning.store.session import POLL_S, Session

T = TypeVar("T")

REAP_S = 1.0
"""Seconds between two looks of a waiting thread for leases that ran out, in case no worker is left to look."""


class SqlBase:
    """`clock` gives Unix seconds for leases; `poll_s`: how long a waiting thread may miss what other processes wrote."""

    def __init__(
        self, url: str, *, create: bool = True, clock: Callable[[], float] = time.time, poll_s: float = POLL_S
    ) -> None:
        self._session = Session(url, create, poll_s)
        self.url = self._session.url
        self._clock = clock
        self._new: dict[str, Any] = {
            table.name: self._session.insert(table).on_conflict_do_nothing()
            for table in (t.steps, t.resources, t.rollouts, t.completions, t.rewards)
        }
        span = self._session.insert(t.spans)
        changed = {name: span.excluded[name] for name in ("kind", "path", "status", "body")}
        self._put_span = span.on_conflict_do_update(
            index_elements=["attempt_id", "id"], set_=changed, where=t.spans.c.status == "open"
        )

    @property
    def identity(self) -> str:
        found = sa.select(t.meta.c.value).where(t.meta.c.key == "identity")
        with self._session.read() as connection:
            number = connection.scalar(found)
        if number is None:  # drawn when somebody first asks
            drawn = {"key": "identity", "value": secrets.randbits(63)}
            with self._session.write(durable=True) as connection:
                connection.execute(self._session.insert(t.meta).on_conflict_do_nothing(), drawn)
                number = connection.scalar(found)
        return f"{number:016x}"

    def close(self) -> None:
        self._session.close()

    def _all(self, codec: Codec[T], query: sa.Select[Any]) -> list[T]:
        with self._session.read() as connection:
            rows = connection.execute(query).all()
        return [codec.record(row) for row in rows]

    def _until(
        self, look: Callable[[Connection], T], timeout_s: float | None, before: Callable[[], None] = lambda: None
    ) -> T:
        """What `look` finds as soon as it is true, or when the time is over. `before` is called before each look."""
        start = reaped = time.monotonic()
        while True:
            ticks, now = self._session.ticks, time.monotonic()
            if now - reaped > REAP_S:
                reaped = now
                self._reap()
            before()
            with self._session.read() as connection:
                found = look(connection)
            left = math.inf if timeout_s is None else start + timeout_s - now
            if found or left <= 0:
                return found
            self._session.wait(ticks, left)

    def _reap(self) -> None:
        with self._session.read() as connection:
            lost = queue.leases_lost(connection, self._clock())
        if lost:
            with self._session.write() as connection:
                queue.expire(connection, self._clock())
            self._session.notify()
