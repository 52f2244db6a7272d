"""Opening a database, and all that differs between one database and another.

SQLite runs in WAL mode. A commit with `synchronous=FULL` waits for the disk (4 ms where this was measured, against
0.01 ms with `NORMAL`), and a rollout makes at least four. So ordinary commits use `NORMAL`: a killed process loses
nothing. What closes a step is committed with `FULL`, which also brings everything before it to the disk: a power cut
loses at most the work since the last step, and never the order of things.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import StaticPool

from agentlightning.errors import StoreError
from agentlightning.schema import SCHEMA_VERSION
from agentlightning.store.tables import meta, metadata

BUSY_S = 30.0
"""Seconds that a writer waits for another process's transaction; `?timeout=` in the URL overrides it."""

_CURES = (
    ("locked", "another process has held its write lock too long: end it, or give the URL a longer `?timeout=SECONDS`"),
    ("disk is full", "free some space, then call again: nothing of this call was written, all before it is kept"),
    ("disk i/o", "check the disk and its free space: nothing of this call was written, all before it is kept"),
    ("not a database", "the file holds something else: give another path"),
    ("malformed", "the file is damaged: put back a copy, or give another path"),
    ("unable to open", "check that the folder exists and may be written to"),
    ("readonly", "the file or its folder may not be written to: change its permissions, or give another path"),
    ("no such table", "the file was emptied or replaced while in use: open the store again"),
)


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns what the driver raises into a StoreError that names the cure."""
    try:
        yield
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        text = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error)
        cure = next((cure for sign, cure in _CURES if sign in text.lower()), "see the database's own message above")
        raise StoreError(f"store {url}: {text}. Cure: {cure}.") from error


def file_of(url: str) -> Path | None:
    """The file behind a store's URL; None for one in memory. Raises StoreError for what is no such URL."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise StoreError(f"{url!r} is not a store URL: write sqlite:///path/to/file.db or sqlite://.") from error
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise StoreError(f"no store speaks {parsed.drivername!r}: use sqlite:///path/to/file.db.")
    return None if parsed.database in (None, "", ":memory:") else Path(str(parsed.database)).absolute()


def open_engine(url: str, create: bool = True) -> sa.Engine:
    """An engine with our tables in it. Raises StoreError where the database is absent, strange or of another version."""
    with explained(url):
        engine = _sqlite(url, create)
        try:
            _prepare(engine, url)
        except BaseException:
            engine.dispose()
            raise
        return engine


def insert(table: sa.Table) -> sqlite.Insert:
    """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
    return sqlite.insert(table)


def _sqlite(url: str, create: bool) -> sa.Engine:
    if sqlite3.sqlite_version_info < (3, 35):
        raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old: use a Python that brings 3.35 or newer.")
    path = file_of(url)
    if path is None:
        engine = sa.create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    else:
        if not create and not path.exists():
            raise StoreError(f"there is no store at {path}: check the URL, or train something first.")
        path.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"pool_size": 16, "max_overflow": -1, "pool_use_lifo": True}
        args = {"check_same_thread": False} | ({} if "timeout" in sa.make_url(url).query else {"timeout": BUSY_S})
        engine = sa.create_engine(url, connect_args=args, **options)
    sa.event.listen(engine, "connect", _connected)
    sa.event.listen(engine, "begin", _begin)
    return engine


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


def _prepare(engine: sa.Engine, url: str) -> None:
    version = sa.select(meta.c.value).where(meta.c.key == "schema_version")
    with engine.begin() as connection:
        found = connection.scalar(version) if sa.inspect(connection).has_table(meta.name) else None
    if found is None:
        with engine.execution_options(agl_write=True).begin() as connection:
            if not sa.inspect(connection).has_table(meta.name):  # another process may have been quicker
                metadata.create_all(connection)
                rows = [{"key": "schema_version", "value": SCHEMA_VERSION}, {"key": "seq", "value": 0}]
                connection.execute(sa.insert(meta), rows)
            found = connection.scalar(version)
    if found != SCHEMA_VERSION:
        raise StoreError(
            f"store {url} has schema version {found}, this release reads {SCHEMA_VERSION}: "
            "open it with the release that wrote it, or give another path to begin a new store."
        )
