"""What each agent is asked. Short on purpose: on a CPU every token costs time."""

from __future__ import annotations

import re

Messages = list[tuple[str, str]]
"""Role and text."""


def write_prompt(schema: str, question: str) -> Messages:
    return [("system", "Answer with one SQLite query."), ("user", f"{schema}\n{question}")]


def check_prompt(question: str, sql: str, result: str) -> Messages:
    return [("system", "Is this query correct or wrong?"), ("user", f"{question}\n{sql}\n{result}")]


def rewrite_prompt(schema: str, question: str, sql: str, result: str, verdict: str) -> Messages:
    return [("system", "Repair this SQLite query."), ("user", f"{schema}\n{question}\n{sql}\n{result}\n{verdict}")]


def query_in(text: str) -> str:
    """The SQL of an answer: without a fence of backticks and without a final semicolon."""
    fenced = re.search(r"```(?:sql(?:ite)?)?\s*(.*?)(?:```|$)", text, re.DOTALL | re.IGNORECASE)
    return (fenced.group(1) if fenced else text).strip().rstrip(";").strip()
