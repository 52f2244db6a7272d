"""Small rollouts by hand: what the tests of credit and of intermediate rewards are written in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from agentlightning.schema import (
    Attempt,
    Completion,
    Episode,
    Group,
    Outcome,
    Reward,
    Rollout,
    Span,
    SpanKind,
    floats,
    ids,
)
from agentlightning.trajectory import Ledger, collect
from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.credit import assign

CENTRED = Advantage(std="none")
_numbers = itertools.count(1)


def call(path: str, prompt: Sequence[int], said: Sequence[int], *, span: str | None = None, **more: Any) -> Completion:
    """`more`: `content`, `tools` (name and arguments), and fields of a completion."""
    number = next(_numbers)
    message: dict[str, Any] = {"content": more.pop("content", None)}
    if tools := more.pop("tools", None):
        message["tool_calls"] = [
            {"id": f"t{number}", "function": {"name": name, "arguments": json.dumps(given)}} for name, given in tools
        ]
    fields: dict[str, Any] = {"finish_reason": "stop", "seq": number} | more
    return Completion(
        f"c{number}",
        "a",
        path,
        span,
        "m",
        "policy",
        0,
        ids(prompt),
        ids(said),
        floats([-1.0] * len(said)),
        request={},
        response={"choices": [{"message": message}]},
        **fields,
    )


def agent(name: str, parent: str | None = None, path: str = "", **attributes: Any) -> Span:
    return Span(name, "a", SpanKind.AGENT, name, parent, path or name, attributes=attributes)


def tool(name: str, path: str, *, error: str | None = None, **attributes: Any) -> Span:
    number = next(_numbers)
    said = {f"gen_ai.tool.call.{key}": value for key, value in attributes.items()}
    status = "ok" if error is None else "error"
    return Span(
        f"s{number}", "a", SpanKind.TOOL, name, None, path, status=status, error=error, attributes=said, seq=number
    )


def episode(
    calls: Sequence[Completion],
    reward: float | None,
    spans: Sequence[Span] = (),
    given: dict[str, float] | None = None,
    task: str = "g",
) -> Episode:
    """`given`: further rewards by target."""
    rollout = f"r{next(_numbers)}"
    rewards = [] if reward is None else [Reward("w", "a", reward)]
    rewards += [Reward(f"w{target}", "a", value, target=target) for target, value in (given or {}).items()]
    record = Rollout(rollout, "run", {}, task, task, outcome=Outcome.OK)
    return Episode(record, Attempt("a", rollout, 1, "w"), list(spans), list(calls), rewards)


def credited(
    episodes: Sequence[Episode], credit: Any, how: Advantage = CENTRED, agents: Sequence[str] = ("*",)
) -> tuple[list[list[float | None]], Ledger, list[Group]]:
    """For each rollout the advantages of its calls in order (None: not trained), the ledger, and the groups."""
    batch = collect(episodes, agents)
    groups = assign(batch.groups, batch.ledger, how, credit, episodes)
    given = {
        t.completion.id: round(t.advantage, 9)
        for group in batch.groups
        for trajectory in group.trajectories
        for t in trajectory.transitions
        if t.advantage == t.advantage
    }
    return [[given.get(c.id) for c in e.completions] for e in episodes], batch.ledger, groups
