"""Trainers over one store in a folder, a program of two agents, and its tasks: what tests of `fit` need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import httpx

import agentlightning as agl
from agentlightning.schema import Run
from agentlightning.store import open_store
from agentlightning.store.base import Store
from tests.fakes.policy import Learner

TRAIN = [{"id": f"t{i}", "x": i} for i in range(4)]
VAL = [{"id": f"v{i}", "x": i} for i in range(3)]


class Trainers:
    """Closes what it made. Called with an algorithm (a `Learner` unless given) and options, it makes a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: list[agl.Trainer] = []
        self._opened: Store | None = None

    def __call__(self, algorithm: Any = None, **options: Any) -> agl.Trainer:
        given = {"store": f"sqlite:///{self.folder}/runs.db", "concurrency": 4}
        self._made.append(agl.Trainer(algorithm or Learner(), **(given | options)))
        return self._made[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self._made:
            trainer.close()
        if self._opened is not None:
            self._opened.close()

    @property
    def store(self) -> Store:
        """The store as another process sees it."""
        if self._opened is None:
            self._opened = open_store(f"sqlite:///{self.folder}/runs.db")
        return self._opened

    @property
    def run(self) -> Run:
        """The only run."""
        (run,) = self.store.runs()
        return run


def post(base_url: str, text: str, **body: Any) -> str:
    """One call as a program without any SDK makes it."""
    asked = {"model": "policy", "messages": [{"role": "user", "content": text}]} | body
    answer = httpx.post(f"{base_url}/chat/completions", json=asked, timeout=30)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def solve(task: Any, policy: Any) -> float:
    """Two agents, one call each; the reward is the task's number / 4."""
    post(policy.agent("writer").base_url, f"write {task['x']}")
    post(policy.agent("critic").base_url, f"judge {task['x']}")
    return float(task["x"]) / 4
