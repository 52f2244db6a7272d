"""One attempt decides: heartbeats, superseded workers, retries, and calls through a real gateway."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import agentlightning as agl
from agentlightning.schema import Outcome, RolloutState
from tests.core.runner_world import GATEWAY, World, arrive, outcomes, values
from tests.fakes.engine import Fault
from tests.fakes.world import HELLO
from tests.fakes.world import World as Gateway


class TestFencing:
    def test_without_heartbeats_another_worker_takes_over_and_the_first_cannot_count(self, tmp_path: Path) -> None:
        begun, go = threading.Event(), threading.Event()

        class Mute:
            """A store that the heartbeats of one worker do not reach."""

            def __init__(self, store: Any) -> None:
                self._store = store

            def __getattr__(self, name: str) -> Any:
                return getattr(self._store, name)

            def heartbeat(self, attempt_ids: Any, lease_s: float = 0) -> list[str]:
                raise agl.AgentLightningError("the network is gone")

        def stuck(task: int) -> float:
            begun.set()
            arrive(go)
            return -1.0

        with World(tmp_path) as world:
            ids = world.enqueue(1, max_attempts=2)
            first = world.start(stuck, store=Mute(world.store), lease_s=0.2, worker="first", concurrency=1)
            arrive(begun)
            second = world.start(lambda task: 1.0, worker="second")
            (episode,) = world.wait(ids)
            go.set()
            first.stop()
            second.stop()
            (again,) = world.store.episodes(ids)
            one, two = world.store.attempts(ids[0])
        assert values(episode) == values(again) == {"reward": 1.0}
        assert (one.worker, one.outcome, two.worker, two.outcome) == ("first", "infra_error", "second", "ok")
        assert (first.counts.finished, first.counts.superseded) == (0, 1)

    def test_a_superseded_attempt_is_told_to_end(self, tmp_path: Path) -> None:
        """The lease ran out while nothing came through; the next heartbeat that does says so."""
        begun, told = threading.Event(), threading.Event()

        class Deaf:
            def __init__(self, store: Any) -> None:
                self._store, self.deaf = store, True

            def __getattr__(self, name: str) -> Any:
                return getattr(self._store, name)

            def heartbeat(self, attempt_ids: Any, lease_s: float = 0) -> Any:
                return [] if self.deaf else self._store.heartbeat(attempt_ids, lease_s)

        async def solve(task: int) -> None:
            begun.set()
            await asyncio.sleep(600)

        with World(tmp_path) as world:
            ids = world.enqueue(1)
            deaf = Deaf(world.store)
            runner = world.start(solve, store=deaf, lease_s=0.2, on_cancel=lambda attempt_id: told.set())
            arrive(begun)
            world.wait(ids)
            deaf.deaf = False
            arrive(told)
            runner.stop()
            (attempt,) = world.store.attempts(ids[0])
        assert attempt.outcome is Outcome.INFRA_ERROR and runner.counts.superseded == 1

    def test_heartbeats_keep_a_long_program_alive_with_one_call_for_all(self, tmp_path: Path) -> None:
        beats: list[int] = []
        enough = threading.Event()

        class Counting:
            def __init__(self, store: Any) -> None:
                self._store = store

            def __getattr__(self, name: str) -> Any:
                return getattr(self._store, name)

            def heartbeat(self, attempt_ids: Any, lease_s: float = 0) -> Any:
                beats.append(len(attempt_ids))
                if len(beats) > 8:  # more than two leases
                    enough.set()
                return self._store.heartbeat(attempt_ids, lease_s)

        def solve(task: int) -> float:
            arrive(enough)
            return 1.0

        with World(tmp_path) as world:
            ids = world.enqueue(6)
            world.start(solve, store=Counting(world.store), lease_s=1.2)
            episodes = world.wait(ids)
        assert outcomes(episodes) == {"ok": 6} and all(e.rollout.attempts == 1 for e in episodes)
        assert max(beats) == 6


class TestRetries:
    def test_a_flaky_model_is_tried_again_until_it_answers(self, tmp_path: Path) -> None:
        """Half of the first attempts fail at the model; each rollout counts once."""

        def solve(task: int, attempt: Any) -> float:
            if task % 2 and attempt.number == 1:
                raise openai.APIConnectionError(request=httpx.Request("POST", GATEWAY))  # type: ignore[arg-type]
            return float(attempt.number)

        with World(tmp_path) as world:
            episodes = world.run(solve, 40, max_attempts=2)
        assert outcomes(episodes) == {"ok": 40}
        assert [values(e)["reward"] for e in episodes] == [1.0, 2.0] * 20

    def test_the_cap(self, tmp_path: Path) -> None:
        def solve(task: int) -> None:
            raise openai.APIConnectionError(request=httpx.Request("POST", GATEWAY))  # type: ignore[arg-type]

        with World(tmp_path) as world:
            episode = world.one(solve, max_attempts=3)
            attempts = world.store.attempts(episode.rollout.id)
        assert episode.rollout.outcome is Outcome.MODEL_ERROR
        assert [attempt.outcome for attempt in attempts] == [Outcome.MODEL_ERROR] * 3


class TestThroughTheGateway:
    """With the real SDK, the real gateway, and an engine that breaks."""

    def run(self, gateway: Gateway, folder: Path, program: Any, **fields: Any) -> Any:
        with World(folder, gateway.store) as world:
            ids = world.enqueue(1, resources={"policy": 3}, run_id=gateway.run.id, **fields)
            door = gateway.gateway
            runner = world.start(
                program, gateway_url=door.url, barrier=door.flush, on_cancel=door.cancel, run_id=gateway.run.id
            )
            (episode,) = world.wait(ids)
            runner.stop()
            return episode

    def test_a_good_call_is_complete_when_the_rollout_is_final(self, tmp_path: Path) -> None:
        def solve(task: int, policy: Any) -> float:
            with openai.OpenAI(base_url=policy.agent("writer").base_url, api_key=policy.api_key) as client:
                answer = client.chat.completions.create(model=policy.model, messages=HELLO)  # type: ignore[arg-type]
            return float(answer.choices[0].message.content == "yes")

        with Gateway(tmp_path, "yes") as gateway:
            episode = self.run(gateway, tmp_path, solve)
        assert values(episode) == {"reward": 1.0}
        assert [call.path for call in episode.completions] == ["writer"]

    @pytest.mark.parametrize(
        ("status", "outcome", "attempts"),
        [
            (400, Outcome.AGENT_ERROR, 1),
            (401, Outcome.AGENT_ERROR, 1),
            (429, Outcome.MODEL_ERROR, 2),
            (503, Outcome.MODEL_ERROR, 2),
        ],
    )
    def test_b92_only_what_may_pass_is_tried_again(
        self, tmp_path: Path, status: int, outcome: Outcome, attempts: int
    ) -> None:
        def solve(task: int, policy: Any) -> None:
            with openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
                client.chat.completions.create(model=policy.model, messages=HELLO)  # type: ignore[arg-type]

        with Gateway(tmp_path, lambda request: Fault("status", status=status)) as gateway:
            episode = self.run(gateway, tmp_path, solve, max_attempts=2)
        assert (episode.rollout.outcome, episode.rollout.attempts) == (outcome, attempts)

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_b91_a_deadline_aborts_the_request_at_the_engine(self, tmp_path: Path, kind: str) -> None:
        def solve(task: int, policy: Any) -> None:
            with openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
                client.chat.completions.create(model=policy.model, messages=HELLO)  # type: ignore[arg-type]

        async def solve_async(task: int, policy: Any) -> None:
            async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
                await client.chat.completions.create(model=policy.model, messages=HELLO)  # type: ignore[arg-type]

        with Gateway(tmp_path, lambda request: Fault("hang")) as gateway:
            episode = self.run(gateway, tmp_path, solve if kind == "sync" else solve_async, timeout_s=0.5)
            while any(seen.state == "open" for seen in gateway.engine.requests):
                time.sleep(0.005)
            assert [seen.state for seen in gateway.engine.requests] == ["aborted"]
        assert episode.rollout.outcome is Outcome.TIMEOUT
        assert "its thread runs on" not in str(episode.attempt.error), "the refused call freed the thread"


def test_b100_nothing_is_kept_of_attempts_that_are_over(tmp_path: Path) -> None:
    class Mine:
        pass

    alive: list[weakref.ref[Mine]] = []

    def solve(task: int, policy: Any) -> float:
        mine = Mine()
        alive.append(weakref.ref(mine))
        if task % 3 == 0:
            raise ValueError(mine)
        return 1.0

    with World(tmp_path) as world:
        ids = world.enqueue(60)
        runner = world.start(solve)
        world.wait(ids)
        while runner.counts.running:
            time.sleep(0.005)
        gc.collect()
        assert runner._jobs == {} and not runner._running()
        assert sum(ref() is not None for ref in alive) == 0


def test_the_state_moves_only_where_it_may(tmp_path: Path) -> None:
    """A rollout that was cancelled while its program ran stays cancelled, whatever the program brings."""
    begun, go = threading.Event(), threading.Event()

    def solve(task: int) -> float:
        begun.set()
        arrive(go)
        return 1.0

    with World(tmp_path) as world:
        ids = world.enqueue(1)
        runner = world.start(functools.partial(solve))
        arrive(begun)
        world.store.cancel(ids)
        go.set()
        runner.stop()
        (rollout,) = world.store.rollouts(ids=ids)
    assert rollout.state is RolloutState.CANCELLED and runner.counts.superseded == 1
