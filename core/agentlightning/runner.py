"""Leases rollouts from the store, runs the user's program on them, and says how each attempt ended.

Everything that can go wrong with one attempt ends in an outcome of that attempt, never in the end of the run. Four
small threads share the work: one leases (`leasing.py`), one watches deadlines, one sends heartbeats, one closes attempts
(`finishing.py`); the programs run in an executor (`execution.py`, `children.py`). Whether a failed attempt is tried again
is the store's to say.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pluggy

from agentlightning.context import Scope, set_scope
from agentlightning.errors import AgentLightningError, ConfigError, RolloutError
from agentlightning.execution import Call, Ended, Executor, InProcess
from agentlightning.finishing import Finisher, Job, Verdict, judge
from agentlightning.leasing import Leasing
from agentlightning.plugins import manager, notify
from agentlightning.program import PolicyHandle, Program, program_of, rollout
from agentlightning.recorder import Recorder
from agentlightning.schema import Attempt, Outcome, Resource, Rollout, RolloutState, new_id, now_ns
from agentlightning.store.base import LEASE_S, Store
from agentlightning.store.records import Worker

__all__ = ["Counts", "PolicyHandle", "Program", "Runner", "program_of", "rollout"]

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that a program has to end after it was told to; then it is written off."""
_MOST_RESOURCES = 256


@dataclass(frozen=True, slots=True)
class Counts:
    """Where a runner stands."""

    running: int
    """Attempts that were begun and are not closed."""
    finished: int
    """Attempts that decided something in the store."""
    superseded: int
    """Attempts whose end came too late to count."""
    late: int
    """Programs that were written off after their deadline and still run."""
    late_results: int
    """Results of such programs, all ignored."""


