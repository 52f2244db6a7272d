"""The store's client when the server is away, restarts, or is another one; and what it costs and does elsewhere."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Self

import pytest

from agentlightning.errors import NotFound, StoreError, StoreUnavailable
from agentlightning.schema import Outcome, Reward, new_id
from agentlightning.store import open_store
from agentlightning.store.base import Store
from agentlightning.store.client import HttpStore
from agentlightning.store.server import StoreServer
from tests.conformance.store_records import LONG, begin, completion, reward, rollout, span
from tests.fakes.store_server import ServerProcess, free_port


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Store]:
    store = open_store(f"sqlite:///{tmp_path / 'agl.db'}")
    yield store
    store.close()


@pytest.fixture
def store(behind: Store) -> Iterator[Store]:
    with StoreServer(behind) as server:
        store = open_store(server.url)
        yield store
        store.close()


# Away.


def test_a_server_that_is_not_there_is_named_with_the_cure_after_a_bounded_time() -> None:
    begun = time.monotonic()
    with pytest.raises(
        StoreUnavailable, match=r"cannot be reached .*tried for 0.3 s: start its server \(`agl store serve"
    ):
        open_store(f"http://127.0.0.1:{free_port()}?timeout=0.3")
    assert time.monotonic() - begun < 10


def test_an_outage_ends_a_call_after_its_patience_and_the_next_call_works(behind: Store) -> None:
    server = StoreServer(behind).start()
    port = int(server.url.rpartition(":")[2])
    store = open_store(f"{server.url}?timeout=0.3")
    store.enqueue([rollout("r1")])
    server.close()
    with pytest.raises(StoreUnavailable, match="what was acknowledged is kept"):
        store.enqueue([rollout("r2")])
    with StoreServer(behind, port=port):
        store.enqueue([rollout("r2")])
        assert [one.id for one in store.rollouts()] == ["r1", "r2"]
    store.close()


def test_b102_a_server_that_is_killed_while_many_write_loses_nothing_and_nobody_notices(tmp_path: Path) -> None:
    """Three kills: every call that returned is there, once; calls that were cut were made again by the client itself."""
    with ServerProcess(f"sqlite:///{tmp_path / 'agl.db'}") as server:
        store = open_store(server.url)
        attempts = [begin(store, f"r{number}") for number in range(4)]
        told: list[str] = []
        over = threading.Event()

        def write(attempt_id: str) -> None:
            while not over.is_set():
                one = Reward(new_id(), attempt_id, 1.0)
                store.add([span(attempt_id)] * 3, [completion(attempt_id)], [one])
                told.append(one.id)

        with ThreadPoolExecutor(4) as pool:
            writers = [pool.submit(write, attempt.id) for attempt in attempts]
            for _ in range(3):
                seen = len(told)
                while len(told) < seen + 40:
                    time.sleep(0.005)
                server.kill()
                server.start()
            over.set()
            for writer in writers:
                writer.result(60)
        kept = [one.id for attempt in attempts for one in store.trace(attempt.id).rewards]
        assert set(told) <= set(kept) and len(kept) == len(set(kept))
        for attempt in attempts:
            seen_of = store.trace(attempt.id)
            assert len(seen_of.rewards) == len(seen_of.completions), "a transaction is there whole or not at all"
            assert store.finish(attempt.id, Outcome.OK) == "succeeded"
        store.close()


def test_a_lease_whose_answer_was_lost_is_given_again(behind: Store) -> None:
    """A proxy that cuts the first answer: the same attempts come, and none is begun twice."""
    behind.enqueue([rollout(f"r{number}") for number in range(4)])
    with StoreServer(behind) as server, Cutting(int(server.url.rpartition(":")[2])) as proxy:
        store = open_store(proxy.url)
        proxy.cuts = 2
        pairs = store.lease("w", 2, lease_s=LONG)
        assert [found.id for found, _ in pairs] == ["r0", "r1"] and proxy.cuts == 0
        assert behind.backlog() == {"queued": 2, "running": 2}
        store.close()


class Cutting:
    """A proxy that hangs up instead of passing on the next `cuts` answers."""

    def __init__(self, port: int) -> None:
        self._port, self.cuts = port, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with suppress(OSError), ThreadPoolExecutor(8) as pool:
            while True:
                pool.submit(self._pass, self._listener.accept()[0])

    def _pass(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            while True:  # what a client says may come in pieces
                ready, _, _ = select.select([client, server], [], [])
                said = ready[0].recv(1 << 20)
                if not said:
                    return
                if ready[0] is server and self.cuts:
                    self.cuts -= 1
                    return
                (server if ready[0] is client else client).sendall(said)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.store.connection.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}?timeout=0.2"
        with pytest.raises(StoreUnavailable, match="timed out"):
            open_store(url)


# Another store.


def test_b95_a_second_server_at_the_same_port_fails_at_once_and_says_why(tmp_path: Path) -> None:
    with ServerProcess(f"sqlite:///{tmp_path / 'mine.db'}") as mine:
        store = open_store(mine.url)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="cannot listen on 127.0.0.1:.*choose another, or port 0"):
            ServerProcess(f"sqlite:///{tmp_path / 'other.db'}", port=mine.port).start()
        assert time.monotonic() - begun < 30
        store.enqueue([rollout("r1")])
        store.close()


def test_b95_a_client_never_writes_into_another_store_than_the_one_it_opened(tmp_path: Path) -> None:
    mine = ServerProcess(f"sqlite:///{tmp_path / 'mine.db'}")
    with mine:
        store = open_store(mine.url)
        store.enqueue([rollout("r1")])
        identity = store.identity
    with ServerProcess(f"sqlite:///{tmp_path / 'other.db'}", port=mine.port) as other:
        with pytest.raises(StoreError, match=f"now serves the store .*, not {identity}: .*nothing was written"):
            store.enqueue([rollout("r2")])
        with pytest.raises(StoreError, match="another port"):
            store.wait_for_work(5)
        with pytest.raises(StoreError, match="now serves"):
            open_store(f"{other.url}?store={identity}")
        fresh = open_store(other.url)
        assert fresh.rollouts() == [] and fresh.identity != identity
        fresh.close()
    with mine:
        assert [one.id for one in store.rollouts()] == ["r1"], "its own store again"
        again = open_store(f"{mine.url}?store={identity}")
        again.close()
    store.close()


def test_what_is_no_stores_server_is_named(tmp_path: Path) -> None:
    program = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=0, bind='127.0.0.1')"
    web = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    assert web.stdout is not None
    port = web.stdout.readline().split("port ")[1].split()[0]
    with pytest.raises(StoreError, match="is no store's server .*mend the URL"):
        open_store(f"http://127.0.0.1:{port}")
    web.kill()
    web.communicate()


@pytest.mark.parametrize(
    "url", ["http://", "http://host:port", "http://host?spam=1", "http://me:pw@host", "http://h?timeout=x"]
)
def test_a_url_that_means_nothing_says_how_to_write_one(url: str) -> None:
    with pytest.raises(StoreError, match="write http://host:port|Write http://host:port"):
        open_store(url)


def test_another_release_is_refused(behind: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreServer(behind) as server:
        monkeypatch.setattr("agentlightning.store.client.SCHEMA_VERSION", 99)
        with pytest.raises(StoreError, match="this release 99: install the same release"):
            open_store(server.url)


# Elsewhere.


def test_a_store_behind_a_prefix_is_reached(store: Store, behind: Store) -> None:
    assert isinstance(store, HttpStore)
    with closing(HttpStore(f"{store.url}/")) as slashed:
        assert slashed.identity == store.identity == behind.identity
    with pytest.raises(StoreError, match="nothing is at /prefix/store/hello"):
        HttpStore(f"{store.url}/prefix")


def test_threads_use_as_many_connections_as_they_need_and_keep_them(store: Store) -> None:
    assert isinstance(store, HttpStore)
    attempt = begin(store)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            list(pool.map(lambda _: store.add(rewards=[reward(attempt.id)]), range(8)))
    assert len(store.trace(attempt.id).rewards) == 160
    assert 1 <= len(store._connections._idle) <= 8 and not store._connections._busy


def test_a_waiter_outlives_the_longest_wait_of_the_server(store: Store) -> None:
    assert isinstance(store, HttpStore)
    attempt = begin(store)
    store._longest_wait_s = 0.05
    finisher = threading.Timer(0.4, store.finish, (attempt.id, Outcome.OK))
    finisher.start()
    assert store.wait(["r1"]) == {"r1"}
    begun = time.monotonic()
    assert store.wait_for_work(0.3) is False and store.follow(10**9, timeout_s=0.3).spans == []
    assert 0.5 < time.monotonic() - begun < 10
    finisher.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_client_follows_into_a_forked_process(store: Store) -> None:
    source = """
