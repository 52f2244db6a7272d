"""A trainer that is killed, as if by `kill -9`, at a moment that it is told: `python -m tests.algorithms.killable FOLDER MOMENT`.

FOLDER holds the model, and gets the store and two logs: each rollout that was begun, each process of a policy.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning_algorithms.policy.base import PolicySettings, Update
from agentlightning_algorithms.policy.torch import TorchPolicy
from tests.core.trainer_world import post

STEPS, TASKS, ROLLOUTS = 3, 2, 2
TRAIN = [{"id": f"t{i}", "say": f"hello {i}"} for i in range(4)]
VAL = [{"id": f"v{i}", "say": f"bye {i}"} for i in range(2)]
MOMENTS = ("evaluating", "sampling", "updating", "saving", "recorded")
"""In the order in which a run passes them: before step 1, in steps 1, 2, 2, and after step 2."""
STORE, BEGUN, POLICIES = "runs.db", "begun.log", "policies.log"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # a signal is not delivered at once


def die_during(work: Callable[[], Any]) -> None:
    """In the middle of something that another process does for us."""
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.01)
    die()


def note(file: Path, line: object) -> None:
    with file.open("a") as log:
        log.write(f"{line}\n")


class Fragile(TorchPolicy):
    folder: Path
    moment: str

    def start(self) -> Any:
        endpoint = super().start()
        note(self.folder / POLICIES, self.pid)
        return endpoint

    def update(self, update: Update) -> dict[str, float]:
        if self.moment == "updating" and self.version == 1:
            die_during(lambda: super(Fragile, self).update(update))
        return super().update(update)

    def save(self, folder: Path) -> None:
        if self.moment == "saving" and self.version == 2:
            die_during(lambda: super(Fragile, self).save(folder))
        super().save(folder)


def fragile(settings: PolicySettings) -> Fragile:
    return Fragile(settings)


class Recorded:
    def __init__(self, moment: str) -> None:
        self.moment = moment

    @agl.hookimpl
    def agl_step_finished(self, step: int) -> None:
        if self.moment == "recorded" and step == 2:
            die()


def fit(folder: Path, moment: str) -> Any:
    Fragile.folder, Fragile.moment = folder, moment
    numbers = {"evaluating": itertools.count(1), "sampling": itertools.count(1)}

    def solve(task: Any, policy: Any, rollout: Any) -> float:
        note(folder / BEGUN, rollout.id)
        doing = "sampling" if rollout.mode == "train" else "evaluating"
        number = next(numbers[doing])
        text = post(policy.agent("writer").base_url, task["say"], max_tokens=6)
        if moment == doing and number == 3:
            die()
        return len(text) / 10 + rollout.seed % 7  # never equal in a group

    algorithm = agl.algorithm(
        "grpo",
        model=str(folder / "model"),
        agents=["writer"],
        lora=2,
        policy=fragile,
        options={"threads": 1},
        steps=STEPS,
        tasks_per_step=TASKS,
        rollouts_per_task=ROLLOUTS,
        learning_rate=1e-3,
    )
    trainer = agl.Trainer(algorithm, store=f"sqlite:///{folder}/{STORE}", concurrency=2, plugins=[Recorded(moment)])
    try:
        return trainer.fit(solve, train=TRAIN, val=VAL)
    finally:
        trainer.close()


if __name__ == "__main__":
    fit(Path(sys.argv[1]), sys.argv[2])
