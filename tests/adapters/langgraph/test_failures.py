"""What goes wrong in programs, and in us: spans end with the truth, and the program sees nothing of it."""

from __future__ import annotations

import asyncio
import datetime
import gc
import itertools
import logging
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning import context
from agentlightning.listening import Trouble
from agentlightning.schema import SpanKind
from tests.fakes.engine import Fault

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from langchain.agents import create_agent
from langchain_core.tools import tool

from agentlightning_adapters import langchain as adapter
from tests.adapters.langgraph import programs


def listening() -> Any:
    return {"callbacks": [agl.callback("langgraph")]}


def failing_first(times: int, fault: Fault) -> Any:
    count = itertools.count()
    return lambda request: fault if next(count) < times else "fine"


@pytest.mark.parametrize("make", [programs.ask, programs.ask_async])
def test_an_error_of_the_model(world, make):
    w = world(failing_first(1, Fault("status", status=400)))
    with w.attempt() as scope, pytest.raises(openai.BadRequestError):
        w.run(programs.single("writer", make(w.llm(), "writer")).ainvoke(programs.start(), config=listening()))
    assert w.check(scope) == ["writer"]
    (call,) = w.spans(scope, SpanKind.LLM)
    (node,) = w.spans(scope, SpanKind.AGENT)
    assert call.status == node.status == "error"
    assert "scripted fault" in (call.error or "") and "scripted fault" in (node.error or "")


def test_retries_of_the_sdk_are_one_call(world):
    """Three requests, one span: the gateway sees that they are tries of the same call."""
    w = world(failing_first(2, Fault("status", status=500, headers={"retry-after-ms": "1"})))
    with w.attempt() as scope:
        w.llm(max_retries=3).invoke("hi", config=listening())
    assert len(w.check(scope)) == 3
    assert len({arrival.span_id for arrival in w.arrivals()}) == 1
    (call,) = w.spans(scope, SpanKind.LLM)
    assert call.status == "ok"


def test_with_retry_makes_a_call_each_time(world):
    w = world(failing_first(2, Fault("status", status=500)))
    with w.attempt() as scope:
        llm = w.llm().with_retry(stop_after_attempt=3, wait_exponential_jitter=False)
        programs.single("writer", programs.ask(llm, "writer")).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["writer"] * 3
    calls = {span.id: span.status for span in w.spans(scope, SpanKind.LLM)}
    assert [calls[arrival.span_id] for arrival in w.arrivals()] == ["error", "error", "ok"]


def test_fallbacks(world):
    w = world(failing_first(1, Fault("status", status=500)))
    with w.attempt() as scope:
        w.llm().with_fallbacks([w.llm(model="other")]).invoke("hi", config=listening())
    assert len(w.check(scope)) == 2
    assert {(s.name, s.status) for s in w.spans(scope, SpanKind.LLM)} == {("base", "error"), ("other", "ok")}


def test_a_tool_that_fails(world):
    @tool
    def look_up(word: str) -> str:
        """Looks a word up."""
        raise LookupError(f"no {word}")

    w = world(programs.call_tool_once)
    agent = create_agent(w.llm(), [look_up])
    graph = programs.single("scout", lambda state: {"notes": [programs.talk(agent, "q")]})
    with w.attempt() as scope, pytest.raises(LookupError):
        graph.invoke(programs.start(), config=listening())
    (used,) = w.spans(scope, SpanKind.TOOL)
    assert (used.status, used.error) == ("error", "LookupError: no x")
    assert [span.status for span in w.spans(scope, SpanKind.AGENT)] == ["error"]


def test_a_tool_whose_error_the_agent_is_told(world):
    """The tool's message says `error`; so does its span, though nothing was raised."""
    w = world(
        lambda request: (
            "done"
            if any(message["role"] == "tool" for message in request["messages"])
            else {"content": "", "tool_calls": [{"name": "look_up", "arguments": {"wrong": 1}}]}
        )
    )
    agent = create_agent(w.llm(), [programs.look_up], name="scout")
    with w.attempt() as scope:
        agent.invoke({"messages": [("user", "q")]}, config=listening())
    (used,) = w.spans(scope, SpanKind.TOOL)
    assert used.status == "error" and "word" in (used.error or "")


def test_a_stream_that_is_left_early(world):
    w = world("one two three four five six seven eight")
    llm = w.llm()
    with w.attempt() as scope:
        for _ in llm.stream("hi", config=listening()):
            break
        for _ in programs.pair(llm).stream(programs.start(), config=listening(), stream_mode="messages"):
            break
        llm.invoke("after", config=listening())
    assert w.check(scope)[-1] == ""
    calls = w.spans(scope, SpanKind.LLM)
    assert calls[0].attributes["agl.stopped_early"] is True
    assert {call.status for call in calls} == {"ok"}
    assert calls[-1].parent_id is None, "nothing of what was left is in force"


def test_an_async_stream_that_is_left_early(world):
    w = world("one two three four five six seven eight")
    llm = w.llm()
    writer = llm.with_config(metadata={"agent": "writer"})

    async def program() -> None:
        async for _ in writer.astream("hi", config=listening()):
            break
        await llm.ainvoke("after", config=listening())
        async for _ in programs.pair(llm, programs.ask_async).astream(programs.start(), config=listening()):
            break
        await llm.ainvoke("last", config=listening())
        await asyncio.sleep(0)

    with w.attempt() as scope:
        w.run(program())
    paths = w.check(scope)
    assert paths[:2] == ["writer", ""] and paths[-1] == ""
    after = [s for s in w.spans(scope, SpanKind.LLM) if s.path == ""]
    assert [span.parent_id for span in after] == [None, None]


