"""The store's server with many clients: waits that wake, transactions that are shared, ends that are told."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.schema import Span, floats
from agentlightning.store import open_store
from agentlightning.store.groups import MOST, Group
from agentlightning.store.server import StoreServer
from agentlightning.store.sql import SqlStore
from tests.conformance.store_records import begin, completion, reward, rollout, span
from tests.core.store_server_world import KEY


def test_a_port_in_use_fails_at_once(server: StoreServer, behind: SqlStore) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(StoreError, match=f"cannot listen on 127.0.0.1:{port} .*choose another, or port 0"):
        StoreServer(behind, port=port).start()


# Waiting.


def test_many_workers_wait_without_a_thread_each(server: StoreServer, behind: SqlStore) -> None:
    store = open_store(server.url, key=KEY)
    with ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(store.wait_for_work, 30) for _ in range(64)]
        until(lambda: gauge(server, "agl_store_waiting_calls") == 64)
        assert store.runs() == [], "other calls are served meanwhile"
        assert threading.active_count() < 64 + 40
        store.enqueue([rollout("r1")])
        assert all(one.result(30) for one in waiting)
    store.close()


def test_a_waiter_hears_of_what_came_past_the_server(server: StoreServer, behind: SqlStore) -> None:
    store = open_store(server.url, key=KEY)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait_for_work, 30)
        until(lambda: gauge(server, "agl_store_waiting_calls") == 1)
        behind.enqueue([rollout("r1")])
        assert waiting.result(30) is True
    store.close()


def test_a_client_that_dies_while_it_waits_is_forgotten(server: StoreServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as raw:
        body = b'{"timeout_s": 20}'
        head = f"POST /store/wait_for_work HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        raw.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: gauge(server, "agl_store_waiting_calls") == 1)
    until(lambda: gauge(server, "agl_store_waiting_calls") == 0)


def test_a_server_that_ends_answers_those_who_wait(behind: SqlStore) -> None:
    server = StoreServer(behind).start()
    with httpx.Client(timeout=30) as http, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(http.post, f"{server.url}/store/wait_for_work", json={"timeout_s": 20})
        until(lambda: gauge(server, "agl_store_waiting_calls") == 1)
        begun = time.monotonic()
        server.close()
        assert waiting.result(30).json() is False and time.monotonic() - begun < 10
    server.close()


def gauge(server: StoreServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def until(true: Any) -> None:
    give_up_at = time.monotonic() + 30
    while not true():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


# Groups of writes, and meters.


def test_writes_that_come_together_share_a_transaction_and_none_takes_another_along(
    server: StoreServer, behind: SqlStore
) -> None:
    attempt = begin(behind)
    store = open_store(server.url, key=KEY)

    def add(number: int) -> str:
        try:
            value = math.nan if number % 10 == 0 else float(number)
            store.add([span(attempt.id, name=f"{number}")], rewards=[reward(attempt.id, value)])
            return "kept"
        except Exception as error:  # noqa: BLE001  the test looks at its name
            return type(error).__name__

    with ThreadPoolExecutor(20) as pool:
        said = list(pool.map(add, range(200)))
    assert gauge(server, "agl_store_add_transactions") >= 20, "each bad one had one of its own in the end"
    assert said == ["RewardError" if number % 10 == 0 else "kept" for number in range(200)]
    seen = behind.trace(attempt.id)
    assert sorted(one.value for one in seen.rewards) == [float(n) for n in range(200) if n % 10]
    assert {one.name for one in seen.spans} == {f"{n}" for n in range(200) if n % 10}
    store.close()


def test_a_group_grows_while_a_transaction_runs_and_stays_within_bounds() -> None:
    written: list[list[int]] = []
    go = threading.Event()

    def write(items: Sequence[int]) -> None:
        go.wait(30)
        written.append(list(items))

    async def play() -> None:
        with ThreadPoolExecutor(2) as pool:
            group = Group(pool, write, lambda item: item)
            first = asyncio.ensure_future(group.put(1))
            await asyncio.sleep(0.05)
            rest = [asyncio.ensure_future(group.put(size)) for size in (2, 3, MOST, 5, 2 * MOST, 7)]
            gone = asyncio.ensure_future(group.put(8))
            await asyncio.sleep(0)
            gone.cancel()
            go.set()
            await asyncio.gather(first, *rest)

    asyncio.run(play())
    assert written == [[1], [2, 3], [MOST], [5], [2 * MOST], [7, 8]]


def test_an_outage_is_told_to_all_of_a_group_without_trying_each() -> None:
    tries: list[int] = []

    def write(items: Sequence[int]) -> None:
        tries.append(len(items))
        raise StoreUnavailable("locked")

    async def play() -> list[BaseException | None]:
        with ThreadPoolExecutor(1) as pool:
            group = Group(pool, write, lambda item: 1)
            return await asyncio.gather(*(group.put(n) for n in range(5)), return_exceptions=True)

    assert all(isinstance(error, StoreUnavailable) for error in asyncio.run(play()))
    assert tries == [5]


def test_what_the_server_did_is_counted(http: httpx.Client, server: StoreServer, behind: SqlStore) -> None:
    begin(behind)
    http.post("/store/runs", json={})
    http.post("/store/runs", json={})
    http.post("/store/trace", json={"attempt_id": "nothing"})
    said = http.get("/metrics")
    assert said.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = said.text.splitlines()
    assert 'agl_store_calls_total{method="runs",status="200"} 2' in lines
    assert 'agl_store_call_seconds_count{method="runs"} 2' in lines
    assert 'agl_store_calls_total{method="trace",status="404"} 1' in lines
    assert gauge(server, "agl_rollouts_running") == 1 and gauge(server, "agl_rollouts_queued") == 0


def test_floats_and_lists_are_read_alike(http: httpx.Client, behind: SqlStore) -> None:
    attempt = begin(behind)
    record = completion(attempt.id, logprobs=floats([-0.25, -0.5]))
    given = {name: getattr(record, name) for name in record.__struct_fields__}
    given |= {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "logprobs": [-0.25, -0.5]}
    assert http.post("/store/add", json={"completions": [given]}).status_code == 200
    assert behind.trace(attempt.id).completions[0].logprobs.tolist() == [-0.25, -0.5]


def test_spans_of_the_open_store_are_structs(server: StoreServer) -> None:
    store = open_store(server.url, key=KEY)
    attempt = begin(store)
    store.add([span(attempt.id)])
    assert isinstance(store.trace(attempt.id).spans[0], Span)
    store.close()
