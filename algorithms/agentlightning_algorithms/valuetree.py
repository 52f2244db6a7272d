"""Credit from the tree of situations that the rollouts of a task share.

The value of a situation is the mean return of the rollouts that came through it. A decision in it is worth the mean
return of those that decided the same, less the mean of the others. Unlike the return of one rollout, which is a single
draw however many are taken, this becomes exact with the number of rollouts.

**Cross-fitted**: a rollout's own return is never in the baseline that it is compared with, so that the estimate is unbiased
for the policy gradient at `prior=0`.

**Anchors** say when two situations are the same. Text that a model made seldom repeats, so the finest anchor under which a
situation repeats, and under which some decision in it was taken twice, is the one that counts:

| anchor | the situation | the decision |
|---|---|---|
| `exact` | the prompt's ids | the response's ids |
| `state` | agents and canonical messages before (case, spaces, numbers and ids of no matter) | the canonical message |
| `tools` | agents and tool calls before, arguments in canonical form | tool calls with arguments |
| `node` | agents that spoke before | who speaks next |
| a function of a completion | agents and values before | the value |
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from agentlightning.errors import ConfigError
from agentlightning.schema import Completion
from agentlightning.trajectory import rollout_reward
from agentlightning_algorithms.advantage import Advantage

if TYPE_CHECKING:
    from agentlightning_algorithms.credit import Decision, Verdict

ROUNDING = 1e-12
Place: TypeAlias = tuple[Hashable, Hashable]
"""A situation, and a decision in it."""
Level: TypeAlias = Callable[[Sequence[Completion]], list[Place]]
"""From the calls of a rollout, in order, to the place of each."""


def levels(anchors: Sequence[Any]) -> list[Level]:
    """The anchors, by name or as functions of a completion. Raises ConfigError for unknown names, or none at all."""
    if not anchors:
        raise ConfigError(f"credit: anchors is empty: give some of {', '.join(('exact', *ANCHORS, 'node'))}.")
    return [_level(anchor) for anchor in anchors]


def _level(anchor: Any) -> Level:
    if anchor == "exact":
        return _exact
    if anchor == "node":
        return lambda calls: _history(calls, [c.path for c in calls[1:]] + ["end"])
    say = ANCHORS.get(anchor) if isinstance(anchor, str) else anchor
    if not callable(say):
        raise ConfigError(
            f"credit: anchor {anchor!r}: choose of {', '.join(('exact', *ANCHORS, 'node'))}, or a function."
        )
    return lambda calls: _history(calls, [say(call) for call in calls])


def _exact(calls: Sequence[Completion]) -> list[Place]:
    return [((call.path, call.prompt_ids.tobytes()), call.response_ids.tobytes()) for call in calls]


def _history(calls: Sequence[Completion], said: Iterable[Hashable]) -> list[Place]:
    places: list[Place] = []
    before: Hashable = ()
    for call, word in zip(calls, said, strict=True):
        situation = (before, call.path)
        places.append((situation, word))
        before = hash((situation, word))  # one number, or a history of n calls would cost its square
    return places


def canonical(call: Completion) -> str:
    """What a call said, without what changes from run to run: case, spaces, numbers, ids."""
    message = _message(call)
    text = message.get("content") or ""
    return f"{_plain(text if isinstance(text, str) else json.dumps(text, sort_keys=True))} {signature(call)}".strip()


def signature(call: Completion) -> str:
    """The tools that a call asked for, with their arguments in one order; empty: none."""
    asked = _message(call).get("tool_calls") or ()
    return "; ".join(_asked(tool.get("function") or tool) for tool in asked if isinstance(tool, dict))


ANCHORS: dict[str, Callable[[Completion], str]] = {"state": canonical, "tools": signature}
_VOLATILE = re.compile(r"\b(?:0x)?[0-9a-f]*\d[0-9a-f]*(?:[-_.:][0-9a-f]*\d[0-9a-f]*)*\b")


def _plain(text: str) -> str:
    return " ".join(_VOLATILE.sub("#", text.lower()).split())


def _message(call: Completion) -> dict[str, Any]:
    choices = call.response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return message if isinstance(message, dict) else {}


def _asked(function: dict[str, Any]) -> str:
    given = function.get("arguments")
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        pass  # text that is no JSON stands for itself
    return f"{function.get('name')}({json.dumps(given, sort_keys=True, default=str).lower()})"


@dataclass
class _Node:
    """Returns of the rollouts that came through, each once: the mean of its visits."""

    visits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rollout: str, value: float) -> None:
        self.visits[rollout].append(value)

    def close(self) -> None:
        self.means = {rollout: sum(values) / len(values) for rollout, values in self.visits.items()}
        self.total = sum(self.means.values())
        self.count = len(self.means)
        self.flat = max(self.means.values()) == min(self.means.values())

    def mean(self) -> float:
        return self.total / self.count

    def without(self, rollout: str) -> float:
        return (self.total - self.means[rollout]) / (self.count - 1)


class _Tree:
    """All places of one task under one anchor."""

    def __init__(self, places: dict[int, Place], decisions: Sequence[Decision], value: dict[int, float]) -> None:
        self._places = places
        self._nodes: dict[Hashable, _Node] = defaultdict(_Node)
        choices: dict[Hashable, set[Hashable]] = defaultdict(set)
        for decision in decisions:
            situation, choice = places[id(decision)]
            self._nodes[situation].add(decision.rollout, value[id(decision)])
            self._nodes[situation, choice].add(decision.rollout, value[id(decision)])
            choices[situation].add(choice)
        for node in self._nodes.values():
            node.close()
        self._pooled = {s for s, found in choices.items() if len(found) < self._nodes[s].count}

    def parent(self, decision: Decision) -> _Node:
        return self._nodes[self._places[id(decision)][0]]

    def child(self, decision: Decision) -> _Node:
        return self._nodes[self._places[id(decision)]]

    def pooled(self, decision: Decision) -> bool:
        """Whether some decision was taken twice in its situation."""
        return self._places[id(decision)][0] in self._pooled


class _Forest:
    """The trees of one task, the finest first, and one without anchors: what each agent got in all."""

    def __init__(self, decisions: Sequence[Decision], anchors: Sequence[Level], value: dict[int, float]) -> None:
        self.trees = [_Tree(places, decisions, value) for places in _places(decisions, anchors)]
        whole: dict[int, Place] = {id(d): (d.group.key, (d.rollout, d.path)) for d in decisions}
        self.whole = _Tree(whole, decisions, {id(d): d.trajectory.reward for d in decisions})

    def of(self, decision: Decision) -> _Tree:
        """The finest tree that tells the decision apart from others, else the finest where its situation repeats."""
        repeated = [tree for tree in self.trees if tree.parent(decision).count > 1]
        return next((tree for tree in repeated if tree.pooled(decision)), repeated[0] if repeated else self.whole)


def _places(decisions: Sequence[Decision], anchors: Sequence[Level]) -> list[dict[int, Place]]:
    found: list[dict[int, Place]] = [{} for _ in anchors]
    for members in _by(decisions, lambda d: d.rollout).values():
        episode = members[0].episode
        calls = episode.completions if episode else [d.transition.completion for d in members]
        for places, anchor in zip(found, anchors, strict=True):
            by_call = dict(zip(map(id, calls), anchor(calls), strict=True))
            places.update((id(d), by_call[id(d.transition.completion)]) for d in members)
    return found


def _by(decisions: Sequence[Decision], key: Callable[[Decision], str]) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = {}
    for decision in decisions:
        found.setdefault(key(decision), []).append(decision)
    return found


def tree(decisions: Sequence[Decision], how: Advantage, anchors: Sequence[Level], prior: float) -> list[Verdict]:
    """(mean return below - mean return of the others in the situation) * n / (n + prior), on the estimator's scale."""
    from agentlightning_algorithms.credit import scaled

    raw = np.zeros(len(decisions))
    reasons: dict[int, str] = {}
    number = {id(d): n for n, d in enumerate(decisions)}
    for members in _by(decisions, lambda d: d.task).values():
        forest = _Forest(members, anchors, {id(d): d.to_go for d in members})
        for decision in members:
            found = forest.of(decision)
            parent, child = found.parent(decision), found.child(decision)
            if parent.count < 2:
                reasons[id(decision)] = "single"
            elif parent.flat and how.flat != "keep":
                reasons[id(decision)] = "zero_variance"
            else:
                value = child.mean() - parent.without(decision.rollout)
                raw[number[id(decision)]] = value * child.count / (child.count + prior)
    values = scaled(decisions, raw, how)
    return [reasons.get(id(d), float(value)) for d, value in zip(decisions, values, strict=True)]