def test_raw_requests_after_an_async_run_are_outside_its_agents(world):
    """The run ends in another task than the one it began in; its scope must end there all the same."""
    w = world()
    llm = w.llm()
    graph = programs.nested(llm, programs.ask_async)
    body: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "raw"}]}

    async def program() -> None:
        await graph.ainvoke(programs.start(), config=listening())
        async with openai.AsyncOpenAI(base_url=w.engine.base_url, api_key="none") as client:
            await client.chat.completions.create(**body)
        await graph.ainvoke(programs.start(), config=listening())

    with w.attempt() as scope:
        w.run(program())
    paths = [arrival.path for arrival in w.arrivals(scope.attempt_id)]
    assert paths == ["team/writer", "team/checker", "editor", "", "team/writer", "team/checker", "editor"]
    assert {s.parent_id for s in w.spans(scope, SpanKind.AGENT) if "/" not in s.path} == {None}


def test_b15_cancellation_ends_the_call_that_was_in_flight(world):
    w = world(lambda request: Fault("hang"))
    graph = programs.single("writer", programs.ask_async(w.llm(), "writer"))

    async def program() -> None:
        running = asyncio.create_task(graph.ainvoke(programs.start(), config=listening()))
        while not w.engine.requests:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with w.attempt() as scope:
        w.run(program())
    assert w.check(scope) == ["writer"]
    for span in w.spans(scope):
        assert (span.status, span.error) == ("error", "CancelledError")


def test_interrupts_are_no_errors(world):
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, StateGraph
    from langgraph.types import Command, interrupt

    w = world()
    llm = w.llm()

    def node(state: programs.Notes) -> dict[str, Any]:
        answer = interrupt("may I?")
        return {"notes": [answer, llm.invoke("go").content]}

    graph = StateGraph(programs.Notes)
    graph.add_node("asker", node)
    graph.add_edge(START, "asker")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {**listening(), "configurable": {"thread_id": "1"}}
    with w.attempt() as scope:
        app.invoke(programs.start(), config=config)
        app.invoke(Command(resume="yes"), config=config)
    assert w.check(scope) == ["asker"]
    first, second = w.spans(scope, SpanKind.AGENT)
    assert first.status == second.status == "ok"
    assert first.attributes["langgraph.left_by"] == "GraphInterrupt"


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_b16_whatever_the_state_holds_the_span_ends(world):
    """Dates, bytes, NaN, circles, huge lists and objects without a repr: the program goes on, and the span ends."""
    w = world()
    llm = w.llm()
    circle: dict[str, Any] = {}
    circle["self"] = circle
    odd = [datetime.date(2020, 1, 1), b"\xff", float("nan"), {1, 2}, circle, Odd(), "\ud800", list(range(10**6))]

    def node(state: programs.Notes) -> dict[str, Any]:
        return {"notes": [llm.invoke("a").content, *odd]}

    with w.attempt() as scope:
        out = programs.single("writer", node).invoke(programs.start(), config=listening())
    assert out["notes"][1:] == odd
    (span,) = w.spans(scope, SpanKind.AGENT)
    assert (span.status, len(span.attributes["output"]["notes"])) == ("ok", 9)
    assert span.attributes["output"]["notes"][-1][-1] == "... (1000000 items)"


def test_our_own_failures_never_reach_the_program(world, monkeypatch, caplog):
    """A broken recorder costs the trace, not the run; it is said once and counted."""
    w = world()
    graph = programs.pair(w.llm())

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("recorder broke")

    monkeypatch.setattr(Trouble, "count", 0)
    with w.attempt(), caplog.at_level(logging.WARNING):
        expected = graph.invoke(programs.start())
        monkeypatch.setattr(w.recorder, "start", broken)
        assert graph.invoke(programs.start(), config=listening()) == expected
    assert Trouble.count >= 4
    assert [r.levelname for r in caplog.records if "recorder broke" in (r.exc_text or r.message)] == ["ERROR"]


def test_ends_without_a_start_are_ignored(world):
    """B14: handed over late or out of order, an event harms nothing."""
    import uuid

    from langchain_core.outputs import LLMResult

    w = world()
    handler = agl.callback("langgraph")
    before = Trouble.count
    with w.attempt() as scope:
        handler.on_llm_end(LLMResult(generations=[]), run_id=uuid.uuid4())
        handler.on_llm_error(ValueError(), run_id=uuid.uuid4())
        handler.on_chain_end({}, run_id=uuid.uuid4())
        handler.on_tool_end("x", run_id=uuid.uuid4())
        handler.on_tool_error(ValueError(), run_id=uuid.uuid4())
        handler.on_chain_error(ValueError(), run_id=uuid.uuid4())
    assert w.spans(scope) == []
    assert Trouble.count == before


def test_b101_a_start_without_an_end_goes_with_its_attempt(world):
    import uuid

    w = world()
    handler = agl.callback("langgraph")
    with w.attempt() as scope:
        for _ in range(1000):
            handler.on_chat_model_start({}, [[]], run_id=uuid.uuid4(), invocation_params={"model": "m"})
        assert len(adapter._runs) == 1000
    assert context.current() is None, "what was left open is not in force outside the attempt"
    spans = w.spans(scope)
    assert len(spans) == 1000 and {span.status for span in spans} == {"open"}
    del scope
    gc.collect()
    assert len(adapter._runs) == 0
