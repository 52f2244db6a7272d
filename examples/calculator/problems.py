"""The world of the example: word problems of nine kinds, in disjoint sets, all from one seed.

A kind has wordings, the right expression, and for some kinds the one that a careless reader takes for it. `--data`
reads problems in the form of GSM8K instead.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lea")
THINGS = ("apples", "books", "cards", "coins", "eggs", "keys", "pens", "rings", "shells", "stamps", "stones", "toys")


class Task(TypedDict):
    """One row of a data set."""

    id: str
    question: str
    answer: float
    kind: str


@dataclass(frozen=True)
class Kind:
    """Wordings and expressions are filled with two names, a thing and the numbers x, y, z."""

    wordings: tuple[str, ...]
    right: str
    careless: str | None = None
    weight: float = 1.0


KINDS = {
    "sum": Kind(
        (
            "{n} has {x} {t} and {m} has {y}. How many have they together?",
            "{n} found {x} {t}, then {y} more. How many are that?",
        ),
        "{x} + {y}",
    ),
    "rest": Kind(
        ("{n} has {x} {t} and gives {m} {y}. How many are left?", "Of {x} {t} {n} loses {y}. How many are left?"),
        "{x} - {y}",
    ),
    "boxes": Kind(
        (
            "{n} has {y} boxes of {z} {t}. How many are that?",
            "{n} fills {y} bags with {z} {t} each. How many are that?",
        ),
        "{y} * {z}",
    ),
    "bought": Kind(
        (
            "{n} has {x} {t} and buys {y} bags of {z}. How many has {n} now?",
            "{n} had {x} {t} and got {y} packs of {z}. How many are that?",
        ),
        "{x} + {y} * {z}",
        "{x} + {z}",
        2,
    ),
    "sold": Kind(
        (
            "{n} has {y} boxes of {z} {t} and sells {x}. How many are left?",
            "From {y} bags of {z} {t} {n} takes {x}. How many are left?",
        ),
        "{y} * {z} - {x}",
        "{z} - {x}",
        2,
    ),
    "more": Kind(
        (
            "{n} has {x} {t}, {m} has {y} more. How many have they together?",
            "{m} has {y} {t} more than {n}, who has {x}. How many in all?",
        ),
        "{x} + {x} + {y}",
        "{x} + {y}",
        2,
    ),
    "fewer": Kind(
        (
            "{n} has {x} {t}, {m} has {y} fewer. How many have they together?",
            "{m} has {y} {t} fewer than {n}, who has {x}. How many in all?",
        ),
        "{x} + {x} - {y}",
        "{x} - {y}",
        2,
    ),
    "times": Kind(
        (
            "{n} has {x} {t}, {m} has {y} times as many. How many have they together?",
            "{m} has {y} times the {t} of {n}, who has {x}. How many in all?",
        ),
        "{x} + {x} * {y}",
        "{x} * {y}",
        2,
    ),
    "days": Kind(
        (
            "{n} makes {z} {t} a day and breaks one. How many are left after {y} days?",
            "Each day {n} finds {z} {t} and loses one. How many are left after {y} days?",
        ),
        "{z} * {y} - {y}",
        "{z} * {y} - 1",
        2,
    ),
}


@dataclass(frozen=True)
class Problem:
    """A task with what the logs are made of."""

    task: Task
    right: str
    careless: str | None


@dataclass(frozen=True)
class World:
    """`warm` is for demonstrations; no problem of it is trained or held out."""

    warm: list[Problem]
    train: list[Task]
    validation: list[Task]
    heldout: list[Task]


def make_world(seed: int = 0, *, warm: int = 4000, train: int = 600, heldout: int = 150) -> World:
    """Equal seeds give equal worlds. No two problems of a world share their words, numbers left out or not."""
    draw = _drawer(random.Random(f"word problems {seed}"))
    held, validation, trained, demonstrated = ([draw() for _ in range(n)] for n in (heldout, heldout, train, warm))
    return World(demonstrated, *([problem.task for problem in part] for part in (trained, validation, held)))


def _drawer(rng: random.Random) -> Callable[[], Problem]:
    seen: set[str] = set()

    def draw() -> Problem:
        while True:
            problem = _problem(rng, len(seen))
            if problem is not None and problem.task["question"] not in seen:
                seen.add(problem.task["question"])
                return problem

    return draw


def _problem(rng: random.Random, number: int) -> Problem | None:
    """None where the numbers do not suit the words, or the careless answer is right by luck."""
    name = rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
    kind = KINDS[name]
    n, m = rng.sample(NAMES, 2)
    x, y, z = rng.randint(10, 60), rng.randint(2, 9), rng.randint(3, 30)
    words = {"n": n, "m": m, "t": rng.choice(THINGS), "x": x, "y": y, "z": z}
    right, careless = kind.right.format(**words), kind.careless and kind.careless.format(**words)
    answer = value(right)
    if not 0 < answer < 1000 or (careless and (value(careless) == answer or value(careless) <= 0)):
        return None
    task = Task(id=f"p{number:05d}", question=rng.choice(kind.wordings).format(**words), answer=answer, kind=name)
    return Problem(task, right, careless)


def value(expression: str) -> float:
    """What the team's calculator makes of it."""
    from .team import calculator

    return float(calculator(expression).rpartition("=")[2])


def load(folder: Path, held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Training tasks, and `held_out` tasks of the dev set drawn by `seed`. Raises SystemExit with the cure."""
    for name in ("train.jsonl", "dev.jsonl"):
        if not (folder / name).exists():
            raise SystemExit(
                f"{folder} has no {name}: --data takes a folder with train.jsonl and dev.jsonl, as GSM8K's."
            )
    train, dev = (_tasks(folder / name) for name in ("train.jsonl", "dev.jsonl"))
    return train, random.Random(seed).sample(dev, min(held_out, len(dev)))


def _tasks(file: Path) -> list[Task]:
    with file.open(encoding="utf-8") as lines:  # `splitlines` would split at line separators inside a question too
        rows = [json.loads(line) for line in lines]
    return [
        Task(id=row["id"], question=row["question"], answer=float(str(row["answer"]).replace(",", "")), kind="gsm8k")
        for row in rows
    ]
