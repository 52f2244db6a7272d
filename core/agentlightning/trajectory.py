"""From what was recorded to what can be trained, with the reason for everything that is left out.

Completions become transitions, transitions of one agent in one attempt a trajectory, trajectories with the same key a
group. Nothing is silently nothing: each call is counted in the ledger, once, where it fell out or as trained.

Rewards, by rule: within one target and name the last one wins (what the program returns comes last). A target's value is
its reward named `reward` if there is one, else the sum of its named ones. An agent's return is the value of the rollout,
plus its own, plus those of its calls. A trajectory that no reward reaches is left out as `reward_missing`, never 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from agentlightning.forks import HARMLESS, forks, tail_of, temperature
from agentlightning.schema import (
    Completion,
    Episode,
    Group,
    Ids,
    Outcome,
    Reward,
    Trajectory,
    Transition,
    leaf,
    selector_of,
)

USABLE = frozenset({Outcome.OK, Outcome.TRUNCATED})
"""Outcomes whose calls may be trained."""


class Ledger(msgspec.Struct):
    """Where the model calls of a step went. `seen` is the sum of `trained` and of all that was dropped."""

    seen: int = 0
    attributed: int = 0
    selected: int = 0
    complete: int = 0
    """Selected calls with exact tokens, a usable outcome and a reward."""
    trained: int = 0
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Reason -> calls."""
    agents: Counter[str] = msgspec.field(default_factory=Counter)
    """Agent path -> calls seen."""
    chosen: Counter[str] = msgspec.field(default_factory=Counter)
    """Selector -> calls selected."""
    sequences: int = 0
    """What the complete calls became: turns that continue each other are one sequence to learn from."""
    forks: Counter[str] = msgspec.field(default_factory=Counter)
    """Cause -> calls that could not continue an earlier one (`forks.CAUSES`)."""

    def drop(self, reason: str, calls: int = 1) -> None:
        if calls:
            self.dropped[reason] += calls

    def as_dict(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "attributed": self.attributed,
            "selected": self.selected,
            "complete": self.complete,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "agents": dict(self.agents),
            "chosen": dict(self.chosen),
            "sequences": self.sequences,
            "forks": dict(self.forks),
        }

    @property
    def broken(self) -> Counter[str]:
        """The forks that have a cure."""
        return Counter({cause: calls for cause, calls in self.forks.items() if cause not in HARMLESS})

    @property
    def merge_ratio(self) -> float:
        """Conversations over sequences: 1 where every turn that could continue another does, 1/3 where each of three turns
        is a sequence of its own; NaN without any."""
        return (self.sequences - self.broken.total()) / self.sequences if self.sequences else math.nan

    def __str__(self) -> str:
        lost = ", ".join(f"{reason} {calls}" for reason, calls in self.dropped.most_common())
        return (
            f"calls: {self.seen} seen -> {self.attributed} attributed -> {self.selected} selected -> "
            f"{self.complete} complete -> {self.trained} trained"
            + (f" (left out: {lost})" if lost else "")
            + (f"; {self.complete} calls in {self.sequences} sequences ({self._torn()})" if self.broken else "")
        )

    def _torn(self) -> str:
        return ", ".join(f"{cause} {calls}" for cause, calls in self.broken.most_common())


class Batch(msgspec.Struct):
    """What a step can learn from."""

    groups: list[Group]
    ledger: Ledger


