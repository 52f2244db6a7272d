"""The store on a database: every method is one short transaction, and the database is the only truth.

Nothing is cached between calls, so that any thread of any process sees what was acknowledged. Clocks decide leases and
nothing else; order comes from one counter that all records share.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, select, update

from agentlightning.errors import NotFound, RewardError, RunInUse, StoreError
from agentlightning.schema import (
    Attempt,
    Completion,
    Episode,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Span,
    Step,
    new_id,
    now_ns,
)
from agentlightning.store import queue, reads
from agentlightning.store import tables as t
from agentlightning.store.base import LEASE_S
from agentlightning.store.codec import ATTEMPT, COMPLETION, RESOURCE, REWARD, ROLLOUT, RUN, SPAN, STEP, Codec
from agentlightning.store.database import insert
from agentlightning.store.owners import refuse_rival
from agentlightning.store.queue import chunks
from agentlightning.store.session import Session

T = TypeVar("T")

REAP_S = 1.0
"""Seconds between two looks of a waiting thread for leases that ran out, in case no worker is left to look."""


class SqlStore:
    """`Store` over SQLAlchemy Core. `clock` gives Unix seconds for leases."""

    def __init__(self, url: str, *, create: bool = True, clock: Callable[[], float] = time.time) -> None:
        self.url = url
        self._session = Session(url, create)
        self._clock = clock
        self._new: dict[str, Any] = {
            table.name: insert(table).on_conflict_do_nothing()
            for table in (t.steps, t.resources, t.rollouts, t.completions, t.rewards)
        }
        span = insert(t.spans)
        changed = {name: span.excluded[name] for name in ("kind", "path", "status", "body")}
        self._put_span = span.on_conflict_do_update(
            index_elements=["attempt_id", "id"], set_=changed, where=t.spans.c.status == "open"
        )

    # Runs and steps.
    def begin_run(self, name: str, config: dict[str, object], owner: str, lease_s: float = LEASE_S) -> Run:
        digest = _digest(config)
        same = (t.runs.c.name == name, t.runs.c.config_hash == digest, t.runs.c.state.in_(["running", "paused"]))
        newest = select(*RUN.columns).where(*same).order_by(t.runs.c.seq.desc()).limit(1).with_for_update()
        now = self._clock()
        with self._session.write(durable=True) as connection:
            row = connection.execute(newest).one_or_none()
            if row is None:
                run = Run(new_id(), name, config, digest, "running", owner, now + lease_s, now_ns())
                number = self._session.number(connection, 1)
                connection.execute(sa.insert(t.runs), RUN.row(run, seq=number))
                return run
            run = RUN.record(row)
            refuse_rival(run, owner, now)
            if run.owner and run.owner != owner:
                queue.release(connection, run.owner)
            run.state, run.owner, run.lease_until = "running", owner, now + lease_s
            held = {"state": run.state, "owner": owner, "lease_until": run.lease_until}
            connection.execute(update(t.runs).where(t.runs.c.id == run.id).values(**held))
            return run

    def renew_run(self, run_id: str, owner: str, lease_s: float = LEASE_S) -> None:
        held = (t.runs.c.id == run_id, t.runs.c.owner == owner)
        with self._session.write() as connection:
            if connection.execute(update(t.runs).where(*held).values(lease_until=self._clock() + lease_s)).rowcount:
                return
            holder = connection.scalar(select(t.runs.c.owner).where(t.runs.c.id == run_id))
        if holder is None:
            raise reads.missing("run", run_id)
        raise RunInUse(
            f"run {run_id} is no longer held by {owner}, but by {holder or 'nobody'}: this process must stop "
            "training it. Begin the run again to take it back."
        )

    def end_run(self, run_id: str, state: str) -> None:
        if state not in ("finished", "failed", "paused"):
            raise StoreError(f"a run cannot end as {state!r}: use finished, failed or paused.")
        ended = None if state == "paused" else now_ns()
        change = (
            update(t.runs).where(t.runs.c.id == run_id).values(state=state, owner="", lease_until=0.0, ended_ns=ended)
        )
        with self._session.write(durable=True) as connection:
            if not connection.execute(change).rowcount:
                raise reads.missing("run", run_id)

    def runs(self) -> list[Run]:
        return self._all(RUN, select(*RUN.columns).order_by(t.runs.c.seq))

    def add_step(self, step: Step) -> None:
        with self._session.write(durable=True) as connection:
            connection.execute(self._new[t.steps.name], STEP.row(step))

    def steps(self, run_id: str) -> list[Step]:
        return self._all(STEP, select(*STEP.columns).where(t.steps.c.run_id == run_id).order_by(t.steps.c.number))

    # Resources.
    def publish(self, run_id: str, resources: Sequence[Resource], *, moved: bool = False) -> None:
        if resources:
            statement = self._new[t.resources.name]
            if moved:
                added = insert(t.resources)
                keys = ["run_id", "name", "version"]
                statement = added.on_conflict_do_update(index_elements=keys, set_={"body": added.excluded.body})
            with self._session.write(durable=True) as connection:
                rows = [RESOURCE.row(resource, run_id=run_id) for resource in resources]
                connection.execute(statement, rows)

    def resource(self, run_id: str, name: str, version: int | None = None) -> Resource:
        query = select(*RESOURCE.columns).where(t.resources.c.run_id == run_id, t.resources.c.name == name)
        if version is not None:
            query = query.where(t.resources.c.version == version)
        found = self._all(RESOURCE, query.order_by(t.resources.c.version.desc()).limit(1))
        if not found:
            which = name if version is None else f"{name} version {version}"
            raise NotFound(f"run {run_id} has no resource {which}: publish it before rollouts read it.")
        return found[0]

    # Rollouts.
    def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        if not rollouts:
            return
        rows = [_queued(rollout) for rollout in rollouts]
        with self._session.write() as connection:
            first = self._session.number(connection, len(rows))
            for number, row in enumerate(rows, first):
                row["seq"] = number
            connection.execute(self._new[t.rollouts.name], rows)
        self._session.notify()

    def lease(
        self, worker: str, limit: int = 1, lease_s: float = LEASE_S, run_id: str | None = None
    ) -> list[tuple[Rollout, Attempt]]:
        now = self._clock()
        with self._session.write() as connection:
            lost = queue.expire(connection, now)
            pairs = queue.lease(connection, worker, limit, lease_s, run_id, now)
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

    # What happened.
    def add(
        self,
        spans: Sequence[Span] = (),
        completions: Sequence[Completion] = (),
        rewards: Sequence[Reward] = (),
    ) -> None:
        for reward in rewards:
            if not math.isfinite(reward.value):
                raise RewardError(
                    f"reward {reward.name!r} of attempt {reward.attempt_id} is {reward.value}: give a finite number."
                )
        named = {span.attempt_id for span in spans} | {reward.attempt_id for reward in rewards}
        named.update(call.attempt_id for call in completions if call.attempt_id is not None)
        parts: list[tuple[Any, list[dict[str, Any]]]] = [
            (self._put_span, [SPAN.row(span) for span in spans]),
            (self._new[t.completions.name], [COMPLETION.row(completion) for completion in completions]),
            (self._new[t.rewards.name], [REWARD.row(reward) for reward in rewards]),
        ]
        count = sum(len(rows) for _, rows in parts)
        if count:
            self._append(parts, count, sorted(named))

    def _append(self, parts: list[tuple[Any, list[dict[str, Any]]]], count: int, attempt_ids: list[str]) -> None:
        with self._session.write() as connection:
            number = self._session.number(connection, count)
            calls = parts[1][1]
            known = reads.known_attempts(connection, attempt_ids) if calls else set()
            for call in calls:
                call["attributed"] = call["attempt_id"] in known
            for statement, rows in parts:
                for row in rows:
                    row["seq"] = number
                    number += 1
                if rows:
                    connection.execute(statement, rows)
            queue.extend(connection, attempt_ids, self._clock())

    def episodes(self, rollout_ids: Sequence[str]) -> list[Episode]:
        with self._session.read() as connection:
            found = reads.rollouts(connection, rollout_ids)
            decided = reads.deciding(connection, found)
            records = reads.records(connection, [attempt.id for attempt in decided.values()])
            superseded = reads.superseded(connection, found, decided)
        episodes = []
        for rollout_id in rollout_ids:
            attempt = decided.get(rollout_id)
            happened = records[attempt.id] if attempt else ([], [], [])
            episodes.append(Episode(found[rollout_id], attempt, *happened, superseded[rollout_id]))
        return episodes

    def trace(self, attempt_id: str) -> Episode:
        with self._session.read() as connection:
            rollout, attempt = reads.attempt(connection, attempt_id)
            return Episode(rollout, attempt, *reads.records(connection, [attempt_id])[attempt_id])

    def find(self, prefix: str, limit: int = 10) -> list[str]:
        found: list[str] = []
        with self._session.read() as connection:
            for column in (t.rollouts.c.id, t.attempts.c.id):
                near = (column >= prefix, column < prefix + chr(0x10FFFF))
                found += connection.scalars(select(column).where(*near).order_by(column).limit(limit))
        return found[:limit]

    def unattributed(self, after_seq: int = 0) -> list[Completion]:
        stray = (t.strays, t.completions.c.seq > after_seq)
        return self._all(COMPLETION, select(*COMPLETION.columns).where(*stray).order_by(t.completions.c.seq))

    def close(self) -> None:
        self._session.close()

    # Shared by the methods above.
    def _all(self, codec: Codec[T], query: sa.Select[Any]) -> list[T]:
        with self._session.read() as connection:
            rows = connection.execute(query).all()
        return [codec.record(row) for row in rows]

    def _until(self, look: Callable[[Connection], T], timeout_s: float | None) -> T:
        """What `look` finds as soon as it is true, or when the time is over."""
        start = reaped = time.monotonic()
        while True:
            ticks, now = self._session.ticks, time.monotonic()
            if now - reaped > REAP_S:
                reaped = now
                self._reap()
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


def _digest(config: dict[str, object]) -> str:
    """Equal configurations, equal digest, whatever the order of their keys."""
    try:
        plain = msgspec.json.encode(config, order="deterministic")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(
            f"the configuration of a run must be plain data, so that it can be resumed: {error}."
        ) from error
    return hashlib.sha256(plain).hexdigest()


def _queued(rollout: Rollout) -> dict[str, Any]:
    """The row of a rollout that nobody has begun, whatever state the record claims."""
    if rollout.max_attempts < 1:
        raise StoreError(f"rollout {rollout.id} has max_attempts={rollout.max_attempts}: give at least 1.")
    fresh = {"state": RolloutState.QUEUED.value, "outcome": None, "attempts": 0, "ended_ns": None}
    return ROLLOUT.row(rollout, created_ns=rollout.created_ns or now_ns(), **fresh)
