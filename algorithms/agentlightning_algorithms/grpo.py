"""GRPO (arXiv 2402.03300) on chosen agents of a program, on one page.

1. A step draws tasks and runs the whole program several times on each: many agents, many calls, one reward.
2. The calls of each chosen agent in a rollout are its trajectory. `credit` says what each call is worth, compared with
   others on the same task; by default every call gets its trajectory's advantage, (return - mean) / std, over
   rollouts, so that a long conversation counts no more than a short one.
3. Each sampled token is pushed by its call's advantage, within the clipped ratio of PPO. The old log-probabilities
   are the engine's own, of the very tokens that it sampled.
4. Agents that were not chosen are served by frozen weights, and their tokens never enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning import plugins
from agentlightning.errors import ConfigError
from agentlightning.loop import Loop
from agentlightning.schema import Episode, Group
from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.credit import WHOLE, Credit, assign, credit_of
from agentlightning_algorithms.intermediate import Intermediate, audit, intermediate_of, pay
from agentlightning_algorithms.policy.base import Loss, Policy, PolicySettings, Update
from agentlightning_algorithms.presets import Preset, resolve
from agentlightning_algorithms.rows import rows_of

SCHEDULES = ("constant", "linear")
DRAWS = 3
"""How many times a step may draw tasks when `flat="resample"`."""


@dataclass(kw_only=True, frozen=True)
class GRPO:
    """What is trained (`model` to `seed`), and twelve knobs. Raises ConfigError for a value that cannot work."""

    model: str
    """Folder of a Hugging Face model, or a `.gguf` file."""
    agents: Sequence[str]
    """Names, paths or globs of the agents to train."""
    lora: int = 0
    """Rank of one adapter per entry of `agents`; 0 trains all weights, shared by the chosen agents."""
    policy: str | Callable[[PolicySettings], Policy] = "torch"
    """Name of a back end, or a callable that takes `PolicySettings`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The back end's own, such as `{"device": "cuda"}`."""
    seed: int = 0

    steps: int = 50
    tasks_per_step: int = 8
    rollouts_per_task: int = 8
    learning_rate: float = 1e-5
    schedule: str = "constant"
    """`constant`, or `linear`: falls to 0 over the steps, which lets a high rate end in calm."""
    epochs: int = 1
    """Optimiser steps on each step's tokens."""
    temperature: float = 1.0
    """Of the chosen agents' calls in training."""
    preset: str | Preset = field(default_factory=Preset)
    """Estimator and loss as another project has them: `verl`, `trl`, `dapo`, ...; see `presets.py`."""
    advantage: str | dict[str, Any] | Advantage | None = None
    """Instead of the preset's: a name (`rloo`, `maxrl`, ...), some fields (`{"std": "none"}`), or all of it."""
    loss: str | dict[str, Any] | Loss | None = None
    """Likewise: `gspo`, `{"kl": 0.01, "clip": [0.2, 0.28]}`, ..."""
    credit: str | dict[str, Any] | Credit | Callable[..., Any] = "broadcast"
    """Which calls earned the reward: `per_agent`, `turn`, `discounted`, `gigpo`, `tree`, `gae`, or a function."""
    intermediate: str | dict[str, Any] | Intermediate | Callable[..., Any] | None = None
    """Rewards on the way: `tools`, or a function of a span; see `intermediate.py`."""

    def __post_init__(self) -> None:
        if isinstance(self.agents, str) or not self.agents or not all(self.agents):
            raise ConfigError(f"agents={self.agents!r}: give a list of names, such as agents=['writer'].")
        for name, least in (("steps", 0), ("tasks_per_step", 1), ("rollouts_per_task", 2), ("epochs", 1), ("lora", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: the least that works is {least}.")
        for name, least in (("learning_rate", 0), ("temperature", 0)):
            if not getattr(self, name) > least:
                raise ConfigError(f"{name}={getattr(self, name)}: it must be above {least}.")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r}: choose one of {', '.join(SCHEDULES)}.")
        credit, rewards = credit_of(self.credit), intermediate_of(self.intermediate)
        resolve(self.preset, self.advantage, self.loss)
        if rewards and rewards.form == "potential" and isinstance(credit, Credit) and credit.kind in WHOLE:
            raise ConfigError(
                f"intermediate rewards in potential form cancel out over a rollout, and credit={credit.kind!r} looks at whole "
                "rollouts: choose credit='turn', 'discounted', 'gigpo', 'tree' or 'gae', or form='plain'."
            )

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
        loss = resolve(self.preset, self.advantage, self.loss).loss
        policy = self.serve(loop)
        for step in loop.steps(self.steps):
            groups, metrics = self.sample(loop)
            if groups:
                rows = rows_of(groups, loss.aggregation, loss.length, apart=loss.of_sequences)
                metrics |= policy.update(Update(rows, loss=loss, epochs=self.epochs, learning_rate=self.rate(step)))
                loop.publish()
            loop.report(metrics)

    def sample(self, loop: Loop) -> tuple[list[Group], dict[str, float]]:
        """A step's rollouts, as groups with advantages, and figures about their rewards. Where groups of equal returns are to
        be sampled again, other tasks are drawn until enough differ; a step of equal ones alone is reported as such."""
        how = resolve(self.preset, self.advantage, self.loss).advantage
        draws = DRAWS if how.flat == "resample" else 1
        tasks = loop.draw(self.tasks_per_step * draws)
        groups: list[Group] = []
        metrics: dict[str, float] = {}
        for count in range(1, draws + 1):
            drawn = tasks[: self.tasks_per_step * count]
            episodes = loop.sample(drawn, self.rollouts_per_task, sampling={"temperature": self.temperature})
            batch = loop.collect(episodes, self.agents)
            metrics = self._pay(loop, batch.groups, episodes)
            groups = assign(batch.groups, batch.ledger, how, self.credit, episodes)
            if len({group.key[0] for group in groups}) >= self.tasks_per_step:
                break
        return groups, metrics

    def _pay(self, loop: Loop, groups: Sequence[Group], episodes: Sequence[Episode]) -> dict[str, float]:
        """Intermediate rewards, with their audit lines in the store."""
        how = intermediate_of(self.intermediate)
        if how is None and not loop.pays_spans:
            return {}
        credit = credit_of(self.credit)
        paid = pay(groups, episodes, how, credit.gamma if isinstance(credit, Credit) else 1.0, loop.span_reward)
        loop.store.add(spans=audit(paid, how))
        return {"intermediate_rewards": float(len(paid)), "intermediate_sum": sum(p.value for _, p in paid)}
