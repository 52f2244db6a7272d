"""What each agent is asked. Short on purpose: on a CPU every token costs time."""

from __future__ import annotations

from collections.abc import Sequence

Messages = list[tuple[str, str]]
"""Role and text."""


def write_prompt(schema: str, question: str) -> Messages:
    return [("system", "Answer with one SQLite query."), ("user", f"{schema}\n{question}")]


def check_prompt(question: str, sql: str, result: str) -> Messages:
    return [("system", "Is this query correct or wrong?"), ("user", f"{question}\n{sql}\n{result}")]


def rewrite_prompt(schema: str, question: str, sql: str, result: str, verdict: str) -> Messages:
    return [("system", "Repair this SQLite query."), ("user", f"{schema}\n{question}\n{sql}\n{result}\n{verdict}")]


def result_text(rows: Sequence[Sequence[object]], most: int = 3) -> str:
    """`Ada,30;Ben,25`: the first rows, at most 60 characters; `empty` where there are none."""
    if not rows:
        return "empty"
    text = ";".join(",".join(_cell(cell) for cell in row) for row in rows[:most])
    return (text if len(text) <= 60 else text[:60]) + (";..." if len(rows) > most else "")


def _cell(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)
