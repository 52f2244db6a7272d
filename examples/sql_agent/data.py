"""Real questions in the form of Spider: a folder with `train.jsonl`, `dev.jsonl` and `databases/*.sqlite`."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

from .world import Task

SCHEMA_CHARS = 1500
"""A longer schema is cut: small models have small windows."""


def load(folder: Path, held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Training tasks, and `held_out` tasks of the dev set drawn by `seed`. Raises SystemExit with the cure."""
    for name in ("train.jsonl", "dev.jsonl", "databases"):
        if not (folder / name).exists():
            raise SystemExit(
                f"{folder} has no {name}: --data takes a folder with train.jsonl, dev.jsonl and databases/."
            )
    train, dev = (_tasks(folder, name) for name in ("train.jsonl", "dev.jsonl"))
    return train, random.Random(seed).sample(dev, min(held_out, len(dev)))


def _tasks(folder: Path, name: str) -> list[Task]:
    schemas: dict[str, str] = {}
    tasks = []
    for line in (folder / name).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        path = folder / "databases" / f"{row['db_id']}.sqlite"
        if row["db_id"] not in schemas:
            schemas[row["db_id"]] = schema_text(path)
        tasks.append(
            Task(
                id=row["id"],
                question=row["question"],
                gold_sql=row["gold_sql"],
                compare=row["compare"],
                database=str(path),
                schema=schemas[row["db_id"]],
                kind=row.get("level", ""),
            )
        )
    return tasks


def schema_text(path: Path) -> str:
    """`singer(Singer_ID Name Age) song(Title ...)`, cut to `SCHEMA_CHARS`."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        names = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")
        ]
        columns = {
            name: [row[0] for row in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))]
            for name in names
            if not name.startswith("sqlite_")
        }
    return " ".join(f"{name}({' '.join(of)})" for name, of in columns.items())[:SCHEMA_CHARS]
