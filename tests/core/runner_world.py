"""A store, a recorder and a runner for a program: what tests of the runner need and nothing more."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from agentlightning.recorder import Recorder
from agentlightning.runner import Runner
from agentlightning.schema import Episode, Resource, Rollout, RolloutState
from agentlightning.store import open_store

GATEWAY = "http://127.0.0.1:9"
WAIT_S = 60.0
"""How long a test waits for what must come; never how long something takes."""


class World:
    """`options` go to the runner. Runners are started by `run` or `start` and stopped at the end."""

    def __init__(self, folder: Path, store: Any = None) -> None:
        self._owned = [] if store else [open_store(f"sqlite:///{folder}/store.db")]
        self.store = store or self._owned[0]
        self.run_id = self.store.begin_run("test", {}, "here:1:nonce").id
        self.store.publish(
            self.run_id, [Resource("policy", 1, "policy", {}), Resource("prompt", 1, "prompt", {"t": "x"})]
        )
        self.recorder = Recorder(self.store)
        self.cancelled: list[str] = []
        self.made = 0
        self.runners: list[Runner] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self.runners:
            runner.stop(drain=False)
        self.recorder.close()
        for store in self._owned:
            store.close()

    def enqueue(self, count: int = 1, **fields: Any) -> list[str]:
        """Rollouts `0`, `1`, ... whose task is their number."""
        already, self.made = self.made, self.made + count
        given = {"run_id": self.run_id, "group_id": "g", "resources": {"policy": 1}} | fields
        made = [
            Rollout(**{"id": str(i), "task": i, "task_id": str(i)} | given) for i in range(already, already + count)
        ]
        self.store.enqueue(made)
        return [rollout.id for rollout in made]

    def start(self, program: Callable[..., Any], store: Any = None, **options: Any) -> Runner:
        given = {"gateway_url": GATEWAY, "recorder": self.recorder, "run_id": self.run_id, "concurrency": 8}
        given |= {"on_cancel": self.cancelled.append} | options
        runner = Runner(store or self.store, program, **given)
        self.runners.append(runner)
        return runner.start()

    def wait(self, ids: list[str]) -> list[Episode]:
        """What happened in these rollouts, once all have ended."""
        waiting = set(ids)
        while waiting:
            ended = self.store.wait(sorted(waiting), WAIT_S)
            assert ended, f"{len(waiting)} rollouts never ended"
            waiting -= ended
        return self.store.episodes(ids)

    def run(self, program: Callable[..., Any], count: int = 1, **fields: Any) -> list[Episode]:
        """The program on `count` tasks, to the end."""
        ids = self.enqueue(count, **fields)
        runner = self.start(program)
        episodes = self.wait(ids)
        runner.stop()
        return episodes

    def one(self, program: Callable[..., Any], **fields: Any) -> Episode:
        (episode,) = self.run(program, 1, **fields)
        return episode


def outcomes(episodes: list[Episode]) -> Counter[str]:
    return Counter(str(episode.rollout.outcome) for episode in episodes)


def values(episode: Episode) -> dict[str, float]:
    return {reward.name: reward.value for reward in episode.rewards}


def arrive(event: threading.Event) -> None:
    """Waits for what must come."""
    assert event.wait(WAIT_S), "it never came"


SUCCEEDED, FAILED, CANCELLED = RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED
