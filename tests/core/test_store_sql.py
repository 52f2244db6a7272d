"""What the SQL store promises beyond the contract: clocks, durability, cost, and errors that name the cure."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agentlightning.errors import StoreError, Superseded
from agentlightning.schema import SCHEMA_VERSION, Outcome, Step
from agentlightning.store import open_store
from agentlightning.store.database import explained
from agentlightning.store.sql import SqlStore
from tests.conformance.store_records import begin, completion, reward, rollout, span

REPO = Path(__file__).parents[2]


class Clock:
    """Unix seconds that move when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agl.db"


@pytest.fixture
def url(file: Path) -> str:
    return f"sqlite:///{file}"


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    store = SqlStore(url)
    yield store
    store.close()


def engine_of(store: SqlStore) -> sa.Engine:
    return store._session._engine


# Leases and time.


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(clock: Clock) -> Iterator[SqlStore]:
    store = SqlStore("sqlite://", clock=clock)
    yield store
    store.close()


@pytest.mark.parametrize("record", ["span", "completion", "reward"])
def test_every_record_is_a_sign_of_life(timed: SqlStore, clock: Clock, record: str) -> None:
    attempt = begin(timed, lease_s=10, max_attempts=2)
    clock.now += 9
    given: dict[str, Any] = {
        "span": {"spans": [span(attempt.id)]},
        "completion": {"completions": [completion(attempt.id)]},
        "reward": {"rewards": [reward(attempt.id)]},
    }[record]
    timed.add(**given)
    clock.now += 9
    assert timed.lease("other") == [], "extended by the length of the lease"
    clock.now += 1
    ((_, second),) = timed.lease("other")
    assert second.number == 2


def test_a_late_record_does_not_revive_an_attempt_that_was_replaced(timed: SqlStore, clock: Clock) -> None:
    first = begin(timed, lease_s=10, max_attempts=3)
    clock.now += 10
    ((_, second),) = timed.lease("other", lease_s=10)
    timed.add([span(first.id)])
    assert timed.heartbeat([first.id]) == [first.id]
    clock.now += 10
    ((_, third),) = timed.lease("other", lease_s=10)
    assert third.number == 3
    with pytest.raises(Superseded):
        timed.finish(second.id, Outcome.OK)


def test_a_clock_that_goes_back_takes_no_lease_away(timed: SqlStore, clock: Clock) -> None:
    attempt = begin(timed, lease_s=10)
    clock.now -= 500
    timed.heartbeat([attempt.id], 10)
    assert timed.attempt(attempt.id)[1].lease_until == attempt.lease_until


def test_a_run_is_free_when_its_hold_runs_out(timed: SqlStore, clock: Clock) -> None:
    first = timed.begin_run("grpo", {}, "a:1:x", lease_s=10)
    clock.now += 9
    timed.renew_run(first.id, "a:1:x", lease_s=10)
    clock.now += 9
    with pytest.raises(StoreError, match="for another 1 s"):
        timed.begin_run("grpo", {}, "b:1:x")
    clock.now += 1
    assert timed.begin_run("grpo", {}, "b:1:x").id == first.id


# Durability and cost.


def test_closing_a_step_reaches_the_disk_and_ordinary_commits_do_not_wait(store: SqlStore) -> None:
    levels: list[int] = []

    def note(connection: sa.Connection) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        levels.append(driver.execute("PRAGMA synchronous").fetchone()[0])

    sa.event.listen(engine_of(store), "commit", note)
    attempt = begin(store)
    store.add([span(attempt.id)])
    assert set(levels) == {1}, "NORMAL"
    levels.clear()
    store.add_step(Step("run", 1, {}, {}, None))
    assert levels == [2], "FULL"
    store.finish(attempt.id, Outcome.OK)
    assert levels == [2, 1]
    with engine_of(store).connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


def test_64_episodes_take_as_many_queries_as_one(store: SqlStore) -> None:
    names = [f"r{number}" for number in range(64)]
    for name in names:
        attempt = begin(store, name)
        store.add([span(attempt.id)], [completion(attempt.id)], [reward(attempt.id)])
        store.finish(attempt.id, Outcome.OK)
    statements: list[str] = []
    sa.event.listen(engine_of(store), "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert len(store.episodes(names)) == 64
    assert len(statements) == 5
    statements.clear()
    store.episodes(names[:1])
    assert len(statements) == 5


@pytest.mark.parametrize("run_id", [None, "run"])
def test_a_lease_reads_only_what_is_queued(store: SqlStore, run_id: str | None) -> None:
    plans: list[str] = []

    def explain(connection: sa.Connection, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if "ORDER BY" in statement:
            driver = connection.connection.driver_connection
            assert driver is not None
            plans.extend(row[3] for row in driver.execute("EXPLAIN QUERY PLAN " + statement, parameters))

    sa.event.listen(engine_of(store), "before_cursor_execute", explain)
    store.lease("w", run_id=run_id)
    assert len(plans) == 1 and "queue" in plans[0], "no sorting, no walk over rollouts that ended"


# Errors.


def test_a_file_that_is_no_database_is_left_alone(file: Path, url: str) -> None:
    file.write_bytes(b"these are my notes, not a database" * 40)
    before = file.read_bytes()
    with pytest.raises(StoreError, match="not a database.*give another path"):
        open_store(url)
    assert file.read_bytes() == before


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0])
def test_another_schema_version_says_what_to_do(url: str, file: Path, version: int) -> None:
    open_store(url).close()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE agl_meta SET value = ? WHERE key = 'schema_version'", (version,))
    connection.close()
    with pytest.raises(StoreError, match=f"version {version}, this release reads {SCHEMA_VERSION}: .*another path"):
        open_store(url)


