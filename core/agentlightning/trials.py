"""Single rollouts, before and after: how one is planned from what it reads, and what a batch of them says at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from agentlightning.errors import RolloutError
from agentlightning.schema import FINAL_STATES, Episode, Rollout, now_ns
from agentlightning.tasks import Task, digest
from agentlightning.trajectory import rollout_reward


class Trial(msgspec.Struct, frozen=True):
    """A rollout that is a function of what it reads: the same trial twice in a run is one rollout."""

    task: Task
    resources: dict[str, int] = {}
    """Versions instead of the current ones."""
    number: int = 0
    """Tells repetitions apart."""


def planned(run_id: str, seed: int, task: Task, place: tuple[Any, ...], i: int) -> Rollout:
    """A rollout whose id and seed are functions of `place` and `i`; rollouts of one place are a group."""
    return Rollout(
        id=digest(run_id, *place, i),
        run_id=run_id,
        task=task.value,
        task_id=task.id,
        group_id=digest(run_id, *place),
        seed=int(digest(seed, *place, i, size=4), 16) >> 1,
        created_ns=now_ns(),
    )


def refuse_total_failure(episodes: Sequence[Episode]) -> None:
    """Raises RolloutError, with the first error, when no rollout made a model call or gave a reward."""
    if any(rollout_reward(e.rewards) is not None or e.completions for e in episodes) or not episodes:
        return
    first = next((e.attempt for e in episodes if e.attempt and e.attempt.error), None)
    assert all(e.rollout.state in FINAL_STATES for e in episodes)
    outcomes = Counter(e.rollout.outcome.value if e.rollout.outcome else "unknown" for e in episodes)
    told = ", ".join(f"{name} {count}" for name, count in outcomes.items())
    detail = first.error if first else "no error was recorded"
    raise RolloutError(
        f"none of {len(episodes)} rollouts made a model call or gave a reward ({told}). The first error was:\n{detail}\n"
        f"See `agl show {episodes[0].rollout.id[:12]}`; run the program by itself on one task to debug it."
    )


def figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Of a step's training rollouts; without `reward` where none has one."""
    rewards = [r for e in episodes if (r := rollout_reward(e.rewards)) is not None]
    found = {
        "rollouts": float(len(episodes)),
        "failed": float(len(episodes) - len(rewards)),
        "calls_per_task": fmean(len(e.completions) for e in episodes) if episodes else 0.0,
    }
    return {"reward": fmean(rewards), **found} if rewards else found
