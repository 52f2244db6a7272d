"""Answers are judged by what a query returns, never by its text."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

Row = tuple[Any, ...]


def run_query(database: Path | str, sql: str, seconds: float = 2.0, max_rows: int = 10_000) -> list[Row]:
    """Rows of `sql` on a read-only connection. Raises sqlite3.Error: wrong SQL, a write, or longer than `seconds`."""
    uri = f"{Path(database).resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000_000)
        connection.execute("PRAGMA query_only = ON")
        end = time.monotonic() + seconds
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        rows: list[Row] = connection.execute(sql).fetchmany(max_rows + 1)
    if len(rows) > max_rows:
        raise sqlite3.OperationalError(f"more than {max_rows} rows")
    return rows


def canonical_cell(value: object) -> object:
    """NULL stays; whole floats become ints; others get 4 decimals (6 significant digits from 1e6 up); bytes are hex."""
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    if value.is_integer():
        return int(value)
    return float(f"{value:.6g}") if abs(value) >= 1e6 else round(value, 4)


def canonical(rows: list[Row], compare: str) -> list[list[object]]:
    """Rows in the form that is compared: `ordered` keeps their order, `multiset` sorts by their JSON text."""
    if compare not in ("ordered", "multiset"):
        raise ValueError(f"compare is {compare!r}: use 'ordered' or 'multiset'.")
    table = [[canonical_cell(cell) for cell in row] for row in rows]
    return table if compare == "ordered" else sorted(table, key=lambda row: json.dumps(row, ensure_ascii=False))


def same_answer(database: Path | str, gold_sql: str, sql: str | None, compare: str = "multiset") -> bool:
    """Whether `sql` returns what `gold_sql` returns. A query that fails is a wrong answer; a failing gold query raises."""
    gold = canonical(run_query(database, gold_sql), compare)
    if sql is None:
        return False
    try:
        return canonical(run_query(database, sql), compare) == gold
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return False


def show(database: str, sql: str) -> str:
    """What the agents see of a query's result; the error's text where it fails."""
    try:
        return result_text(run_query(database, sql))
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return f"error: {error}"[:60]


def result_text(rows: Sequence[Sequence[object]], most: int = 3) -> str:
    """`Ada,30;Ben,25`: the first rows, at most 60 characters; `empty` where there are none."""
    if not rows:
        return "empty"
    text = ";".join(",".join(_cell(cell) for cell in row) for row in rows[:most])
    return (text if len(text) <= 60 else text[:60]) + (";..." if len(rows) > most else "")


def _cell(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)
