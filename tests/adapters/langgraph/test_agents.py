"""Who is speaking: nested graphs, agents with tools, names that the program gives, threads, and raw clients."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

import agentlightning as agl
from agentlightning import context
from agentlightning.schema import SpanKind

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from langchain.agents import create_agent
from langchain_core.tools import tool

from agentlightning_adapters.langgraph_place import Place
from tests.adapters.langgraph import programs


def listening() -> Any:
    return {"callbacks": [agl.callback("langgraph")]}


@pytest.mark.parametrize("make", [programs.ask, programs.ask_async])
def test_nested_graphs(world, make):
    w = world()
    graph = programs.nested(w.llm(), make)
    with w.attempt() as scope:
        w.run(graph.ainvoke(programs.start(), config=listening()))
    assert w.check(scope) == ["team/writer", "team/checker", "editor"]
    spans = {span.id: span for span in w.spans(scope)}
    team = next(span for span in spans.values() if span.path == "team")
    assert {span.path for span in spans.values() if span.parent_id == team.id} == {"team/writer", "team/checker"}


named = pytest.mark.skipif(
    not programs.NAMES_REACH_US, reason="langchain before 1.2.4 does not tell the name of create_agent"
)


@pytest.mark.parametrize(
    ("name", "path"), [("researcher", "researcher" if programs.NAMES_REACH_US else "helper"), (None, "helper")]
)
def test_create_agent_in_a_node(world, name, path):
    """Its inner nodes `model` and `tools` are the agent itself."""
    w = world(programs.call_tool_once)
    with w.attempt() as scope:
        programs.helper(w.llm(), name).invoke(programs.start(), config=listening())
    assert w.check(scope) == [path, path]
    (used,) = w.spans(scope, SpanKind.TOOL)
    assert (used.name, used.path, used.status) == ("look_up", path, "ok")
    assert used.attributes["gen_ai.tool.call.id"] == "call_0"
    assert used.attributes["gen_ai.tool.call.arguments"] == {"word": "x"}
    assert used.attributes["gen_ai.tool.call.result"] == "x means x"


@pytest.mark.parametrize(
    ("name", "path"), [("solver", "solver" if programs.NAMES_REACH_US else "model"), (None, "model")]
)
def test_create_agent_alone(world, name, path):
    w = world(programs.call_tool_once)
    agent = create_agent(w.llm(), [programs.look_up], name=name)
    with w.attempt() as scope:
        agent.invoke({"messages": [("user", "q")]}, config=listening())
    assert w.check(scope) == [path, path]


@named
def test_an_agent_as_a_node_of_a_team(world):
    w = world(programs.call_tool_once)
    agent = create_agent(w.llm(), [programs.look_up], name="scout")
    team = programs.single("search", lambda state: {"notes": [programs.talk(agent, state["question"])]})
    with w.attempt() as scope:
        programs.single("team", team).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["team/scout", "team/scout"]


@named
def test_an_agent_that_is_another_agents_tool(world):
    def script(request: dict[str, Any]) -> Any:
        boss = any("boss" in str(message["content"]) for message in request["messages"])
        asked = any(message["role"] == "tool" for message in request["messages"])
        if boss and not asked:
            return {"content": "", "tool_calls": [{"name": "delegate", "arguments": {"text": "go"}}]}
        return "done"

    w = world(script)
    worker = create_agent(w.llm(), [], name="worker")

    @tool
    def delegate(text: str) -> str:
        """Lets the worker do it."""
        return programs.talk(worker, text)

    boss = create_agent(w.llm(), [delegate], name="boss")
    with w.attempt() as scope:
        boss.invoke({"messages": [("user", "boss, do it")]}, config=listening())
    assert w.check(scope) == ["boss", "boss/worker", "boss"]


def test_two_calls_in_one_node_with_metadata(world):
    w = world()
    llm = w.llm()
    critic, poet = (llm.with_config(metadata={"agent": name}) for name in ("critic", "poet"))

    def node(state: programs.Notes) -> dict[str, Any]:
        return {"notes": [llm.invoke("a").content, critic.invoke("b").content, poet.invoke("c").content]}

    team = programs.single("team", programs.single("review", node))
    with w.attempt() as scope:
        team.invoke(programs.start(), config=listening())
    assert w.check(scope) == ["team/review", "team/critic", "team/poet"]


def test_metadata_on_the_whole_run_names_every_call(world):
    w = world()
    with w.attempt() as scope:
        programs.nested(w.llm()).invoke(programs.start(), config={**listening(), "metadata": {"agent": "all"}})
    assert w.check(scope) == ["all", "all", "all"]


def test_metadata_with_a_path_is_the_path(world):
    w = world()
    llm = w.llm().with_config(metadata={"agent": "house/cook"})
    with w.attempt() as scope:
        programs.pair(llm).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["house/cook", "house/cook"]


def test_the_programs_own_agent_blocks_nest_with_the_graph(world):
    w = world()
    llm = w.llm()

    def node(state: programs.Notes) -> dict[str, Any]:
        first = llm.invoke("a").content
        with agl.agent("inner"):
            return {"notes": [first, llm.invoke("b").content]}

    with w.attempt() as scope, agl.agent("outer"):
        programs.single("writer", node).invoke(programs.start(), config=listening())
        llm.invoke("c", config=listening())
    assert w.check(scope) == ["outer/writer", "outer/writer/inner", "outer"]


def test_operations_stand_between_node_and_call(world):
    w = world()
    llm = w.llm()

    def node(state: programs.Notes) -> dict[str, Any]:
        with agl.operation("think"):
            return {"notes": [llm.invoke("a").content]}

    with w.attempt() as scope:
        programs.single("writer", node).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["writer"]
    (step,) = w.spans(scope, SpanKind.OPERATION)
    (call,) = w.spans(scope, SpanKind.LLM)
    assert call.parent_id == step.id


def test_b13_the_callback_passed_again_inside_a_node(world):
    """One span per call, below the node, also when the program hands the callback (or its like) to the inner call."""
    w = world()
    llm = w.llm()
    config = {"callbacks": [agl.callback("langgraph"), agl.callback("langchain")]}

    def node(state: programs.Notes) -> dict[str, Any]:
        return {"notes": [llm.invoke("a", config=config).content, llm.invoke("b").content]}

    undo = agl.install("langgraph")
    try:
        with w.attempt() as scope:
            programs.single("writer", node).invoke(programs.start(), config=config)
    finally:
        undo()
    assert w.check(scope) == ["writer", "writer"]
    (writer,) = w.spans(scope, SpanKind.AGENT)
    calls = w.spans(scope, SpanKind.LLM)
    assert [call.parent_id for call in calls] == [writer.id, writer.id]


def test_b39_two_simultaneous_calls_of_one_tool(world):
    meet = threading.Barrier(2, timeout=20)

    @tool
    def search(word: str) -> str:
        """Searches."""
        meet.wait()
        return f"found {word}"

    def script(request: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in request["messages"]):
            return "done"
        calls = [{"id": f"id_{word}", "name": "search", "arguments": {"word": word}} for word in "ab"]
        return {"content": "", "tool_calls": calls}

    w = world(script)
    agent = create_agent(w.llm(), [search])
    graph = programs.single("scout", lambda state: {"notes": [programs.talk(agent, "q")]})
    with w.attempt() as scope:
        graph.invoke(programs.start(), config=listening())
    (scout,) = w.spans(scope, SpanKind.AGENT)
    used = {s.attributes["gen_ai.tool.call.id"]: s for s in w.spans(scope, SpanKind.TOOL)}
    assert {key: s.attributes["gen_ai.tool.call.result"] for key, s in used.items()} == {
        "id_a": "found a",
        "id_b": "found b",
    }
    assert {s.parent_id for s in used.values()} == {scout.id}


def test_b56_a_bare_thread_pool_inside_a_node(world):
    w = world()
    llm = w.llm()

    def node(state: programs.Notes) -> dict[str, Any]:
        with ThreadPoolExecutor(4) as pool:
            return {"notes": [m.content for m in pool.map(llm.invoke, ["a", "b", "c", "d"])]}

    with w.attempt() as scope:
        programs.single("writer", node).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["writer"] * 4


def test_a_bare_thread_with_the_nodes_config(world):
    """A thread without context: LangChain's own parent says where it belongs."""
    from langchain_core.runnables import RunnableConfig

    w = world()
    llm = w.llm()

    def node(state: programs.Notes, config: RunnableConfig) -> dict[str, Any]:
        said: list[str] = []
        thread = threading.Thread(target=lambda: said.append(llm.invoke("a", config=config).content))
        thread.start()
        thread.join()
        return {"notes": said}

    with w.attempt() as scope:
        programs.single("writer", node).invoke(programs.start(), config=listening())
    assert w.check(scope) == ["writer"]


