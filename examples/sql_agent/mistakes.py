"""How the agent of the logs goes wrong: a habit for some kinds of question, and slips anywhere."""

from __future__ import annotations

import random
from dataclasses import replace

from .databases import THRESHOLDS, Database
from .questions import Condition, Query

OPPOSITE = {">": "<", "<": ">", "=": "!=", "!=": "="}


def habit(query: Query) -> tuple[str, Query] | None:
    """The systematic fault and the query with it: superlatives are sorted upwards, second conditions are forgotten. None: no habit."""
    if query.order is not None and query.group is None and query.limit is not None and query.descending:
        return "order", replace(query, descending=False)
    if len(query.where) > 1:
        return "condition", replace(query, where=query.where[:1])
    return None


def slips(query: Query, db: Database, rng: random.Random) -> list[tuple[str, Query]]:
    """Every single careless fault of `query`, with the name that a checker gives it; values are drawn from `rng`."""
    found = [
        ("condition", replace(query, where=query.where[:i] + query.where[i + 1 :])) for i in range(len(query.where))
    ]
    for i, condition in enumerate(query.where):
        for fault, other in _other_conditions(condition, db, rng):
            found.append((fault, replace(query, where=(*query.where[:i], other, *query.where[i + 1 :]))))
    if query.order:
        found.append(("order", replace(query, descending=not query.descending)))
    swapped = _swap_number(query, db)
    return [*found, ("column", swapped)] if swapped != query else found


def _other_conditions(condition: Condition, db: Database, rng: random.Random) -> list[tuple[str, Condition]]:
    column, operator, value = condition
    values = THRESHOLDS if isinstance(value, int) else _values(column, db)
    other = rng.choice([v for v in values if v != value])
    return [("condition", (column, OPPOSITE[operator], value)), ("value", (column, operator, other))]


def _values(column: str, db: Database) -> tuple[str, ...]:
    known = {category.column: category.values for category in db.categories} | {db.key: db.keys}
    if db.link:
        known[db.link.attribute.column] = db.link.attribute.values
    return known[column]


def _swap_number(query: Query, db: Database) -> Query:
    """The other numeric column wherever the right one should be."""
    first, second = (number.column for number in db.numbers)
    other = {first: second, second: first}
    select = query.select
    for column in (first, second):
        if query.select in (column, f"{query.select[:3]}({column})"):
            select = query.select.replace(column, other[column])
    where = tuple((other.get(column, column), operator, value) for column, operator, value in query.where)
    return replace(query, select=select, where=where, order=other.get(query.order or "", query.order))
