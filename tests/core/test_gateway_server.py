"""The gateway's life: start, addresses, memory, end."""

from __future__ import annotations

import gc
import socket
import threading
from pathlib import Path

import httpx
import pytest

from agentlightning.errors import GatewayError
from agentlightning.gateway import Gateway
from agentlightning.gateway.directory import Place
from agentlightning.gateway.sampling import Seeds, seed_of
from agentlightning.schema import Attempt, Rollout
from agentlightning.store import open_store
from tests.fakes.world import World


def place(name: str) -> Place:
    return Place(Rollout(name, "run", {}, "t", "g"), Attempt(name, name, 1, "w"))


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GatewayError, match=rf"cannot listen on 127.0.0.1:{port} .*choose another, or port 0"):
            Gateway(store, port=port).start()
    store.close()


def test_a_gateway_ends_its_threads_and_can_be_closed_twice(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with World(tmp_path) as world:
        world.post(world.attempt())
        world.gateway.close()
        world.gateway.close()
        with pytest.raises(httpx.ConnectError):
            world.post()
        world.gateway.cancel("a" * 32)  # late calls of a runner that is ending too
    assert not [t.name for t in threading.enumerate() if t.name.startswith("agl-") and t.name not in before]


def test_a_gateway_that_never_started_closes(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    Gateway(store).close()
    store.close()


def test_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with World(tmp_path, "six", host="::1") as world:
        assert world.gateway.url.startswith("http://[::1]:")
        assert world.post(world.attempt()).status_code == 200


def test_what_the_gateway_remembers_is_bounded() -> None:
    seeds = Seeds(size=10)
    places = [place(str(i)) for i in range(1000)]
    tickets = [seeds.take(each, "agent", []) for each in places]
    assert len(seeds._asked) == 10
    seeds.give_back(places[0], tickets[0])  # forgotten: nothing to give back to
    assert len(seeds._asked) == 10


def test_numbers_that_come_back_are_given_out_again_smallest_first() -> None:
    seeds, here = Seeds(), place("a")
    tickets = [seeds.take(here, "agent", ["q"]) for _ in range(4)]
    assert [number for _, number in tickets] == [0, 1, 2, 3]
    for index in (2, 1):
        seeds.give_back(here, tickets[index])
    assert [seeds.take(here, "agent", ["q"])[1] for _ in range(3)] == [1, 2, 4]
    assert seed_of(here, tickets[0]) == seed_of(here, Seeds().take(here, "agent", ["q"]))


def test_calls_leave_nothing_behind(tmp_path: Path) -> None:
    from agentlightning.gateway.call import Call

    with World(tmp_path) as world:
        for _ in range(30):
            world.post(world.attempt(), stream=True)
        world.gateway.flush()
        gc.collect()
        assert world.gateway.in_flight == 0
        assert not [each for each in gc.get_objects() if isinstance(each, Call)]