def test_b57_a_task_that_outlives_its_node(world):
    w = world()
    llm = w.llm()
    late: list[asyncio.Task[Any]] = []

    async def node(state: programs.Notes) -> dict[str, Any]:
        gate = asyncio.Event()

        async def work() -> None:
            await gate.wait()
            await llm.ainvoke("late")

        late.append(asyncio.create_task(work()))
        state_gate.append(gate)
        return {"notes": ["planned"]}

    state_gate: list[asyncio.Event] = []

    async def program() -> None:
        await programs.single("planner", node).ainvoke(programs.start(), config=listening())
        state_gate[0].set()
        await late[0]

    with w.attempt() as scope:
        w.run(program())
    assert w.check(scope) == ["planner"]


@pytest.mark.parametrize("kind", ["openai", "openai_async", "httpx"])
def test_a_raw_client_inside_a_node(world, kind):
    """No callback sees it; the request bears the attempt, the node's agent path and the node's span."""
    w = world()
    body = {"model": "base", "messages": [{"role": "user", "content": "raw"}]}

    def raw() -> None:
        if kind == "httpx":
            httpx.post(f"{w.engine.base_url}/chat/completions", json=body).raise_for_status()
        elif kind == "openai":
            with openai.OpenAI(base_url=w.engine.base_url, api_key="none") as client:
                client.chat.completions.create(**body)
        else:
            asyncio.run(raw_async())

    async def raw_async() -> None:
        async with openai.AsyncOpenAI(base_url=w.engine.base_url, api_key="none") as client:
            await client.chat.completions.create(**body)

    def node(state: programs.Notes) -> dict[str, Any]:
        raw()
        return {"notes": ["x"]}

    with w.attempt() as scope:
        programs.single("writer", node).invoke(programs.start(), config=listening())
    (arrival,) = w.arrivals(scope.attempt_id)
    (writer,) = w.spans(scope, SpanKind.AGENT)
    assert (arrival.path, arrival.span_id) == ("writer", writer.id)


