"""The store on a database: every method is one short transaction, and the database is the only truth.

Nothing is cached between calls, so that any thread of any process sees what was acknowledged. Clocks decide leases and
nothing else; order comes from one counter that all records share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from agentlightning.errors import StoreError
from agentlightning.schema import Attempt, Outcome, Rollout, RolloutState, new_id, now_ns
from agentlightning.store import queue, reads
from agentlightning.store import tables as t
from agentlightning.store.base import LEASE_S
from agentlightning.store.codec import ATTEMPT, ROLLOUT
from agentlightning.store.queue import chunks
from agentlightning.store.sql_records import SqlRecords
from agentlightning.store.sql_runs import SqlRuns

_OUTCOMES = tuple(outcome.value for outcome in Outcome)


class SqlStore(SqlRuns, SqlRecords):
    """`Store` over SQLAlchemy Core. The methods here are the queue's."""

    def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        if not rollouts:
            return
        rows = [_queued(rollout) for rollout in rollouts]
        with self._session.write() as connection:
            for number, row in zip(self._session.numbers(connection, len(rows)), rows, strict=True):
                row["seq"] = number
            connection.execute(self._new[t.rollouts.name], rows)
        self._session.notify()

    def lease(
        self,
        worker: str,
        limit: int = 1,
        lease_s: float = LEASE_S,
        run_id: str | None = None,
        token: str = "",
    ) -> list[tuple[Rollout, Attempt]]:
        now, ids = self._clock(), attempt_ids(token, limit)
        with self._session.write() as connection:
            pairs = queue.begun(connection, ids) if token else []
            lost = False
            if not pairs:
                lost = queue.expire(connection, now)
                pairs = queue.lease(connection, worker, ids, lease_s, run_id, now)
        if lost:
            self._session.notify()
        return pairs

    def heartbeat(self, attempt_ids: Sequence[str], lease_s: float = LEASE_S) -> list[str]:
        alive: set[str] = set()
        with self._session.write() as connection:
            queue.extend(connection, attempt_ids, self._clock(), lease_s)
            for ids in chunks(attempt_ids):
                known = select(t.attempts.c.id).where(t.attempts.c.id.in_(ids), t.running)
                alive.update(connection.scalars(known))
        return [attempt_id for attempt_id in attempt_ids if attempt_id not in alive]

    def finish(self, attempt_id: str, outcome: Outcome, error: str | None = None) -> RolloutState:
        with self._session.write() as connection:
            state = queue.finish(connection, attempt_id, Outcome(outcome), error)
        self._session.notify()
        return state

    def give_back(self, attempt_ids: Sequence[str], reason: str) -> None:
        with self._session.write() as connection:
            queue.give_back(connection, attempt_ids, reason)
        self._session.notify()

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        with self._session.write() as connection:
            reads.require(connection, rollout_ids)
            queue.cancel(connection, rollout_ids)
        self._session.notify()

    def rollouts(
        self,
        run_id: str | None = None,
        *,
        ids: Sequence[str] | None = None,
        step: int | None = None,
        mode: str | None = None,
        state: RolloutState | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Rollout]:
        columns = t.rollouts.c
        wanted = [(columns.run_id, run_id), (columns.step, step), (columns.mode, mode)]
        where = [column == value for column, value in wanted if value is not None]
        if state is not None:
            where.append(columns.state == RolloutState(state).value)
        with self._session.read() as connection:
            if after is not None:
                seq = connection.scalar(select(columns.seq).where(columns.id == after))
                if seq is None:
                    raise reads.missing("rollout", after)
                where.append(columns.seq > seq)
            query = select(*ROLLOUT.columns, columns.seq).where(*where).order_by(columns.seq).limit(limit)
            parts = [query] if ids is None else [query.where(columns.id.in_(part)) for part in chunks(set(ids))]
            rows = [row for part in parts for row in connection.execute(part)]
        rows.sort(key=lambda row: row[-1])
        return [ROLLOUT.record(row) for row in rows[:limit]]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        query = select(*ATTEMPT.columns).where(t.attempts.c.rollout_id == rollout_id).order_by(t.attempts.c.number)
        return self._all(ATTEMPT, query)

    def attempt(self, attempt_id: str) -> tuple[Rollout, Attempt]:
        with self._session.read() as connection:
            return reads.attempt(connection, attempt_id)

    def wait(self, rollout_ids: Sequence[str], timeout_s: float | None = None) -> set[str]:
        wanted = list(dict.fromkeys(rollout_ids))
        with self._session.read() as connection:
            reads.require(connection, wanted)
        return self._until(lambda connection: reads.ended(connection, wanted), timeout_s) if wanted else set()

    def wait_for_work(self, timeout_s: float) -> bool:
        return self._until(lambda connection: queue.work_waits(connection, self._clock()), timeout_s)

    def backlog(self, run_id: str | None = None) -> dict[str, int]:
        with self._session.read() as connection:
            return reads.backlog(connection, run_id)


def _queued(rollout: Rollout) -> dict[str, Any]:
    """The row of a rollout that nobody has begun, whatever state the record claims."""
    if rollout.max_attempts < 1:
        raise StoreError(f"rollout {rollout.id} has max_attempts={rollout.max_attempts}: give at least 1.")
    unknown = [name for name, count in rollout.retry.items() if name not in _OUTCOMES or count < 0]
    if unknown:
        raise StoreError(
            f"rollout {rollout.id} has retry={rollout.retry}: give a number of tries, at least 0, for each of "
            f"{', '.join(_OUTCOMES)}."
        )
    fresh = {"state": RolloutState.QUEUED.value, "outcome": None, "attempts": 0, "ended_ns": None}
    return ROLLOUT.row(rollout, created_ns=rollout.created_ns or now_ns(), **fresh)


def attempt_ids(token: str, count: int) -> list[str]:
    """Ids of new attempts. Those of the same token are the same, so that a repeated lease finds what it began."""
    if not token:
        return [new_id() for _ in range(count)]
    return [hashlib.sha256(f"{token} {number}".encode()).hexdigest()[:32] for number in range(count)]
