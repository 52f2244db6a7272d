"""Transactions on one database, and news of them for the threads that wait.

Writers of one process take turns at one lock per file, whichever store object they use: cheaper than losing races at
the database. Other processes are waited for by the database itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from agentlightning.errors import StoreError
from agentlightning.store.database import explained, file_of, open_engine
from agentlightning.store.tables import meta

POLL_S = 0.03
"""Seconds after which a waiting thread looks for what other processes wrote."""

_BUMP = (
    sa.update(meta)
    .where(meta.c.key == "seq")
    .values(value=meta.c.value + sa.bindparam("count"))
    .returning(meta.c.value)
)


class _Door:
    """What the stores of one process that open the same database share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.ticks = 0


_doors: weakref.WeakValueDictionary[str, _Door] = weakref.WeakValueDictionary()
_doors_lock = threading.Lock()


def _after_fork() -> None:
    """A lock that another thread held at the fork would never be free in the child."""
    global _doors, _doors_lock
    _doors, _doors_lock = weakref.WeakValueDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Session:
    """An open database. `read` and `write` give a connection inside a transaction."""

    def __init__(self, url: str, create: bool = True) -> None:
        self.url = url
        self._file = file_of(url)
        self._in_memory = self._file is None
        self._engine = open_engine(url, create)
        self._closed = False
        self._attach()

    def _attach(self) -> None:
        self._pid = os.getpid()
        with _doors_lock:
            key = os.path.realpath(self._file) if self._file else f"memory {id(self)}"
            self._door = _doors.setdefault(key, _Door())
        self._writer = self._engine.execution_options(agl_write=True)
        self._durable = self._engine.execution_options(agl_write=True, agl_durable=True)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view of the database."""
        self._check()
        if self._in_memory:  # all threads share its single connection
            with self._door.lock, explained(self.url), self._engine.begin() as connection:
                yield connection
        else:
            with explained(self.url), self._engine.begin() as connection:
                yield connection

    @contextmanager
    def write(self, durable: bool = False) -> Iterator[sa.Connection]:
        """Committed when the block ends; all or nothing. `durable`: not even a power cut undoes it."""
        self._check()
        engine = self._durable if durable else self._writer
        with self._door.lock, explained(self.url), engine.begin() as connection:
            yield connection

    def number(self, connection: sa.Connection, count: int) -> int:
        """The first of `count` new sequence numbers."""
        last: int = connection.execute(_BUMP, {"count": count}).scalar_one()
        return last - count + 1

    @property
    def ticks(self) -> int:
        """Grows with every `notify`; take it before looking, and give it to `wait`."""
        return self._door.ticks

    def notify(self) -> None:
        with self._door.changed:
            self._door.ticks += 1
            self._door.changed.notify_all()

    def wait(self, ticks: int, timeout_s: float) -> None:
        """Until a `notify` after `ticks` was read, or until it is time to look at the database again."""
        with self._door.changed:
            self._door.changed.wait_for(lambda: self._door.ticks != ticks, min(timeout_s, POLL_S))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.notify()
            with self._door.lock:
                self._engine.dispose()

    def _check(self) -> None:
        if self._closed:
            raise StoreError(f"store {self.url} is closed: open it again with open_store(url).")
        if self._pid != os.getpid():
            if self._in_memory:
                raise StoreError("a store in memory cannot follow into another process: use sqlite:///path/to/file.db.")
            self._inherited = self._engine.pool  # closing the parent's connections would be the parent's loss
            self._engine.dispose(close=False)
            self._attach()
