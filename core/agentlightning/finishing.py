"""How an attempt is closed: everything of it is committed first, and its outcome last.

So whoever reads a rollout in a final state sees all of it. The barriers of recorder and gateway wait for the disk;
one thread therefore takes all attempts that ended meanwhile and pays for them once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from agentlightning.errors import GatewayGone, NotFound, RewardError, StoreError, StoreUnavailable, Superseded
from agentlightning.execution import Call, Ended
from agentlightning.outcomes import Failure, describe, failure_of
from agentlightning.program import returned_rewards
from agentlightning.recorder import Recorder
from agentlightning.schema import (
    Attempt,
    Outcome,
    Reward,
    Rollout,
    RolloutState,
    Span,
    SpanKind,
    new_span_id,
    now_ns,
)
from agentlightning.store.base import Store

log = logging.getLogger(__name__)

PATIENCE_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between the tries of a write that the store refuses; then the attempt is left to its lease."""

AWAY_S = 300.0
"""How long attempts that have ended wait for a store that is away, unless the runner is told to hurry."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Job:
    """One attempt in the hands of a runner."""

    rollout: Rollout
    attempt: Attempt
    deadline: float
    """Monotonic seconds."""
    gateway_url: str = ""
    """Where its model calls go."""
    call: Call | None = None
    cause: Outcome | None = None
    """Why we ended it ourselves; None: we did not, and its program decides."""
    reason: str = ""
    give_up_at: float = 0.0
    """When to stop waiting for a program that was told to end."""
    over: bool = False
    """Its program has ended or was written off: what comes later is ignored."""


@dataclass(eq=False, slots=True)
class Verdict:
    """What an attempt comes to."""

    job: Job
    outcome: Outcome
    error: str | None
    rewards: list[Reward]
    spans: list[Span]
    back: bool = False
    """The rollout is queued again and the attempt not counted: we stop, or its gateway died."""

    def spoil(self, trouble: Exception) -> None:
        """Something of the attempt may be missing in the store, so it must not count as a good one. One that had failed
        before keeps its outcome: what went wrong first is what went wrong."""
        self.back = self.back or (isinstance(trouble, GatewayGone) and self.outcome is not Outcome.CANCELLED)
        if self.outcome in _GOOD:
            self.outcome = Outcome.INFRA_ERROR
        self.rewards = []
        self.error = f"{self.error or ''}\n\n{describe(trouble)}".strip()


_GOOD = (Outcome.OK, Outcome.TRUNCATED)


def judge(job: Job, ended: Ended, program: str) -> Verdict:
    """The verdict on an attempt whose `program` (a name) ended like this. A failed one never has a returned reward."""
    failure = ended.failure
    if ended.error is not None and not (job.cause and isinstance(ended.error, asyncio.CancelledError)):
        failure = failure_of(ended.error, job.gateway_url)
    if job.cause is not None:
        said = failure.text if failure else ""
        back = job.cause is Outcome.INFRA_ERROR
        return Verdict(job, job.cause, f"{job.reason}\n\n{said}".strip(), [], [], back)
    if failure is None:
        try:
            return Verdict(job, Outcome.OK, None, rewards_of(ended.value, job.attempt.id, program), [])
        except RewardError as refused:
            failure = failure_of(refused)
    return Verdict(job, failure.outcome, failure.text, [], [_exception_span(job, failure)])


def rewards_of(value: object, attempt_id: str, program: str) -> list[Reward]:
    """`returned_rewards`, whatever the returned object does when it is looked at. Raises RewardError."""
    try:
        return returned_rewards(value, attempt_id, program)
    except RewardError:
        raise
    except Exception as odd:
        raise RewardError(f"what {program} returned cannot be read as a reward: {type(odd).__name__}: {odd}.") from odd


def _exception_span(job: Job, failure: Failure) -> Span:
    """OpenTelemetry's attribute names: https://opentelemetry.io/docs/specs/semconv/attributes-registry/exception/"""
    now = now_ns()
    attributes = {"exception.type": failure.kind, "exception.stacktrace": failure.text}
    last = failure.text.rpartition("\n")[2][:500]
    name = failure.kind.rpartition(".")[2]
    return Span(new_span_id(), job.attempt.id, SpanKind.EXCEPTION, name, None, "", now, now, "error", last, attributes)


