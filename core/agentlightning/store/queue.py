"""The life of rollouts and attempts, as moves within one transaction.

Only these functions change `rollouts.state`, each along `TRANSITIONS`. Fencing rests on two facts: the number of the
deciding attempt stands in `rollouts.attempts`, and an attempt that lost its say has an outcome already.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, select, update

from agentlightning.errors import NotFound, Superseded
from agentlightning.schema import FINAL_STATES, Attempt, Outcome, Rollout, RolloutState, now_ns
from agentlightning.store.base import RETRIED
from agentlightning.store.codec import ATTEMPT, ROLLOUT
from agentlightning.store.tables import attempts, queued, rollouts, running

T = TypeVar("T")

QUEUED, RUNNING = RolloutState.QUEUED.value, RolloutState.RUNNING.value
FINAL = sorted(state.value for state in FINAL_STATES)

_INFRA = Outcome.INFRA_ERROR

_STATES = {
    Outcome.OK: RolloutState.SUCCEEDED,
    Outcome.TRUNCATED: RolloutState.SUCCEEDED,
    Outcome.CANCELLED: RolloutState.CANCELLED,
}

_POLICY = (rollouts.c.id, rollouts.c.attempts, rollouts.c.max_attempts, rollouts.c.retry)
"""What `_again` wants to know."""

_lost = (running, attempts.c.lease_until <= bindparam("now"))
_ids: sa.BindParameter[Any] = bindparam("ids", expanding=True)
_MAYBE_LOST = (
    select(rollouts.c.id)
    .join(attempts, rollouts.c.id == attempts.c.rollout_id)
    .where(*_lost)
    .with_for_update(skip_locked=True, of=rollouts)
)
_LOST = (
    select(attempts.c.id, attempts.c.worker, attempts.c.lease_s, *_POLICY)
    .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
    .where(*_lost, rollouts.c.id.in_(_ids))
    .order_by(attempts.c.id)
    .with_for_update(of=attempts)
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
_BEGIN = update(rollouts).where(rollouts.c.id.in_(_ids)).values(state=RUNNING, attempts=rollouts.c.attempts + 1)
_HOLD = select(attempts.c.id).where(attempts.c.id.in_(_ids)).order_by(attempts.c.id).with_for_update()
_HOLD_ROLLOUTS = select(rollouts.c.id).where(rollouts.c.id.in_(_ids)).order_by(rollouts.c.id).with_for_update()
_HOLD_ATTEMPTS_OF = (
    select(attempts.c.id).where(attempts.c.rollout_id.in_(_ids), running).order_by(attempts.c.id).with_for_update()
)
_ALIVE = update(attempts).where(attempts.c.id.in_(_ids), running)
_EXTEND = _ALIVE.where(attempts.c.lease_until < bindparam("now") + attempts.c.lease_s).values(
    lease_until=bindparam("now") + attempts.c.lease_s
)
_EXTEND_TO = _ALIVE.where(attempts.c.lease_until < bindparam("until")).values(lease_until=bindparam("until"))
_HOLD_ROLLOUT = (
    select(*_POLICY, rollouts.c.state)
    .where(rollouts.c.id == select(attempts.c.rollout_id).where(attempts.c.id == bindparam("key")).scalar_subquery())
    .with_for_update()
)
_HOLD_ATTEMPT = select(attempts.c.number, attempts.c.outcome).where(attempts.c.id == bindparam("key")).with_for_update()
_ENDED_SO = select(sa.func.count()).where(
    attempts.c.rollout_id == bindparam("rollout"), attempts.c.outcome == bindparam("ended")
)
_BEGUN = select(*ATTEMPT.columns).where(attempts.c.id.in_(_ids)).order_by(attempts.c.number)
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
    maybe = connection.scalars(_MAYBE_LOST, {"now": now}).all()
    for ids in chunks(maybe):
        for attempt_id, worker, lease_s, *policy in connection.execute(_LOST, {"now": now, "ids": ids}).all():
            error = f"no sign of life from worker {worker} for {lease_s:g} s"
            _end(connection, attempt_id, policy[0], Outcome.INFRA_ERROR, error, _again(connection, policy, _INFRA))
    return bool(maybe)


def begun(connection: Connection, attempt_ids: Sequence[str]) -> list[tuple[Rollout, Attempt]]:
    """Which of these attempts a lease whose answer was lost has begun already."""
    found = [ATTEMPT.record(row) for ids in chunks(attempt_ids) for row in connection.execute(_BEGUN, {"ids": ids})]
    order = {attempt_id: place for place, attempt_id in enumerate(attempt_ids)}
    found.sort(key=lambda attempt: order[attempt.id])
    of = select(*ROLLOUT.columns).where(rollouts.c.id.in_(_ids))
    known: dict[str, Rollout] = {}
    for ids in chunks(attempt.rollout_id for attempt in found):
        known.update((rollout.id, rollout) for rollout in map(ROLLOUT.record, connection.execute(of, {"ids": ids})))
    return [(known[attempt.rollout_id], attempt) for attempt in found]


def lease(
    connection: Connection, worker: str, ids: Sequence[str], lease_s: float, run_id: str | None, now: float
) -> list[tuple[Rollout, Attempt]]:
    """Begins the next attempt of as many queued rollouts as there are `ids` for new attempts."""
    query = _NEXT if run_id is None else _NEXT.where(rollouts.c.run_id == run_id)
    found = [ROLLOUT.record(row) for row in connection.execute(query, {"limit": len(ids)})]
    started, pairs = now_ns(), []
    for rollout, attempt_id in zip(found, ids, strict=False):
        rollout.state, rollout.attempts = RolloutState.RUNNING, rollout.attempts + 1
        attempt = Attempt(
            attempt_id, rollout.id, rollout.attempts, worker, lease_until=now + lease_s, started_ns=started
        )
        pairs.append((rollout, attempt))
    if pairs:
        connection.execute(sa.insert(attempts), [ATTEMPT.row(attempt, lease_s=lease_s) for _, attempt in pairs])
        for part in chunks(rollout.id for rollout in found):
            connection.execute(_BEGIN, {"ids": part})
    return pairs


def extend(connection: Connection, attempt_ids: Sequence[str], now: float, lease_s: float | None = None) -> None:
    """A sign of life of these attempts: their leases last at least `lease_s` from now (None: as long as at first)."""
    for ids in chunks(attempt_ids):
        _hold(connection, _HOLD, ids)
        if lease_s is None:
            connection.execute(_EXTEND, {"ids": ids, "now": now})
        else:
            connection.execute(_EXTEND_TO, {"ids": ids, "until": now + lease_s})


def finish(connection: Connection, attempt_id: str, outcome: Outcome, error: str | None) -> RolloutState:
    held = connection.execute(_HOLD_ROLLOUT, {"key": attempt_id}).one_or_none()
    if held is None:
        raise NotFound(f"no attempt {attempt_id}: finish takes the id of an attempt that `lease` gave.")
    *policy, state = held
    number, ended_as = connection.execute(_HOLD_ATTEMPT, {"key": attempt_id}).one()
    rollout_id, latest = policy[:2]
    if ended_as == outcome.value:
        return RolloutState(state)
    if ended_as is not None or number != latest:
        raise Superseded(
            f"attempt {attempt_id} (number {number} of rollout {rollout_id}) ended as {ended_as} before, the rollout is "
            f"{state}: {outcome.value} is ignored. Heartbeats in time, or a longer lease, keep an attempt alive."
        )
    return _end(connection, attempt_id, rollout_id, outcome, error, _again(connection, policy, outcome))


def release(connection: Connection, worker: str) -> None:
    """Queues again what a worker held that is known to be gone."""
    _requeue(connection, attempts.c.worker == worker, f"its worker {worker} is gone")


def give_back(connection: Connection, attempt_ids: Sequence[str], reason: str) -> None:
    """Queues again what these attempts were to do; those that have ended are left alone."""
    for ids in chunks(attempt_ids):
        _requeue(connection, attempts.c.id.in_(ids), reason)


def _requeue(connection: Connection, which: sa.ColumnElement[bool], reason: str) -> None:
    """The attempts end, but are not counted against the limit: the fault was not theirs."""
    held = (
        select(attempts.c.id, attempts.c.rollout_id)
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .where(running, which)
        .order_by(rollouts.c.id)
        .with_for_update(of=rollouts)
    )
    rollout_of = {attempt_id: rollout_id for attempt_id, rollout_id in connection.execute(held)}
    for ids in chunks(rollout_of):
        _hold(connection, _HOLD, ids)
        # Asked again: whoever held the lock before us may have ended them.
        for attempt_id in connection.scalars(select(attempts.c.id).where(attempts.c.id.in_(ids), running)).all():
            one_more = update(rollouts).where(rollouts.c.id == rollout_of[attempt_id])
            connection.execute(one_more.values(max_attempts=rollouts.c.max_attempts + 1))
            _end(connection, attempt_id, rollout_of[attempt_id], Outcome.INFRA_ERROR, reason, True)


def cancel(connection: Connection, rollout_ids: Sequence[str]) -> None:
    """Ends what has not ended."""
    ended = {"outcome": Outcome.CANCELLED.value, "ended_ns": now_ns()}
    for ids in chunks(rollout_ids):
        _hold(connection, _HOLD_ROLLOUTS, ids)
        _hold(connection, _HOLD_ATTEMPTS_OF, ids)
        alive = (rollouts.c.id.in_(ids), rollouts.c.state.in_([QUEUED, RUNNING]))
        connection.execute(update(rollouts).where(*alive).values(state=RolloutState.CANCELLED.value, **ended))
        running = (attempts.c.rollout_id.in_(ids), attempts.c.outcome.is_(None))
        connection.execute(update(attempts).where(*running).values(**ended))


def _hold(connection: Connection, rows: sa.Select[Any], ids: Sequence[str]) -> None:
    """Locks many rows in one order for all, so that no two writers wait for each other. SQLite has one writer anyway."""
    if len(ids) > 1 and connection.dialect.name != "sqlite":
        connection.execute(rows, {"ids": ids})


def _again(connection: Connection, policy: Sequence[Any], outcome: Outcome) -> bool:
    """Whether a rollout whose attempt ends as `outcome` gets another one."""
    rollout_id, begun, most, retry = policy
    if begun >= most:
        return False
    allowed = json.loads(retry).get(outcome.value) if retry != "{}" else None
    if allowed is None:
        return outcome in RETRIED
    before: int = connection.execute(_ENDED_SO, {"rollout": rollout_id, "ended": outcome.value}).scalar_one()
    return before < int(allowed)


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
