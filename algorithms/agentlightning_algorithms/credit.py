"""Which of the calls earned the reward. Every method sees the same: the calls that could be trained, as `Decision`s.

| name | value of a decision | compared with |
|---|---|---|
| `broadcast` | the return of its trajectory (LightningRL, arXiv 2508.03680) | same task and entry of `agents=` |
| `per_agent` | the same (Dr.MAS) | same task and agent path |
| `turn` | what its trajectory still got from this call on (AT-GRPO) | same task, agent path and turn |
| `discounted` | what came of it in the call tree, discounted by calls (`calltree.py`) | same task, agent path and turn |
| `gigpo` | that of `broadcast`, plus what came from here on (GiGPO) | ..., plus equal observations |
| `tree` | mean return below its node less the mean below its parent (`valuetree.py`) | equal situations |
| `gae` | generalised advantage over the tree's values, without a critic (arXiv 1506.02438) | equal situations |

A function does too: it takes the decisions and an `Advantage`, and returns for each a number, or the reason (a word for the
ledger) why it is not trained. Ours are such functions.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from agentlightning.errors import ConfigError, RewardError
from agentlightning.schema import Episode, Group, Trajectory, Transition
from agentlightning.trajectory import Ledger
from agentlightning_algorithms import calltree, valuetree
from agentlightning_algorithms.advantage import Advantage, Values, advantages, overlong_penalty, scales

logger = logging.getLogger(__name__)

Verdict: TypeAlias = float | str
"""An advantage, or why there is none."""


@dataclass(slots=True, eq=False)
class Decision:
    """One call that could be trained, and where it stands."""

    transition: Transition
    trajectory: Trajectory
    group: Group
    episode: Episode | None
    """All that is known of its rollout; None where the caller did not have it."""
    turn: int
    """0, 1, ...: how many trained calls of its agent came before in the attempt."""
    to_go: float
    """Its trajectory's return, less what was given to the calls before this one alone."""

    @property
    def task(self) -> str:
        """Group id: decisions of one task in one step."""
        return self.group.key[0]

    @property
    def path(self) -> str:
        return self.trajectory.path

    @property
    def rollout(self) -> str:
        return self.trajectory.rollout_id


Method: TypeAlias = Callable[[Sequence[Decision], Advantage], Sequence[Verdict]]


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A method by name, with what it can be told. Raises ConfigError for fields that the method does not know."""

    kind: str = "broadcast"
    gamma: float = 1.0
    """Discount per call: `discounted`, `gigpo`, `gae`."""
    weight: float = 1.0
    """`gigpo`: of the step part."""
    lam: float = 0.95
    """`gae`: 0 trusts the tree's values, 1 the rollout's own return."""
    anchors: tuple[Any, ...] = ("exact", "state", "tools", "node")
    """`tree`, `gae`: what makes situations equal, the finest first; a decision is judged by the first under which its
    situation repeats. Names, or functions of a completion."""
    prior: float = 0.5
    """`tree`: how many rollouts' worth of doubt an advantage is shrunk by: n / (n + prior); 0: not at all."""

    def __post_init__(self) -> None:
        if self.kind not in USES:
            raise ConfigError(f"credit={self.kind!r}: choose one of {', '.join(USES)}, or give a function.")
        for name in ("gamma", "weight", "lam", "anchors", "prior"):
            if getattr(self, name) != _DEFAULTS[name] and name not in USES[self.kind]:
                raise ConfigError(f"credit: {name} changes nothing for {self.kind!r}: leave it out.")
        valuetree.levels(self.anchors)
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1 and self.weight >= 0 and self.prior >= 0):
            raise ConfigError(f"{self}: gamma is within (0, 1], lam within [0, 1], weight and prior are not negative.")

    @property
    def method(self) -> Method:
        """The function."""
        if self.kind in ("tree", "gae"):
            levels = valuetree.levels(self.anchors)
            if self.kind == "tree":
                return lambda decisions, how: valuetree.tree(decisions, how, levels, self.prior)
            return lambda decisions, how: valuetree.gae(decisions, how, levels, self.gamma, self.lam)
        if self.kind == "discounted":
            return lambda decisions, how: compare(
                decisions, how, _turn, dict(zip(decisions, calltree.discounted(decisions, self.gamma), strict=True)).get
            )
        if self.kind == "gigpo":
            return lambda decisions, how: gigpo(decisions, how, self.gamma, self.weight)
        return {"broadcast": broadcast, "per_agent": per_agent, "turn": turn}[self.kind]


_DEFAULTS: dict[str, Any] = {"gamma": 1.0, "weight": 1.0, "lam": 0.95, "prior": 0.5}
_DEFAULTS["anchors"] = ("exact", "state", "tools", "node")
USES: dict[str, tuple[str, ...]] = {
    "broadcast": (),
    "per_agent": (),
    "turn": (),
    "discounted": ("gamma",),
    "gigpo": ("gamma", "weight"),
    "tree": ("anchors", "prior"),
    "gae": ("gamma", "lam", "anchors"),
}
"""Method -> the fields that it knows."""
WHOLE = ("broadcast", "per_agent")
"""Methods that see the return of a rollout alone: rewards that cancel out within one are lost on them."""


