"""What adapters and `emit_*` write through: records go into a queue at once, and into the store a moment later.

The user's program pays for an append; one thread writes batches. A span that ended before its batch was written is
written once. `flush` is the barrier that makes this invisible: what was handed in before it is committed after it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec

from agentlightning.context import Scope, current
from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.plain import plain
from agentlightning.schema import Reward, Span, SpanKind, finite, new_id, new_span_id, now_ns
from agentlightning.spool import may_pass

logger = logging.getLogger(__name__)

CAPACITY = 100_000
"""Records that wait for a store that does not answer; more are refused and counted."""
LINGER_S = 0.05
"""How long a batch waits for company."""
BATCH = 1_000
_MOST_REMEMBERED = 1_000

Record: TypeAlias = Span | Reward


class Sink(Protocol):
    """The part of a store that a recorder needs. One that has `settle` too (`spool.py`) is asked for it by `flush`."""

    def add(self, spans: Sequence[Span] = (), completions: Sequence[Any] = (), rewards: Sequence[Reward] = ()) -> None:
        """Appends in one transaction."""


class _Barrier(threading.Event):
    """Set when everything before it in the queue is written or lost."""


class Recorder:
    """Writes what happens in attempts to a store. Every method may be called from any thread.

    Outside an attempt `start`, `event` and `reward` do nothing: they return records that are not stored.
    """

    def __init__(self, store: Sink, *, linger_s: float = LINGER_S, capacity: int = CAPACITY) -> None:
        self._store = store
        self._settle: Callable[[float], None] | None = getattr(store, "settle", None)
        self._linger_s = linger_s
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Record | _Barrier | None] = queue.SimpleQueue()  # safe within finalizers
        self._hurry = threading.Event()
        self._give_up_at: float | None = None
        self._trouble: Exception | None = None
        self._lost: dict[str, str] = {}
        self.lost = 0
        """Records that could not be stored, since the start."""
        self._thread = threading.Thread(target=self._run, name="agl-recorder", daemon=True)
        self._thread.start()

    def start(
        self,
        kind: SpanKind | str,
        name: str,
        *,
        path: str | None = None,
        parent_id: str | None = None,
        attributes: Mapping[str, Any] | None = None,
        scope: Scope | None = None,
    ) -> Span:
        """Opens a span in `scope`, or the current one; `path` and `parent_id` say otherwise. End it with `end`."""
        span = self._span(kind, name, path, parent_id, attributes, scope or current())
        if span.attempt_id:
            self._put(msgspec.structs.replace(span, attributes=dict(span.attributes)))
        return span

    def end(
        self,
        span: Span,
        *,
        status: str = "ok",
        error: BaseException | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Closes a span; an `error` makes the status `error`. A span that is closed already stays as it is."""
        if span.end_ns is not None:
            return
        span.end_ns = now_ns()
        span.status = status if error is None else "error"
        span.error = None if error is None else _told(error)
        span.attributes = {**span.attributes, **_plain(attributes)}
        if span.attempt_id:
            self._put(msgspec.structs.replace(span, attributes=dict(span.attributes)))

    def event(
        self,
        kind: SpanKind | str,
        name: str,
        *,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        """A span that takes no time."""
        span = self._span(kind, name, None, None, attributes, current())
        self.end(span, error=error)
        return span

    def reward(
        self,
        value: object,
        *,
        name: str = "reward",
        target: str = "rollout",
        source: str = "emit",
        attempt_id: str | None = None,
    ) -> Reward:
        """Records a reward of the current attempt, or of `attempt_id`. Raises RewardError for what is not finite."""
        scope = current()
        attempt = attempt_id or (scope.attempt_id if scope else "")
        number = finite(value, f"reward {name!r}")
        record = Reward(id=new_id(), attempt_id=attempt, value=number, name=name, target=target, source=source)
        if attempt:
            self._put(record)
        return record

    def pass_on(self, record: Record) -> None:
        """A record that another process has made."""
        self._put(record)

    def flush(self, attempt_id: str | None = None, *, timeout_s: float = 30.0) -> None:
        """Returns when everything handed in before is committed.

        Raises StoreUnavailable when the store takes nothing for `timeout_s` (the records are kept and tried again), and
        StoreError when records of this attempt (of any, without `attempt_id`) were lost since the last flush that said so.
        """
        give_up_at = time.monotonic() + timeout_s
        if self._give_up_at is None:
            barrier = _Barrier()
            self._queue.put(barrier)
            self._hurry.set()
            if not barrier.wait(timeout_s):
                raise StoreUnavailable(
                    f"the store has taken no records for {timeout_s:g} s ({self._trouble or 'no answer'}): check that "
                    "it is up and its disk has room; the records are kept and tried again."
                )
            if self._settle is not None:
                self._settle(max(0.0, give_up_at - time.monotonic()))
        self._tell_lost(attempt_id)

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes what is left and ends the thread; safe to call twice. Raises StoreError like `flush`."""
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + timeout_s
            self._queue.put(None)
            self._hurry.set()
        self._thread.join(timeout_s + 1.0)
        self._tell_lost(None)

    def _span(
        self,
        kind: SpanKind | str,
        name: str,
        path: str | None,
        parent_id: str | None,
        attributes: Mapping[str, Any] | None,
        scope: Scope | None,
    ) -> Span:
        span = Span(
            id=new_span_id(),
            attempt_id=scope.attempt_id if scope else "",
            kind=SpanKind(kind),
            name=plain(str(name)),
            parent_id=parent_id or (scope.span_id if scope else "") or None,
            path=plain((scope.path if scope else "") if path is None else path),
            start_ns=now_ns(),
            status="open",
            attributes=_plain(attributes),
        )
        if scope is not None:
            scope.memory.note(span)
        return span

    def _put(self, record: Record) -> None:
        if self._give_up_at is not None:
            self._lose([record], "the recorder is closed")
        elif self._queue.qsize() >= self._capacity:
            self._lose([record], f"{self._capacity} records wait for the store already ({self._trouble})")
        else:
            self._queue.put(record)

    def _lose(self, records: Sequence[Record], why: str) -> None:
        if not self.lost:
            logger.error("a record of attempt %s was lost: %s; later ones are counted", records[0].attempt_id, why)
        self.lost += len(records)
        for record in records:
            if len(self._lost) < _MOST_REMEMBERED:
                self._lost[record.attempt_id] = why

    def _tell_lost(self, attempt_id: str | None) -> None:
        lost, why = 0, ""
        for attempt in list(self._lost) if attempt_id is None else [attempt_id]:
            if reason := self._lost.pop(attempt, ""):
                lost, why = lost + 1, reason
        if lost:
            raise StoreError(f"records of {lost} attempt(s) were lost: {why}; cure that and run them again.")

    # The writing thread.

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """One batch; False after the last. A function of its own, so that nothing of a batch stays while it waits."""
        items = [self._queue.get()]
        if self._queue.qsize() < BATCH:
            self._hurry.wait(self._linger_s)
        self._hurry.clear()
        while len(items) < BATCH and not self._queue.empty():
            items.append(self._queue.get())
        self._write([item for item in items if isinstance(item, (Span, Reward))])
        barriers, more = [item for item in items if isinstance(item, _Barrier)], None not in items
        del items
        for barrier in barriers:
            barrier.set()
        return more

    def _write(self, records: list[Record]) -> None:
        """Stores the latest form of each record, in the order in which they began."""
        latest: dict[str, Record] = {record.id: record for record in records}
        self._store_or_lose(list(latest.values()))

    def _store_or_lose(self, records: list[Record]) -> None:
        if not records:
            return
        delay = 0.05
        while True:
            try:
                self._store.add(
                    spans=[record for record in records if isinstance(record, Span)],
                    rewards=[record for record in records if isinstance(record, Reward)],
                )
                self._trouble = None
                return
            except Exception as error:  # noqa: BLE001  stores fail in their own ways; none may reach the user's program
                if not may_pass(error):
                    return self._isolate(records, error)
                self._trouble = error
                if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                    return self._lose(records, str(error))
                time.sleep(delay)
                delay = min(2 * delay, 1.0)

    def _isolate(self, records: list[Record], error: Exception) -> None:
        """One record that no store can take must not take its neighbours along."""
        if len(records) == 1:
            return self._lose(records, f"{type(error).__name__}: {error}")
        half = len(records) // 2
        self._store_or_lose(records[:half])
        self._store_or_lose(records[half:])


class CurrentRecorder(Recorder):
    """Stands for the recorder of whatever attempt the code runs in: what adapters get before any attempt exists."""

    def __init__(self) -> None:
        self.lost = 0
        self._lost = {}

    def _put(self, record: Record) -> None:
        scope = current()
        if scope is not None and scope.recorder is not None:
            scope.recorder._put(record)

    def flush(self, attempt_id: str | None = None, *, timeout_s: float = 30.0) -> None:
        """Flushes the current attempt's recorder; nothing outside attempts."""
        scope = current()
        if scope is not None and scope.recorder is not None:
            scope.recorder.flush(attempt_id, timeout_s=timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing: the recorder belongs to whoever made it."""


def _plain(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {str(key): plain(value) for key, value in attributes.items()} if attributes else {}


def _told(error: BaseException | str) -> str:
    if isinstance(error, str):
        return str(plain(error))
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001  a user's __str__ may do anything
        text = f"<str() failed: {type(broken).__name__}>"
    return str(plain(f"{type(error).__name__}: {text}" if text else type(error).__name__))[:4000]
