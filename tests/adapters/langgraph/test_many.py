"""Many rollouts at once and in a row: each call in its own rollout, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import context, propagation
from agentlightning.schema import new_id

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from langchain_core.language_models import FakeListChatModel
from langchain_core.tracers.context import _configure_hooks

from agentlightning_adapters import langchain as adapter
from tests.adapters.langgraph import programs

MANY = 64


def verify(w: Any, scopes: list[context.Scope]) -> None:
    """The nonce in each prompt (the attempt's id) proves whose call it was."""
    assert len(scopes) == MANY
    for scope in scopes:
        assert w.check(scope) == ["writer", "checker"]
    for arrival in w.arrivals():
        assert arrival.attempt_id and arrival.attempt_id in arrival.last
        assert arrival.last.startswith(arrival.path)


@pytest.mark.parametrize("mode", ["invoke", "stream"])
def test_b54_many_rollouts_on_a_thread_pool(world, mode):
    w = world()
    graph = programs.pair(w.llm())
    handler = agl.callback("langgraph")

    def rollout(_: int) -> context.Scope:
        with w.attempt() as scope:
            config: Any = {"callbacks": [handler]}
            if mode == "invoke":
                graph.invoke(programs.start(scope.attempt_id), config=config)
            else:
                list(graph.stream(programs.start(scope.attempt_id), config=config, stream_mode="messages"))
            return scope

    with ThreadPoolExecutor(MANY) as pool:
        verify(w, list(pool.map(rollout, range(MANY))))


@pytest.mark.parametrize("mode", ["ainvoke", "astream", "astream_events"])
def test_b54_many_rollouts_in_one_loop(world, mode):
    w = world()
    graph = programs.pair(w.llm(), programs.ask_async)
    handler = agl.callback("langgraph")

    async def rollout() -> context.Scope:
        with w.attempt() as scope:
            config: Any = {"callbacks": [handler]}
            given = programs.start(scope.attempt_id)
            if mode == "ainvoke":
                await graph.ainvoke(given, config=config)
            elif mode == "astream":
                assert [part async for part in graph.astream(given, config=config, stream_mode="messages")]
            else:
                assert [event async for event in graph.astream_events(given, config=config, version="v2")]
            return scope

    async def program() -> list[context.Scope]:
        return await asyncio.gather(*(rollout() for _ in range(MANY)))

    verify(w, w.run(program()))


def test_global_mode_needs_no_argument(world):
    """Also seen: runs whose program passes no config at all, and calls in a bare pool."""
    w = world()
    llm = w.llm()

    def node(state: programs.Notes) -> dict[str, Any]:
        with ThreadPoolExecutor(2) as pool:
            return {"notes": [m.content for m in pool.map(llm.invoke, [state["question"]] * 2)]}

    graph = programs.single("writer", node)
    undo = agl.install("langgraph")
    try:
        with w.attempt() as scope:
            graph.invoke(programs.start())
    finally:
        undo()
    assert w.check(scope) == ["writer", "writer"]


def test_install_and_callback_and_install_again_are_one_span(world):
    w = world()
    graph = programs.pair(w.llm())
    undos = [agl.install("langgraph"), agl.install("langchain")]
    try:
        with w.attempt() as scope:
            graph.invoke(programs.start(), config={"callbacks": [agl.callback("langgraph")]})
    finally:
        for undo in undos:
            undo()
    assert w.check(scope) == ["writer", "checker"]
    assert len(w.spans(scope)) == 4


def test_after_the_undo_nothing_listens(world):
    w = world()
    graph = programs.pair(w.llm())
    hooks = list(_configure_hooks)
    undo = agl.install("langgraph")
    assert len(_configure_hooks) == len(hooks) + 1
    with w.attempt() as scope:
        undo()
        undo()
        graph.invoke(programs.start())
    assert _configure_hooks == hooks
    assert w.spans(scope) == []
    assert len(w.arrivals(scope.attempt_id)) == 2, "the requests still bear the attempt"


def test_the_undo_silences_runs_that_had_begun(world):
    w = world()
    llm = w.llm()
    undo = agl.install("langgraph")

    def node(state: programs.Notes) -> dict[str, Any]:
        undo()
        return {"notes": [llm.invoke("a").content]}

    with w.attempt() as scope:
        programs.single("writer", node).invoke(programs.start())
    (span,) = w.spans(scope)
    assert (span.name, span.status) == ("writer", "ok"), "what had begun ends; nothing begins"


def test_b100_two_thousand_runs_leave_memory_flat(world):
    """No model server here: a scripted model, so that only we could hold on to anything."""
    w = world()
    model = FakeListChatModel(responses=["x"])
    graph = programs.single("writer", programs.ask(model, "writer"))
    handler = agl.callback("langgraph")

    def blocks_after(runs: int) -> int:
        for _ in range(runs):
            with context.use(context.Scope(new_id(), recorder=w.recorder)):
                graph.invoke(programs.start(), config={"callbacks": [handler]})
        w.recorder.flush()
        gc.collect()
        return sys.getallocatedblocks()

    blocks_after(200)
    before = blocks_after(200)
    after = blocks_after(1600)
    assert after - before < 1600, f"{(after - before) / 1600:.1f} blocks stay of each run"
    assert len(adapter._runs) == 0
    assert vars(handler) == {"active": True}


def test_nothing_is_left_patched(tmp_path):
    """After the last undo every class that was touched is as it was before."""
    import httpx
    import httpx2

    from tests.adapters.world import World

    owners = [httpx.Client, httpx.AsyncClient, httpx2.Client, httpx2.AsyncClient, ThreadPoolExecutor]
    before = [dict(vars(owner)) for owner in owners]
    finders, hooks = list(sys.meta_path), list(_configure_hooks)
    with World(tmp_path) as w:
        undo = agl.install("langgraph")
        with w.attempt() as scope:
            programs.pair(w.llm()).invoke(programs.start())
        assert w.check(scope) == ["writer", "checker"]
        assert dict(vars(httpx2.Client)) != before[2]
        undo()
    assert [dict(vars(owner)) for owner in owners] == before
    assert (list(sys.meta_path), list(_configure_hooks)) == (finders, hooks)
    assert not propagation._patches and not propagation._roots
