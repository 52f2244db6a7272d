"""GRPO (arXiv 2402.03300) on chosen agents of a program, on one page.

1. A step draws tasks and runs the whole program several times on each: many agents, many calls, one reward.
2. The calls of each chosen agent in a rollout are its trajectory. Trajectories of one agent on one task are compared:
   advantage = (return - mean) / std, over rollouts, so that a long conversation counts no more than a short one.
3. Each sampled token is pushed by its trajectory's advantage, within the clipped ratio of PPO. The old
   log-probabilities are the engine's own, of the very tokens that it sampled.
4. Agents that were not chosen are served by frozen weights, and their tokens never enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning import plugins
from agentlightning.errors import ConfigError
from agentlightning.loop import Loop
from agentlightning_algorithms.advantage import STANDARD_DEVIATIONS, set_advantages
from agentlightning_algorithms.policy.base import Policy, PolicySettings, Update
from agentlightning_algorithms.rows import AGGREGATIONS, rows_of

SCHEDULES = ("constant", "linear")


@dataclass(kw_only=True, frozen=True)
class GRPO:
    """The knobs. Raises ConfigError for a value that cannot work."""

    model: str
    """Folder of a Hugging Face model, or a `.gguf` file."""
    agents: Sequence[str]
    """Names, paths or globs of the agents to train."""
    lora: int = 0
    """Rank of one adapter per entry of `agents`; 0 trains all weights, shared by the chosen agents."""
    steps: int = 50
    tasks_per_step: int = 8
    rollouts_per_task: int = 8
    learning_rate: float = 1e-5
    schedule: str = "constant"
    """`constant`, or `linear`: falls to 0 over the steps, which lets a high rate end in calm."""
    epochs: int = 1
    """Optimiser steps on each step's tokens."""
    clip: tuple[float, float] = (0.2, 0.2)
    """The ratio is held within [1 - low, 1 + high]."""
    kl: float = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy)."""
    std: str = "sample"
    """What centred returns are divided by: `sample`, `population` (standard deviations) or `none`."""
    aggregation: str = "token"
    """`token`: every sampled token weighs the same; `rollout`: every trajectory does."""
    temperature: float = 1.0
    """Of the chosen agents' calls in training."""
    seed: int = 0
    policy: str | Callable[[PolicySettings], Policy] = "torch"
    """Name of a back end, or a callable that takes `PolicySettings`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The back end's own, such as `{"device": "cuda"}`."""

    def __post_init__(self) -> None:
        if isinstance(self.agents, str) or not self.agents or not all(self.agents):
            raise ConfigError(f"agents={self.agents!r}: give a list of names, such as agents=['writer'].")
        for name, least in (("steps", 0), ("tasks_per_step", 1), ("rollouts_per_task", 2), ("epochs", 1), ("lora", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: the least that works is {least}.")
        for name, least in (("learning_rate", 0), ("temperature", 0)):
            if not getattr(self, name) > least:
                raise ConfigError(f"{name}={getattr(self, name)}: it must be above {least}.")
        if self.kl < 0 or min(self.clip) < 0:
            raise ConfigError(f"kl={self.kl}, clip={self.clip}: neither can be negative.")
        for name, known in (("std", STANDARD_DEVIATIONS), ("aggregation", AGGREGATIONS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(known)}.")

    def serve(self, loop: Loop) -> Policy:
        """The policy, started and published."""
        backend = plugins.load(plugins.POLICIES, self.policy) if isinstance(self.policy, str) else self.policy
        settings = PolicySettings(
            self.model, tuple(self.agents), self.lora, self.learning_rate, self.seed, dict(self.options)
        )
        return loop.serve(backend(settings))

    def rate(self, step: int) -> float:
        """Learning rate of a step (1, 2, ..., `steps`)."""
        left = (self.steps - step + 1) / self.steps
        return self.learning_rate * (left if self.schedule == "linear" else 1.0)

    def run(self, loop: Loop) -> None:
        """Trains until `steps` are done."""
        policy = self.serve(loop)
        for step in loop.steps(self.steps):
            tasks = loop.draw(self.tasks_per_step)
            episodes = loop.sample(tasks, self.rollouts_per_task, sampling={"temperature": self.temperature})
            batch = loop.collect(episodes, self.agents)
            groups = set_advantages(batch.groups, batch.ledger, self.std)
            metrics = {}
            if groups:
                rows = rows_of(groups, self.aggregation)
                metrics = policy.update(
                    Update(rows, clip=self.clip, kl=self.kl, epochs=self.epochs, learning_rate=self.rate(step))
                )
                loop.publish()
            loop.report(metrics)