class Finisher:
    """The thread that closes attempts. `finished(job, outcome, state)` is told of each; state None: it did not count."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        barrier: Callable[[], None],
        judge: Callable[[Job, Ended], Verdict],
        finished: Callable[[Job, Outcome, RolloutState | None], None],
    ) -> None:
        self._store, self._recorder, self._barrier = store, recorder, barrier
        self._judge, self._finished = judge, finished
        self._queue: SimpleQueue[tuple[Job, Ended] | None] = SimpleQueue()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agl-finisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job, ended: Ended) -> None:
        self._queue.put((job, ended))

    def hurry(self) -> None:
        """A store that is away is not waited for any more."""
        self._hurry.set()

    def close(self) -> None:
        """Returns when all that was put has been closed."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._round():
            pass

    def _round(self) -> bool:
        """Closes all that has ended meanwhile. Its own frame, so that an idle thread holds nothing of the last batch."""
        batch = [self._queue.get()]
        while batch[-1] is not None:
            try:
                batch.append(self._queue.get_nowait())
            except Empty:
                break
        self._settle([self._judge(*entry) for entry in batch if entry is not None])
        return batch[-1] is not None

    def _settle(self, verdicts: list[Verdict]) -> None:
        if not verdicts:
            return
        self._flush(verdicts)
        try:
            self._waited(lambda left: self._barrier(), AWAY_S)
        except Exception as trouble:  # noqa: BLE001  told in each attempt
            log.warning("the model calls of %d attempts may be incomplete: %s", len(verdicts), trouble)
            for verdict in verdicts:
                verdict.spoil(trouble)
        try:
            self._add(verdicts)
        except Exception as trouble:  # noqa: BLE001  told in each attempt
            log.warning("the rewards of %d attempts could not be stored: %s", len(verdicts), trouble)
            for verdict in verdicts:
                verdict.spoil(trouble)
        for verdict in verdicts:
            self._finished(verdict.job, verdict.outcome, self._finish(verdict))

    def _flush(self, verdicts: list[Verdict]) -> None:
        """What one attempt lost spoils no other; a store that is away is waited for once, not once for each."""
        give_up_at = time.monotonic() + AWAY_S
        for verdict in verdicts:
            attempt_id = verdict.job.attempt.id
            flush = functools.partial(self._recorder.flush, attempt_id)
            try:
                self._waited(lambda left, flush=flush: flush(timeout_s=left), max(0.0, give_up_at - time.monotonic()))  # type: ignore[misc]
            except Exception as trouble:  # noqa: BLE001  told in the attempt
                log.warning("the records of attempt %s may be incomplete: %s", attempt_id, trouble)
                verdict.spoil(trouble)

    def _waited(self, barrier: Callable[[float], None], limit_s: float) -> None:
        """Asks again while the store is away; each time for a moment only, so that `hurry` is heard."""
        give_up_at = time.monotonic() + limit_s
        while True:
            left = give_up_at - time.monotonic()
            try:
                return barrier(max(0.0, min(1.0, left)))
            except StoreUnavailable:
                if left <= 1.0 or self._hurry.wait(0.05):
                    raise

    def _add(self, verdicts: list[Verdict]) -> None:
        spans = [span for verdict in verdicts for span in verdict.spans]
        rewards = [reward for verdict in verdicts for reward in verdict.rewards]
        if spans or rewards:
            self._patiently(lambda: self._store.add(spans=spans, rewards=rewards))

    def _finish(self, verdict: Verdict) -> RolloutState | None:
        attempt = verdict.job.attempt
        try:
            if verdict.back:
                self._patiently(lambda: self._store.give_back([attempt.id], verdict.error or ""))
                return RolloutState.QUEUED
            return self._patiently(lambda: self._store.finish(attempt.id, verdict.outcome, verdict.error))
        except Superseded as error:
            log.info("%s", error)
        except Exception:
            log.exception("attempt %s could not be finished; it is left to its lease", attempt.id)
        return None

    def _patiently(self, write: Callable[[], T]) -> T:
        """Writes are idempotent, so one that may or may not have arrived is simply repeated."""
        give_up_at, pauses = time.monotonic() + AWAY_S, iter(PATIENCE_S)
        while True:
            try:
                return write()
            except (NotFound, Superseded):
                raise
            except (StoreError, OSError) as error:
                away = isinstance(error, StoreUnavailable) and time.monotonic() < give_up_at
                pause = next(pauses, PATIENCE_S[-1] if away and not self._hurry.is_set() else None)
                if pause is None:
                    raise
                log.warning("the store refused a write, next try in %g s: %s", pause, error)
                time.sleep(pause)
