"""Three agents in a row, four choices each: small enough that every advantage is known exactly.

What an agent chooses depends on all choices before it; the reward is 1 with a probability that depends on all three. The
rollouts are given to our credit as it sees those of a real program: completions with ids, responses and an order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentlightning.schema import (
    Attempt,
    Completion,
    Episode,
    Group,
    Outcome,
    Reward,
    Rollout,
    Trajectory,
    Transition,
    floats,
    ids,
)
from agentlightning.trajectory import Ledger
from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.credit import assign

CHOICES, AGENTS = 4, ("planner", "worker", "writer")
Array = Any


@dataclass
class Problem:
    """`logits[k]` has shape [4^k, 4]: a row for each situation of agent k. `chance` has shape [64]."""

    logits: list[Array]
    chance: Array

    def policies(self) -> list[Array]:
        return [softmax(rows) for rows in self.logits]

    def advantages(self) -> list[Array]:
        """Exact, shape [4^k, 4] for agent k."""
        value, found = self.chance, []
        for policy in reversed(self.policies()):
            q = value.reshape(-1, CHOICES)
            value = (q * policy).sum(1)
            found.append(q - value[:, None])
        return found[::-1]

    def value(self) -> float:
        """Expected return."""
        value = self.chance
        for policy in reversed(self.policies()):
            value = (value.reshape(-1, CHOICES) * policy).sum(1)
        return float(value[0])


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def problem(rng: np.random.Generator, structured: bool = True) -> Problem:
    """`structured`: choices of every agent matter by themselves too, as they do where agents divide a task; otherwise the
    chance of each of the 64 ends is drawn by itself, and little is to be seen before the last choice."""
    if structured:
        effects = (rng.normal(size=(4, 1, 1)), rng.normal(size=(4, 4, 1)), rng.normal(size=(4, 4, 4)))
        chance = 1 / (1 + np.exp(-2 * sum(effects)))
    else:
        chance = rng.random((4, 4, 4))
    return Problem([rng.normal(size=(4**k, CHOICES)) * 0.75 for k in range(3)], np.asarray(chance).reshape(64))


@dataclass
class Sample:
    """Rollouts of one group; `states` and `choices` have shape [3, rollouts]."""

    states: Array
    choices: Array
    returns: Array


def sample(rng: np.random.Generator, of: Problem, count: int) -> Sample:
    state, states, choices = np.zeros(count, int), [], []
    for policy in of.policies():
        states.append(state)
        choice = (policy[state].cumsum(1) < rng.random(count)[:, None]).sum(1).clip(max=CHOICES - 1)
        choices.append(choice)
        state = state * CHOICES + choice
    returns = (rng.random(count) < of.chance[state]).astype(float)
    return Sample(np.array(states), np.array(choices), returns)


def credited(found: Sample, credit: Any, how: Advantage, words: np.random.Generator | None = None) -> Array:
    """Advantages that `credit` gives, shape [3, rollouts]; 0 where a call is not trained. `words`: agents speak free text."""
    groups = {agent: Group(("task", agent), []) for agent in AGENTS}
    episodes = []
    for number in range(len(found.returns)):
        calls = _calls(found, number, words)
        reward = float(found.returns[number])
        record = Rollout(f"r{number}", "run", {}, "task", "task", outcome=Outcome.OK)
        rewards = [Reward(f"w{number}", f"a{number}", reward)]
        episodes.append(Episode(record, Attempt(f"a{number}", record.id, 1, "w"), [], calls, rewards))
        for agent, call in zip(AGENTS, calls, strict=True):
            groups[agent].trajectories.append(
                Trajectory(record.id, f"a{number}", agent, reward, [Transition(call, agent, 0.0)])
            )
    assign(list(groups.values()), Ledger(), how, credit, episodes)
    given = [[t.transitions[0].advantage for t in groups[agent].trajectories] for agent in AGENTS]
    return np.nan_to_num(np.array(given), nan=0.0)


def _calls(found: Sample, number: int, words: np.random.Generator | None) -> list[Completion]:
    prompt, calls = [1], []
    for place, agent in enumerate(AGENTS):
        choice = int(found.choices[place, number])
        said, response = ([10 + choice], {}) if words is None else _free(choice, words)
        calls.append(
            Completion(
                f"c{number}-{place}",
                f"a{number}",
                agent,
                None,
                "m",
                "policy",
                0,
                ids(prompt),
                ids(said),
                floats([-1.0] * len(said)),
                "stop",
                {},
                response,
                seq=number * len(AGENTS) + place,
            )
        )
        prompt = [*prompt, *said]
    return calls


TOOLS = ("search", "lookup", "compute", "ask")


def _free(choice: int, words: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """Prose that never repeats; nine times in ten with a tool call that says the choice, its keys in any order."""
    said = [int(token) for token in words.integers(100, 30_000, 12)]
    arguments = {"limit": 5, "which": ["Alpha", "alpha"][int(words.integers(2))], "what": f"thing-{choice}"}
    order: Sequence[str] = [str(key) for key in words.permutation(list(arguments))]
    call = {"function": {"name": TOOLS[choice], "arguments": json.dumps({key: arguments[key] for key in order})}}
    message: dict[str, Any] = {"content": " ".join(f"word{chr(97 + t % 26)}{chr(97 + t // 26 % 26)}" for t in said)}
    if words.random() < 0.9:
        message["tool_calls"] = [{"id": f"call-{said[0]}", **call}]
    return said, {"choices": [{"message": message}]}
