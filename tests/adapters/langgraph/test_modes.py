"""Every way to run a graph: the request bears its attempt, its agent and its own span."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.schema import SpanKind

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from tests.adapters.langgraph import programs


def listening() -> Any:
    return {"callbacks": [agl.callback("langgraph")]}


def test_invoke(world):
    w = world()
    graph = programs.pair(w.llm())
    with w.attempt() as scope:
        graph.invoke(programs.start(), config=listening())
    assert w.check(scope) == ["writer", "checker"]
    agents = w.spans(scope, SpanKind.AGENT)
    assert [(span.name, span.path, span.parent_id) for span in agents] == [
        ("writer", "writer", None),
        ("checker", "checker", None),
    ]
    calls = w.spans(scope, SpanKind.LLM)
    assert [call.parent_id for call in calls] == [span.id for span in agents]


def test_the_client_that_the_model_makes_for_itself(world):
    from langchain_openai import ChatOpenAI

    w = world()
    with w.attempt() as scope:
        ChatOpenAI(base_url=w.engine.base_url, api_key="none", model="base").invoke("hi", config=listening())
    assert w.check(scope) == [""]


def test_llm_span_has_the_genai_attributes(world):
    w = world("four")
    with w.attempt() as scope:
        w.llm(temperature=0.5, seed=3).invoke("two and two?", config=listening())
    (call,) = w.spans(scope, SpanKind.LLM)
    usage = {key: call.attributes.pop(f"gen_ai.usage.{key}_tokens") for key in ("input", "output")}
    assert usage["output"] == len("four") + 1 and usage["input"] > 0
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "base",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "base",
        "gen_ai.response.finish_reasons": ["stop"],
    }


def test_the_program_runs_the_same_with_and_without_us(world):
    w = world()
    graph = programs.pair(w.llm())
    plain = graph.invoke(programs.start())
    with w.attempt():
        traced = graph.invoke(programs.start(), config=listening())
    assert traced == plain
    assert [a.body for a in w.arrivals("")] == [a.body for a in w.arrivals() if a.attempt_id]


@pytest.mark.parametrize("mode", ["values", "updates", "messages", ["messages", "updates"], "debug"])
def test_stream(world, mode):
    w = world()
    graph = programs.pair(w.llm())
    with w.attempt() as scope:
        assert list(graph.stream(programs.start(), config=listening(), stream_mode=mode))
    assert w.check(scope) == ["writer", "checker"]
    streamed = "messages" in mode
    assert [bool(a.body.get("stream")) for a in w.arrivals()] == [streamed, streamed]


def test_ainvoke(world):
    w = world()
    graph = programs.pair(w.llm(), programs.ask_async)
    with w.attempt() as scope:
        w.run(graph.ainvoke(programs.start(), config=listening()))
    assert w.check(scope) == ["writer", "checker"]


@pytest.mark.parametrize("mode", ["values", "updates", "messages"])
def test_astream(world, mode):
    w = world()
    graph = programs.pair(w.llm(), programs.ask_async)

    async def program() -> list[Any]:
        return [part async for part in graph.astream(programs.start(), config=listening(), stream_mode=mode)]

    with w.attempt() as scope:
        assert w.run(program())
    assert w.check(scope) == ["writer", "checker"]


@pytest.mark.filterwarnings("ignore:.*version='v1' is deprecated")
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_astream_events(world, version):
    w = world()
    graph = programs.pair(w.llm(), programs.ask_async)

    async def program() -> set[str]:
        events = graph.astream_events(programs.start(), config=listening(), version=version)
        return {event["event"] async for event in events}

    with w.attempt() as scope:
        assert "on_chat_model_stream" in w.run(program())
    assert w.check(scope) == ["writer", "checker"]


def test_sync_nodes_in_an_async_run(world):
    w = world()
    graph = programs.pair(w.llm())
    with w.attempt() as scope:
        w.run(graph.ainvoke(programs.start(), config=listening()))
    assert w.check(scope) == ["writer", "checker"]


@pytest.mark.parametrize("make", [programs.ask, programs.ask_async])
def test_b47_send_fan_out(world, make):
    """Parallel calls of one agent are told apart by their spans."""
    w = world()
    graph = programs.fan_out(w.llm(), 5, make)
    with w.attempt() as scope:
        w.run(graph.ainvoke(programs.start(), config=listening()))
    assert w.check(scope) == ["checker"] * 5
    calls = {call.id: call for call in w.spans(scope, SpanKind.LLM)}
    assert len({call.parent_id for call in calls.values()}) == 5
    assert {a.span_id for a in w.arrivals()} == set(calls)


def test_send_fan_out_on_threads(world):
    w = world()
    with w.attempt() as scope:
        programs.fan_out(w.llm(), 5).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["checker"] * 5
    assert len({call.parent_id for call in w.spans(scope, SpanKind.LLM)}) == 5


def test_batch_of_a_graph(world):
    w = world()
    graph = programs.pair(w.llm())
    with w.attempt() as scope:
        graph.batch([programs.start("a"), programs.start("b")], config=listening())
    assert sorted(w.check(scope)) == ["checker", "checker", "writer", "writer"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_plain_chains(world, asynchronous):
    """LangChain without LangGraph: no node names the agent, so the path is what the program says around it."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    w = world()
    chain = ChatPromptTemplate.from_template("say {word}") | w.llm() | StrOutputParser()
    with w.attempt() as scope, agl.agent("team"):
        if asynchronous:
            w.run(chain.ainvoke({"word": "x"}, config=listening()))
        else:
            chain.invoke({"word": "x"}, config=listening())
        named = chain.with_config(metadata={"agent": "speaker"})
        assert "".join(named.stream({"word": "y"}, config=listening()))
    assert w.check(scope) == ["team", "team/speaker"]


def test_functional_api(world):
    from langgraph.func import entrypoint, task

    w = world()
    llm = w.llm()

    @task
    def draft(text: str) -> str:
        return str(llm.invoke(text).content)

    @entrypoint()
    def workflow(text: str) -> list[str]:
        return [future.result() for future in [draft(f"{text} {i}") for i in range(3)]]

    with w.attempt() as scope:
        assert len(workflow.invoke("hi", config=listening())) == 3
    assert w.check(scope) == ["workflow/draft"] * 3


def test_graph_built_once_outside_serves_many_attempts(world):
    w = world()
    graph = programs.pair(w.llm())
    handler = agl.callback("langgraph")
    scopes = []
    for _ in range(3):
        with w.attempt() as scope:
            scopes.append(scope)
            graph.invoke(programs.start(scope.attempt_id), config={"callbacks": [handler]})
    graph.invoke(programs.start("outside"), config={"callbacks": [handler]})
    for scope in scopes:
        assert w.check(scope) == ["writer", "checker"]
        assert all(scope.attempt_id in arrival.last for arrival in w.arrivals(scope.attempt_id))
    assert len(w.arrivals("")) == 2, "outside attempts, requests are as they were"


def test_wait_for_moves_each_step_to_a_new_task(world):
    w = world()
    llm = w.llm()

    async def program() -> None:
        stream = llm.astream("hi", config=listening())
        while True:
            try:
                await asyncio.wait_for(anext(stream), 10)
            except StopAsyncIteration:
                return

    with w.attempt() as scope:
        w.run(program())
    assert w.check(scope) == [""]
