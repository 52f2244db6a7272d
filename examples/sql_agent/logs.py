"""Logs of a mediocre agent, to warm-start the tiny model from.

Its writer has bad habits for some kinds of question and makes slips everywhere; its rewriter mostly keeps the bad
habits; its checker is mostly right. So the right answer keeps some probability, and training can find it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from . import mistakes, prompts
from .judge import show
from .questions import KINDS
from .world import Question, World

WRITER_HABIT = 0.65
"""How often the writer follows its bad habit, for kinds that have one."""
REWRITER_HABIT = 0.85
"""How often the rewriter falls back on it."""
SLIP = 0.10
CHECKER_ERROR = 0.04


@dataclass(frozen=True)
class Demonstration:
    """One model call of the logs: what the agent read and what it answered."""

    messages: prompts.Messages
    answer: str


def make_logs(world: World, count: int, seed: int) -> list[Demonstration]:
    """`count` calls of the three agents, with the natural mix of kinds. Equal arguments give equal logs."""
    rng = random.Random(f"sql logs {seed}")
    by_kind: dict[str, list[Question]] = {}
    for question in world.warm:
        by_kind.setdefault(question.kind, []).append(question)
    weights = [KINDS[kind][1] for kind in by_kind]
    pools = rng.choices(list(by_kind.values()), weights, k=count)
    return [_call(rng.choice(pool), rng) for pool in pools]


def _call(question: Question, rng: random.Random) -> Demonstration:
    role = rng.choices(["write", "check", "rewrite"], [0.45, 0.35, 0.2])[0]
    task = question.task
    if role == "write":
        messages = prompts.write_prompt(task["schema"], task["question"])
        return Demonstration(messages, _attempt(question, WRITER_HABIT, rng)[0])
    sql, fault = _attempt(question, 0.4, rng, slip=0.25)
    result = show(task["database"], sql)
    if role == "check":
        answer = _verdict(fault, rng)
        return Demonstration(prompts.check_prompt(task["question"], sql, result), answer)
    messages = prompts.rewrite_prompt(task["schema"], task["question"], sql, result, f"wrong {fault or 'value'}")
    return Demonstration(messages, sql if fault is None else _attempt(question, REWRITER_HABIT, rng)[0])


def _attempt(question: Question, habit: float, rng: random.Random, slip: float = SLIP) -> tuple[str, str | None]:
    """A query as the mediocre agent writes it, and its fault or None."""
    wrong = mistakes.habit(question.query)
    if wrong is not None and rng.random() < habit:
        return wrong[1].sql(), wrong[0]
    if rng.random() < slip:
        fault, query = rng.choice([*mistakes.slips(question.query, question.db, rng), ("error", question.query)])
        return (_broken(query.sql(), rng) if fault == "error" else query.sql()), fault
    return question.query.sql(), None


def _broken(sql: str, rng: random.Random) -> str:
    """The query with a keyword left out, so that it does not run."""
    words = sql.split(" ")
    gap = words.index(rng.choice([word for word in ("FROM", "WHERE", "BY") if word in words]))
    return " ".join(words[:gap] + words[gap + 1 :])


def _verdict(fault: str | None, rng: random.Random) -> str:
    if rng.random() < CHECKER_ERROR:
        fault = None if fault else "value"
    return f"wrong {fault}" if fault else "correct"