def credit_of(credit: str | Credit | dict[str, Any] | Method) -> Credit | Method:
    """What `credit=` means. Raises ConfigError."""
    if isinstance(credit, str):
        return Credit(credit)
    if isinstance(credit, dict):
        try:
            return msgspec.convert(credit, Credit)
        except msgspec.ValidationError as error:
            raise ConfigError(f"credit: {error}. Its fields are: {', '.join(Credit.__struct_fields__)}.") from error
    if isinstance(credit, Credit) or callable(credit):
        return credit
    raise ConfigError(f"credit={credit!r}: give a name ({', '.join(USES)}), a Credit, or a function.")


def decisions_of(groups: Sequence[Group], episodes: Sequence[Episode] = ()) -> list[Decision]:
    """All calls of the groups, in order. A return that is no number takes its trajectory out, and NaN goes no further."""
    known = {episode.rollout.id: episode for episode in episodes}
    found = []
    for group in groups:
        for trajectory in group.trajectories:
            to_go = trajectory.reward
            for number, transition in enumerate(trajectory.transitions):
                episode = known.get(trajectory.rollout_id)
                found.append(Decision(transition, trajectory, group, episode, number, to_go))
                to_go -= transition.reward
    return found


def assign(
    groups: Sequence[Group],
    ledger: Ledger,
    how: Advantage = Advantage(),  # noqa: B008  # frozen
    credit: str | Credit | dict[str, Any] | Method = "broadcast",
    episodes: Sequence[Episode] = (),
) -> list[Group]:
    """Gives every call its advantage, or counts in the ledger why it has none; returns the groups that teach something."""
    decisions = []
    for decision in decisions_of(_punished(groups, how), episodes):
        if np.isfinite(decision.trajectory.reward):
            decisions.append(decision)
        else:
            ledger.drop("reward_not_finite")
    chosen = credit_of(credit)
    method = chosen.method if isinstance(chosen, Credit) else chosen
    verdicts = list(method(decisions, how))
    if len(verdicts) != len(decisions):
        raise RewardError(f"credit gave {len(verdicts)} verdicts for {len(decisions)} calls: return one for each.")
    for decision, verdict in zip(decisions, verdicts, strict=True):
        reason = verdict if isinstance(verdict, str) else _refused(decision, float(verdict), how)
        if reason:
            ledger.drop(reason)
        else:
            decision.transition.advantage = float(verdict)
            ledger.trained += 1
    if decisions and all(verdict == "single" for verdict in verdicts):
        logger.warning(
            "every group has a single member, so nothing can be compared: raise `rollouts_per_task`, or look for rollouts that "
            "fail or never reach the agents."
        )
    taught = {id(d.group) for d in decisions if not np.isnan(d.transition.advantage)}
    return [group for group in groups if id(group) in taught]


def _refused(decision: Decision, value: float, how: Advantage) -> str | None:
    if not np.isfinite(value):
        raise RewardError(
            f"credit gave {value} for a call of {decision.path!r} in rollout {decision.rollout}: return a finite number, or "
            "a word that says why the call is not trained."
        )
    if how.truncated == "mask" and decision.transition.completion.finish_reason == "length":
        return "truncated"
    return None


def _punished(groups: Sequence[Group], how: Advantage) -> Sequence[Group]:
    """Takes the over-long punishment off the calls that earned it."""
    if how.overlong is not None:
        for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
            for transition in trajectory.transitions:
                penalty = overlong_penalty(len(transition.completion.response_ids), *how.overlong)
                transition.reward += penalty
                trajectory.reward += penalty
    return groups


# ---- methods that compare trajectories


def compare(
    decisions: Sequence[Decision],
    how: Advantage,
    key: Callable[[Decision], Hashable],
    value: Callable[[Decision], float | None],
) -> list[Verdict]:
    """Advantages of `value` among the decisions with one `key`; a rollout counts once, with the mean of its values."""
    members: dict[Hashable, dict[str, list[Decision]]] = defaultdict(lambda: defaultdict(list))
    for decision in decisions:
        members[key(decision)][_unit(decision)].append(decision)
    verdicts: dict[int, Verdict] = {}
    compared: list[list[list[Decision]]] = []
    for units in members.values():
        calls = list(units.values())
        reason = _nothing_to_compare([_mean(value, call) for call in calls], how)
        if reason:
            verdicts.update((id(decision), reason) for call in calls for decision in call)
        else:
            compared.append(calls)
    returns = [[_mean(value, call) for call in calls] for calls in compared]
    lengths = [
        [float(sum(len(d.transition.completion.response_ids) for d in call)) for call in calls] for calls in compared
    ]
    for calls, found in zip(compared, advantages(returns, how, lengths), strict=True):
        for call, advantage in zip(calls, found, strict=True):
            verdicts.update((id(decision), float(advantage)) for decision in call)
    return [verdicts[id(decision)] for decision in decisions]


