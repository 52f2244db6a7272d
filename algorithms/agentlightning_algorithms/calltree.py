"""The tree of the calls of a rollout: which call came of which. A discount runs along it, and never into a sibling.

An agent's calls in one visit are a chain. The first call of a visit came of the last call of whoever handed over to it
(`agl.handoff.from`), else of the agent around it, else of the last call that had ended before: so parallel sub-agents are
branches of the call that began them, and nodes that follow each other are a chain. After a join the tree goes on from the
last of its branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentlightning.schema import Completion, Episode, Span, SpanKind
from agentlightning.trajectory import call_reward

if TYPE_CHECKING:
    from agentlightning_algorithms.credit import Decision

HANDED = "agl.handoff.from"


def parents(completions: Sequence[Completion], spans: Sequence[Span]) -> list[int | None]:
    """For each call, in order of arrival, the place of the call that it came of; None: of the task itself."""
    places = _Visits({span.id: span for span in spans})
    last: dict[str, int] = {}
    of_path: dict[str, int] = {}
    found: list[int | None] = []
    for number, call in enumerate(completions):
        visit = places.of(call)
        parent = last.get(visit[0])
        if parent is None:
            givers = [of_path[path] for path in places.givers(visit[0]) if path in of_path]
            around = [last[outer] for outer in visit[1:] if outer in last]
            ended = [n for n in range(number - 1, -1, -1) if completions[n].end_ns <= call.start_ns][:1]
            parent = max(givers) if givers else next(iter(around or ended), None)
        found.append(parent)
        last[visit[0]] = of_path[call.path] = number
    return found


class _Visits:
    """Visits of agents: ids of agent spans, and paths where there are none."""

    def __init__(self, spans: Mapping[str, Span]) -> None:
        self._spans = spans

    def of(self, call: Completion) -> list[str]:
        """The visit that a call belongs to, then those around it."""
        found, span_id, seen = [], call.span_id, set()
        while span_id and span_id in self._spans and span_id not in seen:
            seen.add(span_id)
            span = self._spans[span_id]
            if span.kind == SpanKind.AGENT:
                found.append(span.id)
            span_id = span.parent_id
        parts = call.path.split("/")
        return found or [f"/{'/'.join(parts[:count])}" for count in range(len(parts), 0, -1)]

    def givers(self, visit: str) -> list[str]:
        """Paths of the agents that handed over to this visit."""
        span = self._spans.get(visit)
        told = span.attributes.get(HANDED) if span is not None else None
        return [told] if isinstance(told, str) else list(told or ())


def discounted(decisions: Sequence[Decision], gamma: float) -> list[float]:
    """What came of each decision: rewards of calls below it, a factor `gamma` for each call between, plus what its
    trajectory was given as a whole, discounted by the longest chain of calls below it.

    In a chain of T calls this is sum_k gamma^(k - t) r_k + gamma^(T - 1 - t) R.
    """
    found: dict[int, float] = {}
    rollouts: dict[str, list[Decision]] = {}
    for decision in decisions:
        rollouts.setdefault(decision.rollout, []).append(decision)
    for members in rollouts.values():
        found.update(_of_rollout(members, gamma))
    return [found[id(decision)] for decision in decisions]


def _of_rollout(members: Sequence[Decision], gamma: float) -> dict[int, float]:
    episode = members[0].episode
    calls = episode.completions if episode else [d.transition.completion for d in members]
    own = {id(d.transition.completion): d.transition.reward for d in members}
    parent = parents(calls, episode.spans if episode else [])
    value = [own[id(c)] if id(c) in own else _given(episode, c) for c in calls]
    height = [0] * len(calls)
    for number in range(len(calls) - 1, -1, -1):  # a parent comes before its children
        above = parent[number]
        if above is not None:
            value[above] += gamma * value[number]
            height[above] = max(height[above], height[number] + 1)
    place = {id(call): number for number, call in enumerate(calls)}
    found = {}
    for decision in members:
        number = place[id(decision.transition.completion)]
        whole = decision.trajectory.reward - sum(t.reward for t in decision.trajectory.transitions)
        found[id(decision)] = value[number] + gamma ** height[number] * whole
    return found


def _given(episode: Episode | None, call: Completion) -> float:
    return call_reward(episode, call) if episode else 0.0