def gae(
    decisions: Sequence[Decision], how: Advantage, anchors: Sequence[Level], gamma: float, lam: float
) -> list[Verdict]:
    """sum_k (gamma lam)^k (r + gamma V(next) - V), over the calls of all agents in the order that they came; V is the
    cross-fitted mean return of the situation. Rewards of an agent come with its last call, the rollout's with the last."""
    from agentlightning_algorithms.credit import scaled

    raw = np.zeros(len(decisions))
    reasons: dict[int, str] = {}
    number = {id(d): n for n, d in enumerate(decisions)}
    for members in _by(decisions, lambda d: d.task).values():
        chains = [_chain(found) for found in _by(members, lambda d: d.rollout).values()]
        to_go = {key: value for chain in chains for key, value in _to_go(chain, gamma).items()}
        forest = _Forest(members, anchors, to_go)
        for chain in chains:
            after, value_after = 0.0, 0.0
            for decision, reward in reversed(chain):
                value = _value(forest, decision)
                if value is None:
                    reasons[id(decision)] = "single"
                    continue
                after = reward + gamma * value_after - value + gamma * lam * after
                value_after = value
                raw[number[id(decision)]] = after
        if how.flat != "keep" and not any(abs(raw[number[id(d)]]) > ROUNDING for d in members):
            reasons |= {id(d): reasons.get(id(d), "zero_variance") for d in members}
    values = scaled(decisions, raw, how)
    return [reasons.get(id(d), float(value)) for d, value in zip(decisions, values, strict=True)]


