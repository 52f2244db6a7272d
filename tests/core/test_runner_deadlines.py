"""Every way an attempt can end that its program did not choose: deadlines, cancellation, spawned tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.schema import Outcome
from tests.core.runner_world import CANCELLED, FAILED, World, arrive, outcomes, values


async def nap(task: int) -> float:
    await asyncio.sleep(600)
    return 1.0


class TestDeadlines:
    def test_an_async_program_is_cancelled(self, tmp_path: Path) -> None:
        cleaned = threading.Event()

        async def solve(task: int) -> None:
            try:
                await asyncio.sleep(600)
            finally:
                agl.emit_annotation({"cleaned": True})
                cleaned.set()

        with World(tmp_path) as world:
            episode = world.one(solve, timeout_s=0.05)
        assert (episode.rollout.outcome, episode.rollout.state) == (Outcome.TIMEOUT, FAILED)
        assert episode.attempt is not None and "timeout_s=0.05" in str(episode.attempt.error)
        assert world.cancelled == [episode.attempt.id]
        assert cleaned.is_set() and len(episode.spans) == 1, "what its clean-up wrote belongs to the attempt"

    def test_b88_one_deadline_for_the_whole_program(self, tmp_path: Path) -> None:
        """The agent takes most of the time and scoring as much again: the deadline does not begin anew."""

        async def solve(task: int) -> float:
            await asyncio.sleep(0.3)  # agent
            await asyncio.sleep(0.3)  # scoring
            return 1.0

        with World(tmp_path) as world:
            episode = world.one(solve, timeout_s=0.4)
        assert (episode.rollout.outcome, episode.rewards) == (Outcome.TIMEOUT, [])

    def test_a_result_in_the_grace_is_still_too_late(self, tmp_path: Path) -> None:
        asked = threading.Event()

        def solve(task: int) -> float:
            arrive(asked)
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(1, timeout_s=0.05)
            runner = world.start(solve, on_cancel=lambda attempt_id: asked.set())
            (episode,) = world.wait(ids)
            runner.stop()
            counts = runner.counts
        assert (episode.rollout.outcome, episode.rewards) == (Outcome.TIMEOUT, [])
        assert (counts.late, counts.late_results) == (0, 0)

    def test_a_thread_that_runs_on_is_written_off_and_fenced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agentlightning.runner.GRACE_S", 0.05)
        go = threading.Event()

        def solve(task: int) -> float:
            if task == 0:
                arrive(go)
            return 7.0

        with World(tmp_path) as world:
            ids = world.enqueue(1, timeout_s=0.05)
            runner = world.start(solve, concurrency=1)
            (episode,) = world.wait(ids)
            assert episode.rollout.outcome is Outcome.TIMEOUT
            assert episode.attempt is not None and "its thread runs on" in str(episode.attempt.error)
            assert runner.counts.late == 1
            (other,) = world.wait(world.enqueue(1))  # its place is free again, though its thread is not
            assert values(other) == {"reward": 7.0}
            go.set()
            while runner.counts.late:
                time.sleep(0.005)
            runner.stop()
            (again,) = world.store.episodes(ids)
        assert (again.rollout.outcome, again.rewards) == (Outcome.TIMEOUT, [])
        assert runner.counts.late_results == 1

    def test_late_threads_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentlightning.runner.GRACE_S", 0.02)
        go = threading.Event()

        def solve(task: int) -> None:
            if task < 4:
                arrive(go)

        with World(tmp_path) as world:
            ids = world.enqueue(4, timeout_s=0.02)
            world.start(solve, concurrency=2)
            assert outcomes(world.wait(ids)) == {"timeout": 4}
            (refused,) = world.wait(world.enqueue(1))
            go.set()
        assert refused.rollout.outcome is Outcome.AGENT_ERROR
        assert refused.attempt is not None and "4 programs ignored their deadline" in str(refused.attempt.error)

    def test_an_async_program_that_ignores_its_cancellation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agentlightning.runner.GRACE_S", 0.05)
        go = threading.Event()

        async def solve(task: int) -> float:
            while not go.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(1, timeout_s=0.05)
            runner = world.start(solve)
            (episode,) = world.wait(ids)
            go.set()
            while runner.counts.late:
                time.sleep(0.005)
        assert episode.rollout.outcome is Outcome.TIMEOUT
        assert episode.attempt is not None and "ignores its cancellation" in str(episode.attempt.error)

    def test_an_async_program_that_blocks_the_loop_does_not_outlive_its_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agentlightning.runner.GRACE_S", 0.05)
        go = threading.Event()

        async def solve(task: int) -> float:
            arrive(go)
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(1, timeout_s=0.05)
            world.start(solve)
            (episode,) = world.wait(ids)
            assert not go.is_set()
            go.set()
        assert episode.attempt is not None and "blocks the event loop" in str(episode.attempt.error)

    def test_a_timeout_is_tried_again(self, tmp_path: Path) -> None:
        async def solve(task: int, attempt: Any) -> float:
            if attempt.number == 1:
                await asyncio.sleep(600)
            return float(attempt.number)

        with World(tmp_path) as world:
            episode = world.one(solve, timeout_s=0.5, max_attempts=2)
        assert (episode.rollout.outcome, values(episode)) == (Outcome.OK, {"reward": 2.0})

    def test_the_programs_own_timeout_is_its_own_error(self, tmp_path: Path) -> None:
        async def solve(task: int) -> None:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(600)

        with World(tmp_path) as world:
            episode = world.one(solve, timeout_s=60, max_attempts=3)
        assert (episode.rollout.outcome, episode.rollout.attempts) == (Outcome.AGENT_ERROR, 1)


class TestCancellation:
    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_from_outside(self, tmp_path: Path, kind: str) -> None:
        begun, ended = threading.Event(), threading.Event()

        def solve(task: int) -> float:
            begun.set()
            arrive(ended)
            return 1.0

        async def solve_async(task: int) -> float:
            begun.set()
            try:
                return await nap(task)
            finally:
                ended.set()

        with World(tmp_path) as world:
            ids = world.enqueue(1)
            told = threading.Event()
            runner = world.start(
                solve if kind == "sync" else solve_async, lease_s=0.3, on_cancel=lambda attempt_id: told.set()
            )
            arrive(begun)
            world.store.cancel(ids)
            arrive(told)
            ended.set()
            runner.stop()
            (episode,) = world.store.episodes(ids)
        assert (episode.rollout.state, episode.rollout.outcome) == (CANCELLED, Outcome.CANCELLED)
        assert episode.rewards == [] and runner.counts.running == 0

    def test_a_program_that_cancels_itself_is_its_own_error(self, tmp_path: Path) -> None:
        async def solve(task: int) -> None:
            raise asyncio.CancelledError("I give up")

        async def other(task: int) -> None:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(600)

        with World(tmp_path) as world:
            assert outcomes([world.one(solve)]) == {"agent_error": 1}
        with World(tmp_path / "..") as world:
            assert outcomes([world.one(other)]) == {"agent_error": 1}

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_leaving_the_process_is_not_the_programs_to_do(self, tmp_path: Path, kind: str, error: Any) -> None:
        def solve(task: int) -> float:
            if task == 0:
                raise error
            return 1.0

        async def solve_async(task: int) -> float:
            return solve(task)

        with World(tmp_path) as world:
            episodes = world.run(solve if kind == "sync" else solve_async, 5)
        assert outcomes(episodes) == {"agent_error": 1, "ok": 4}

    def test_a_spawned_task_that_leaves_the_process_does_not_end_the_loop(self, tmp_path: Path) -> None:
        async def leave() -> None:
            raise SystemExit(3)

        async def solve(task: int) -> float:
            spawned = asyncio.create_task(leave())
            await asyncio.wait([spawned])
            return 1.0 if isinstance(spawned.exception(), SystemExit) else 0.0

        with World(tmp_path) as world:
            assert [values(e) for e in world.run(solve, 3)] == [{"reward": 1.0}] * 3


class TestB57SpawnedTasks:
    def test_what_a_spawned_task_does_soon_after_belongs_to_the_attempt(self, tmp_path: Path) -> None:
        async def later(go: asyncio.Event) -> None:
            await go.wait()
            agl.emit_reward(2.0, name="late")

        async def solve(task: int) -> float:
            go = asyncio.Event()
            asyncio.create_task(later(go))
            asyncio.get_running_loop().call_later(0.05, go.set)
            return 1.0

        with World(tmp_path) as world:
            assert values(world.one(solve)) == {"late": 2.0, "reward": 1.0}

    def test_a_task_that_goes_on_does_not_hold_the_attempt_and_lives(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agentlightning.execution.LINGER_S", 0.05)
        shared: list[asyncio.Task[float]] = []

        async def solve(task: int) -> float:
            if not shared:  # as a client does that several rollouts share
                shared.append(asyncio.create_task(nap(0)))
            return 0.0 if shared[0].done() else 1.0

        with World(tmp_path) as world:
            assert [values(e)["reward"] for e in world.run(solve, 3)] == [1.0] * 3

    def test_b91_they_are_cancelled_with_their_program(self, tmp_path: Path) -> None:
        ended = threading.Semaphore(0)

        async def helper() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                ended.release()

        async def solve(task: int) -> None:
            spawned = [asyncio.create_task(helper()) for _ in range(3)]
            await asyncio.sleep(600)
            del spawned

        with World(tmp_path) as world:
            assert world.one(solve, timeout_s=0.1).rollout.outcome is Outcome.TIMEOUT
            assert all(ended.acquire(timeout=60) for _ in range(3))

    def test_to_thread_has_room_for_all_rollouts(self, tmp_path: Path) -> None:
        together = threading.Barrier(24)

        async def solve(task: int) -> float:
            await asyncio.to_thread(together.wait, 60)
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(24)
            world.start(solve, concurrency=24)
            assert outcomes(world.wait(ids)) == {"ok": 24}