class Runner:
    """Runs `program` on the rollouts of `run_id`, at most `concurrency` at once, until `stop`.

    `run_id`: one run, a function that names those to serve now, or None for all. `gateway_url`: of the gateway, or a
    function that gives the one for an attempt. `processes`: each program in a process of its own, which is killed with all
    that it started when it does not end in time; the program, its tasks and its resources must be importable and picklable.
    `barrier` returns when all model calls that were answered are committed; `on_cancel(attempt_id)` makes the gateway
    refuse the attempt's further calls, and is called when its program ends, however it does. Both are called from threads
    of the runner. Raises RolloutError for a program that cannot be run.
    """

    def __init__(
        self,
        store: Store,
        program: Callable[..., Any] | Program,
        *,
        gateway_url: str | Callable[[Rollout, Attempt], str],
        recorder: Recorder,
        run_id: str | None | Callable[[], Sequence[str | None]],
        concurrency: int = 32,
        worker: str | None = None,
        barrier: Callable[[], None] = lambda: None,
        on_cancel: Callable[[str], None] = lambda attempt_id: None,
        hooks: pluggy.PluginManager | None = None,
        lease_s: float = LEASE_S,
        processes: bool = False,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}: give at least 1.")
        self._store, self._recorder = store, recorder
        self._only = run_id if isinstance(run_id, str) else None
        self._program = program_of(program)
        self._gateway_url = gateway_url if callable(gateway_url) else lambda rollout, attempt: gateway_url
        self._concurrency, self._lease_s = concurrency, lease_s
        self._worker = worker or f"{socket.gethostname()}:{os.getpid()}:{new_id()[:8]}"
        self._on_cancel = on_cancel
        self._hooks = hooks or manager()
        self._executor = self._made(concurrency, processes)
        self._finisher = Finisher(store, recorder, barrier, self._judge, self._finished)
        self._changed = threading.Condition()
        self._alarm = threading.Condition()
        self._halt, self._over, self._nudge = threading.Event(), threading.Event(), threading.Event()
        runs = run_id if callable(run_id) else lambda: [run_id]
        self._leasing = Leasing(store, self._worker, lease_s, runs, self._halt)
        self._jobs: dict[str, Job] = {}
        self._resources: dict[tuple[str, str, int], Resource] = {}
        self._active = self._count = self._superseded = self._late_results = 0
        self._fatal: AgentLightningError | None = None
        self._started = self._stopped = False
        self._context = contextvars.copy_context()
        self._began_ns = now_ns()
        self._feeder = threading.Thread(target=self._feed, name="agl-feeder", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="agl-watcher", daemon=True)
        self._heart = threading.Thread(target=self._beat, name="agl-heartbeat", daemon=True)

    def _made(self, concurrency: int, processes: bool) -> Executor:
        if not processes:
            return InProcess(concurrency)
        from agentlightning.children import Children

        return Children(self._program.function, self._program.name, self._recorder)

    def start(self) -> Self:
        """Begins to lease. Programs see the context variables of the caller."""
        self._started, self._context = True, contextvars.copy_context()
        self._executor.start()
        self._finisher.start()
        for thread in (self._watcher, self._heart, self._feeder):
            thread.start()
        return self

    @property
    def counts(self) -> Counts:
        with self._changed:
            now = (len(self._jobs), self._count, self._superseded)
            return Counts(*now, self._executor.late, self._late_results)

    @property
    def fatal(self) -> AgentLightningError | None:
        """Why no rollout can be run at all, once that is known."""
        return self._fatal

    def check(self) -> None:
        """Raises what keeps *every* rollout from running: a parameter that no resource fills, a store that is away.

        Whoever waits for rollouts calls this now and then.
        """
        trouble = self._fatal or self._leasing.trouble
        if trouble is not None:
            raise trouble

    def stop(self, drain: bool = True) -> None:
        """Leases no more, and returns when everything begun is closed. Safe to call twice.

        With `drain` the programs run to their end or deadline; without, or when Ctrl-C comes meanwhile, they are told
        to end, and their rollouts are given back: another runner begins them again.
        """
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._changed.notify_all()
        self._halt.set()
        self._nudge.set()
        try:
            self._join(drain)
        except KeyboardInterrupt:
            self._join(drain=False)
            raise
        finally:
            self._shut()

    def give_back(self) -> None:
        """Tells all programs to end, while `stop` waits for them; others begin their rollouts again."""
        self._finisher.hurry()
        for job in self._running():
            self._interrupt(job, Outcome.INFRA_ERROR, "the runner was stopped")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(drain=error is None)

    # Leasing.

    def _feed(self) -> None:
        while free := self._room():
            for leased in self._leasing.take(free):
                self._begin(*leased)

    def _room(self) -> int:
        """How many more programs may run, as soon as one may; 0 when the runner stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._active < self._concurrency)
            return 0 if self._stopped else self._concurrency - self._active

    def _begin(self, rollout: Rollout, attempt: Attempt) -> None:
        limit = math.inf if rollout.timeout_s is None else rollout.timeout_s
        job = Job(rollout, attempt, time.monotonic() + limit)
        with self._changed:
            self._jobs[attempt.id] = job
            self._active += 1
        notify(self._hooks, "agl_rollout_started", rollout=rollout, attempt=attempt)
        try:
            call = self._prepare(job)
        except Exception as error:  # noqa: BLE001  it becomes the outcome
            if isinstance(error, ConfigError):
                self._fatal = error
            self._ended(job, Ended(error=error))
            return
        job.call = call
        self._executor.begin(call)
        if job.cause is not None:
            self._executor.cancel(call)
        if limit < math.inf:
            with self._alarm:
                self._alarm.notify()

    def _prepare(self, job: Job) -> Call:
        """The program with all that it asks for, in a context of its own that knows its attempt."""
        if self._executor.late >= 2 * self._concurrency:
            raise RolloutError(
                f"{self._executor.late} programs ignored their deadline and still run, so no more are begun: give the "
                "blocking calls in the program timeouts of their own."
            )
        rollout, attempt, program = job.rollout, job.attempt, self._program
        job.gateway_url = self._gateway_url(rollout, attempt).rstrip("/")
        arguments = program.bind(rollout, attempt, functools.partial(self._resource, rollout), job.gateway_url)
        context = self._context.copy()
        context.run(set_scope, Scope(attempt.id, recorder=self._recorder))
        run = functools.partial(program.function, rollout.task, **arguments)
        return Call(run, program.is_async, context, functools.partial(self._ended, job), job.gateway_url)

    def _resource(self, rollout: Rollout, name: str) -> Resource:
        """Versions never change, so each is read once."""
        key = (rollout.run_id, name, rollout.resources[name])
        found = self._resources.get(key)
        if found is None:
            found = self._store.resource(*key)
            if len(self._resources) >= _MOST_RESOURCES:
                self._resources.pop(next(iter(self._resources)))
            self._resources[key] = found
        return found

    # Deadlines and heartbeats.

    def _watch(self) -> None:
        while not self._over.is_set():
            with self._alarm:
                self._alarm.wait(self._until_next())
            now = time.monotonic()
            for job in self._running():
                if job.cause is None and now >= job.deadline:
                    self._interrupt(job, Outcome.TIMEOUT, f"not done after timeout_s={job.rollout.timeout_s:g}")
                elif job.cause is not None and now >= job.give_up_at:
                    self._write_off(job)

    def _until_next(self) -> float | None:
        """Seconds until something is due."""
        due = min((job.deadline if job.cause is None else job.give_up_at for job in self._running()), default=math.inf)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _running(self) -> list[Job]:
        with self._changed:
            return [job for job in self._jobs.values() if not job.over]

    def _interrupt(self, job: Job, cause: Outcome, reason: str) -> None:
        """Tells a program to end. Its attempt ends as `cause`, whatever the program still returns."""
        with self._changed:
            if job.over or job.cause is not None:
                return
            job.cause, job.reason, job.give_up_at = cause, reason, time.monotonic() + GRACE_S
        self._shut_door(job)
        if job.call is not None:
            self._executor.cancel(job.call)
        with self._alarm:
            self._alarm.notify()

    def _shut_door(self, job: Job) -> None:
        """No model call of the attempt is answered from now on."""
        try:
            self._on_cancel(job.attempt.id)
        except Exception:
            log.exception("the gateway could not be told that attempt %s has ended", job.attempt.id)

    def _write_off(self, job: Job) -> None:
        if job.call is None:  # not begun yet: the store is slow to tell its resources
            job.give_up_at = time.monotonic() + GRACE_S
            return
        hint = self._executor.write_off(job.call)
        job.reason += f"; it was told to end and did not within {GRACE_S:g} s ({hint})"
        log.warning("attempt %s of rollout %s: %s", job.attempt.id, job.rollout.id, job.reason)
        self._ended(job, Ended(), written_off=True)

    def _beat(self) -> None:
        self._tell("running")
        while True:
            self._nudge.wait(self._lease_s / 3)
            self._nudge.clear()
            if self._over.is_set():
                return
            with self._changed:
                ids = list(self._jobs)
            try:
                gone = self._store.heartbeat(ids, self._lease_s) if ids else []
            except Exception as error:  # noqa: BLE001  the next one may pass; if none does, the store fences
                log.warning("a heartbeat of %d attempts failed: %s", len(ids), error)
                continue
            for attempt_id in gone:
                job = self._jobs.get(attempt_id)
                if job is not None:
                    self._interrupt(job, Outcome.CANCELLED, "superseded, ended or cancelled from outside")
            self._tell("draining" if self._stopped else "running")

    def _tell(self, state: str) -> None:
        """People see in the store who is there and how it is."""
        with self._changed:
            running = len(self._jobs)
        who = (self._worker, self._only, self._program.name, self._concurrency)
        try:
            self._store.see(Worker(*who, running, state, self._began_ns))
        except Exception as error:  # noqa: BLE001  the next one may pass; rollouts do not depend on it
            log.warning("the store could not be told of worker %s: %s", self._worker, error)

    # Endings.

    def _ended(self, job: Job, ended: Ended, written_off: bool = False) -> None:
        """Called once by the executor, and once more where we stopped waiting before; the first call decides."""
        with self._changed:
            if job.over:
                self._late_results += not written_off
                return
            job.over, job.call = True, None
            self._active -= 1
            self._changed.notify_all()
        if job.cause is None:  # else it was told when it was interrupted
            self._shut_door(job)
        self._finisher.put(job, ended)

    def _judge(self, job: Job, ended: Ended) -> Verdict:
        return judge(job, ended, self._program.name)

    def _finished(self, job: Job, outcome: Outcome, state: RolloutState | None) -> None:
        notify(self._hooks, "agl_rollout_finished", rollout=job.rollout, attempt=job.attempt, outcome=outcome)
        with self._changed:
            self._jobs.pop(job.attempt.id, None)
            self._count += state is not None
            self._superseded += state is None
            self._changed.notify_all()

    def _join(self, drain: bool) -> None:
        if not self._started:
            return
        self._feeder.join()
        if not drain:
            self.give_back()
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def _shut(self) -> None:
        self._over.set()
        self._nudge.set()
        with self._alarm:
            self._alarm.notify()
        if self._started:
            self._watcher.join()
            self._heart.join()
            self._finisher.close()
            self._tell("ended")
        self._executor.close()
