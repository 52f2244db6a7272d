"""A recorded run of a program of the OpenAI SDK, played again: streamed, two tool calls in one answer."""

from __future__ import annotations

import asyncio

import pytest

import agentlightning as agl
from agentlightning.schema import SpanKind
from tests.adapters import replay

pytest.importorskip("openai", reason="the openai extra is not installed")

from tests.adapters.openai import programs

NAME = "openai-sdk--openllmetry--test_open_ai_function_calls_tools_streaming_parallel"
ASK = {
    "model": "gpt-3.5-turbo",
    "messages": [{"role": "user", "content": "What's the weather like in San Francisco and Boston?"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_current_weather",
                "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
            },
        }
    ],
    "stream": True,
}


@pytest.mark.parametrize(("run", "asynchronous"), [(0, False), (1, True)])
def test_two_tool_calls_in_a_stream(recorded, tmp_path, run, asynchronous):
    recording = recorded(NAME, run, 2)
    with replay.play(recording, tmp_path) as world, agl.install("openai"):

        async def program() -> list[object]:
            async with programs.client_async(world) as client:
                return [piece async for piece in await client.chat.completions.create(**ASK)]

        with world.attempt() as scope, agl.agent("forecaster"):
            if asynchronous:
                pieces = asyncio.run(program())
            else:
                with programs.client(world) as client:
                    pieces = list(client.chat.completions.create(**ASK))
        calls = [call for p in pieces for choice in p.choices for call in choice.delta.tool_calls or ()]
        assert {call.index for call in calls} == {0, 1}
        replay.prove(world, scope, ["forecaster"])
        (call,) = world.spans(scope, SpanKind.LLM)
        assert call.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