def _unit(decision: Decision) -> str:
    """Agents of one glob in one rollout are compared with each other: each is a trajectory."""
    return f"{decision.rollout}\0{decision.path}"


def _mean(value: Callable[[Decision], float | None], decisions: Sequence[Decision]) -> float:
    values = [value(decision) for decision in decisions]
    first = values[0]
    assert first is not None
    return first if all(v == first for v in values) else float(np.mean([v for v in values if v is not None]))


def _nothing_to_compare(values: Sequence[float], how: Advantage) -> str | None:
    if len(values) < 2:
        return "single"
    return "zero_variance" if max(values) == min(values) and how.flat != "keep" else None


def _turn(decision: Decision) -> Hashable:
    return decision.task, decision.path, decision.turn


def broadcast(decisions: Sequence[Decision], how: Advantage) -> list[Verdict]:
    """Every call gets what its trajectory got."""
    return compare(decisions, how, lambda d: d.group.key, lambda d: d.trajectory.reward)


def per_agent(decisions: Sequence[Decision], how: Advantage) -> list[Verdict]:
    """Baselines and scales of each agent path by itself (Dr.MAS). Over rollouts: the published code counts every step,
    which mixes the agent's identity with how often it spoke."""
    return compare(decisions, how, lambda d: (d.task, d.path), lambda d: d.trajectory.reward)


def turn(decisions: Sequence[Decision], how: Advantage) -> list[Verdict]:
    """Groups by task, agent path and turn (AT-GRPO)."""
    return compare(decisions, how, _turn, lambda d: d.to_go)


def gigpo(decisions: Sequence[Decision], how: Advantage, gamma: float, weight: float) -> list[Verdict]:
    """A_episode + weight * A_step (GiGPO, arXiv 2505.10978): the step part compares calls of one agent that read exactly
    the same. A call that nobody else made has no step part (published code: its raw return)."""
    whole = broadcast(decisions, how)
    to_go = _discounted_to_go(decisions, gamma)
    own = [(d.task, d.path, d.transition.completion.prompt_ids.tobytes()) for d in decisions]
    by_anchor: dict[Hashable, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for decision, anchor, value in zip(decisions, own, to_go, strict=True):
        by_anchor[anchor][_unit(decision)].append(value)
    anchors = {anchor: np.array([np.mean(v) for v in units.values()]) for anchor, units in by_anchor.items()}
    centred = {anchor: values - values.mean() for anchor, values in anchors.items()}
    divisors = scales(list(anchors.values()), list(centred.values()), how)
    scale = {anchor: float(found.mean()) for anchor, found in zip(anchors, divisors, strict=True)}
    verdicts: list[Verdict] = []
    for verdict, anchor, value in zip(whole, own, to_go, strict=True):
        several = len(anchors[anchor]) > 1 and np.ptp(anchors[anchor]) > 0
        step = (value - anchors[anchor].mean()) / scale[anchor] if several else 0.0
        if isinstance(verdict, float):
            verdicts.append(verdict + weight * float(step))
        else:  # equal returns may still hide different steps
            verdicts.append(weight * float(step) if several and weight else verdict)
    return verdicts


def _discounted_to_go(decisions: Sequence[Decision], gamma: float) -> list[float]:
    """sum_k gamma^(k - t) r_k over the calls of a trajectory; what was not given to one call comes with the last."""
    found: dict[int, float] = {}
    for trajectory in {id(d.trajectory): d.trajectory for d in decisions}.values():
        value = trajectory.reward - sum(t.reward for t in trajectory.transitions)
        for transition in reversed(trajectory.transitions):
            last = transition is trajectory.transitions[-1]
            value = transition.reward + (value if last else gamma * value)
            found[id(transition)] = value
    return [found[id(decision.transition)] for decision in decisions]


def scaled(decisions: Sequence[Decision], raw: Values, how: Advantage) -> Values:
    """Differences of returns on the scale that the estimator gives returns: that of each task's trajectories."""
    members: dict[Hashable, dict[str, float]] = defaultdict(dict)
    for decision in decisions:
        members[decision.group.key][_unit(decision)] = decision.trajectory.reward
    returns = [np.array(list(units.values()), dtype=np.float64) for units in members.values()]
    centred = [values - values.mean() for values in returns]
    divisors = {}
    for (key, units), found in zip(members.items(), scales(returns, centred, how), strict=True):
        divisors.update({(key, unit): float(divisor) for unit, divisor in zip(units, found, strict=True)})
    return np.array([value / divisors[d.group.key, _unit(d)] for d, value in zip(decisions, raw, strict=True)])
