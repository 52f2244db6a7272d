"""All that is particular to SQLite: WAL, one writer at a time, and when a commit waits for the disk.

A commit with `synchronous=FULL` waits for the disk (4 ms where this was measured, against 0.01 ms with `NORMAL`), and a
rollout makes at least four. So ordinary commits use `NORMAL`: a killed process loses nothing. What closes a step is
committed with `FULL`, which also brings everything before it to the disk: a power cut loses at most the work since the
last step, and never the order of things.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import StaticPool

from agentlightning.errors import StoreError
from agentlightning.store.tables import meta

BUSY_S = 30.0
"""Seconds that a writer waits for another process's transaction; `?timeout=` in the URL overrides it."""

_BUMP = (
    sa.update(meta)
    .where(meta.c.key == "seq")
    .values(value=meta.c.value + sa.bindparam("count"))
    .returning(meta.c.value)
)


class Sqlite:
    """A database in a file, or in memory."""

    exclusive = True
    """Writers take turns in our process: cheaper than losing races at the database."""

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        memory = url.database in (None, "", ":memory:")
        self.file = None if memory else Path(str(url.database)).absolute()
        self.place = str(self.file.resolve()) if self.file else ""
        """The same for every URL of the same file; empty in memory, where each store is a place of its own."""

    def engine(self, create: bool) -> sa.Engine:
        if sqlite3.sqlite_version_info < (3, 35):
            raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: use a Python that brings 3.35 or newer.")
        if self.file is None:
            engine = sa.create_engine(self.url, poolclass=StaticPool, connect_args={"check_same_thread": False})
        else:
            if not create and not self.file.exists():
                raise StoreError(f"there is no store at {self.file}: check the URL, or train something first.")
            self.file.parent.mkdir(parents=True, exist_ok=True)
            options: dict[str, Any] = {"pool_size": 16, "max_overflow": -1, "pool_use_lifo": True}
            args = {"check_same_thread": False} | ({} if "timeout" in self.url.query else {"timeout": BUSY_S})
            engine = sa.create_engine(self.url, connect_args=args, **options)
        sa.event.listen(engine, "connect", _connected)
        sa.event.listen(engine, "begin", _begin)
        return engine

    def reader(self, engine: sa.Engine) -> sa.Engine:
        return engine

    def guard_creation(self, connection: sa.Connection) -> None:
        """Nothing: writers are alone anyway."""

    def alone(self, connection: sa.Connection, what: str) -> None:
        """Nothing: writers are alone anyway."""

    def insert(self, table: sa.Table) -> sqlite.Insert:
        return sqlite.insert(table)

    def numbers(self, connection: sa.Connection, count: int) -> Sequence[int]:
        last: int = connection.execute(_BUMP, {"count": count}).scalar_one()
        return range(last - count + 1, last + 1)

    def last_number(self, connection: sa.Connection) -> int:
        number: int = connection.execute(sa.select(meta.c.value).where(meta.c.key == "seq")).scalar_one()
        return number


def _connected(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself: `_begin` does
    deadline = time.monotonic() + 5
    while connection.execute("PRAGMA journal_mode").fetchone()[0] not in ("wal", "memory"):
        try:
            if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                break  # a file system without shared memory: slower, still safe
        except sqlite3.OperationalError:  # SQLite does not wait here while another process makes the same change
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin(connection: sa.Connection) -> None:
    options, driver = connection.get_execution_options(), connection.connection.driver_connection
    assert driver is not None
    if options.get("agl_write"):
        driver.execute("PRAGMA synchronous=" + ("FULL" if options.get("agl_durable") else "NORMAL"))
        driver.execute("BEGIN IMMEDIATE")  # a reader that turned writer could find its snapshot outdated
    else:
        driver.execute("BEGIN")
