"""The life of rollouts and attempts, as moves within one transaction.

Only these functions change `rollouts.state`, each along `TRANSITIONS`. Fencing rests on two facts: the number of the
deciding attempt stands in `rollouts.attempts`, and an attempt that lost its say has an outcome already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, select, update

from agentlightning.errors import NotFound, Superseded
from agentlightning.schema import FINAL_STATES, Attempt, Outcome, Rollout, RolloutState, new_id, now_ns
from agentlightning.store.base import RETRIED
from agentlightning.store.codec import ATTEMPT, ROLLOUT
from agentlightning.store.tables import attempts, queued, rollouts, running

T = TypeVar("T")

QUEUED, RUNNING = RolloutState.QUEUED.value, RolloutState.RUNNING.value
FINAL = sorted(state.value for state in FINAL_STATES)

_STATES = {
    Outcome.OK: RolloutState.SUCCEEDED,
    Outcome.TRUNCATED: RolloutState.SUCCEEDED,
    Outcome.CANCELLED: RolloutState.CANCELLED,
}

_lost = (running, attempts.c.lease_until <= bindparam("now"))
_LOST = (
    select(
        attempts.c.id,
        attempts.c.worker,
        attempts.c.lease_s,
        rollouts.c.id,
        rollouts.c.attempts,
        rollouts.c.max_attempts,
    )
    .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
    .where(*_lost)
    .with_for_update(skip_locked=True)
)
_ANY_LOST = select(sa.exists().where(*_lost))
_ANY_QUEUED = select(sa.exists().where(queued))
_NEXT = (
    select(*ROLLOUT.columns)
    .where(queued)
    .order_by(rollouts.c.priority.desc(), rollouts.c.seq)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_BEGIN = (
    update(rollouts)
    .where(rollouts.c.id.in_(bindparam("ids", expanding=True)))
    .values(state=RUNNING, attempts=rollouts.c.attempts + 1)
)
_ALIVE = update(attempts).where(attempts.c.id.in_(bindparam("ids", expanding=True)), running)
_EXTEND = _ALIVE.where(attempts.c.lease_until < bindparam("now") + attempts.c.lease_s).values(
    lease_until=bindparam("now") + attempts.c.lease_s
)
_EXTEND_TO = _ALIVE.where(attempts.c.lease_until < bindparam("until")).values(lease_until=bindparam("until"))
_FOR_FINISH = (
    select(attempts.c.rollout_id, attempts.c.number, attempts.c.outcome)
    .add_columns(rollouts.c.attempts, rollouts.c.max_attempts, rollouts.c.state)
    .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
    .where(attempts.c.id == bindparam("attempt_id"))
    .with_for_update()
)
_END_ATTEMPT = update(attempts).where(attempts.c.id == bindparam("key"))
_MOVE = update(rollouts).where(rollouts.c.id == bindparam("key"))


def chunks(values: Iterable[T], size: int = 500) -> Iterator[list[T]]:
    """Databases bound the number of parameters of a statement."""
    items = list(values)
    for start in range(0, len(items), size):
        yield items[start : start + size]


def work_waits(connection: Connection, now: float) -> bool:
    """Whether a lease would find something."""
    return bool(connection.scalar(_ANY_QUEUED) or connection.scalar(_ANY_LOST, {"now": now}))


def leases_lost(connection: Connection, now: float) -> bool:
    return bool(connection.scalar(_ANY_LOST, {"now": now}))


def expire(connection: Connection, now: float) -> bool:
    """Ends the attempts whose lease ran out; True when there were any."""
    lost = connection.execute(_LOST, {"now": now}).all()
    for attempt_id, worker, lease_s, rollout_id, begun, most in lost:
        error = f"no sign of life from worker {worker} for {lease_s:g} s"
        _end(connection, attempt_id, rollout_id, Outcome.INFRA_ERROR, error, begun < most)
    return bool(lost)


def lease(
    connection: Connection, worker: str, limit: int, lease_s: float, run_id: str | None, now: float
) -> list[tuple[Rollout, Attempt]]:
    """Begins the next attempt of up to `limit` queued rollouts."""
    query = _NEXT if run_id is None else _NEXT.where(rollouts.c.run_id == run_id)
    found = [ROLLOUT.record(row) for row in connection.execute(query, {"limit": limit})]
    started, pairs = now_ns(), []
    for rollout in found:
        rollout.state, rollout.attempts = RolloutState.RUNNING, rollout.attempts + 1
        attempt = Attempt(new_id(), rollout.id, rollout.attempts, worker, lease_until=now + lease_s, started_ns=started)
        pairs.append((rollout, attempt))
    if pairs:
        connection.execute(sa.insert(attempts), [ATTEMPT.row(attempt, lease_s=lease_s) for _, attempt in pairs])
        for ids in chunks(rollout.id for rollout in found):
            connection.execute(_BEGIN, {"ids": ids})
    return pairs


def extend(connection: Connection, attempt_ids: Sequence[str], now: float, lease_s: float | None = None) -> None:
    """A sign of life of these attempts: their leases last at least `lease_s` from now (None: as long as at first)."""
    for ids in chunks(attempt_ids):
        if lease_s is None:
            connection.execute(_EXTEND, {"ids": ids, "now": now})
        else:
            connection.execute(_EXTEND_TO, {"ids": ids, "until": now + lease_s})


def finish(connection: Connection, attempt_id: str, outcome: Outcome, error: str | None) -> RolloutState:
    row = connection.execute(_FOR_FINISH, {"attempt_id": attempt_id}).one_or_none()
    if row is None:
        raise NotFound(f"no attempt {attempt_id}: finish takes the id of an attempt that `lease` gave.")
    rollout_id, number, ended_as, latest, most, state = row
    if ended_as == outcome.value:
        return RolloutState(state)
    if ended_as is not None or number != latest:
        raise Superseded(
            f"attempt {attempt_id} (number {number} of rollout {rollout_id}) ended as {ended_as} before, the rollout is "
            f"{state}: {outcome.value} is ignored. Heartbeats in time, or a longer lease, keep an attempt alive."
        )
    return _end(connection, attempt_id, rollout_id, outcome, error, outcome in RETRIED and latest < most)


def release(connection: Connection, worker: str) -> None:
    """Queues again what a worker held that is known to be gone. Its attempts end, but are not counted against the limit:
    the fault was not theirs."""
    held = (
        select(attempts.c.id, attempts.c.rollout_id)
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .where(running, attempts.c.worker == worker)
    )
    for attempt_id, rollout_id in connection.execute(held).all():
        one_more = update(rollouts).where(rollouts.c.id == rollout_id)
        connection.execute(one_more.values(max_attempts=rollouts.c.max_attempts + 1))
        _end(connection, attempt_id, rollout_id, Outcome.INFRA_ERROR, f"its worker {worker} is gone", True)


def cancel(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Ends what has not ended."""
    ended = {"outcome": Outcome.CANCELLED.value, "ended_ns": now_ns()}
    for ids in chunks(rollout_ids):
        alive = (rollouts.c.id.in_(ids), rollouts.c.state.in_([QUEUED, RUNNING]))
        connection.execute(update(rollouts).where(*alive).values(state=RolloutState.CANCELLED.value, **ended))
        running = (attempts.c.rollout_id.in_(ids), attempts.c.outcome.is_(None))
        connection.execute(update(attempts).where(*running).values(**ended))


def _end(
    connection: Connection, attempt_id: str, rollout_id: str, outcome: Outcome, error: str | None, again: bool
) -> RolloutState:
    ended: dict[str, Any] = {"outcome": outcome.value, "ended_ns": now_ns()}
    text = error.encode("utf-8", "replace").decode() if error else error
    connection.execute(_END_ATTEMPT, {"key": attempt_id, "error": text, **ended})
    state = RolloutState.QUEUED if again else _STATES.get(outcome, RolloutState.FAILED)
    moved = {"state": state.value} if again else {"state": state.value, **ended}
    connection.execute(_MOVE, {"key": rollout_id, **moved})
    return state