def collect(episodes: Sequence[Episode], selectors: Sequence[str], version: int | None = None) -> Batch:
    """Groups by (group id, selector) of all trajectories that can be trained, and the ledger of all calls.

    Calls that another policy version than `version` sampled are left out as `stale`; None accepts every version."""
    ledger = Ledger()
    groups: dict[tuple[str, ...], list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        for selector, trajectory in _trajectories(episode, selectors, version, ledger):
            groups[(episode.rollout.group_id, selector)].append(trajectory)
    return Batch([Group(key, members) for key, members in groups.items()], ledger)


def _trajectories(
    episode: Episode, selectors: Sequence[str], version: int | None, ledger: Ledger
) -> Iterable[tuple[str, Trajectory]]:
    ledger.seen += len(episode.completions) + episode.superseded
    ledger.attributed += len(episode.completions) + episode.superseded
    ledger.drop("superseded", episode.superseded)
    by_agent: dict[tuple[str, str], list[Completion]] = defaultdict(list)
    for completion in episode.completions:
        ledger.agents[completion.path] += 1
        selector = selector_of(selectors, completion.path)
        if selector is None:
            ledger.drop("not_selected")
            continue
        ledger.selected += 1
        ledger.chosen[selector] += 1
        reason = _untrainable(episode, completion, version)
        if reason:
            ledger.drop(reason)
        else:
            by_agent[selector, completion.path].append(completion)
    for (selector, path), calls in by_agent.items():
        total = agent_return(episode, path, calls)
        if total is None or episode.attempt is None:
            ledger.drop("reward_missing", len(calls))
            continue
        ledger.complete += len(calls)
        transitions = [Transition(c, selector, call_reward(episode, c)) for c in calls]
        chains = lineages(transitions)
        ledger.sequences += len(chains)
        ledger.forks.update(fork.cause for fork in forks(chains))
        yield selector, Trajectory(episode.rollout.id, episode.attempt.id, path, total, transitions)


def _untrainable(episode: Episode, completion: Completion, version: int | None) -> str | None:
    """The reason why this selected call cannot be trained, or None."""
    if completion.defect:
        return completion.defect
    if completion.policy is None:
        return "not_policy"
    if len(completion.response_ids) != len(completion.logprobs):
        return "length_mismatch"
    if not len(completion.prompt_ids) or not len(completion.response_ids):
        return "no_token_ids"
    if version is not None and completion.version != version:
        return "stale"
    outcome = episode.rollout.outcome
    if outcome not in USABLE:
        return f"outcome_{outcome.value if outcome else 'unknown'}"
    return None


def _value(rewards: Sequence[Reward], targets: frozenset[str]) -> float | None:
    """Value of one target; `rewards` are in order of arrival. None: no reward reaches it."""
    named = {reward.name: reward.value for reward in rewards if reward.target in targets}
    if not named:
        return None
    return named["reward"] if "reward" in named else sum(named.values())


def _call_targets(completion: Completion) -> frozenset[str]:
    return frozenset({f"call:{completion.id}", f"call:{completion.span_id}"})


def call_reward(episode: Episode, call: Completion) -> float:
    """What was given to this call alone; 0 where nothing was."""
    return _value(episode.rewards, _call_targets(call)) or 0.0


def rollout_reward(rewards: Sequence[Reward]) -> float | None:
    """The value of the rollout itself; None when nothing was returned or emitted for it."""
    return _value(rewards, frozenset({"rollout"}))


def agent_return(episode: Episode, path: str, calls: Sequence[Completion]) -> float | None:
    """The return of one agent in one rollout by the rule of this module; None when no reward reaches it."""
    parts = [
        rollout_reward(episode.rewards),
        _value(episode.rewards, frozenset({f"agent:{path}", f"agent:{leaf(path)}"})),
        *(_value(episode.rewards, _call_targets(call)) for call in calls),
    ]
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def lineages(transitions: Sequence[Transition]) -> list[list[Transition]]:
    """Chains in which each prompt begins with every token of the call before it, prompt and response.

    A chain is one sequence to learn from. A call whose prompt departs from all chains by a single id starts its own, so
    interleaved sub-agents and edited histories never mix. Calls sampled at different temperatures are not chained.
    """
    chains: list[list[Transition]] = []
    tails: list[Ids] = []
    for transition in transitions:
        fits = [i for i, tail in enumerate(tails) if _continues(chains[i][-1], tail, transition)]
        tail = tail_of(transition.completion)
        if fits:
            longest = max(fits, key=lambda i: len(tails[i]))
            chains[longest].append(transition)
            tails[longest] = tail
        else:
            chains.append([transition])
            tails.append(tail)
    return chains


def _continues(last: Transition, tail: Ids, transition: Transition) -> bool:
    prompt = transition.completion.prompt_ids
    return (
        len(prompt) >= len(tail)
        and temperature(last) == temperature(transition)
        and bool(np.array_equal(prompt[: len(tail)], tail))
    )
