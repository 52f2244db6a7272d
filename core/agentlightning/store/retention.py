"""Pruning: what happened in rollouts that ended long ago is removed; that they ended, and how, stays.

A few rollouts per transaction, so that no other writer waits long.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import select

from agentlightning.errors import StoreError
from agentlightning.store import queue
from agentlightning.store import tables as t
from agentlightning.store.session import Session

AT_ONCE = 200
"""Attempts per transaction."""

_ids: sa.BindParameter[list[str]] = sa.bindparam("ids", expanding=True)
_REMOVE = tuple(sa.delete(table).where(table.c.attempt_id.in_(_ids)) for table in (t.spans, t.completions))


def prune(session: Session, run_id: str | None, before_step: int | None, before_ns: int | None) -> int:
    """Removes spans and completions of rollouts in a final state; rewards stay. Returns how many records went."""
    if before_step is None and before_ns is None:
        raise StoreError("prune takes before_step or before_ns: nothing is removed without a limit.")
    ended: list[sa.ColumnElement[bool]] = [t.rollouts.c.state.in_(queue.FINAL)]
    if run_id is not None:
        ended.append(t.rollouts.c.run_id == run_id)
    if before_step is not None:
        ended.append(t.rollouts.c.step < before_step)
    if before_ns is not None:
        ended.append(t.rollouts.c.ended_ns < before_ns)
    holds = sa.or_(*(sa.exists().where(table.c.attempt_id == t.attempts.c.id) for table in (t.spans, t.completions)))
    full = (
        select(t.attempts.c.id)
        .join(t.rollouts, t.rollouts.c.id == t.attempts.c.rollout_id)
        .where(*ended, holds)
        .limit(AT_ONCE)
    )
    removed = 0
    while True:
        with session.write() as connection:
            found = connection.scalars(full).all()
            for statement in _REMOVE:
                removed += connection.execute(statement, {"ids": found}).rowcount if found else 0
        if len(found) < AT_ONCE:
            return removed
