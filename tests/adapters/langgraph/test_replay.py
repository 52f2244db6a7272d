"""Recorded runs of LangChain and LangGraph programs, played again."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl
from tests.adapters import replay

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from langchain.agents import create_agent
from langchain_core.tools import StructuredTool, tool
from langgraph.graph import START, MessagesState, StateGraph


def in_a_node(name: str, agent: Any) -> Any:
    """The agent as the node of a graph: the node names it, also where its own name is not told."""
    graph = StateGraph(MessagesState)
    graph.add_node(name, agent)
    graph.add_edge(START, name)
    return graph.compile()


def stream(graph: Any, *messages: Any) -> None:
    config = {"callbacks": [agl.callback("langgraph")]}
    assert list(graph.stream({"messages": list(messages)}, config=config, stream_mode="messages"))


def test_an_agent_that_is_given_plain_dicts(recorded, tmp_path):
    @tool
    def get_weather(location: str) -> str:
        """Get the weather for a location."""
        return f"The weather in {location} is sunny."

    recording = recorded("langgraph--openinference--test_agent_with_raw_dict_messages")
    with replay.play(recording, tmp_path) as world:
        model = world.llm(model="gpt-4o-mini", temperature=0.0, n=1)
        agent = create_agent(model, [get_weather], system_prompt="You are a helpful assistant.", name="weather")
        with world.attempt() as scope:
            stream(in_a_node("weather", agent), {"role": "user", "content": "What's the weather in London?"})
        replay.prove(world, scope, ["weather", "weather"], tools={"get_weather": "weather"})


@pytest.mark.parametrize("run", range(4))
def test_an_agent_that_searches(recorded, tmp_path, run):
    """Recorded four times in a row, with other words each time."""
    recording = recorded("langchain--openllmetry--test_agents", run, 4)
    found = recording.results("tavily_search_results_json")

    def look(query: str) -> str:
        return next(found)

    search = StructuredTool.from_function(look, name="tavily_search_results_json", description="A search engine.")
    with replay.play(recording, tmp_path) as world:
        model = world.llm(model="gpt-3.5-turbo")
        agent = create_agent(model, [search], system_prompt="You are a helpful assistant", name="researcher")
        with world.attempt() as scope:
            stream(in_a_node("researcher", agent), ("user", "What is OpenLLMetry?"))
        used = {"tavily_search_results_json": "researcher"}
        replay.prove(world, scope, ["researcher", "researcher"], tools=used)


def test_a_chain_whose_model_asks_for_two_tools(recorded, tmp_path):
    """LangChain alone, and the program does not run the tools: one call, no agent, no tool."""

    @tool
    def get_weather(location: str) -> str:
        """Weather."""
        raise AssertionError("the recorded program runs no tool")

    @tool
    def get_news(location: str) -> str:
        """News."""
        raise AssertionError("the recorded program runs no tool")

    recording = recorded("langchain--openllmetry--test_parallel_tool_calls")
    with replay.play(recording, tmp_path) as world:
        model = world.llm(model="gpt-4.1-nano").bind_tools([get_weather, get_news])
        with world.attempt() as scope:
            question = "Hey, what's the weather in San Francisco? Also, any news in town?"
            answer = model.invoke([("user", question)], config={"callbacks": [agl.callback("langchain")]})
        assert [call["name"] for call in answer.tool_calls] == ["get_weather", "get_news"]
        replay.prove(world, scope, [""])
