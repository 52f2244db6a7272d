"""Recorded runs of AutoGen programs, played again. There is one in the data, and it can be played whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.schema import SpanKind
from tests.adapters import replay

pytest.importorskip("autogen_agentchat", reason="the autogen extra is not installed")

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ChatCompletionClient

from tests.adapters.autogen.programs import serving


def test_an_agent_that_asks_for_the_weather(recorded, tmp_path):
    """Streamed: one tool, and what the agent makes of its result."""

    def get_weather(city: str) -> str:
        """Get the weather for a given city."""
        return f"The weather in {city} is 73 degrees and Sunny."

    async def program(model: ChatCompletionClient) -> Any:
        agent = AssistantAgent(
            "weather_agent",
            model,
            tools=[get_weather],
            system_message="You are a helpful assistant that can check the weather.",
            reflect_on_tool_use=True,
            model_client_stream=True,
        )
        return await agent.run(task="What is the weather in New York?")

    async def whole() -> None:
        async with serving(world, model="gpt-3.5-turbo") as model:
            await program(model)

    recording = recorded("autogen--openinference--TestAssistantAgent.test_agent_run")
    with replay.play(recording, tmp_path) as world, agl.install("autogen"):
        with world.attempt() as scope:
            asyncio.run(whole())
        replay.prove(world, scope, ["weather_agent"] * 2, tools={"get_weather": "weather_agent"})
        (turn,) = world.spans(scope, SpanKind.AGENT)
        assert "New York" in turn.attributes["output"]
