"""Eight small databases: what they are about, and how to make them from a seed.

Each has one main table and half of them a second one that the main table refers to. Numbers are distinct within a
column, so that no ORDER BY ever has a tie.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

THRESHOLDS = tuple(range(10, 100, 5))
"""Numbers that questions compare with; no row holds one of them, so `>` and `>=` agree."""

_NUMBERS = tuple(n for n in range(3, 100) if n not in THRESHOLDS)
_PEOPLE = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hana",
    "Ivan",
    "June",
    "Karl",
    "Lena",
    "Max",
    "Nora",
    "Omar",
    "Pia",
    "Quin",
    "Rosa",
    "Sven",
    "Tess",
]
_THINGS = [
    "Alto",
    "Brisk",
    "Comet",
    "Delta",
    "Ember",
    "Fable",
    "Glint",
    "Halo",
    "Iris",
    "Jolt",
    "Kite",
    "Lumen",
    "Mango",
    "Nova",
    "Opal",
    "Pearl",
    "Quill",
    "Raven",
    "Spark",
    "Tulip",
]


@dataclass(frozen=True)
class Number:
    """A numeric column and how people speak of it."""

    column: str
    more: str
    """`older than`"""
    less: str
    most: str
    """`oldest`; of two words where the language has no single one: `highest score`"""
    least: str


@dataclass(frozen=True)
class Category:
    """A text column with few values."""

    column: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """A second table; its key is the first category of the main table."""

    table: str
    attribute: Category


@dataclass(frozen=True)
class Database:
    """One main table (`plural` is its name) with a key column, two categories and two numbers."""

    id: str
    plural: str
    singular: str
    key: str
    keys: tuple[str, ...]
    categories: tuple[Category, Category]
    numbers: tuple[Number, Number]
    link: Link | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.key, *(c.column for c in self.categories), *(n.column for n in self.numbers))


def _plain(column: str) -> Number:
    return Number(column, f"with {column} above", f"with {column} below", f"highest {column}", f"lowest {column}")


def _words(column: str, values: str) -> Category:
    return Category(column, tuple(values.split()))


DATABASES = (
    Database(
        "club",
        "players",
        "player",
        "name",
        tuple(_PEOPLE),
        (_words("team", "hawks wolves bears sharks"), _words("role", "keeper wing back striker")),
        (Number("age", "older than", "younger than", "oldest", "youngest"), _plain("goals")),
        Link("teams", _words("city", "Rome Oslo Lima")),
    ),
    Database(
        "library",
        "books",
        "book",
        "title",
        tuple(_THINGS),
        (_words("genre", "crime poetry travel drama"), _words("language", "Greek Dutch Hindi")),
        (Number("pages", "longer than", "shorter than", "longest", "shortest"), _plain("copies")),
    ),
    Database(
        "zoo",
        "animals",
        "animal",
        "name",
        tuple(_THINGS),
        (_words("zone", "north south island forest"), _words("species", "lynx otter zebra tapir")),
        (Number("weight", "heavier than", "lighter than", "heaviest", "lightest"), _plain("visits")),
        Link("zones", _words("keeper", "Mia Noel Olga")),
    ),
    Database(
        "shop",
        "products",
        "product",
        "product",
        tuple(_THINGS),
        (_words("category", "toys garden kitchen sport"), _words("color", "red blue green")),
        (Number("price", "dearer than", "cheaper than", "dearest", "cheapest"), _plain("stock")),
    ),
    Database(
        "school",
        "students",
        "student",
        "name",
        tuple(_PEOPLE),
        (_words("house", "oak elm pine birch"), _words("subject", "math music biology")),
        (Number("height", "taller than", "smaller than", "tallest", "smallest"), _plain("score")),
        Link("houses", _words("teacher", "Ruth Samir Vera")),
    ),
    Database(
        "fleet",
        "trucks",
        "truck",
        "truck",
        tuple(_THINGS),
        (_words("depot", "harbor airport station mill"), _words("brand", "Volta Atlas Orion")),
        (Number("speed", "faster than", "slower than", "fastest", "slowest"), _plain("load")),
        Link("depots", _words("region", "coast valley desert")),
    ),
    Database(
        "hotel",
        "guests",
        "guest",
        "name",
        tuple(_PEOPLE),
        (_words("country", "Chile Ghana Japan Malta"), _words("room", "single double suite")),
        (_plain("nights"), _plain("bill")),
    ),
    Database(
        "farm",
        "fields",
        "field",
        "field",
        tuple(_THINGS),
        (_words("crop", "wheat barley corn beans"), _words("soil", "clay sand loam")),
        (Number("area", "larger than", "tinier than", "largest", "tiniest"), _plain("harvest")),
    ),
)


def create(database: Database, folder: Path, rng: random.Random) -> Path:
    """Writes `<folder>/<id>.sqlite` anew and returns its path. The same rng gives the same rows."""
    path = folder / f"{database.id}.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        _fill(connection, database.plural, _types(database), _rows(database, rng))
        if database.link:
            first, attribute = database.categories[0], database.link.attribute
            rows = [(value, attribute.values[i % len(attribute.values)]) for i, value in enumerate(first.values)]
            types = {first.column: "TEXT", attribute.column: "TEXT"}
            _fill(connection, database.link.table, types, rows)
    return path


def _types(database: Database) -> dict[str, str]:
    numeric = {number.column for number in database.numbers}
    return {column: "INTEGER" if column in numeric else "TEXT" for column in database.columns}


def _rows(database: Database, rng: random.Random) -> list[tuple[object, ...]]:
    count = len(database.keys)
    columns: list[list[object]] = [list(database.keys)]
    columns += [[rng.choice(category.values) for _ in range(count)] for category in database.categories]
    columns += [list(rng.sample(_NUMBERS, count)) for _ in database.numbers]
    return list(zip(*columns, strict=True))


def _fill(
    connection: sqlite3.Connection, table: str, types: dict[str, str], rows: Sequence[tuple[object, ...]]
) -> None:
    connection.execute(f"CREATE TABLE {table} ({', '.join(f'{name} {kind}' for name, kind in types.items())})")
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(types))})", rows)
