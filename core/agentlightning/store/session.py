"""Transactions on one database, and news of them for the threads that wait.

Where a database lets in one writer at a time, those of one process take turns at one lock per file, whichever store
object they use: cheaper than losing races at the database. Other processes are waited for by the database itself.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import sqlalchemy as sa

from agentlightning.errors import StoreError
from agentlightning.store.database import dialect_of, explained, open_engine

POLL_S = 0.03
"""Seconds after which a waiting thread looks for what other processes wrote."""


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

    def __init__(self, url: str, create: bool = True, poll_s: float = POLL_S) -> None:
        self.dialect = dialect_of(url)
        self.url = self.dialect.url.render_as_string() if self.dialect.url.password else url
        """Without the password: for people."""
        self._in_memory = self.dialect.exclusive and self.dialect.file is None
        self._engine = open_engine(self.dialect, self.url, create)
        self._poll_s = poll_s
        self._closed = False
        self._attach()

    def _attach(self) -> None:
        self._pid = os.getpid()
        with _doors_lock:
            self._door = _doors.setdefault(self.dialect.place or f"memory {id(self)}", _Door())
        self._reader = self.dialect.reader(self._engine)
        self._writer = self._engine.execution_options(agl_write=True)
        self._durable = self._engine.execution_options(agl_write=True, agl_durable=True)

    @property
    def _turn(self) -> Any:
        return self._door.lock if self.dialect.exclusive else nullcontext()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view of the database."""
        self._check()
        if self._in_memory:  # all threads share its single connection
            with self._door.lock, explained(self.url), self._engine.begin() as connection:
                yield connection
        else:
            with self._tidy(), explained(self.url), self._reader.begin() as connection:
                yield connection

    @contextmanager
    def _tidy(self) -> Iterator[None]:
        """A connection that was in use while the store was closed is closed when it comes back."""
        pool = self._engine.pool
        try:
            yield
        finally:
            if self._closed and not self._in_memory:
                pool.dispose()

    @contextmanager
    def write(self, durable: bool = False) -> Iterator[sa.Connection]:
        """Committed when the block ends; all or nothing. `durable`: not even a power cut undoes it."""
        self._check()
        engine = self._durable if durable else self._writer
        with self._turn, self._tidy(), explained(self.url), engine.begin() as connection:
            yield connection

    def insert(self, table: sa.Table) -> Any:
        return self.dialect.insert(table)

    def numbers(self, connection: sa.Connection, count: int) -> Sequence[int]:
        """`count` new sequence numbers."""
        return self.dialect.numbers(connection, count)

    def last_number(self) -> int:
        """No number up to this one will still appear: where a cursor may go."""
        self._check()
        lock = self._door.lock if self._in_memory else nullcontext()
        with lock, self._tidy(), explained(self.url), self._engine.begin() as connection:
            return self.dialect.last_number(connection)

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
            self._door.changed.wait_for(lambda: self._door.ticks != ticks, min(timeout_s, self._poll_s))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.notify()
            with self._turn:
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
