"""How answers are compared, and what a query may not do."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from contextlib import closing

import pytest

from examples.sql_agent.judge import canonical, canonical_cell, result_text, run_query, same_answer, show


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "d b?.sqlite"  # a name that must be quoted in a URI
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (name TEXT, x REAL)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [("a", 1.0), ("b", 2.5), ("c", None), ("b", 2.5)])
    return path


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, None),
        (3, 3),
        (3.0, 3),
        (-0.0, 0),
        (2.50004, 2.5),
        (2.50006, 2.5001),
        (1234567.891, 1234570.0),
        (1234567.0, 1234567),
        (1e20, 100000000000000000000),
        (b"\x01\xff", "x'01ff'"),
        ("text", "text"),
        (float("inf"), float("inf")),
    ],
)
def test_cells(value, expected):
    assert canonical_cell(value) == expected and type(canonical_cell(value)) is type(expected)


def test_multisets_count_and_lists_keep_their_order():
    assert canonical([("b", 1), ("a", 2)], "multiset") == [["a", 2], ["b", 1]]
    assert canonical([("b", 1), ("a", 2)], "ordered") == [["b", 1], ["a", 2]]
    assert canonical([("a",), ("a",)], "multiset") != canonical([("a",)], "multiset")


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="ordered"):
        canonical([], "set")


@pytest.mark.parametrize(
    "sql, compare, right",
    [
        ("SELECT name FROM t ORDER BY x DESC, name", "multiset", True),
        ("SELECT name FROM t ORDER BY name", "ordered", True),
        ("SELECT name FROM t ORDER BY name DESC", "ordered", False),
        ("SELECT DISTINCT name FROM t", "multiset", False),
        ("SELECT name, x FROM t", "multiset", False),
        ("SELECT nothing FROM t", "multiset", False),
        ("SELECT name FROM t; SELECT 1", "multiset", False),
        ("", "multiset", False),
        ("SELECT \x00", "multiset", False),
        ("SELECT '\ud800'", "multiset", False),
        (None, "multiset", False),
    ],
)
def test_answers(database, sql, compare, right):
    assert same_answer(database, "SELECT name FROM t ORDER BY name", sql, compare) is right


def test_a_gold_query_that_fails_is_an_error_and_no_wrong_answer(database):
    with pytest.raises(sqlite3.Error):
        same_answer(database, "SELECT nothing", "SELECT 1")


@pytest.mark.parametrize(
    "sql",
    ["DELETE FROM t", "DROP TABLE t", "CREATE TABLE u (x)", "PRAGMA user_version = 3", "VACUUM INTO 'never.db'"],
)
def test_nothing_can_be_written(database, sql):
    before = database.read_bytes()
    with pytest.raises(sqlite3.Error):
        run_query(database, sql)
        run_query(database, "SELECT wrong")  # a write that SQLite ignores instead of refusing
    assert database.read_bytes() == before


def test_no_other_file_can_be_opened(database, tmp_path):
    with pytest.raises(sqlite3.Error):
        run_query(database, f"ATTACH '{tmp_path / 'new.sqlite'}' AS other")
    assert not (tmp_path / "new.sqlite").exists()


def test_a_missing_database_is_an_error_and_is_not_made(tmp_path):
    with pytest.raises(sqlite3.Error):
        run_query(tmp_path / "none.sqlite", "SELECT 1")
    assert not (tmp_path / "none.sqlite").exists()


def test_endless_queries_are_stopped(database):
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    began = time.monotonic()
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        run_query(database, endless, seconds=0.05)
    assert time.monotonic() - began < 30


def test_endless_and_huge_results_are_refused(database):
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c"
    with pytest.raises(sqlite3.OperationalError, match="more than 100 rows"):
        run_query(database, endless, max_rows=100)
    with pytest.raises(sqlite3.Error):
        run_query(database, "SELECT zeroblob(900000000)")


def test_agents_see_rows_or_the_error(database):
    assert show(str(database), "SELECT name, x FROM t") == "a,1;b,2;c,None;..."
    assert show(str(database), "SELECT name FROM t WHERE x > 9") == "empty"
    assert show(str(database), "SELECT y FROM t") == "error: no such column: y"
    assert len(result_text([("long " * 100,)])) <= 64


def test_the_judge_agrees_with_the_gold_digests_of_spider(shared_data):
    folder = shared_data / "spider_sql"
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[::20]
    for row in map(json.loads, lines):
        rows = run_query(folder / "databases" / f"{row['db_id']}.sqlite", row["gold_sql"])
        text = json.dumps(canonical(rows, row["compare"]), ensure_ascii=False)
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == row["gold_digest"], row["id"]