def _value(forest: _Forest, decision: Decision) -> float | None:
    """Mean return of the other rollouts in the situation, under the finest anchor where there are others."""
    for found in (*forest.trees, forest.whole):
        node = found.parent(decision)
        if node.count > 1:
            return node.without(decision.rollout)
    return None


def _chain(members: Sequence[Decision]) -> list[tuple[Decision, float]]:
    """The calls of one rollout in order of arrival, each with what was given to it."""
    ordered = sorted(members, key=lambda d: d.transition.completion.seq)
    episode = members[0].episode
    team = (rollout_reward(episode.rewards) or 0.0) if episode else None
    last = {id(d.trajectory): d for d in ordered}
    chain = []
    for decision in ordered:
        reward = decision.transition.reward
        rest = decision.trajectory.reward - sum(t.reward for t in decision.trajectory.transitions)
        if last[id(decision.trajectory)] is decision and team is not None:
            reward += rest - team
        if decision is ordered[-1]:
            reward += rest if team is None else team
        chain.append((decision, reward))
    return chain


def _to_go(chain: Sequence[tuple[Decision, float]], gamma: float) -> dict[int, float]:
    found: dict[int, float] = {}
    value = 0.0
    for decision, reward in reversed(chain):
        value = reward + gamma * value
        found[id(decision)] = value
    return found
