"""What the store looks up, a few queries for however many rollouts: each function works within one transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, select

from agentlightning.errors import NotFound, StoreError
from agentlightning.schema import FINAL_STATES, Attempt, Completion, Reward, Rollout, Span
from agentlightning.store import queue
from agentlightning.store import tables as t
from agentlightning.store.codec import ATTEMPT, COMPLETION, REWARD, ROLLOUT, SPAN, Codec
from agentlightning.store.queue import chunks
from agentlightning.store.records import News

_ids: sa.BindParameter[Any] = sa.bindparam("ids", expanding=True)
_KNOWN_ATTEMPTS = select(t.attempts.c.id).where(t.attempts.c.id.in_(_ids))
_KNOWN_ROLLOUTS = select(t.rollouts.c.id).where(t.rollouts.c.id.in_(_ids))
_ENDED = _KNOWN_ROLLOUTS.where(t.rollouts.c.state.in_(queue.FINAL))
_ROLLOUTS = select(*ROLLOUT.columns).where(t.rollouts.c.id.in_(_ids))
_ATTEMPTS_OF = select(*ATTEMPT.columns).where(t.attempts.c.rollout_id.in_(_ids))
_CALLS_BY_ATTEMPT = (
    select(t.attempts.c.rollout_id, t.attempts.c.id, sa.func.count())
    .join(t.completions, t.completions.c.attempt_id == t.attempts.c.id)
    .where(t.attempts.c.rollout_id.in_(_ids), t.attempts.c.outcome.is_not(None))
    .group_by(t.attempts.c.rollout_id, t.attempts.c.id)
)
_HAPPENED: tuple[tuple[Codec[Any], sa.Select[Any]], ...] = tuple(
    (codec, select(*codec.columns).where(table.c.attempt_id.in_(_ids)).order_by(table.c.seq))
    for codec, table in ((SPAN, t.spans), (COMPLETION, t.completions), (REWARD, t.rewards))
)


def missing(kind: str, record_id: str) -> NotFound:
    return NotFound(f"no {kind} {record_id} in this store: check the id and the store's URL (`agl runs` lists runs).")


def rollouts(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, Rollout]:
    """By id. Raises NotFound for the first that is missing."""
    found: dict[str, Rollout] = {}
    for ids in chunks(dict.fromkeys(rollout_ids)):
        rows = connection.execute(_ROLLOUTS, {"ids": ids})
        found.update((rollout.id, rollout) for rollout in map(ROLLOUT.record, rows))
    for rollout_id in rollout_ids:
        if rollout_id not in found:
            raise missing("rollout", rollout_id)
    return found


def require(connection: Connection, rollout_ids: Sequence[str]) -> None:
    known: set[str] = set()
    for ids in chunks(rollout_ids):
        known.update(connection.scalars(_KNOWN_ROLLOUTS, {"ids": ids}))
    for rollout_id in rollout_ids:
        if rollout_id not in known:
            raise missing("rollout", rollout_id)


def ended(connection: Connection, rollout_ids: Sequence[str]) -> set[str]:
    ended: set[str] = set()
    for ids in chunks(rollout_ids):
        ended.update(connection.scalars(_ENDED, {"ids": ids}))
    return ended


def known_attempts(connection: Connection, attempt_ids: Sequence[str]) -> set[str]:
    known: set[str] = set()
    for ids in chunks(attempt_ids):
        known.update(connection.scalars(_KNOWN_ATTEMPTS, {"ids": ids}))
    return known


def attempt(connection: Connection, attempt_id: str) -> tuple[Rollout, Attempt]:
    row = connection.execute(select(*ATTEMPT.columns).where(t.attempts.c.id == attempt_id)).one_or_none()
    if row is None:
        raise missing("attempt", attempt_id)
    attempt = ATTEMPT.record(row)
    return rollouts(connection, [attempt.rollout_id])[attempt.rollout_id], attempt


def deciding(connection: Connection, found: dict[str, Rollout]) -> dict[str, Attempt]:
    """By rollout: the attempt with the latest number, where its outcome is the rollout's."""
    decided: dict[str, Attempt] = {}
    for ids in chunks(rollout.id for rollout in found.values() if rollout.state in FINAL_STATES):
        for attempt in map(ATTEMPT.record, connection.execute(_ATTEMPTS_OF, {"ids": ids})):
            rollout = found[attempt.rollout_id]
            if attempt.number == rollout.attempts and attempt.outcome == rollout.outcome:
                decided[rollout.id] = attempt
    return decided


