"""Programs run, in threads and as tasks, each with what belongs to it; what they return is stored."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.context import current
from agentlightning.errors import ConfigError, RolloutError, StoreError
from agentlightning.plugins import manager
from agentlightning.runner import PolicyHandle, Runner
from agentlightning.schema import Outcome, SpanKind
from tests.core.runner_world import CANCELLED, FAILED, GATEWAY, SUCCEEDED, World, arrive, outcomes, values


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


class TestStopping:
    def test_draining_lets_programs_end_and_leaves_the_rest_queued(self, tmp_path: Path) -> None:
        begun, go = threading.Semaphore(0), threading.Event()

        def solve(task: int) -> float:
            begun.release()
            arrive(go)
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(5)
            runner = world.start(solve, concurrency=2)
            assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
            stopper = threading.Thread(target=runner.stop)
            stopper.start()
            go.set()
            stopper.join()
            states = [rollout.state.value for rollout in world.store.rollouts(ids=ids)]
        assert sorted(states) == ["queued"] * 3 + ["succeeded"] * 2

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_without_draining_they_are_told_to_end_and_may_be_tried_again(self, tmp_path: Path, kind: str) -> None:
        begun, never = threading.Event(), threading.Event()

        def solve(task: int) -> float:
            begun.set()
            never.wait(60)
            return 1.0

        async def solve_async(task: int) -> float:
            begun.set()
            await asyncio.sleep(60)
            return 1.0

        with World(tmp_path) as world:
            (rollout_id,) = world.enqueue(1, max_attempts=2)
            runner = world.start(solve if kind == "sync" else solve_async)
            arrive(begun)
            runner.stop(drain=False)
            (attempt,) = world.store.attempts(rollout_id)
            assert world.cancelled == [attempt.id]
            (rollout,) = world.store.rollouts(ids=[rollout_id])
            assert (rollout.state.value, attempt.outcome) == ("queued", Outcome.INFRA_ERROR)
            assert "stopped" in str(attempt.error)
            never.set()
            world.start(lambda task: 2.0)
            (episode,) = world.wait([rollout_id])
        assert values(episode) == {"reward": 2.0}

    def test_as_a_context_and_twice_and_never_started(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            ids = world.enqueue(2)
            options: dict[str, Any] = {"gateway_url": GATEWAY, "recorder": world.recorder, "run_id": None}
            with Runner(world.store, lambda task: 1.0, **options) as runner:
                world.wait(ids)
            runner.stop()
            Runner(world.store, lambda task: 1.0, **options).stop()

    def test_ctrl_c_while_draining_tells_programs_to_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        begun = threading.Event()

        async def solve(task: int) -> float:
            begun.set()
            await asyncio.sleep(600)
            return 1.0

        with World(tmp_path) as world:
            (rollout_id,) = world.enqueue(1, max_attempts=2)
            runner = world.start(solve)
            arrive(begun)
            join = Runner._join

            def interrupted(self: Runner, drain: bool) -> None:
                if drain:
                    raise KeyboardInterrupt
                join(self, drain)

            monkeypatch.setattr(Runner, "_join", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner.stop()
            (attempt,) = world.store.attempts(rollout_id)
        assert attempt.outcome is Outcome.INFRA_ERROR

    def test_no_thread_is_left(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        with World(tmp_path) as world:
            world.run(lambda task: 1.0, 20)
        left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("agl-")]
        for thread in left:  # idle program threads were told to end and need a moment
            thread.join(60)
        assert not any(thread.is_alive() for thread in left)


class TestTheStoreFails:
    class Flaky:
        """A store whose `method` fails `times` times before it works again."""

        def __init__(self, store: Any, method: str, times: float) -> None:
            self._store, self._method, self.left = store, method, times

        def __getattr__(self, name: str) -> Any:
            return functools.partial(self._call, name)

        def _call(self, name: str, *args: Any, **options: Any) -> Any:
            if name == self._method and self.left > 0:
                self.left -= 1
                raise StoreError("the disk is full")
            return getattr(self._store, name)(*args, **options)

    @pytest.mark.parametrize("method", ["lease", "wait_for_work", "finish", "add", "resource"])
    def test_a_short_failure_is_survived(self, tmp_path: Path, method: str) -> None:
        with World(tmp_path) as world:
            ids = world.enqueue(4, max_attempts=3)
            flaky = self.Flaky(world.store, method, 2)
            runner = world.start(lambda task, policy: 1.0, store=flaky)
            episodes = world.wait(ids)
            runner.check()
            more = world.wait(world.enqueue(1))
        assert outcomes(episodes + more) == {"ok": 5}
        assert [values(e) for e in episodes] == [{"reward": 1.0}] * 4

    def test_a_store_that_stays_away_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentlightning.runner.MOST_FAILURES", 3)
        with World(tmp_path) as world:
            flaky = self.Flaky(world.store, "lease", math.inf)
            runner = world.start(lambda task: 1.0, store=flaky)
            told = self.told(runner)
            assert "the disk is full" in told and "resume" in told
            flaky.left = 0
            world.wait(world.enqueue(1))
            runner.check()

    @staticmethod
    def told(runner: Runner) -> str:
        for _ in range(6000):
            try:
                runner.check()
            except RolloutError as error:
                return str(error)
            time.sleep(0.01)
        raise AssertionError("it was never reported")

    def test_an_attempt_that_cannot_be_finished_is_left_to_its_lease(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("agentlightning.finishing.PATIENCE_S", (0.001,))
        with World(tmp_path) as world:
            ids = world.enqueue(1, max_attempts=2)
            flaky = self.Flaky(world.store, "finish", 2)
            runner = world.start(lambda task: 1.0, store=flaky, lease_s=0.3)
            (episode,) = world.wait(ids)
            runner.stop()
        assert (episode.rollout.outcome, episode.rollout.attempts) == (Outcome.OK, 2)
        assert values(episode) == {"reward": 1.0}
        assert "left to its lease" in caplog.text

    @pytest.mark.parametrize("broken", ["barrier", "flush"])
    def test_an_attempt_whose_records_are_incomplete_is_not_a_good_one(self, tmp_path: Path, broken: str) -> None:
        failures = iter([True])

        def fail_once() -> None:
            if next(failures, False):
                raise agl.AgentLightningError("a completion could not be stored")

        with World(tmp_path) as world:
            flush = world.recorder.flush
            options: dict[str, Any] = {"barrier": fail_once}
            if broken == "flush":
                world.recorder.flush = lambda *a, **o: (fail_once(), flush(*a, **o))[1]  # type: ignore[method-assign]
                options = {}
            (rollout_id,) = world.enqueue(1, max_attempts=2)
            world.start(lambda task: 1.0, **options)
            (episode,) = world.wait([rollout_id])
            first, second = world.store.attempts(rollout_id)
        assert (first.outcome, second.outcome) == (Outcome.INFRA_ERROR, Outcome.OK)
        assert "could not be stored" in str(first.error)
        assert [r.attempt_id for r in episode.rewards] == [second.id]


def test_idle_runners_do_not_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run's queue makes the store say that work waits: the runner must not ask again at once."""
    with World(tmp_path) as world:
        world.enqueue(1, run_id="another")
        leases = []
        lease = world.store.lease

        def counted(*args: Any, **options: Any) -> Any:
            leases.append(time.monotonic())
            return lease(*args, **options)

        monkeypatch.setattr(world.store, "lease", counted)
        runner = world.start(lambda task: 1.0)
        while len(leases) < 6:
            time.sleep(0.01)
        runner.stop()
    assert leases[5] - leases[2] >= 0.5


def test_a_cancelled_rollout_of_the_queue_is_never_begun(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        cancelled, kept = world.enqueue(2)
        world.store.cancel([cancelled])
        begun: list[int] = []
        world.start(lambda task: begun.append(task))
        episodes = world.wait([cancelled, kept])
    assert [e.rollout.state for e in episodes] == [CANCELLED, SUCCEEDED] and begun == [int(kept)]


def test_errors_are_logged_not_swallowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(attempt_id: str) -> None:
        raise OSError("the gateway is gone")

    async def solve(task: int) -> None:
        await asyncio.sleep(60)

    with World(tmp_path) as world, caplog.at_level(logging.ERROR):
        (rollout_id,) = world.enqueue(1, timeout_s=0.05)
        world.start(solve, on_cancel=refuse)
        (episode,) = world.wait([rollout_id])
    assert episode.rollout.outcome is Outcome.TIMEOUT and "the gateway is gone" in caplog.text
