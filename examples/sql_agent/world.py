"""The world of the example: eight databases and disjoint sets of questions, all from one seed.

Held-out, validation, training and warm-start questions share no wording and no gold query. A question is kept only if
it is hard to be right by luck: its answer is neither empty, 0 nor NULL, and a wrong query by habit or by an obvious slip
gives another answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from . import mistakes
from .databases import DATABASES, Database, create
from .judge import canonical, run_query, same_answer
from .questions import KINDS, Draft, Query


class Task(TypedDict):
    """One row of a data set, as the graph and the judge read it."""

    id: str
    question: str
    gold_sql: str
    compare: str
    """`ordered` or `multiset`."""
    database: str
    """Path of the SQLite file."""
    schema: str
    """Tables and columns as text, for the prompt."""
    kind: str


@dataclass(frozen=True)
class Question:
    """A task with the query in parts, which demonstrations are made from."""

    task: Task
    db: Database
    query: Query

    @property
    def kind(self) -> str:
        return self.task["kind"]


@dataclass(frozen=True)
class World:
    """`warm` is for demonstrations; no question of it is trained, so that training meets what the model cannot do yet."""

    warm: list[Question]
    train: list[Task]
    validation: list[Task]
    heldout: list[Task]


def make_world(folder: Path, seed: int = 0, *, warm: int = 3600, train: int = 800, heldout: int = 200) -> World:
    """Writes the databases into `folder` and draws the questions. Equal seeds give equal worlds, byte for byte."""
    rng = random.Random(f"sql world {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    draw = _Drawer({db.id: create(db, folder, rng) for db in DATABASES}, rng)
    held = [draw.one() for _ in range(heldout)]
    validation = [draw.one() for _ in range(heldout)]
    trained = [draw.one() for _ in range(train)]
    demonstrated = [draw.one() for _ in range(warm)]
    tasks = [[question.task for question in part] for part in (trained, validation, held)]
    return World(demonstrated, *tasks)


def score(task: Task, sql: str | None) -> bool:
    """Whether `sql` answers the task."""
    return same_answer(task["database"], task["gold_sql"], sql, task["compare"])


def schema_text(db: Database) -> str:
    """`players(name team role age goals) teams(team city)`"""
    tables = [f"{db.plural}({' '.join(db.columns)})"]
    if db.link:
        tables.append(f"{db.link.table}({db.categories[0].column} {db.link.attribute.column})")
    return " ".join(tables)


class _Drawer:
    """Draws questions that are new in wording and in query. Small kinds run out; they are then drawn no more."""

    def __init__(self, paths: dict[str, Path], rng: random.Random) -> None:
        self.paths, self.rng = paths, rng
        self.seen: set[str] = set()
        self.count = 0
        self.weights = {kind: weight for kind, (_, weight) in KINDS.items()}

    def one(self) -> Question:
        while self.weights:
            kind = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
            for _ in range(300):
                db = self.rng.choice(DATABASES)
                draft = KINDS[kind][0](db, self.rng)
                if draft is not None and self._is_new(draft) and self._is_hard(draft, db):
                    return self._keep(draft, db)
            del self.weights[kind]
        raise ValueError("no more questions in this world: ask for fewer.")

    def _is_new(self, draft: Draft) -> bool:
        return draft.question not in self.seen and draft.query.sql() not in self.seen

    def _is_hard(self, draft: Draft, db: Database) -> bool:
        answer = self._answer(draft, draft.query, db)
        if not answer or all(cell in (None, 0) for row in answer for cell in row) or self._is_tied(draft.query, db):
            return False
        slips = mistakes.slips(draft.query, db, self.rng)
        wrong = [query for fault, query in slips if fault in ("condition", "order")]
        return all(self._answer(draft, query, db) != answer for query in wrong)

    def _is_tied(self, query: Query, db: Database) -> bool:
        """Whether the first group is no clear winner, or some group is empty and would really be the smallest."""
        if query.group is None or query.order is None:
            return False
        counts = run_query(self.paths[db.id], replace(query, select="COUNT(*)", limit=None).sql())
        groups = next(len(category.values) for category in db.categories if category.column == query.group)
        return len(counts) < groups or counts[0] == counts[1]

    def _answer(self, draft: Draft, query: Query, db: Database) -> list[list[object]]:
        return canonical(run_query(self.paths[db.id], query.sql()), draft.compare)

    def _keep(self, draft: Draft, db: Database) -> Question:
        self.seen |= {draft.question, draft.query.sql()}
        self.count += 1
        task = Task(
            id=f"q{self.count:05d}",
            question=draft.question,
            gold_sql=draft.query.sql(),
            compare=draft.compare,
            database=str(self.paths[db.id]),
            schema=schema_text(db),
            kind=draft.kind,
        )
        return Question(task, db, draft.query)
