"""The runner stops when asked, survives a store that fails, and rests when there is nothing to do."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import RolloutError, StoreError
from agentlightning.runner import Runner
from agentlightning.schema import Outcome
from tests.core.runner_world import CANCELLED, GATEWAY, SUCCEEDED, World, arrive, outcomes, values


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
        monkeypatch.setattr("agentlightning.leasing.MOST_FAILURES", 3)
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
