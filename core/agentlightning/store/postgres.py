"""All that is particular to PostgreSQL (psycopg 3): numbers from a sequence, and who waits for whom.

Each commit waits for the disk, as the server is configured; commits of different clients share that wait, because
nothing in a transaction keeps the others out. The price: numbers are drawn before a commit and may become visible in
another order. Whoever reads with a cursor therefore first waits for the writers that have drawn theirs (`last_number`).

Rows are locked in one order everywhere, rollouts before attempts and each by id, so that no two writers wait for each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from agentlightning.errors import StoreError

LOCK_S = 30
"""Seconds that a writer waits for another one's rows."""

_WRITERS, _CREATION, _ALONE = 0x61676C01, 0x61676C02, 0x61676C03
"""Keys of our advisory locks: writers that have drawn numbers share the first; who makes the tables holds the second;
the third is salt for names."""

_NUMBERS = sa.text(
    f"WITH here AS MATERIALIZED (SELECT pg_advisory_xact_lock_shared({_WRITERS})) "
    "SELECT nextval('agl_seq') FROM here, generate_series(1, :count)"
)
_SETTLED = sa.text(f"SELECT pg_advisory_xact_lock({_WRITERS})")
_LAST = sa.text("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM agl_seq")


class Postgres:
    """A database of a PostgreSQL server."""

    exclusive = False
    file: Path | None = None

    def __init__(self, url: sa.URL) -> None:
        self.url = url.set(drivername="postgresql+psycopg")
        self.place = self.url.render_as_string(hide_password=True)

    def engine(self, create: bool) -> sa.Engine:
        try:
            import psycopg  # noqa: F401
        except ImportError as error:
            raise StoreError("PostgreSQL needs the driver psycopg: pip install 'lightning[postgres]'.") from error
        settings = f"-c lock_timeout={LOCK_S}s -c idle_in_transaction_session_timeout=60s"
        args: dict[str, Any] = {"connect_timeout": 10, "application_name": "agl"}
        given = {name: value for name, value in args.items() if name not in self.url.query}
        given["options"] = f"{settings} {self.url.query.get('options', '')}".strip()  # what the URL says comes last
        # 16 connections a process: several processes must fit into a server's usual limit of 100.
        url = self.url.difference_update_query(["options"])
        return sa.create_engine(url, connect_args=given, pool_size=8, max_overflow=8, pool_pre_ping=True)

    def reader(self, engine: sa.Engine) -> sa.Engine:
        return engine.execution_options(isolation_level="REPEATABLE READ")

    def guard_creation(self, connection: sa.Connection) -> None:
        """Two processes that make the same tables at once would both fail. Also refuses what cannot hold every text."""
        encoding = connection.scalar(sa.text("SHOW server_encoding"))
        if encoding != "UTF8":
            raise StoreError(f"the database has the encoding {encoding}: create one with ENCODING 'UTF8'.")
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION)))

    def alone(self, connection: sa.Connection, what: str) -> None:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(what, _ALONE))))

    def insert(self, table: sa.Table) -> postgresql.Insert:
        return postgresql.insert(table)

    def numbers(self, connection: sa.Connection, count: int) -> Sequence[int]:
        return connection.execute(_NUMBERS, {"count": count}).scalars().all()

    def last_number(self, connection: sa.Connection) -> int:
        connection.execute(_SETTLED)
        number: int = connection.execute(_LAST).scalar_one()
        return number
