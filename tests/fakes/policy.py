"""A policy back end without a model: the fake engine serves, and an update only counts. For tests of everything around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.loop import Loop
from agentlightning.schema import Endpoint, Episode, Group, Route
from tests.fakes.engine import FakeEngine, Script


class FakePolicy:
    """`updates` is its state: what `save` writes and `load` takes up."""

    def __init__(self, selectors: Sequence[str] = ("writer",), reply: Script | str | None = None) -> None:
        self.selectors, self.reply = selectors, reply
        self.version = 1
        self.updates = 0
        self.closed = 0
        self.engine: Any = None

    def start(self) -> Endpoint:
        self.engine = FakeEngine(self.reply, version=self.version).start()
        trained = [Route(name, "base", True) for name in self.selectors]
        return self.engine.endpoint([*trained, Route("*", "base", False)])

    def update(self) -> dict[str, float]:
        self.updates += 1
        self.version += 1
        self.engine.version = self.version
        return {"loss": 1.0 / self.updates}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"updates": self.updates, "version": self.version}))

    def load(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        self.updates, self.version = state["updates"], state["version"]
        self.engine.version = self.version

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1 and self.engine is not None:
            self.engine.close()


@dataclass
class Learner:
    """An algorithm of a user's own: samples, collects, counts."""

    agents: Sequence[str] = ("writer",)
    total: int = 2
    tasks_per_step: int = 2
    rollouts: int = 2
    reply: Any = None

    def __post_init__(self) -> None:  # not fields: those are the run's configuration
        self.before_report: Callable[[int], None] = lambda step: None
        """May break a step after its update."""
        self.policies: list[FakePolicy] = []
        self.episodes: list[Episode] = []
        self.groups: list[Group] = []

    def serve(self, loop: Loop) -> FakePolicy:
        policy = FakePolicy(self.agents, self.reply)
        self.policies.append(policy)
        return loop.serve(policy)

    def run(self, loop: Loop) -> None:
        policy = self.serve(loop)
        for step in loop.steps(self.total):
            episodes = loop.sample(loop.draw(self.tasks_per_step), self.rollouts)
            batch = loop.collect(episodes, self.agents)
            self.episodes += episodes
            self.groups += batch.groups
            batch.ledger.trained = batch.ledger.complete
            metrics = policy.update()
            loop.publish()
            self.before_report(step)
            loop.report(metrics)
