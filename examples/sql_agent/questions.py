"""Kinds of questions: each makes a query and a natural wording for it from a database's description.

Queries are kept as data, so that the mediocre agent of `logs.py` can get them wrong in a natural way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .databases import THRESHOLDS, Database

Condition = tuple[str, str, str | int]
"""Column, operator, value."""

AGGREGATES = (("average", "AVG"), ("total", "SUM"), ("maximum", "MAX"), ("minimum", "MIN"))

MOST = 0.85
"""Share of superlatives that ask for the most."""


@dataclass(frozen=True)
class Query:
    """A SELECT statement in parts."""

    select: str
    table: str
    where: tuple[Condition, ...] = ()
    join: tuple[str, str] | None = None
    """Second table and the column that both have."""
    group: str | None = None
    order: str | None = None
    descending: bool = False
    limit: int | None = None

    def sql(self) -> str:
        parts = [f"SELECT {self.select} FROM {self.table}"]
        if self.join:
            parts.append("JOIN {} USING ({})".format(*self.join))
        if self.where:
            parts.append("WHERE " + " AND ".join(_condition(c) for c in self.where))
        if self.group:
            parts.append(f"GROUP BY {self.group}")
        if self.order:
            parts.append(f"ORDER BY {self.order} {'DESC' if self.descending else 'ASC'}")
        if self.limit:
            parts.append(f"LIMIT {self.limit}")
        return " ".join(parts)


@dataclass(frozen=True)
class Draft:
    """A question before it has been checked against the rows."""

    kind: str
    question: str
    query: Query
    compare: str = "multiset"


def _condition(condition: Condition) -> str:
    column, operator, value = condition
    return f"{column} {operator} '{value}'" if isinstance(value, str) else f"{column} {operator} {value}"


def _equal(db: Database, rng: random.Random) -> tuple[str, Condition]:
    category = rng.choice(db.categories)
    value = rng.choice(category.values)
    return f"{category.column} '{value}'", (category.column, "=", value)


def _equal_or_not(db: Database, rng: random.Random) -> tuple[str, Condition]:
    words, (column, _, value) = _equal(db, rng)
    return (
        (f"with {words}", (column, "=", value)) if rng.random() < 0.5 else (f"without {words}", (column, "!=", value))
    )


def _compare(db: Database, rng: random.Random) -> tuple[str, Condition]:
    number, threshold, more = rng.choice(db.numbers), rng.choice(THRESHOLDS), rng.random() < 0.5
    plain = f"with {number.column} {'over' if more else 'under'}"
    words = rng.choice([plain, number.more if more else number.less])
    return f"{words} {threshold}", (number.column, ">" if more else "<", threshold)


def count_equal(db: Database, rng: random.Random) -> Draft:
    words, condition = _equal_or_not(db, rng)
    texts = [f"How many {db.plural} are there {words}?", f"Count the {db.plural} {words}."]
    return Draft("count_equal", rng.choice(texts), Query("COUNT(*)", db.plural, (condition,)))


def list_equal(db: Database, rng: random.Random) -> Draft:
    words, condition = _equal_or_not(db, rng)
    texts = [
        f"Which {db.plural} are there {words}?",
        f"List the {db.plural} {words}.",
        f"Show all {db.plural} {words}.",
    ]
    return Draft("list_equal", rng.choice(texts), Query(db.key, db.plural, (condition,)))


def count_compare(db: Database, rng: random.Random) -> Draft:
    words, condition = _compare(db, rng)
    texts = [f"How many {db.plural} are there {words}?", f"Count the {db.plural} {words}."]
    return Draft("count_compare", rng.choice(texts), Query("COUNT(*)", db.plural, (condition,)))


def list_compare(db: Database, rng: random.Random) -> Draft:
    words, condition = _compare(db, rng)
    texts = [
        f"Which {db.plural} are there {words}?",
        f"List the {db.plural} {words}.",
        f"Show all {db.plural} {words}.",
    ]
    return Draft("list_compare", rng.choice(texts), Query(db.key, db.plural, (condition,)))


def lookup(db: Database, rng: random.Random) -> Draft:
    key, column = rng.choice(db.keys), rng.choice(db.columns[1:])
    texts = [f"What is the {column} of '{key}'?", f"Tell me the {column} of {db.singular} '{key}'."]
    return Draft("lookup", rng.choice(texts), Query(column, db.plural, ((db.key, "=", key),)))


def aggregate(db: Database, rng: random.Random) -> Draft:
    words, condition = _equal(db, rng)
    number = rng.choice(db.numbers)
    name, function = rng.choice(AGGREGATES)
    texts = [
        f"What is the {name} {number.column} of {db.plural} with {words}?",
        f"Find the {name} {number.column} for {words}.",
    ]
    return Draft("aggregate", rng.choice(texts), Query(f"{function}({number.column})", db.plural, (condition,)))


def group_count(db: Database, rng: random.Random) -> Draft:
    words, condition = _compare(db, rng)
    group = rng.choice(db.categories).column
    texts = [
        f"How many {db.plural} {words} are there per {group}?",
        f"For each {group}, count the {db.plural} {words}.",
    ]
    query = Query(f"{group}, COUNT(*)", db.plural, (condition,), group=group)
    return Draft("group_count", rng.choice(texts), query)


def distinct(db: Database, rng: random.Random) -> Draft:
    words, condition = _compare(db, rng)
    column = rng.choice(db.categories).column
    texts = [
        f"How many different {column} values do {db.plural} {words} have?",
        f"Count the distinct {column} of {db.plural} {words}.",
    ]
    return Draft("distinct", rng.choice(texts), Query(f"COUNT(DISTINCT {column})", db.plural, (condition,)))


def join(db: Database, rng: random.Random) -> Draft | None:
    if db.link is None:
        return None
    shared, attribute, number = db.categories[0].column, db.link.attribute, rng.choice(db.numbers).column
    value = rng.choice(attribute.values)
    words = f"whose {shared} has {attribute.column} '{value}'"
    name, function = rng.choice(AGGREGATES)
    texts, select = rng.choice(
        [
            ([f"How many {db.plural} are there {words}?", f"Count the {db.plural} {words}."], "COUNT(*)"),
            ([f"Which {db.plural} are there {words}?", f"List the {db.plural} {words}."], db.key),
            ([f"What is the {name} {number} of {db.plural} {words}?"], f"{function}({number})"),
        ]
    )
    query = Query(select, db.plural, ((attribute.column, "=", value),), join=(db.link.table, shared))
    return Draft("join", rng.choice(texts), query)


def both(db: Database, rng: random.Random) -> Draft:
    equal, first = _equal(db, rng)
    words, second = _compare(db, rng)
    count = rng.random() < 0.5
    texts = [f"Which {db.plural} {words} have {equal}?", f"List the {db.plural} with {equal} {words}."]
    if count:
        texts = [f"How many {db.plural} {words} have {equal}?", f"Count the {db.plural} with {equal} {words}."]
    return Draft("both", rng.choice(texts), Query("COUNT(*)" if count else db.key, db.plural, (first, second)))


def top(db: Database, rng: random.Random) -> Draft:
    number, limit, most = rng.choice(db.numbers), rng.choice([1, 1, 2, 3]), rng.random() < MOST
    superlative = number.most if most else number.least
    words, condition = _equal(db, rng)
    tail, where = (f" with {words}", (condition,)) if rng.random() < 0.85 else ("", ())
    one = limit == 1
    which = f"{superlative} {db.singular if one else db.plural}"
    count = "" if one else f"{limit} "
    texts = [f"Which {'is' if one else 'are'} the {count}{which}{tail}?", f"Name the {count}{which}{tail}."]
    if " " in superlative:
        texts = [
            f"Which {count}{db.singular if one else db.plural}{tail} {'has' if one else 'have'} the {superlative}?"
        ]
    query = Query(db.key, db.plural, where, order=number.column, descending=most, limit=limit)
    return Draft("top", rng.choice(texts), query, "multiset" if one else "ordered")


def in_order(db: Database, rng: random.Random) -> Draft:
    number, most = rng.choice(db.numbers), rng.random() < 0.5
    superlative = number.most if most else number.least
    words, condition = _equal_or_not(db, rng)
    texts = [
        f"List the {db.plural} {words}, {superlative} first.",
        f"Show all {db.plural} {words}, {superlative} first.",
    ]
    query = Query(db.key, db.plural, (condition,), order=number.column, descending=most)
    return Draft("in_order", rng.choice(texts), query, "ordered")


def group_top(db: Database, rng: random.Random) -> Draft:
    words, condition = _compare(db, rng)
    group, most = rng.choice(db.categories).column, rng.random() < 0.5
    texts = [
        f"Which {group} has the {'most' if most else 'fewest'} {db.plural} {words}?",
        f"Name the {group} with the {'most' if most else 'fewest'} {db.plural} {words}.",
    ]
    query = Query(group, db.plural, (condition,), group=group, order="COUNT(*)", descending=most, limit=1)
    return Draft("group_top", rng.choice(texts), query)


KINDS: dict[str, tuple[Callable[[Database, random.Random], Draft | None], float]] = {
    "count_equal": (count_equal, 0.03),
    "list_equal": (list_equal, 0.03),
    "count_compare": (count_compare, 0.04),
    "list_compare": (list_compare, 0.04),
    "lookup": (lookup, 0.05),
    "aggregate": (aggregate, 0.05),
    "group_count": (group_count, 0.03),
    "distinct": (distinct, 0.03),
    "join": (join, 0.03),
    "both": (both, 0.28),
    "top": (top, 0.30),
    "in_order": (in_order, 0.05),
    "group_top": (group_top, 0.04),
}
"""Maker and share of all questions, by kind."""
