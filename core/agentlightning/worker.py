"""A worker: runs one program on rollouts of a store, on any machine, until it is told to stop or its run has ended.

It takes rollouts of runs that are held by a living trainer whose gateway answers; all others stay in the queue. The store may
go away and come back; what happens meanwhile waits on disk (`spool.py`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.gateways import Gateways, held
from agentlightning.program import Program
from agentlightning.recorder import Recorder
from agentlightning.runner import Runner
from agentlightning.schema import Run, new_id
from agentlightning.spool import Spooled
from agentlightning.store.base import LEASE_S, Store

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""For how long it is believed which runs there are."""
TICK_S = 0.1


class Report(msgspec.Struct):
    """What a worker did."""

    worker: str
    finished: int
    """Attempts that decided something in the store, or were given back."""
    superseded: int
    late: int
    """Programs that ignored their end and still ran."""
    spooled: int
    """Records that waited on disk while the store was away."""
    waiting: int
    """Of these, still there: the next process on this machine that opens the store sends them."""
    lost: int
    """Records that could not be kept."""


class Runs:
    """Which runs to serve now: those of `only` (a name, an id, or the beginning of one), else those of the same program."""

    def __init__(self, store: Store, gateways: Gateways, program: str, only: str = "") -> None:
        self._store, self._gateways, self._program, self._only = store, gateways, program, only
        self._known: list[str] = []
        self._served: set[str] = set()
        self._read_at = -REFRESH_S
        self.over = False
        """Whether `only` was given and the run that it means has ended since it was first served."""

    def __call__(self) -> list[str | None]:
        if time.monotonic() - self._read_at >= REFRESH_S:
            self._read()
            self._read_at = time.monotonic()
        return list(self._known)

    def _read(self) -> None:
        runs = self._store.runs()
        mine = [run for run in runs if self._means(run)]
        now = [run.id for run in mine if held(run) and self._gateways.alive(run.id)]
        self._served.update(now)
        # A queue that somebody filled by hand has no run.
        self._known = now if mine or not self._only else [self._only]
        ended = {run.id for run in mine if run.state in ("finished", "failed")}
        self.over = bool(self._only and self._served) and self._served <= ended

    def _means(self, run: Run) -> bool:
        if self._only:
            return run.name == self._only or run.id.startswith(self._only)
        return bool(run.config.get("program", self._program) == self._program)


def work(
    store: Store,
    program: Program,
    *,
    concurrency: int = 1,
    run: str = "",
    processes: bool = False,
    lease_s: float = LEASE_S,
    drain_s: float | None = None,
    told: Callable[[], int] = lambda: 0,
    begun: Callable[[str], Any] = lambda worker: None,
) -> Report:
    """Works until `told()` is positive, or until `run` has ended. Then it takes nothing new, and finishes what it has; after
    `drain_s` seconds, or when `told()` is above 1, it ends that and gives it back.

    Raises ConfigError when the program asks for what its runs do not have, RolloutError for one that cannot be run.
    """
    worker = f"{socket.gethostname()}:{os.getpid()}:{new_id()[:8]}"
    with ExitStack() as stack:
        sink = Spooled(store)
        stack.callback(sink.close)
        recorder = Recorder(sink)
        stack.callback(recorder.close)
        gateways = Gateways(store)
        stack.callback(gateways.close)
        runs = Runs(store, gateways, program.name, run)
        runner = Runner(
            store,
            program,
            gateway_url=gateways.url,
            recorder=recorder,
            run_id=runs,
            concurrency=concurrency,
            worker=worker,
            barrier=gateways.flush,
            on_cancel=gateways.cancel,
            lease_s=lease_s,
            processes=processes,
        )
        stack.callback(runner.stop, drain=False)
        runner.start()
        begun(worker)
        while not told() and not runs.over:
            _refuse_hopeless(runner)
            time.sleep(TICK_S)
        _drain(runner, drain_s, told)
        counts = runner.counts
    return Report(
        worker, counts.finished, counts.superseded, counts.late, sink.spooled, sink.left, recorder.lost + sink.dropped
    )


def _refuse_hopeless(runner: Runner) -> None:
    """A store that is away is waited for; a program that fits no run is not."""
    if isinstance(runner.fatal, ConfigError):
        raise runner.fatal


def _drain(runner: Runner, drain_s: float | None, told: Callable[[], int]) -> None:
    log.info("worker takes nothing new and finishes %d attempts", runner.counts.running)
    give_up_at = None if drain_s is None else time.monotonic() + drain_s
    stopping = threading.Thread(target=runner.stop, name="agl-drain", daemon=True)
    stopping.start()
    while stopping.is_alive():
        if told() > 1 or (give_up_at is not None and time.monotonic() > give_up_at):
            runner.give_back()
            break
        stopping.join(TICK_S)
    stopping.join()