def superseded(connection: Connection, found: dict[str, Rollout], decided: dict[str, Attempt]) -> dict[str, int]:
    """By rollout: how many calls its attempts made that ended and did not decide it."""
    counts = dict.fromkeys(found, 0)
    for ids in chunks(rollout.id for rollout in found.values() if rollout.attempts > (rollout.id in decided)):
        for rollout_id, attempt_id, count in connection.execute(_CALLS_BY_ATTEMPT, {"ids": ids}):
            if rollout_id not in decided or decided[rollout_id].id != attempt_id:
                counts[rollout_id] += count
    return counts


_Happened = tuple[list[Span], list[Completion], list[Reward]]


def records(connection: Connection, attempt_ids: Sequence[str]) -> dict[str, _Happened]:
    """By attempt, in order of arrival: three queries for up to 500 attempts."""
    found: dict[str, _Happened] = {attempt_id: ([], [], []) for attempt_id in attempt_ids}
    for ids in chunks(attempt_ids):
        for place, (codec, query) in enumerate(_HAPPENED):
            for record in map(codec.record, connection.execute(query, {"ids": ids})):
                found[record.attempt_id][place].append(record)
    return found


KINDS = ("span", "completion", "reward")
_TABLES: tuple[sa.Table, ...] = (t.spans, t.completions, t.rewards)


def news(
    connection: Connection,
    after: int,
    settled: int,
    run_id: str | None,
    attempt_id: str | None,
    kinds: Collection[str],
    limit: int,
) -> News:
    """Records with numbers in (`after`, `settled`], the first `limit` of each kind and never past a gap that this left."""
    if unknown := set(kinds) - set(KINDS):
        raise StoreError(f"there are no records of kind {sorted(unknown)}: choose from {', '.join(KINDS)}.")
    found: list[list[Any]] = []
    end = settled
    for kind, table, (codec, _) in zip(KINDS, _TABLES, _HAPPENED, strict=True):
        rows = []
        if kind in kinds and settled > after:
            query = select(*codec.columns, table.c.seq).where(table.c.seq > after, table.c.seq <= settled)
            if attempt_id is not None:
                query = query.where(table.c.attempt_id == attempt_id)
            if run_id is not None:
                of_run = select(t.attempts.c.id).join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
                query = query.where(table.c.attempt_id.in_(of_run.where(t.rollouts.c.run_id == run_id)))
            rows = list(connection.execute(query.order_by(table.c.seq).limit(limit)))
            if len(rows) == limit:
                end = min(end, rows[-1][-1])
        found.append([(row[-1], codec.record(row)) for row in rows])
    spans, completions, rewards = ([record for seq, record in part if seq <= end] for part in found)
    return News(end, spans, completions, rewards)


def backlog(connection: Connection, run_id: str | None) -> dict[str, int]:
    """How many rollouts wait and how many run."""
    of_run = () if run_id is None else (t.rollouts.c.run_id == run_id,)
    waiting = select(sa.func.count()).select_from(t.rollouts).where(t.queued, *of_run)
    begun = select(sa.func.count()).select_from(t.attempts).where(t.running)
    if of_run:
        begun = begun.join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id).where(*of_run)
    return {"queued": int(connection.scalar(waiting) or 0), "running": int(connection.scalar(begun) or 0)}
