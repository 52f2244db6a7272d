"""Opening a database, and turning what its driver raises into errors that name the cure.

`sqlite.py` and `postgres.py` hold what differs between the two; everything else is written once, in SQLAlchemy Core.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa

from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.schema import SCHEMA_VERSION
from agentlightning.store.postgres import Postgres
from agentlightning.store.sqlite import Sqlite
from agentlightning.store.tables import meta, metadata
from agentlightning.store.upgrades import UPGRADES, upgraded

_CURES = (
    ("locked", "another process has held its write lock too long: end it, or give the URL a longer `?timeout=SECONDS`"),
    ("disk is full", "free some space, then call again: nothing of this call was written, all before it is kept"),
    ("no space left", "free some space, then call again: nothing of this call was written, all before it is kept"),
    ("could not extend", "free some space, then call again: nothing of this call was written, all before it is kept"),
    ("disk i/o", "check the disk and its free space: nothing of this call was written, all before it is kept"),
    ("not a database", "the file holds something else: give another path"),
    ("malformed", "the file is damaged: put back a copy, or give another path"),
    ("unable to open", "check that the folder exists and may be written to"),
    ("readonly", "the file or its folder may not be written to: change its permissions, or give another path"),
    ("read-only", "this server takes no writes: give the URL of one that does"),
    ("no such table", "the file was emptied or replaced while in use: open the store again"),
    ("relation", "the tables were dropped while in use: open the store again"),
    ("password authentication", "check user and password in the URL"),
    ("lock timeout", "another client has held these rows too long: end it, then call again"),
    ("deadlock", "call again: nothing of this call was written"),
    ("too many clients", "the server's max_connections is reached: raise it, or end some clients"),
    ("remaining connection slots", "the server's max_connections is reached: raise it, or end some clients"),
    ("does not exist", "create that database or role, or mend the URL"),
    ("connection", "start the server or mend the URL, then call again: what was acknowledged is kept"),
    ("terminating", "start the server again, then call again: what was acknowledged is kept"),
    ("shutting down", "start the server again, then call again: what was acknowledged is kept"),
    ("starting up", "call again in a moment: the server has just been started"),
)


class Dialect(Protocol):
    """What differs between databases."""

    url: sa.URL
    exclusive: bool
    """Whether the writers of a process should take turns."""
    file: Path | None
    place: str
    """Names the database, however its URL was written; empty when it lives in this store object alone."""

    def engine(self, create: bool) -> sa.Engine: ...

    def reader(self, engine: sa.Engine) -> sa.Engine:
        """An engine whose transactions see one state of the database."""

    def guard_creation(self, connection: sa.Connection) -> None:
        """Keeps others from making the tables at the same time, until the transaction ends."""

    def alone(self, connection: sa.Connection, what: str) -> None:
        """Whoever else asks for the same waits until this transaction ends."""

    def insert(self, table: sa.Table) -> Any:
        """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""

    def numbers(self, connection: sa.Connection, count: int) -> Sequence[int]:
        """New sequence numbers, greater than every number of a transaction that committed before."""

    def last_number(self, connection: sa.Connection) -> int:
        """No number up to this one will still appear."""


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turns what the driver raises into a StoreError that names the cure."""
    try:
        yield
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        text = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error).strip()
        cure = next((cure for sign, cure in _CURES if sign in text.lower()), "see the database's own message above")
        wrong = isinstance(error, (sa.exc.IntegrityError, sa.exc.DataError, sqlite3.IntegrityError))
        raise (StoreError if wrong else StoreUnavailable)(f"store {url}: {text}. Cure: {cure}.") from error
    except sa.exc.TimeoutError as error:
        cure = "call again, or let fewer threads use this store at once"
        raise StoreUnavailable(f"store {url}: all connections are in use. Cure: {cure}.") from error


def dialect_of(url: str) -> Dialect:
    """Raises StoreError for what is no URL of a database that we speak."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise StoreError(f"{url!r} is not a store URL: write sqlite:///path/to/file.db or sqlite://.") from error
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return Sqlite(parsed)
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return Postgres(parsed)
    raise StoreError(
        f"no store speaks {parsed.drivername!r}: use sqlite:///path/to/file.db, postgresql://user@host/database or "
        "http://host:port."
    )


def open_engine(dialect: Dialect, url: str, create: bool = True) -> sa.Engine:
    """An engine with our tables in it. Raises StoreError where the database is absent, strange or of another version."""
    with explained(url):
        engine = dialect.engine(create)
        try:
            _prepare(dialect, engine, url)
        except BaseException:
            engine.dispose()
            raise
        return engine


def _prepare(dialect: Dialect, engine: sa.Engine, url: str) -> None:
    version = sa.select(meta.c.value).where(meta.c.key == "schema_version")
    with engine.begin() as connection:
        found = connection.scalar(version) if sa.inspect(connection).has_table(meta.name) else None
    if found is None:
        with engine.execution_options(agl_write=True).begin() as connection:
            dialect.guard_creation(connection)
            if not sa.inspect(connection).has_table(meta.name):  # another process may have been quicker
                metadata.create_all(connection)
                rows = [{"key": "schema_version", "value": SCHEMA_VERSION}, {"key": "seq", "value": 0}]
                connection.execute(sa.insert(meta), rows)
            found = connection.scalar(version)
    if found in UPGRADES:
        with engine.execution_options(agl_write=True, agl_durable=True).begin() as connection:
            dialect.guard_creation(connection)
            found = upgraded(connection, int(connection.scalar(version) or 0))
    if found != SCHEMA_VERSION:
        raise StoreError(
            f"store {url} has schema version {found}, this release reads {SCHEMA_VERSION}: "
            "open it with the release that wrote it, or give another path to begin a new store."
        )
