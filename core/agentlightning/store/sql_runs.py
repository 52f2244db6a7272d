"""The part of the SQL store that keeps runs, steps, resources and workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy import select, update

from agentlightning.errors import NotFound, RunInUse, StoreError
from agentlightning.schema import Resource, Run, Step, new_id, now_ns
from agentlightning.store import queue, reads
from agentlightning.store import tables as t
from agentlightning.store.base import LEASE_S
from agentlightning.store.codec import RESOURCE, RUN, STEP, WORKER
from agentlightning.store.owners import refuse_rival
from agentlightning.store.records import Worker
from agentlightning.store.sql_base import SqlBase


class SqlRuns(SqlBase):
    # Runs and steps.
    def begin_run(self, name: str, config: dict[str, object], owner: str, lease_s: float = LEASE_S) -> Run:
        digest = _digest(config)
        same = (t.runs.c.name == name, t.runs.c.config_hash == digest, t.runs.c.state.in_(["running", "paused"]))
        newest = select(*RUN.columns).where(*same).order_by(t.runs.c.seq.desc()).limit(1).with_for_update()
        now = self._clock()
        with self._session.write(durable=True) as connection:
            self._session.dialect.alone(connection, f"{name} {digest}")
            row = connection.execute(newest).one_or_none()
            if row is None:
                run = Run(new_id(), name, config, digest, "running", owner, now + lease_s, now_ns())
                (number,) = self._session.numbers(connection, 1)
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

    def end_run(self, run_id: str, state: str, owner: str | None = None) -> None:
        if state not in ("finished", "failed", "paused"):
            raise StoreError(f"a run cannot end as {state!r}: use finished, failed or paused.")
        ended = None if state == "paused" else now_ns()
        mine = t.runs.c.owner.in_(["", owner]) if owner is not None else sa.true()
        change = {"state": state, "owner": "", "lease_until": 0.0, "ended_ns": ended}
        with self._session.write(durable=True) as connection:
            if connection.execute(update(t.runs).where(t.runs.c.id == run_id, mine).values(**change)).rowcount:
                return
            holder = connection.scalar(select(t.runs.c.owner).where(t.runs.c.id == run_id))
        if holder is None:
            raise reads.missing("run", run_id)
        raise RunInUse(f"run {run_id} is held by {holder} now, so {owner} cannot end it: leave it to its holder.")

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
                added = self._session.insert(t.resources)
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

    # Workers.
    def see(self, worker: Worker) -> None:
        seen = msgspec.structs.replace(worker, seen_ns=int(self._clock() * 1e9))
        added = self._session.insert(t.workers)
        changed = {"seen_ns": added.excluded.seen_ns, "body": added.excluded.body}
        with self._session.write() as connection:
            connection.execute(added.on_conflict_do_update(index_elements=["id"], set_=changed), [WORKER.row(seen)])

    def workers(self, seen_within_s: float | None = None) -> list[Worker]:
        query = select(*WORKER.columns).order_by(t.workers.c.seen_ns.desc(), t.workers.c.id)
        if seen_within_s is not None:
            query = query.where(t.workers.c.seen_ns >= int((self._clock() - seen_within_s) * 1e9))
        return self._all(WORKER, query)


def _digest(config: dict[str, object]) -> str:
    """Equal configurations, equal digest, whatever the order of their keys."""
    try:
        plain = msgspec.json.encode(config, order="deterministic")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(
            f"the configuration of a run must be plain data, so that it can be resumed: {error}."
        ) from error
    return hashlib.sha256(plain).hexdigest()
