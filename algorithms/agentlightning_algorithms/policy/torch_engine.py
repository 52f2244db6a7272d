"""The thread that owns the model: it answers requests in continuous batches and, between them, learns and saves.

All tensor work happens here, so nothing needs a lock. A command that changes weights waits until the answers that were
begun are finished; new requests then wait for the command. So every answer is sampled by one version.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch

from agentlightning.errors import AgentLightningError, PolicyError

from .torch_job import Job
from .torch_lane import Lane


class Served(NamedTuple):
    """What answers to a served name."""

    lane: Callable[[], Lane]
    adapter: str | None


class Command(NamedTuple):
    """Work for the engine's thread other than answering."""

    run: Callable[[], Any]
    exclusive: bool
    """Changes weights: nothing may be half answered."""
    result: Future[Any]


class Engine:
    """See the module. `served` maps the names that requests may ask for; `version` tells that of the weights."""

    def __init__(
        self,
        served: dict[str, Served],
        version: Callable[[], int],
        max_batch: int,
        notify: Callable[[Sequence[Job]], None],
    ) -> None:
        self.served, self.max_batch = served, max_batch
        self._version, self._notify = version, notify
        self._inbox: queue.SimpleQueue[Job | Command | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._commands: deque[Command] = deque()
        self._lanes: dict[int, Lane] = {}
        self._open = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """From any thread; the job is woken when there is news."""
        self._inbox.put(job)

    def call(self, run: Callable[[], Any], *, exclusive: bool = False) -> Future[Any]:
        """From any thread: `run` on the engine's thread, between two steps."""
        result: Future[Any] = Future()
        self._inbox.put(Command(run, exclusive, result))
        return result

    def stop(self) -> None:
        """Ends the thread; jobs that are not finished stay so."""
        self._inbox.put(None)
        self._thread.join(timeout=30)

    @property
    def lanes(self) -> list[Lane]:
        return list(self._lanes.values())

    def _run(self) -> None:
        with torch.inference_mode():
            while self._open:
                self._receive()
                self._obey()
                if not self._commands or not self._commands[0].exclusive:
                    self._admit()
                self._work()

    def _receive(self) -> None:
        """Takes everything that has come; sleeps while there is nothing to do."""
        idle = not (self._commands or self._waiting or any(lane.active for lane in self.lanes))
        while True:
            try:
                item = self._inbox.get(block=idle)
            except queue.Empty:
                return
            idle = False
            if item is None:
                self._open = False
            elif isinstance(item, Command):
                self._commands.append(item)
            else:
                self._waiting.append(item)

    def _obey(self) -> None:
        while self._commands:
            command = self._commands[0]
            if command.exclusive and any(lane.active for lane in self.lanes):
                return
            self._commands.popleft()
            try:
                with torch.inference_mode(False):
                    command.result.set_result(command.run())
            except AgentLightningError as error:
                command.result.set_exception(error)
            except Exception as error:  # noqa: BLE001 - whoever gave the command gets its error
                traceback.print_exc(file=sys.stderr)
                command.result.set_exception(PolicyError(f"{type(error).__name__}: {error}"))

    def _admit(self) -> None:
        room = self.max_batch - sum(len(lane.active) for lane in self.lanes)
        left: deque[Job] = deque()
        ended = []
        while self._waiting:
            job = self._waiting.popleft()
            if job.cancelled:
                job.finish = "cancelled"
                ended.append(job)
            elif room > 0 and self._give_slot(job, ended):
                room -= 1
            else:
                left.append(job)
                if job.awaits is None:  # no room for this one, so none for those behind it
                    room = 0
        self._waiting = left
        if ended:
            self._notify(ended)

    def _give_slot(self, job: Job, ended: list[Job]) -> bool:
        served = self.served[job.model]
        try:
            with torch.inference_mode(False):
                lane = served.lane()
        except AgentLightningError as error:
            job.finish, job.error = "error", str(error)
            ended.append(job)
            return True
        self._lanes[id(lane)] = lane
        job.version = self._version()
        return lane.admit(job, served.adapter)

    def _work(self) -> None:
        changed: list[Job] = []
        for lane in self.lanes:
            changed += lane.sweep()
            try:
                changed += lane.step()
            except Exception as error:  # noqa: BLE001 - one bad step fails its jobs, the service goes on
                traceback.print_exc(file=sys.stderr)
                changed += lane.fail(f"{type(error).__name__}: {error}")
        if changed:
            self._notify(changed)