import os, sys
from agentlightning.store import open_store
from agentlightning.schema import Rollout
store = open_store(sys.argv[1])
store._connections._lock.acquire()
if os.fork() == 0:
    store.enqueue([Rollout("child", "run", None, "t", "g")])
    os._exit(0)
store._connections._lock.release()
os.wait()
store.enqueue([Rollout("parent", "run", None, "t", "g")])
store.close()
"""
    subprocess.run([sys.executable, "-c", source, store.url], check=True, timeout=60, env=os.environ)
    assert [one.id for one in store.rollouts()] == ["child", "parent"]


def test_methods_take_what_the_contract_says(store: Store) -> None:
    with pytest.raises(TypeError, match="steps takes run_id"):
        store.steps("run", 1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="resource takes run_id, name, version"):
        store.resource("run", name="policy", spam=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="resource takes"):
        store.resource("run", run_id="run")  # type: ignore[call-arg, misc]
    with pytest.raises(StoreError, match="does not take this"):
        store.resource("run")  # type: ignore[call-arg]
    with pytest.raises(NotFound):
        store.resource("run", version=None, name="policy")


def test_opening_over_http_imports_neither_a_database_nor_a_server(store: Store) -> None:
    source = """
import sys
from agentlightning.store import open_store
store = open_store(sys.argv[1])
store.runs()
store.close()
sys.exit(any(name in sys.modules for name in ("sqlalchemy", "uvicorn", "starlette", "httpx")))
"""
    subprocess.run([sys.executable, "-c", source, store.url], check=True, timeout=60, env=os.environ)