def test_a_store_of_the_release_before_is_taken_up_with_all_that_is_in_it(url: str, file: Path) -> None:
    store = open_store(url)
    begin(store)
    before = store.rollouts()
    store.close()
    with sqlite3.connect(file) as connection:  # as version 1 had it
        connection.execute("ALTER TABLE agl_rollouts DROP COLUMN retry")
        connection.execute("DROP TABLE agl_workers")
        connection.execute("UPDATE agl_meta SET value = 1 WHERE key = 'schema_version'")
    connection.close()
    store = open_store(url)
    assert store.rollouts() == before and store.workers() == []
    store.enqueue([rollout("new", retry={"timeout": 1})])
    assert store.rollouts(ids=["new"])[0].retry == {"timeout": 1}
    store.close()


def test_a_locked_database_is_waited_for_and_then_named(file: Path, url: str) -> None:
    store = open_store(url + "?timeout=0.05")
    rival = sqlite3.connect(file, isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked.*end it, or give the URL a longer"):
        store.enqueue([rollout("r1")])
    assert store.rollouts() == [], "readers never wait for a writer"
    rival.execute("COMMIT")
    rival.close()
    store.enqueue([rollout("r1")])
    assert len(store.rollouts()) == 1
    store.close()


def test_a_full_disk_keeps_all_before_and_the_store_goes_on(store: SqlStore) -> None:
    attempt = begin(store)
    with engine_of(store).connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    big = [span(attempt.id, attributes={"text": "x" * 100_000})]
    with pytest.raises(StoreError, match="full.*free some space"):
        store.add(big, rewards=[reward(attempt.id)])
    assert store.trace(attempt.id).rewards == []
    with engine_of(store).connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=100000")
    store.add(big, rewards=[reward(attempt.id)])
    assert len(store.trace(attempt.id).rewards) == 1


def test_a_file_that_may_only_be_read_says_so(store: SqlStore, file: Path) -> None:
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    with pytest.raises(StoreError, match="readonly.*permissions"), explained("here"):
        connection.execute("DELETE FROM agl_meta")
    connection.close()


def test_a_table_that_vanished_is_named(store: SqlStore, file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("DROP TABLE agl_steps")
    connection.close()
    with pytest.raises(StoreError, match="no such table.*open the store again"):
        store.steps("run")


def test_a_record_that_breaks_the_schema_is_an_error_of_the_store(store: SqlStore) -> None:
    attempt = begin(store)
    with pytest.raises(StoreError, match="NOT NULL"):
        store.add([span(attempt.id, path=None)])


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path}/runs/today/agl.db").close()
    assert (tmp_path / "runs/today/agl.db").exists()


def test_a_missing_store_is_not_made_where_it_should_exist(file: Path, url: str) -> None:
    with pytest.raises(StoreError, match="no store at .*check the URL"):
        open_store(url, create=False)
    assert not file.exists()


def test_a_folder_is_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open.*check that the folder exists"):
        open_store(f"sqlite:///{tmp_path}")


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("agl.db", "write sqlite:///path"),
        ("mysql://host/db", "use sqlite:///"),
        ("redis://host", "use sqlite:///"),
        ("sqlite+aiosqlite:///x.db", "use sqlite:///"),
    ],
)
def test_a_url_that_no_store_speaks_is_refused(url: str, cure: str) -> None:
    with pytest.raises(StoreError, match=cure):
        open_store(url)


def test_memory_ends_with_its_store() -> None:
    first, second = open_store("sqlite://"), open_store("sqlite://")
    first.enqueue([rollout("r1")])
    assert second.rollouts() == []
    first.close()
    second.close()


def test_importing_the_door_does_not_import_what_is_behind_it() -> None:
    source = "import sys, agentlightning.store; sys.exit('sqlalchemy' in sys.modules)"
    path = str(Path(__file__).parents[2] / "core")
    subprocess.run([sys.executable, "-c", source], check=True, env={**os.environ, "PYTHONPATH": path})
