"""The part of the SQL store that keeps what happened: spans, completions and rewards."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import select

from agentlightning.errors import RewardError
from agentlightning.schema import Completion, Episode, Reward, Span
from agentlightning.store import queue, reads, retention
from agentlightning.store import tables as t
from agentlightning.store.codec import COMPLETION, REWARD, SPAN
from agentlightning.store.records import News
from agentlightning.store.sql_base import SqlBase


class SqlRecords(SqlBase):
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
            numbers = iter(self._session.numbers(connection, count))
            calls = parts[1][1]
            known = reads.known_attempts(connection, attempt_ids) if calls else set()
            for call in calls:
                call["attributed"] = call["attempt_id"] in known
            for statement, rows in parts:
                for row in rows:
                    row["seq"] = next(numbers)
                if rows:
                    connection.execute(statement, rows)
            queue.extend(connection, attempt_ids, self._clock())
        self._session.notify()

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
        settled = self._session.last_number()
        stray = (t.strays, t.completions.c.seq > after_seq, t.completions.c.seq <= settled)
        return self._all(COMPLETION, select(*COMPLETION.columns).where(*stray).order_by(t.completions.c.seq))

    def follow(
        self,
        after: int = 0,
        *,
        run_id: str | None = None,
        attempt_id: str | None = None,
        kinds: Collection[str] = reads.KINDS,
        limit: int = 1000,
        timeout_s: float = 0.0,
    ) -> News:
        settled = after

        def look(connection: sa.Connection) -> News | None:
            found = reads.news(connection, after, settled, run_id, attempt_id, kinds, limit)
            return found if found.spans or found.completions or found.rewards else None

        def settle() -> None:
            nonlocal settled
            settled = self._session.last_number()

        return self._until(look, timeout_s, settle) or News(max(after, settled))

    def prune(self, run_id: str | None = None, *, before_step: int | None = None, before_ns: int | None = None) -> int:
        return retention.prune(self._session, run_id, before_step, before_ns)
