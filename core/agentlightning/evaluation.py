"""How good a program is on a set of tasks: numbers that can be shown, compared and stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from agentlightning.schema import Episode
from agentlightning.trajectory import rollout_reward


class Evaluation(msgspec.Struct, forbid_unknown_fields=True):
    """The rollouts of one evaluation. A rollout without a reward is missing; it never counts as 0."""

    name: str
    rewards: dict[str, list[float]]
    """Task id -> one reward per rollout that has one."""
    missing: int
    """Rollouts that failed or gave no reward."""
    calls: list[int]
    """Model calls of each rollout that has a reward."""
    tokens: list[int]
    """Sampled tokens of the same rollouts."""

    @property
    def values(self) -> list[float]:
        """All rewards, task after task."""
        return [reward for rewards in self.rewards.values() for reward in rewards]

    @property
    def mean(self) -> float | None:
        """Mean reward over rollouts; None when no rollout has one."""
        values = self.values
        return sum(values) / len(values) if values else None

    @property
    def mean_calls(self) -> float | None:
        """Model calls per rollout; None when no rollout has a reward."""
        return sum(self.calls) / len(self.calls) if self.calls else None


def evaluation_of(name: str, episodes: Sequence[Episode]) -> Evaluation:
    """The summary of `episodes`."""
    rewards: dict[str, list[float]] = defaultdict(list)
    calls, tokens = [], []
    for episode in episodes:
        reward = rollout_reward(episode.rewards)
        if reward is None or episode.attempt is None:
            continue
        rewards[episode.rollout.task_id].append(reward)
        calls.append(len({completion.id.partition("-")[0] for completion in episode.completions}))
        tokens.append(sum(len(completion.response_ids) for completion in episode.completions))
    return Evaluation(name, dict(rewards), len(episodes) - len(calls), calls, tokens)
