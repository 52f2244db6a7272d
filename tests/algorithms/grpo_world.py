"""GRPO without a tensor and without HTTP: real loop and real store; the rollouts are played, call by call.

    world = World(tmp_path)
    run = world.fit(credit="turn", steps=2)
    run.updates[0].rows

A writer drafts, calls a tool, is checked by another agent, and writes again. Whether the tool works, and what the reward is,
depends on the words, which depend on the rollout's seed alone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import agentlightning as agl
from agentlightning import plugins
from agentlightning.loop import Loop
from agentlightning.schema import (
    Attempt,
    Completion,
    Endpoint,
    Episode,
    Outcome,
    Reward,
    Rollout,
    Route,
    Span,
    SpanKind,
    Step,
    floats,
    ids,
    new_id,
    new_span_id,
)
from agentlightning.store import open_store
from agentlightning.store.base import Store
from agentlightning.tasks import tasks_of
from agentlightning_algorithms.policy.base import PolicySettings, Row, Update

WORDS = ("alpha", "beta", "gamma", "delta")
Play = Callable[["Stage"], float]


class FakePolicy:
    """Keeps the updates; it learns nothing."""

    def __init__(self, settings: PolicySettings, updates: list[Update]) -> None:
        self.settings, self.updates, self.version = settings, updates, 0

    def start(self) -> Endpoint:
        return Endpoint("http://127.0.0.1:1/v1", "key", (Route("*", "base", True),), 4096)

    def update(self, update: Update) -> dict[str, float]:
        self.updates.append(update)
        self.version += 1
        return {"loss": 0.0}

    def logprobs(self, rows: list[Row]) -> list[Any]:
        return [np.zeros(len(row.ids), np.float32) for row in rows]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    def load(self, folder: Path) -> None:
        raise AssertionError("no run of these tests is resumed")

    def close(self) -> None:
        pass


class Stage:
    """One attempt on its way into the store."""

    def __init__(self, store: Store, rollout: Rollout, attempt: Attempt) -> None:
        self.store, self.rollout, self.attempt = store, rollout, attempt
        self.random = random.Random(rollout.seed)
        self.calls: list[Completion] = []
        self.writer = [1, 2, len(rollout.task_id)]

    def say(self, agent: str, prompt: list[int]) -> str:
        """One call: a word of one to three tokens; the writer's prompt goes on where it was."""
        word = self.random.randrange(4)
        response = [100 + word] * (1 + word % 3)
        call = Completion(
            f"{self.attempt.id[:16]}{len(self.calls)}-0",
            self.attempt.id,
            agent,
            None,
            "base",
            "policy",
            self.rollout.resources["policy"],
            ids(prompt),
            ids(response),
            floats([-1.0] * len(response)),
            "stop",
            {},
            {"choices": [{"message": {"content": WORDS[word]}}]},
            dict(self.rollout.sampling),
        )
        self.store.add(completions=[call])
        self.calls.append(call)
        prompt += [*response, 9]
        return WORDS[word]

    def tool(self, works: bool) -> None:
        error = None if works else "no such entry"
        status = "ok" if works else "error"
        span = Span(new_span_id(), self.attempt.id, SpanKind.TOOL, "lookup", None, "writer", status=status, error=error)
        self.store.add(spans=[span])

    def reward(self, value: float, target: str = "rollout") -> None:
        self.store.add(rewards=[Reward(new_id(), self.attempt.id, value, target=target)])


def team(stage: Stage) -> float:
    """Reward: 1 for a second draft that begins with a letter before `c`, and 0.5 for a first one."""
    first = stage.say("writer", stage.writer)
    stage.tool(first != "delta")
    stage.say("checker", [7])
    second = stage.say("writer", stage.writer)
    return (second < "c") + 0.5 * (first < "c")


@dataclass
class Run:
    """What a `fit` did."""

    updates: list[Update]
    episodes: list[Episode]
    steps: list[Step]

    @property
    def ledger(self) -> dict[str, Any]:
        return dict(self.steps[0].ledger)

    def column(self, name: str, update: int = 0) -> list[list[float]]:
        """A column of all rows, such as `advantages`."""
        return [[round(float(v), 6) for v in getattr(row, name)] for row in self.updates[update].rows]


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, 0

    def fit(
        self, play: Play = team, *, tasks: int = 2, observers: tuple[object, ...] = (), train: int = 6, **knobs: Any
    ) -> Run:
        """Runs the algorithm to its end, in a store of its own."""
        updates: list[Update] = []
        given = {"agents": ["writer"], "steps": 1, "tasks_per_step": tasks, "rollouts_per_task": 4} | knobs
        algorithm = agl.algorithm("grpo", model="none", policy=lambda s: FakePolicy(s, updates), **given)
        self._made += 1
        place = self.folder / f"run-{self._made}"
        place.mkdir()
        store = open_store(f"sqlite:///{place}/runs.db")
        run = store.begin_run("test", {}, "here:1:nonce")
        with played(store, play) as begin:
            rows = tasks_of([{"id": f"t{n}"} for n in range(train)], "train")
            loop = Loop(store, run, place, train=rows, begin=begin, observers=plugins.manager(*observers))
            algorithm.run(loop)
        episodes = store.episodes([rollout.id for rollout in store.rollouts(run.id)])
        store.close()
        return Run(updates, episodes, loop.history)


@contextmanager
def played(store: Store, play: Play) -> Iterator[Callable[[], None]]:
    """What begins a worker that plays every rollout of a store."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: work(store, play, over), daemon=True)
    try:
        yield thread.start
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def work(store: Store, play: Play, over: threading.Event) -> None:
    while not over.is_set():
        for rollout, attempt in store.lease("worker", 8) if store.wait_for_work(0.05) else ():
            stage = Stage(store, rollout, attempt)
            stage.reward(play(stage))
            store.finish(attempt.id, Outcome.OK)
