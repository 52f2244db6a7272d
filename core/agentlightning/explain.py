"""From rewards to the advantage of each call of a rollout, with every rule that applied.

Advantages are an algorithm's, so each step leaves a note of them on the attempts that it used (`notes`). All else is
worked out again from the records by the same functions that the step used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

from agentlightning.doctor import code_of
from agentlightning.forks import CAUSES, Fork, forks
from agentlightning.schema import (
    Completion,
    Episode,
    Group,
    Reward,
    Rollout,
    Run,
    Span,
    SpanKind,
    leaf,
    now_ns,
    selector_of,
)
from agentlightning.store.base import Store
from agentlightning.tasks import digest
from agentlightning.trajectory import agent_return, collect, lineages

NOTE = "agl.advantages"


class Part(msgspec.Struct, frozen=True):
    """What one target contributes to a return."""

    target: str
    value: float | None
    """None: no reward reaches it."""
    rule: str


class CallStory(msgspec.Struct):
    """One model call."""

    id: str
    path: str
    prompt_tokens: int
    response_tokens: int
    selector: str | None
    """The entry of `agents=` that chose it."""
    left_out: str | None = None
    """Why it was not trained."""
    cure: str = ""
    parts: list[Part] = []
    total: float | None = None
    """The return of its trajectory."""
    group: list[float] = []
    """Returns that it was compared with, its own included."""
    advantage: float | None = None
    """On each of its sampled tokens."""
    fork: Fork | None = None
    """Where and why it could not continue an earlier call's sequence."""
    fork_cure: str = ""


class Story(msgspec.Struct):
    """One rollout."""

    rollout: Rollout
    finished: bool
    """Whether the step that it belongs to is complete."""
    calls: list[CallStory]


def notes(groups: Sequence[Group], run_id: str, step: int) -> list[Span]:
    """What a step made of its calls: one span for each attempt; the same step gives the same ids."""
    found: dict[str, dict[str, Any]] = {}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        entry = found.setdefault(trajectory.attempt_id, {})
        for transition in trajectory.transitions:
            value = transition.advantage
            entry[transition.completion.id] = None if math.isnan(value) else value
    now = now_ns()
    return [
        Span(
            digest(run_id, step, attempt_id, NOTE, size=8),
            attempt_id,
            SpanKind.ANNOTATION,
            NOTE,
            start_ns=now,
            end_ns=now,
            attributes={"agl.step": step, NOTE: calls},
        )
        for attempt_id, calls in found.items()
    ]


def explain(store: Store, rollout_id: str) -> Story:
    """The story of a rollout. Raises NotFound for an unknown one."""
    (rollout,) = store.rollouts(ids=[rollout_id])
    run = next(run for run in store.runs() if run.id == rollout.run_id)
    finished = any(step.number == rollout.step for step in store.steps(run.id))
    peers = [r.id for r in store.rollouts(run.id) if r.group_id == rollout.group_id and r.mode == rollout.mode]
    episodes = store.episodes(peers)
    episode = next(e for e in episodes if e.rollout.id == rollout_id)
    selectors = selectors_of(run)
    groups = collect(episodes, selectors).groups
    told: dict[str, float | None] = {}
    for span in episode.spans:
        told |= span.attributes.get(NOTE, {}) if span.name == NOTE else {}
    story = Story(rollout, finished, [_call(episode, call, selectors, groups, told) for call in episode.completions])
    departures = _departures(groups, rollout_id)
    for call in story.calls:
        if fork := departures.get(call.id):
            call.fork, call.fork_cure = fork, CAUSES[fork.cause][1]
    return story


def _departures(groups: Sequence[Group], rollout_id: str) -> dict[str, Fork]:
    mine = [t for group in groups for t in group.trajectories if t.rollout_id == rollout_id]
    return {fork.call: fork for trajectory in mine for fork in forks(lineages(trajectory.transitions))}


def selectors_of(run: Run) -> list[str]:
    """`agents=` of the run's algorithm; every agent where it has none."""
    knobs = run.config.get("knobs")
    agents = knobs.get("agents") if isinstance(knobs, dict) else None
    return list(agents) if isinstance(agents, list | tuple) and agents else ["*"]


def _call(
    episode: Episode, call: Completion, selectors: Sequence[str], groups: Sequence[Group], told: dict[str, float | None]
) -> CallStory:
    selector = selector_of(selectors, call.path)
    story = CallStory(call.id, call.path, len(call.prompt_ids), len(call.response_ids), selector)
    group = next((g for g in groups if _has(g, call.id)), None)
    if episode.rollout.mode != "train":
        story.left_out, story.cure = "not_training", "Only rollouts of mode `train` are trained."
    elif selector is None or group is None:
        alone = msgspec.structs.replace(episode, completions=[call], superseded=0)
        reasons = collect([alone], selectors).ledger.dropped
        story.left_out = next(iter(reasons), "reward_missing")
        story.cure = code_of(story.left_out)[1]
    calls = [c for c in episode.completions if c.path == call.path]
    story.parts, story.total = parts_of(episode, call.path, calls), agent_return(episode, call.path, calls)
    if group is not None:
        story.group = [trajectory.reward for trajectory in group.trajectories]
        story.advantage = told.get(call.id)
        if story.advantage is None and story.left_out is None:
            story.left_out = _not_compared(story.group, call.id in told)
            story.cure = code_of(story.left_out)[1] if story.left_out in ("single", "zero_variance") else ""
    return story


def _has(group: Group, call_id: str) -> bool:
    return any(t.completion.id == call_id for trajectory in group.trajectories for t in trajectory.transitions)


def _not_compared(returns: Sequence[float], noted: bool) -> str:
    if len(returns) < 2:
        return "single"
    if max(returns) == min(returns):
        return "zero_variance"
    return "no_advantage" if noted else "not_yet_trained"


def parts_of(episode: Episode, path: str, calls: Sequence[Completion]) -> list[Part]:
    """Each target that could pay the agent, and the rule that gave its value."""
    targets = [("rollout", {"rollout"}), (f"agent:{path}", {f"agent:{path}", f"agent:{leaf(path)}"})]
    targets += [(f"call:{call.id}", {f"call:{call.id}", f"call:{call.span_id}"}) for call in calls]
    return [_part(name, [r for r in episode.rewards if r.target in aliases]) for name, aliases in targets]


def _part(target: str, rewards: Sequence[Reward]) -> Part:
    named = {reward.name: reward.value for reward in rewards}
    if not named:
        return Part(target, None, "no reward")
    replaced = len(rewards) - len(named)
    again = f"; {replaced} earlier of the same name replaced" if replaced else ""
    if "reward" in named:
        others = ", ".join(f"{name} {value:g}" for name, value in named.items() if name != "reward")
        beside = f"; beside it, and not counted: {others}" if others else ""
        return Part(target, named["reward"], f"its reward named `reward`{again}{beside}")
    told = " + ".join(f"{name} {value:g}" for name, value in named.items())
    return Part(target, sum(named.values()), f"the sum of its named rewards: {told}{again}")


def comparison(story: CallStory) -> str:
    """How the return stands among those of its group."""
    if len(story.group) < 2:
        return "nothing to be compared with"
    mean, spread = fmean(story.group), stdev(story.group)
    return f"{len(story.group)} trajectories of this task, mean {mean:.4g}, standard deviation {spread:.4g}"
