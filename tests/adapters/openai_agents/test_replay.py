"""Recorded runs of OpenAI Agents programs, played again over the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.schema import SpanKind
from tests.adapters import replay
from tests.adapters.world import World

pytest.importorskip("agents", reason="the openai-agents extra is not installed")

import agents
import openai
from agents import Agent, OpenAIResponsesModel, Runner, function_tool

ROUTER = "You handle general requests and route data processing tasks to the Analytics Agent."
ANALYST = "You are a data analytics specialist. Use your tools to analyze data, process results, and generate reports."


def run(world: World, program: Any) -> Any:
    """Runs `program(model)`: `model("gpt-4o")` is a model of the SDK that the recording answers for."""

    async def whole() -> Any:
        async with openai.AsyncOpenAI(**world.client) as client:
            return await program(lambda name: OpenAIResponsesModel(name, client))

    agents.set_tracing_disabled(True)  # else its exporter wants to leave the machine
    try:
        return asyncio.run(whole())
    finally:
        agents.set_tracing_disabled(False)


def test_a_router_that_hands_over(recorded, tmp_path):
    """Streamed: two agents, three tools, one edge."""

    @function_tool
    async def analyze_data(data_request: str) -> str:
        """Analyze the requested data patterns."""
        return f"Analyzed data patterns for: {data_request}"

    @function_tool
    async def process_results(analysis_data: str) -> str:
        """Process the analysis results."""
        return f"Processed results: {analysis_data}"

    @function_tool
    async def generate_report(processed_data: str) -> str:
        """Generate a final report from the processed data."""
        return f"Generated report: {processed_data}"

    async def program(model: Any) -> None:
        tools = [analyze_data, process_results, generate_report]
        analyst = Agent(name="Analytics Agent", instructions=ANALYST, tools=tools, model=model("gpt-4o"))
        router = Agent(name="Router", instructions=ROUTER, handoffs=[analyst], model=model("gpt-4o"))
        result = Runner.run_streamed(
            router,
            [{"role": "user", "content": "Can you analyze the sales data from last quarter and generate a report?"}],
        )
        assert [event async for event in result.stream_events()]

    recording = recorded("openai-agents--openllmetry--test_router_analytics_complete_workflow")
    with replay.play(recording, tmp_path) as world, agl.install("openai-agents"):
        with world.attempt() as scope:
            run(world, program)
        analyst = "Router/Analytics Agent"
        names = ["analyze_data", "process_results", "generate_report"]
        replay.prove(world, scope, ["Router", *[analyst] * 4], tools=dict.fromkeys(names, analyst))
        edges = [(span.attributes.get("agl.handoff.from"), span.path) for span in world.spans(scope, SpanKind.AGENT)]
        assert edges == [(None, "Router"), ("Router", analyst)]


@pytest.mark.parametrize("number", [0, 1])
def test_a_tool_and_its_result(recorded, tmp_path, number):
    @function_tool
    async def get_city_info(city_name: str) -> str:
        """Get detailed information about a city."""
        return f"City: {city_name}, Population: 9000000, Country: United Kingdom, Description: Capital city with rich history"

    async def program(model: Any) -> None:
        instructions = "You help users get information about cities using the get_city_info tool."
        agent = Agent(name="City", instructions=instructions, tools=[get_city_info], model=model("gpt-4o"))
        await Runner.run(agent, "Tell me about London")

    recording = recorded("openai-agents--openllmetry--test_tool_call_and_result_attributes", number, 2)
    with replay.play(recording, tmp_path) as world, agl.install("openai-agents"):
        with world.attempt() as scope:
            run(world, program)
        replay.prove(world, scope, ["City", "City"], tools={"get_city_info": "City"})


def test_a_tool_that_asks_a_model_itself(recorded, tmp_path):
    """By a plain client, which is refused: with the adapter of plain clients beside ours, that is a call of the agent too."""

    async def program(model: Any) -> None:
        @function_tool
        async def call_openai_helper(query: str) -> str:
            """Asks."""
            try:
                async with openai.AsyncOpenAI(**world.client) as client:
                    ask: Any = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": query}]}
                    return str(await client.chat.completions.create(**ask))
            except openai.AuthenticationError:
                return next(told)  # its words differ between releases of the client

        tools: Any = [call_openai_helper]
        agent = Agent(name="Helper", instructions="You are a helpful assistant.", tools=tools, model=model("gpt-4.1"))
        await Runner.run(agent, "Use the call_openai_helper tool to answer: What is 2+2?")

    recording = recorded("openai-agents--langsmith-sdk--test_openai_agents_test_wrap_openai_nests_under_agent_trace")
    told = recording.results("call_openai_helper")
    with replay.play(recording, tmp_path) as world, agl.install("openai-agents"), agl.install("openai"):
        with world.attempt() as scope:
            run(world, program)
        replay.prove(world, scope, ["Helper"] * 3, tools={"call_openai_helper": "Helper"})
        calls = world.spans(scope, SpanKind.LLM)
        (tool,) = world.spans(scope, SpanKind.TOOL)
        assert [call.status for call in calls] == ["ok", "error", "ok"]
        assert [call.parent_id == tool.id for call in calls] == [False, True, False]
