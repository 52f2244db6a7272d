"""Several processes on one file: no doubles, no losses, also when one is killed or forks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.schema import Outcome
from agentlightning.store import open_store
from agentlightning.store.session import POLL_S
from agentlightning.store.sql import SqlStore
from tests.conformance.store_records import begin, rollout

REPO = Path(__file__).parents[2]


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


def program(source: str, *args: str) -> subprocess.Popen[str]:
    """A Python process with our imports, running `source`."""
    prelude = "import sys, os, time\nfrom agentlightning.store import open_store\nfrom agentlightning.schema import *\n"
    path = os.pathsep.join([str(REPO), str(REPO / "core"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(source), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def output(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.split()


LEASE_ALL = """
    store = open_store(sys.argv[1])
    while pairs := store.lease(sys.argv[2], limit=2, lease_s=1e6):
        for rollout, attempt in pairs:
            store.add(rewards=[Reward(new_id(), attempt.id, 1.0)])
            store.finish(attempt.id, Outcome.OK)
            print(rollout.id)
    store.close()
"""


def test_two_processes_share_300_rollouts_without_doubles(store: SqlStore, url: str) -> None:
    store.enqueue([rollout(f"r{number:03}") for number in range(300)])
    workers = [program(LEASE_ALL, url, name) for name in ("ann", "bob")]
    done = [line for worker in workers for line in output(worker)]
    assert sorted(done) == [f"r{number:03}" for number in range(300)]
    assert {len(episode.rewards) for episode in store.episodes(done)} == {1}
    assert {attempt.number for one in done for attempt in store.attempts(one)} == {1}


def test_several_processes_may_make_the_same_store_at_once(url: str) -> None:
    source = """
        store = open_store(sys.argv[1])
        store.enqueue([Rollout(sys.argv[2], "run", None, "t", "g")])
        store.close()
    """
    for maker in [program(source, url, name) for name in "abc"]:
        output(maker)
    store = open_store(url, create=False)
    assert sorted(one.id for one in store.rollouts()) == ["a", "b", "c"]
    store.close()


def test_b102_a_killed_writer_loses_nothing_that_was_acknowledged(url: str) -> None:
    writer = program(
        """
        store = open_store(sys.argv[1])
        store.enqueue([Rollout("r1", "run", None, "t", "g", max_attempts=2)])
        ((_, attempt),) = store.lease("doomed", lease_s=0)
        print(attempt.id, flush=True)
        for number in range(10**9):
            spans = [Span(new_span_id(), attempt.id, SpanKind.TOOL, f"{number}", attributes={"x": "y" * 5000})]
            store.add(spans, rewards=[Reward(f"{number}", attempt.id, number)])
            print(number, flush=True)
        """,
        url,
    )
    assert writer.stdout is not None
    attempt_id, acknowledged = writer.stdout.readline().strip(), -1
    while acknowledged < 150:
        acknowledged = int(writer.stdout.readline())
    writer.kill()
    rest = writer.communicate(timeout=60)[0].split()
    acknowledged = int(rest[-1]) if rest else acknowledged

    store = open_store(url, create=False)
    seen = store.trace(attempt_id)
    numbers = [int(one.name) for one in seen.spans]
    assert numbers == list(range(len(numbers))) and len(numbers) > acknowledged
    assert [one.value for one in seen.rewards] == numbers, "a transaction is there whole or not at all"
    ((_, second),) = store.lease("heir")
    assert (second.rollout_id, second.number) == ("r1", 2)
    assert store.finish(second.id, Outcome.OK) == "succeeded"
    store.close()


def test_a_waiter_sees_what_another_process_wrote(store: SqlStore, url: str) -> None:
    attempt = begin(store)
    source = "store = open_store(sys.argv[1]); store.finish(sys.argv[2], Outcome.OK); store.close()"
    other = program(source, url, attempt.id)
    assert store.wait(["r1"], timeout_s=60) == {"r1"}
    output(other)


def test_a_waiter_looks_again_soon_even_when_nobody_tells_it(store: SqlStore, url: str) -> None:
    """Another store object is told apart here by a door of its own, as in another process."""
    other = SqlStore(url)
    other._session._door = type(other._session._door)()
    assert POLL_S <= 0.05
    waiter = threading.Thread(target=lambda: store.wait_for_work(60))
    waiter.start()
    other.enqueue([rollout("r1")])
    waiter.join(30)
    assert not waiter.is_alive()
    other.close()


def test_stores_of_one_process_on_one_file_share_their_turns(store: SqlStore, file: Path) -> None:
    other = SqlStore(f"sqlite:///{file.parent}/../{file.parent.name}/{file.name}")
    assert other._session._door is store._session._door
    other.enqueue([rollout("r1")])
    assert [one.id for one in store.rollouts()] == ["r1"]
    other.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_store_follows_into_a_forked_process(url: str) -> None:
    forks = program(
        """
        store, memory = open_store(sys.argv[1]), open_store("sqlite://")
        store._session._door.lock.acquire()  # what another thread might hold at the fork
        if os.fork() == 0:
            store.enqueue([Rollout("child", "run", None, "t", "g")])
            try:
                memory.runs()
            except Exception as error:
                print(type(error).__name__, "cannot follow" in str(error), flush=True)
            os._exit(0)
        store._session._door.lock.release()
        os.wait()
        store.enqueue([Rollout("parent", "run", None, "t", "g")])
        print(*[one.id for one in store.rollouts()])
        store.close()
        memory.close()
        """,
        url,
    )
    assert output(forks) == ["StoreError", "True", "child", "parent"]
