"""Logs of a mediocre team, to warm-start the tiny model from.

Its solver reads some kinds of problem carelessly, more often than not, and makes slips everywhere; its critic is mostly
right. So the right expression keeps some probability, and training can find it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .problems import Problem, World
from .team import CRITIC, SOLVER, calculator

HABIT = 0.6
"""How often the solver follows the careless reading, for kinds that have one."""
AGAIN = 0.8
"""How often it does so again when it is asked to revise."""
SLIP = 0.05
CRITIC_ERROR = 0.05

OPEN, CLOSE = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
WORDS = (OPEN, CLOSE)
"""A call of the tool as the model writes it, around the expression."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Demonstration:
    """One model call of the logs: what the agent read and what it answered."""

    messages: list[Message]
    answer: str


def make_logs(world: World, count: int, seed: int) -> list[Demonstration]:
    """`count` calls of both agents, as AutoGen would make them. Equal arguments give equal logs."""
    rng = random.Random(f"calculator logs {seed}")
    return [_call(rng.choice(world.warm), rng) for _ in range(count)]


def _call(problem: Problem, rng: random.Random) -> Demonstration:
    step: Callable[[Problem, random.Random], Demonstration] = rng.choices([_ask, _judge, _revise], [0.45, 0.35, 0.2])[0]
    return step(problem, rng)


def _ask(problem: Problem, rng: random.Random) -> Demonstration:
    return Demonstration(_begin(problem), _use(_attempt(problem, HABIT, rng)))


def _judge(problem: Problem, rng: random.Random) -> Demonstration:
    expression = _attempt(problem, 0.5, rng, slip=0.2)
    right = (expression == problem.right) != (rng.random() < CRITIC_ERROR)
    said = [{"role": "user", "content": problem.task["question"]}, {"role": "user", "content": calculator(expression)}]
    return Demonstration([{"role": "system", "content": CRITIC}, *said], "APPROVE" if right else "REVISE")


def _revise(problem: Problem, rng: random.Random) -> Demonstration:
    """After a first attempt that was wrong, most of the time."""
    first = _attempt(problem, 0.9, rng, slip=0.3)
    messages = [*_begin(problem), *_used(first), {"role": "user", "content": "REVISE"}]
    return Demonstration(messages, _use(_attempt(problem, AGAIN, rng)))


def _begin(problem: Problem) -> list[Message]:
    return [{"role": "system", "content": SOLVER}, {"role": "user", "content": problem.task["question"]}]


def _use(expression: str) -> str:
    return f"{OPEN}{expression}{CLOSE}"


def _used(expression: str) -> list[Message]:
    call = {"function": {"name": "calculator", "arguments": {"expression": expression}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": calculator(expression)},
    ]


def _attempt(problem: Problem, habit: float, rng: random.Random, slip: float = SLIP) -> str:
    """An expression as the mediocre solver writes it."""
    wrong = problem.careless
    if wrong is not None and rng.random() < habit:
        return wrong
    if rng.random() < slip:
        return _slip(problem.right, rng)
    return problem.right


def _slip(expression: str, rng: random.Random) -> str:
    """One sign or one number is another."""
    parts = expression.split(" ")
    place = rng.randrange(len(parts))
    parts[place] = str(rng.randint(2, 60)) if parts[place].isdigit() else rng.choice("+-*")
    return " ".join(parts)
