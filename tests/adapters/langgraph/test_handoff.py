"""Who handed over to whom: `Command(goto=...)` from a node, from a tool inside an agent, and from a nested team."""

from __future__ import annotations

from typing import Annotated, Any

import pytest

import agentlightning as agl
from agentlightning.schema import SpanKind

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from langchain.agents import create_agent
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send

from tests.adapters.langgraph import programs


def edges(world: Any, scope: Any) -> list[tuple[str, str]]:
    spans = world.spans(scope, SpanKind.AGENT)
    return [(s.attributes["agl.handoff.from"], s.path) for s in spans if "agl.handoff.from" in s.attributes]


def listening() -> Any:
    return {"callbacks": [agl.callback("langgraph")]}


def test_a_tool_that_hands_over_to_another_agent(world):
    """As in a swarm: the tool leaves the agent's own graph for a node of the graph around it."""

    @tool
    def to_billing(tool_call_id: Annotated[str, InjectedToolCallId]) -> Any:
        """Hands over to billing."""
        done = ToolMessage("over to billing", tool_call_id=tool_call_id)
        return Command(goto="billing", graph=Command.PARENT, update={"messages": [done]})

    def script(request: dict[str, Any]) -> Any:
        if not request.get("tools"):
            return "your bill is paid"
        return {"content": "", "tool_calls": [{"name": "to_billing", "arguments": {}}]}

    w = world(script)
    graph = StateGraph(MessagesState)
    graph.add_node("triage", create_agent(w.llm(), [to_billing], name="triage"), destinations=("billing",))
    graph.add_node("billing", create_agent(w.llm(), [], name="billing"))
    graph.add_edge(START, "triage")
    with w.attempt() as scope:
        graph.compile().invoke({"messages": [("user", "my bill")]}, config=listening())
    assert w.check(scope) == ["triage", "billing"]
    assert edges(w, scope) == [("triage", "billing")]
    assert {span.status for span in w.spans(scope)} == {"ok"}, "leaving by hand-off is no error"


def test_a_member_of_a_team_that_leaves_it(world):
    """The giver is the one who decided, not the team around it."""
    w = world()
    llm = w.llm()

    def clerk(state: programs.Notes) -> Command[Any]:
        return Command(goto="boss", graph=Command.PARENT, update={"notes": [llm.invoke("a").content]})

    graph = StateGraph(programs.Notes)
    graph.add_node("office", programs.single("clerk", clerk), destinations=("boss",))
    graph.add_node("boss", programs.ask(llm, "boss"))
    graph.add_edge(START, "office")
    with w.attempt() as scope:
        graph.compile().invoke(programs.start(), config=listening())
    assert w.check(scope) == ["office/clerk", "boss"]
    assert edges(w, scope) == [("office/clerk", "boss")]


def test_there_and_back_and_to_several_at_once(world):
    w = world()
    llm = w.llm()

    def lead(state: programs.Notes) -> Command[Any]:
        said = [llm.invoke("lead").content]
        if state["notes"]:
            return Command(update={"notes": said})
        return Command(goto=[Send("hand", {"question": "1"}), Send("hand", {"question": "2"})], update={"notes": said})

    graph = StateGraph(programs.Notes)
    graph.add_node("lead", lead, destinations=("hand",))
    graph.add_node("hand", programs.ask(llm, "hand"))
    graph.add_edge(START, "lead")
    graph.add_edge("hand", "lead")
    with w.attempt() as scope:
        graph.compile().invoke(programs.start(), config=listening())
    assert w.check(scope) == ["lead", "hand", "hand", "lead"]
    assert edges(w, scope) == [("lead", "hand"), ("lead", "hand")], "an ordinary edge is no hand-off"
