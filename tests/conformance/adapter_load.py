"""Many rollouts at once and in a row: each call in its own attempt, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentlightning import context
from agentlightning.context import Scope
from agentlightning.schema import new_id
from tests.adapters.world import World
from tests.conformance.adapter_driver import Driver
from tests.conformance.adapter_proof import prove

MANY = 64
RUNS = int(os.environ.get("AGL_CONFORMANCE_RUNS", "1000"))
SPARE_BLOCKS = 300
"""What the interpreter itself may keep, whatever the number of runs."""


class Load:
    @pytest.mark.scenario("single")
    def test_b54_many_rollouts_on_threads(self, driver: Driver, worlds: Any) -> None:
        world = worlds()

        def rollout(_: int) -> tuple[Scope, list[str]]:
            with world.attempt() as scope:
                return scope, list(driver.single(world, nonce(scope)))

        with driver.listen(), ThreadPoolExecutor(MANY) as pool:
            verify(world, driver, list(pool.map(rollout, range(MANY))))

    @pytest.mark.scenario("single_async")
    def test_b54_many_rollouts_in_one_loop(self, driver: Driver, worlds: Any) -> None:
        world = worlds()

        async def rollout() -> tuple[Scope, list[str]]:
            with world.attempt() as scope:
                return scope, list(await driver.single_async(world, nonce(scope)))

        async def program() -> list[tuple[Scope, list[str]]]:
            return await asyncio.gather(*(rollout() for _ in range(MANY)))

        with driver.listen():
            verify(world, driver, asyncio.run(program()))

    @pytest.mark.scenario("tiny")
    def test_b100_many_runs_leave_memory_flat(self, driver: Driver, worlds: Any) -> None:
        """What grows with us and not without us is ours."""
        world = worlds()
        tiny = driver.tiny(world)
        with driver.listen():
            grown = growth(world, tiny, RUNS, traced=True)
        if grown > SPARE_BLOCKS + RUNS // 10:
            grown -= growth(world, tiny, RUNS, traced=False)
        assert grown <= SPARE_BLOCKS + RUNS // 10, f"{grown / RUNS:.2f} blocks stay of each of {RUNS} runs"


def nonce(scope: Scope) -> str:
    return f"question {scope.attempt_id}"


def verify(world: World, driver: Driver, ran: list[tuple[Scope, list[str]]]) -> None:
    """The attempt's id in each prompt proves whose call it was."""
    assert len(ran) == MANY
    for scope, expected in ran:
        assert prove(world, scope, driver.operations) == expected
        for arrival in world.arrivals(scope.attempt_id):
            assert nonce(scope) in arrival.text


def growth(world: World, tiny: Callable[[], object], runs: int, traced: bool) -> int:
    """Blocks of memory that `runs` runs leave behind, after enough of them to warm up."""

    def after(count: int) -> int:
        for _ in range(count):
            if traced:
                with context.use(Scope(new_id(), recorder=world.recorder)):
                    tiny()
            else:
                tiny()
        world.recorder.flush()
        gc.collect()
        return sys.getallocatedblocks()

    after(max(100, runs // 10))
    before = after(max(100, runs // 10))
    return after(runs) - before
