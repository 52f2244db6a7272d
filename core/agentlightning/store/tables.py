"""One table per record of `schema.py`.

A field that has a column of its name is stored there, because someone filters or orders by it or it is a token array;
all other fields go into `body`, one MessagePack map per row. Nothing is stored twice.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    String,
    Table,
    UniqueConstraint,
    false,
    literal_column,
)

from agentlightning.schema import RolloutState

metadata = MetaData()

Sequence("agl_seq", metadata=metadata)
"""Where PostgreSQL draws numbers from; SQLite has none and counts in `agl_meta`."""

_BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite's row id must be declared INTEGER


_TEXT = String().with_variant(String(collation="C"), "postgresql")  # by code point: what `find` relies on


def _text(name: str, **options: Any) -> Column[Any]:
    return Column(name, _TEXT, **{"nullable": False, **options})


def _int(name: str, **options: Any) -> Column[Any]:
    return Column(name, _BIG, **{"nullable": False, **options})


def _seq() -> Column[Any]:
    return Column("seq", _BIG, primary_key=True, autoincrement=False)


def _body() -> Column[Any]:
    return Column("body", LargeBinary, nullable=False)


meta = Table("agl_meta", metadata, _text("key", primary_key=True), _int("value"))

runs = Table(
    "agl_runs",
    metadata,
    _seq(),
    _text("id", unique=True),
    _text("name"),
    _text("config_hash"),
    _text("state"),
    _text("owner"),
    Column("lease_until", Double, nullable=False),
    _int("created_ns"),
    _int("ended_ns", nullable=True),
    _body(),
)

steps = Table("agl_steps", metadata, _text("run_id", primary_key=True), _int("number", primary_key=True), _body())

resources = Table(
    "agl_resources",
    metadata,
    _text("run_id", primary_key=True),
    _text("name", primary_key=True),
    _int("version", primary_key=True),
    _text("kind"),
    _body(),
)

rollouts = Table(
    "agl_rollouts",
    metadata,
    _seq(),
    _text("id", unique=True),
    _text("run_id"),
    _text("task_id"),
    _text("group_id"),
    _int("step"),
    _text("mode"),
    _text("state"),
    _text("outcome", nullable=True),
    _int("priority"),
    _int("attempts"),
    _int("max_attempts"),
    _text("retry", server_default="{}"),
    _int("created_ns"),
    _int("ended_ns", nullable=True),
    _body(),
    Index("agl_rollouts_run", "run_id", "step"),
)
queued = rollouts.c.state == literal_column(
    f"'{RolloutState.QUEUED.value}'"
)  # written out: a parameter hides the index
for name, first in (("agl_rollouts_queue", []), ("agl_rollouts_run_queue", [rollouts.c.run_id])):
    order = (*first, rollouts.c.priority.desc(), rollouts.c.seq)
    Index(name, *order, sqlite_where=queued, postgresql_where=queued)

attempts = Table(
    "agl_attempts",
    metadata,
    _text("id", primary_key=True),
    _text("rollout_id"),
    _int("number"),
    _text("worker"),
    _text("outcome", nullable=True),
    _text("error", nullable=True),
    Column("lease_until", Double, nullable=False),
    Column("lease_s", Double, nullable=False),
    _int("started_ns"),
    _int("ended_ns", nullable=True),
    UniqueConstraint("rollout_id", "number"),
)
running = attempts.c.outcome.is_(None)
Index("agl_attempts_leases", attempts.c.lease_until, sqlite_where=running, postgresql_where=running)

workers = Table("agl_workers", metadata, _text("id", primary_key=True), _int("seen_ns"), _body())

spans = Table(
    "agl_spans",
    metadata,
    _seq(),
    _text("attempt_id"),
    _text("id"),
    _text("kind"),
    _text("path"),
    _text("status"),
    _body(),
    UniqueConstraint("attempt_id", "id"),  # a span id is unique in its trace only
)

completions = Table(
    "agl_completions",
    metadata,
    _seq(),
    _text("id", unique=True),
    _text("attempt_id", nullable=True, index=True),
    Column("attributed", Boolean, nullable=False),
    _text("path"),
    _text("model"),
    _text("policy", nullable=True),
    _int("version", nullable=True),
    _text("finish_reason"),
    _text("defect", nullable=True),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("response_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    _body(),
)
strays = completions.c.attributed == false()
Index("agl_completions_strays", completions.c.seq, sqlite_where=strays, postgresql_where=strays)

rewards = Table(
    "agl_rewards",
    metadata,
    _seq(),
    _text("id", unique=True),
    _text("attempt_id", index=True),
    _text("name"),
    Column("value", Double, nullable=False),
    _text("target"),
    _text("source"),
)
