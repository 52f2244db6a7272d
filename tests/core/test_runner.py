"""Programs run, in threads and as tasks, each with what belongs to it; what they return is stored."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.context import current
from agentlightning.errors import ConfigError, RolloutError
from agentlightning.plugins import manager
from agentlightning.runner import PolicyHandle
from agentlightning.schema import Outcome, SpanKind
from tests.core.runner_world import FAILED, GATEWAY, SUCCEEDED, World, outcomes, values


class TestWhatAProgramGets:
    def test_a_sync_program_with_its_resources(self, tmp_path: Path) -> None:
        seen = {}

        @agl.rollout
        def solve(task: int, policy: PolicyHandle, attempt: Any, prompt: Any = "absent") -> float:
            seen.update(policy=policy, attempt=attempt, prompt=prompt)
            return task + 0.5

        with World(tmp_path) as world:
            episode = world.one(solve)
        assert episode.rollout.state is SUCCEEDED and values(episode) == {"reward": 0.5}
        assert episode.attempt is not None and seen["attempt"].id == episode.attempt.id
        assert seen["policy"].base_url == f"{GATEWAY}/attempts/{episode.attempt.id}/v1"
        assert seen["policy"].api_key == f"agl-{episode.attempt.id}"
        assert seen["prompt"] == "absent"

    def test_an_async_program(self, tmp_path: Path) -> None:
        async def solve(task: int, policy: PolicyHandle) -> dict[str, float]:
            await asyncio.sleep(0)
            return {"right": 1, "short": 0.25}

        with World(tmp_path) as world:
            assert values(world.one(solve)) == {"right": 1.0, "short": 0.25}

    def test_a_plain_function_that_hands_back_a_coroutine(self, tmp_path: Path) -> None:
        async def solve(task: int) -> float:
            scope = current()
            await asyncio.sleep(0)
            return 1.0 if scope is not None and current() is scope else 0.0

        with World(tmp_path) as world:
            assert values(world.one(lambda task: solve(task))) == {"reward": 1.0}

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_context_variables_of_the_caller(self, tmp_path: Path, kind: str) -> None:
        mine: contextvars.ContextVar[float] = contextvars.ContextVar("mine", default=0.0)

        def solve(task: int) -> float:
            before = mine.get()
            mine.set(before + 1)  # stays in this rollout
            return before

        async def solve_async(task: int) -> float:
            return solve(task)

        with World(tmp_path) as world:
            token = mine.set(5.0)
            episodes = world.run(solve if kind == "sync" else solve_async, 10)
            mine.reset(token)
        assert [values(e) for e in episodes] == [{"reward": 5.0}] * 10

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_b54_what_it_emits_is_its_own(self, tmp_path: Path, kind: str) -> None:
        together = threading.Barrier(8)

        def solve(task: int) -> None:
            with agl.agent("team"):
                together.wait(60)
                agl.emit_reward(task, name="mine")

        async def solve_async(task: int) -> None:
            with agl.agent("team"):
                await asyncio.sleep(0.001 * random.random())
                agl.emit_reward(task, name="mine")

        with World(tmp_path) as world:
            episodes = world.run(solve if kind == "sync" else solve_async, 48)
        assert [values(e) for e in episodes] == [{"mine": float(i)} for i in range(48)]
        assert all([s.path for s in e.spans if s.kind is SpanKind.AGENT] == ["team"] for e in episodes)


class TestB10Returns:
    @pytest.mark.parametrize("value", [[1.0], "1", math.nan, math.inf, {"a": None}, {"a": 1, "b": math.nan}, object()])
    def test_what_is_no_reward_is_a_grader_error_without_one(self, tmp_path: Path, value: Any) -> None:
        with World(tmp_path) as world:
            episode = world.one(lambda task: value, max_attempts=3)
        assert episode.rollout.outcome is Outcome.GRADER_ERROR and episode.rollout.state is FAILED
        assert episode.rewards == [] and episode.rollout.attempts == 1
        assert episode.attempt is not None and episode.attempt.error is not None
        assert "RewardError" in episode.attempt.error and "None when there is no reward" in episode.attempt.error

    def test_none_is_a_success_without_a_reward(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            episode = world.one(lambda task: None)
        assert (episode.rollout.outcome, episode.rewards) == (Outcome.OK, [])

    def test_b68_emitted_and_returned_rewards_are_both_kept_in_order(self, tmp_path: Path) -> None:
        def solve(task: int) -> float:
            agl.emit_reward(0.3)
            return 1.0

        with World(tmp_path) as world:
            episode = world.one(solve)
        assert [(r.value, r.source) for r in episode.rewards] == [(0.3, "emit"), (1.0, "return")]

    def test_a_container_that_breaks_when_it_is_looked_at(self, tmp_path: Path) -> None:
        class Broken(dict[str, float]):
            def __iter__(self) -> Any:
                raise ZeroDivisionError("no")

        with World(tmp_path) as world:
            episode = world.one(lambda task: Broken(a=1.0))
        assert episode.rollout.outcome is Outcome.GRADER_ERROR
        assert episode.attempt is not None and "ZeroDivisionError" in str(episode.attempt.error)


class TestMany:
    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_200_rollouts_at_32_at_once(self, tmp_path: Path, kind: str) -> None:
        lock, running, most = threading.Lock(), 0, 0

        def enter() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)

        def leave() -> None:
            nonlocal running
            with lock:
                running -= 1

        def solve(task: int) -> float:
            enter()
            time.sleep(0.005)
            leave()
            return task

        async def solve_async(task: int) -> float:
            enter()
            await asyncio.sleep(0.005)
            leave()
            return task

        with World(tmp_path) as world:
            ids = world.enqueue(200)
            runner = world.start(solve if kind == "sync" else solve_async, concurrency=32)
            episodes = world.wait(ids)
            runner.stop()
            counts = runner.counts
        assert [values(e)["reward"] for e in episodes] == [float(i) for i in range(200)]
        assert (counts.running, counts.finished, counts.superseded, counts.late) == (0, 200, 0, 0)
        assert running == 0 and 1 < most <= 32

    def test_concurrency_is_never_exceeded_and_is_reached(self, tmp_path: Path) -> None:
        full, together = threading.Event(), threading.Barrier(4, action=lambda: full.set())

        def solve(task: int) -> float:
            together.wait(60)  # passes only when exactly four run at once, three times over
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(12)
            world.start(solve, concurrency=4)
            assert outcomes(world.wait(ids)) == {"ok": 12}
        assert full.is_set()

    def test_b90_one_that_always_raises_does_not_kill_the_run(self, tmp_path: Path) -> None:
        def solve(task: int) -> float:
            if task == 7:
                raise ValueError("task 7 is cursed")
            return 1.0

        with World(tmp_path) as world:
            episodes = world.run(solve, 32)
        assert outcomes(episodes) == {"ok": 31, "agent_error": 1}
        bad = episodes[7]
        assert bad.rollout.state is FAILED and bad.rewards == []
        assert bad.attempt is not None and "ValueError: task 7 is cursed" in str(bad.attempt.error)
        assert "in solve" in str(bad.attempt.error) and "execution.py" not in str(bad.attempt.error)
        (span,) = bad.spans
        assert (span.kind, span.name, span.status) == (SpanKind.EXCEPTION, "ValueError", "error")
        assert span.attributes["exception.type"] == "ValueError"

    def test_b7_what_is_final_is_complete(self, tmp_path: Path) -> None:
        def solve(task: int) -> float:
            for i in range(3):
                with agl.operation(f"part {i}"):
                    agl.emit_reward(i, name=f"part {i}")
            return 1.0

        with World(tmp_path) as world:
            waiting = set(world.enqueue(100))
            world.start(solve, concurrency=16)
            while waiting:  # each is read the moment it is final
                ended = world.store.wait(sorted(waiting), 60)
                assert ended
                for episode in world.store.episodes(sorted(ended)):
                    assert len(episode.rewards) == 4
                    assert [s.status for s in episode.spans if s.kind is SpanKind.OPERATION] == ["ok"] * 3
                waiting -= ended

    def test_one_barrier_serves_many(self, tmp_path: Path) -> None:
        barriers = []

        def barrier() -> None:
            barriers.append(1)
            time.sleep(0.02)

        with World(tmp_path) as world:
            ids = world.enqueue(128)
            world.start(lambda task: 1.0, concurrency=32, barrier=barrier)
            world.wait(ids)
        assert len(barriers) < 64

    def test_only_its_own_run(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            other = world.enqueue(1, run_id="another")
            mine = world.enqueue(1)
            world.start(lambda task: 1.0)
            world.wait(mine)
            (left,) = world.store.rollouts(ids=other)
            assert left.attempts == 0


class TestObservers:
    def test_they_hear_and_cannot_kill(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        heard: list[Any] = []

        class Observer:
            @agl.hookimpl
            def agl_rollout_started(self, rollout: Any, attempt: Any) -> None:
                heard.append(("started", rollout.id, attempt.number))

            @agl.hookimpl
            def agl_rollout_finished(self, rollout: Any, outcome: Outcome) -> None:
                heard.append(("finished", rollout.id, outcome))
                raise RuntimeError("a logger is broken")

        with World(tmp_path) as world:
            (rollout_id,) = world.enqueue(1)
            runner = world.start(lambda task: 1.0, hooks=manager(Observer()))
            (episode,) = world.wait([rollout_id])
            runner.stop()
        assert heard == [("started", rollout_id, 1), ("finished", rollout_id, Outcome.OK)]
        assert episode.rollout.outcome is Outcome.OK and "a logger is broken" in caplog.text


class TestB94WhatCannotWork:
    def test_a_parameter_without_a_resource_is_fatal_and_ends_each_rollout_once(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            ids = world.enqueue(3, max_attempts=5)
            runner = world.start(lambda task, polcy: 1.0)
            episodes = world.wait(ids)
            with pytest.raises(ConfigError, match="'polcy'.*'policy'"):
                runner.check()
        assert outcomes(episodes) == {"agent_error": 3}
        assert [e.rollout.attempts for e in episodes] == [1, 1, 1]

    def test_a_resource_that_was_never_published(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            episode = world.one(lambda task, ghost: 1.0, resources={"ghost": 1})
        assert episode.rollout.outcome is Outcome.INFRA_ERROR
        assert episode.attempt is not None and "ghost" in str(episode.attempt.error)

    def test_bad_settings(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            with pytest.raises(ConfigError, match="concurrency=0"):
                world.start(lambda task: 1.0, concurrency=0)
            with pytest.raises(RolloutError, match="takes no task"):
                world.start(lambda: 1.0)

    def test_a_healthy_runner_has_nothing_to_say(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            runner = world.start(lambda task: 1.0)
            world.wait(world.enqueue(1))
            runner.check()
