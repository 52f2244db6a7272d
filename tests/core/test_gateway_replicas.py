"""Other servers: frozen ones for some agents, several of the same weights, and a pause while weights change."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.errors import GatewayError
from agentlightning.gateway.directory import Target
from agentlightning.gateway.replicas import AVOID_S, Replicas
from agentlightning.schema import Attempt, Route
from tests.core.test_gateway_faults import in_thread
from tests.fakes.engine import FakeEngine, Fault
from tests.fakes.world import HELLO, World


def ask(world: World, attempt: Attempt, agent: str) -> str:
    answer = world.client(attempt, agent).chat.completions.create(model="policy", messages=HELLO, temperature=0.3)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def test_b9_an_agent_may_be_answered_by_another_server_with_another_key(tmp_path: Path) -> None:
    """A frozen teammate or a judge: served and traced, asked as the program asks, never a sample of the policy."""
    with FakeEngine("judged") as judge, World(tmp_path, "written") as world:
        routes = (
            Route("judge", "big-model", False, judge.base_url, "judge-key"),
            Route("*", "base", True),
        )
        world.publish("policy", 4, world.engine.endpoint(routes))
        attempt = world.attempt(resources={"policy": 4}, sampling={"temperature": 1.0})
        assert [ask(world, attempt, agent) for agent in ("writer", "judge")] == ["written", "judged"]
        ours, theirs = world.calls(attempt)
        assert judge.requests[0].headers["authorization"] == "Bearer judge-key"
        assert judge.requests[0].body["model"] == "big-model" and judge.requests[0].body["temperature"] == 0.3
        assert world.engine.requests[0].body["temperature"] == 1.0
    assert (ours.policy, ours.version, theirs.policy, theirs.version) == ("policy", 3, None, 0)
    assert (ours.sampling["temperature"], ours.request["temperature"]) == (1.0, 0.3), "both are on record"
    assert theirs.defect is None


class Several(World):
    """A policy that three engines serve; version 4."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, "0", **options)
        self.others = [FakeEngine(str(i), version=3).start() for i in (1, 2)]
        replicas = tuple(other.base_url for other in self.others)
        self.publish("policy", 4, msgspec.structs.replace(self.engine.endpoint(), replicas=replicas))

    def close(self) -> None:
        super().close()
        for other in self.others:
            other.close()

    def who(self, attempt: Attempt) -> str:
        return str(self.post(attempt).json()["choices"][0]["message"]["content"])


def test_a_rollout_stays_with_its_server_and_all_servers_have_work(tmp_path: Path) -> None:
    with Several(tmp_path) as world:
        attempts = [world.attempt(resources={"policy": 4}, id=f"{i:032x}") for i in range(30)]
        first = [world.who(attempt) for attempt in attempts]
        assert [world.who(attempt) for attempt in reversed(attempts)] == first[::-1]
    assert set(first) == {"0", "1", "2"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_does_not_answer_hands_its_rollouts_to_others(tmp_path: Path, stream: bool) -> None:
    with Several(tmp_path) as world:
        attempts = [world.attempt(resources={"policy": 4}, id=f"{i:032x}") for i in range(12)]
        before = [world.who(attempt) for attempt in attempts]
        world.others[0].close()
        for attempt in attempts:
            assert world.post(attempt, stream=stream).status_code == 200
        after = [world.who(attempt) for attempt in attempts]
        assert all(now == was or was == "1" for now, was in zip(after, before, strict=True)) and "1" not in after
        calls = [call for attempt in attempts for call in world.calls(attempt)]
        assert 1 <= world.gateway.stats["upstream_retries"] <= before.count("1"), "it is avoided, not asked each time"
    assert not any(call.defect for call in calls)


def target(*replicas: str) -> Target:
    return Target("http://a", "k", "m", "policy", 1, True, replicas=replicas)


def test_a_server_that_leaves_moves_its_own_rollouts_only() -> None:
    names = [f"rollout-{i}" for i in range(3000)]
    all_of_them, fewer = target("http://b", "http://c"), target("http://b")
    replicas = Replicas()
    before = {name: replicas.order(all_of_them, name)[0] for name in names}
    after = {name: replicas.order(fewer, name)[0] for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != "http://c")
    assert all(800 < count < 1200 for count in Counter(before.values()).values())


def test_a_silent_server_is_tried_last_for_a_while() -> None:
    now = [0.0]
    replicas = Replicas(lambda: now[0])
    usual = replicas.order(target("http://b"), "r")
    replicas.silent(usual[0])
    assert replicas.order(target("http://b"), "r") == usual[::-1]
    now[0] = AVOID_S + 1
    assert replicas.order(target("http://b"), "r") == usual
    replicas.silent(usual[0])
    replicas.answered(usual[0])
    assert replicas.order(target("http://b"), "r") == usual
    assert replicas.order(target(), "r") == ["http://a"]


def test_a_pause_lets_calls_finish_and_holds_new_ones(tmp_path: Path) -> None:
    go = threading.Event()

    async def reply(request: Any) -> str:
        while not go.is_set():
            import asyncio

            await asyncio.sleep(0.001)
        return f"version {world.engine.version}"

    with World(tmp_path, reply) as world:
        attempt = world.attempt()
        old, old_answer = in_thread(lambda: world.post(attempt).json())
        world.engine.wait(lambda engine: engine.active == 1)
        world.gateway.pause()
        with pytest.raises(GatewayError, match="1 calls of the policy still run after 0.05 s: give `drain` more time"):
            world.gateway.drain(0.05)
        new, new_answer = in_thread(lambda: world.post(attempt, messages=[{"role": "user", "content": "new"}]).json())
        while world.gateway.in_flight < 2:
            pass
        go.set()
        world.gateway.drain()
        old.join()
        assert len(world.engine.requests) == 1 and new.is_alive()
        world.engine.version = 4
        world.gateway.resume()
        new.join()
        first, second = world.calls(attempt)
    assert old_answer[0]["choices"][0]["message"]["content"] == "version 3"
    assert new_answer[0]["choices"][0]["message"]["content"] == "version 4"
    assert (first.version, second.version) == (3, 4)


def test_frozen_endpoints_answer_during_a_pause(tmp_path: Path) -> None:
    with World(tmp_path) as world, FakeEngine("judged") as judge:
        world.publish("judge", 1, judge.endpoint(), kind="llm")
        attempt = world.attempt(resources={"policy": 3, "judge": 1})
        with world.gateway.paused():
            assert world.post(attempt, model="judge").status_code == 200
        assert world.post(attempt).status_code == 200


def test_a_pause_ends_also_when_what_was_done_in_it_fails(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        with pytest.raises(ZeroDivisionError), world.gateway.paused(1.0):
            raise ZeroDivisionError
        assert world.post(world.attempt()).status_code == 200


def test_a_call_that_waits_at_the_gate_can_be_cancelled(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("hang")) as world:
        attempt = world.attempt()
        world.gateway.pause()
        thread, answer = in_thread(lambda: world.post(attempt))
        while not world.gateway.in_flight:
            pass
        world.gateway.cancel(attempt.id)
        thread.join()
        assert answer[0].status_code == 410 and not world.engine.requests
        world.gateway.resume()


def test_a_gateway_that_is_closed_can_be_paused_and_resumed(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        world.gateway.close()
        with world.gateway.paused():
            pass
