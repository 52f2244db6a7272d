"""The world: eight databases, disjoint questions, and no question that a wrong query answers."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from examples.sql_agent import mistakes
from examples.sql_agent.databases import DATABASES, THRESHOLDS, create
from examples.sql_agent.judge import canonical, run_query
from examples.sql_agent.questions import KINDS, Query
from examples.sql_agent.world import World, make_world, schema_text, score

SMALL = {"warm": 60, "train": 40, "heldout": 20}


def parts(world: World) -> list[list[dict]]:
    return [[q.task for q in world.warm], world.train, world.validation, world.heldout]


def test_there_are_eight_databases_and_thirteen_kinds(world):
    assert len(DATABASES) == 8
    assert {q.kind for q in world.warm} == set(KINDS) and len(KINDS) == 13


@pytest.mark.parametrize("field", ["question", "gold_sql", "id"])
def test_no_two_sets_share_a_wording_or_a_query(world, field):
    seen = [task[field] for part in parts(world) for task in part]
    assert len(seen) == len(set(seen))


def test_the_sets_have_the_sizes_that_were_asked_for(world):
    assert [len(part) for part in parts(world)] == [400, 300, 100, 100]


def test_equal_seeds_make_equal_worlds(tmp_path):
    one, two = (make_world(tmp_path / name, 3, **SMALL) for name in ("one", "two"))
    strip = lambda task: {k: v for k, v in task.items() if k != "database"}
    assert [[strip(t) for t in p] for p in parts(one)] == [[strip(t) for t in p] for p in parts(two)]
    for db in DATABASES:
        rows = [run_query(tmp_path / name / f"{db.id}.sqlite", f"SELECT * FROM {db.plural}") for name in ("one", "two")]
        assert rows[0] == rows[1] and len(rows[0]) == 20


def test_other_seeds_make_other_worlds(tmp_path):
    one, two = (make_world(tmp_path / str(seed), seed, **SMALL) for seed in (3, 4))
    assert [t["question"] for t in one.heldout] != [t["question"] for t in two.heldout]


def test_a_second_run_leaves_the_databases_as_they_were(tmp_path):
    first = make_world(tmp_path, 3, **SMALL)
    again = make_world(tmp_path, 3, **SMALL)
    assert first.heldout == again.heldout
    assert all(score(task, task["gold_sql"]) for task in again.heldout)


def test_gold_answers_are_right_and_not_trivial(world):
    for task in world.validation + world.heldout:
        rows = run_query(task["database"], task["gold_sql"])
        assert rows and any(cell not in (None, 0, "") for row in rows for cell in row)
        assert score(task, task["gold_sql"])


def test_habits_and_dropped_conditions_give_wrong_answers(world):
    rng = random.Random(0)
    for question in world.warm[:200]:
        wrong = mistakes.habit(question.query)
        if wrong:
            assert not score(question.task, wrong[1].sql())
        for fault, query in mistakes.slips(question.query, question.db, rng):
            if fault == "order":
                assert not score(question.task, query.sql())


def test_habits_touch_about_half_of_the_questions(world):
    share = sum(mistakes.habit(q.query) is not None for q in world.warm[:300]) / 300
    assert 0.4 < share < 0.65


def test_the_natural_mix_follows_the_shares(world):
    kinds = Counter(task["kind"] for task in world.train)
    assert kinds["both"] > 2 * kinds["aggregate"] and kinds["top"] > 2 * kinds["lookup"]
    assert set(kinds) == set(KINDS)


def test_no_order_by_has_a_tie(world):
    for task in world.heldout + world.validation:
        if " LIMIT " in task["gold_sql"] and "GROUP" not in task["gold_sql"]:
            head, _, tail = task["gold_sql"].partition(" ORDER BY ")
            column = tail.split()[0]
            values = run_query(task["database"], head.replace(head.split()[1], column, 1))
            assert len(values) == len(set(values))


def test_thresholds_hit_no_row(tmp_path):
    for db in DATABASES:
        path = create(db, tmp_path, random.Random(1))
        with closing(sqlite3.connect(path)) as connection:
            for number in db.numbers:
                found = {row[0] for row in connection.execute(f"SELECT {number.column} FROM {db.plural}")}
                assert not found & set(THRESHOLDS) and len(found) == 20


def test_the_schema_text_names_every_column(tmp_path):
    for db in DATABASES:
        path = create(db, tmp_path, random.Random(1))
        text = schema_text(db)
        for (table,) in run_query(path, "SELECT name FROM sqlite_master WHERE type = 'table'"):
            columns = [row[0] for row in run_query(path, f"SELECT name FROM pragma_table_info('{table}')")]
            assert f"{table}({' '.join(columns)})" in text


def test_a_world_says_when_it_has_no_more_questions(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.sql_agent.world.KINDS", {"count_equal": KINDS["count_equal"]})
    with pytest.raises(ValueError, match="ask for fewer"):
        make_world(tmp_path, 0, warm=400, train=10, heldout=10)


def test_queries_print_as_sql():
    query = Query("name", "players", (("team", "=", "hawks"), ("age", ">", 30)), order="age", descending=True, limit=2)
    assert query.sql() == "SELECT name FROM players WHERE team = 'hawks' AND age > 30 ORDER BY age DESC LIMIT 2"


def test_habits_by_kind():
    top = Query("name", "players", order="age", descending=True, limit=1)
    assert mistakes.habit(top) == ("order", Query("name", "players", order="age", descending=False, limit=1))
    assert mistakes.habit(Query("name", "players", order="age", limit=1)) is None
    both = Query("name", "players", (("team", "=", "hawks"), ("age", ">", 30)))
    assert mistakes.habit(both) == ("condition", Query("name", "players", (("team", "=", "hawks"),)))


def test_canonical_form_is_that_of_the_gold_answers(world):
    task = next(t for t in world.heldout + world.validation if t["compare"] == "ordered")
    rows = run_query(task["database"], task["gold_sql"])
    assert canonical(rows, "ordered") == [list(row) for row in rows]


def test_databases_are_ordinary_files(world, tmp_path):
    assert all(Path(task["database"]).read_bytes().startswith(b"SQLite format 3") for task in world.heldout[:5])