def test_reward_of_the_latest_call_is_that_of_this_branch(world):
    """Parallel branches each reward their own call, whatever the others did since."""
    w = world()
    llm = w.llm()
    meet = threading.Barrier(3, timeout=20)

    def node(state: programs.Notes) -> dict[str, Any]:
        llm.invoke(f"ask {state['question']}")
        meet.wait()
        agl.emit_reward(float(state["question"][-1]), target="call")
        return {"notes": []}

    with w.attempt() as scope:
        programs.fan_out(llm, 3, lambda *_: node).invoke(programs.start(), config=listening())
    asked = {a.span_id: float(a.last[-1]) for a in w.arrivals(scope.attempt_id)}
    assert {r.target: r.value for r in w.rewards(scope)} == {f"call:{span}": n for span, n in asked.items()}


def test_reward_in_the_next_node_means_the_last_call(world):
    w = world()
    llm = w.llm()

    def execute(state: programs.Notes) -> dict[str, Any]:
        agl.emit_reward(0.5, name="runs", target="call")
        return {"notes": []}

    from langgraph.graph import START, StateGraph

    graph = StateGraph(programs.Notes)
    graph.add_node("write", programs.ask(llm, "write"))
    graph.add_node("execute", execute)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    with w.attempt() as scope:
        graph.compile().invoke(programs.start(), config=listening())
    (reward,) = w.rewards(scope)
    assert reward.target == f"call:{w.arrivals()[0].span_id}"


@pytest.mark.parametrize(
    ("metadata", "path"),
    [
        ({}, ""),
        ({"langgraph_node": "writer"}, "writer"),
        ({"langgraph_checkpoint_ns": "writer:u"}, "writer"),
        ({"langgraph_checkpoint_ns": "team:u|1|writer:u"}, "team/writer"),
        ({"langgraph_checkpoint_ns": "agent:u"}, "agent"),
        ({"langgraph_checkpoint_ns": "helper:u|model:u"}, "helper"),
        ({"langgraph_checkpoint_ns": "helper:u|agent:u"}, "helper"),
        ({"langgraph_checkpoint_ns": "helper:u|model:u", "lc_agent_name": "scout"}, "scout"),
        ({"langgraph_checkpoint_ns": "model:u", "lc_agent_name": "scout"}, "scout"),
        ({"langgraph_checkpoint_ns": "team:u|helper:u|model:u", "lc_agent_name": "scout"}, "team/scout"),
        ({"langgraph_checkpoint_ns": "helper:u|model:u", "lc_agent_name": "scout", "agent": "critic"}, "critic"),
        ({"langgraph_checkpoint_ns": "team:u|writer:u", "agent": "critic"}, "team/critic"),
        ({"agent": "critic"}, "critic"),
        ({"agent": "/"}, ""),
        ({"agent": 7, "langgraph_checkpoint_ns": 5, "lc_agent_name": None}, ""),
    ],
)
def test_place_from_metadata_alone(metadata, path):
    assert Place().at(metadata).path == path
    assert Place(base="outer").at(metadata).path == context.join("outer", path)
