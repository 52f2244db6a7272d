"""OpenAI Agents passes the suite of all adapters: chat completions and Responses, with its tracing on and off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar

import pytest

from agentlightning.context import current
from tests.adapters.world import World
from tests.conformance.adapter import AdapterConformance, Driver, Paths

pytest.importorskip("agents", reason="the openai-agents extra is not installed")

import agents
from agents import Agent, Model, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents.tool_context import ToolContext
from agents.tracing import get_trace_provider
from agents.tracing.spans import NoOpSpan, SpanImpl

from tests.adapters.openai_agents import programs
from tests.adapters.openai_agents.programs import agent, serving


class OpenAIAgents(Driver):
    """`agl.install("openai-agents")` around programs that know nothing of it."""

    name: ClassVar[str] = "openai-agents"
    kind: ClassVar[str] = "chat"

    def touched(self) -> Iterable[object]:
        models = [Model, OpenAIChatCompletionsModel, OpenAIResponsesModel, programs.Scripted]
        return [SpanImpl, NoOpSpan, ToolContext, get_trace_provider(), Runner, *models]

    def run(self, world: World, make: Callable[[Model], Agent[Any]], prompt: str, **client: Any) -> None:
        """Runs the agent that `make` makes of a model."""

        async def program(model: Model) -> None:
            await Runner.run(make(model), prompt)

        self.serve(world, program, **client)

    def serve(self, world: World, program: Callable[[Model], Awaitable[None]], **client: Any) -> None:
        async def whole() -> None:
            async with serving(world, self.kind, **client) as model:
                await program(model)

        asyncio.run(whole())

    def single(self, world: World, prompt: str, name: str = "writer") -> Paths:
        self.run(world, lambda model: agent(name, model), prompt)
        return [name]

    async def single_async(self, world: World, prompt: str) -> Paths:
        async with serving(world, self.kind) as model:
            await Runner.run(agent("writer", model), prompt)
        return ["writer"]

    def nested(self, world: World, prompt: str) -> Paths:
        world.engine.reply = programs.call_once("ask_helper", {"input": "help me"})
        self.run(world, programs.boss, prompt)
        return ["boss", "boss/helper", "boss"]

    def handoff(self, world: World, prompt: str) -> Paths:
        world.engine.reply = programs.hand_over("triage", "billing")
        self.run(world, programs.office, prompt)
        return ["triage", "triage/billing"]

    def parallel(self, world: World, prompt: str) -> Paths:
        def script(request: dict[str, Any]) -> Any:
            if not request.get("tools") or programs.answered(request):
                return "done"
            asked = [programs.calls("ask_helper", {"input": word}, f"call_{word}") for word in "abc"]
            return {"content": "", "tool_calls": [call for one in asked for call in one["tool_calls"]]}

        world.engine.reply = script
        self.run(world, programs.boss, prompt)
        return ["boss", "boss/helper", "boss/helper", "boss/helper", "boss"]

    def tool_ok(self, world: World, prompt: str) -> Paths:
        return self._tool(world, prompt, programs.look_up)

    def tool_error(self, world: World, prompt: str) -> Paths:
        @function_tool
        def look_up(word: str) -> str:
            """Looks a word up."""
            raise LookupError(f"no {word}")

        return self._tool(world, prompt, look_up)

    def _tool(self, world: World, prompt: str, tool: Any) -> Paths:
        world.engine.reply = programs.call_once("look_up", {"word": "x"})
        self.run(world, lambda model: agent("helper", model, tools=[tool]), prompt)
        return ["helper", "helper"]

    def stream(self, world: World, prompt: str) -> Paths:
        async def program(model: Model) -> None:
            result = Runner.run_streamed(agent("writer", model), prompt)
            async for _ in result.stream_events():
                pass

        self.serve(world, program)
        return ["writer"]

    def stream_break(self, world: World, prompt: str) -> Paths:
        async def program(model: Model) -> None:
            result = Runner.run_streamed(agent("writer", model), prompt)
            async for event in result.stream_events():
                if event.type == "raw_response_event":
                    break
            await world.raw_async()

        self.serve(world, program)
        return ["writer", ""]

    def retry(self, world: World, prompt: str) -> Paths:
        self.run(world, lambda model: agent("writer", model), prompt, max_retries=3)
        return ["writer"] * 3

    def cancel(self, world: World, prompt: str) -> Paths:
        async def program(model: Model) -> None:
            running = asyncio.create_task(Runner.run(agent("writer", model), prompt))
            while not world.engine.requests:
                await asyncio.sleep(0.001)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        self.serve(world, program)
        return ["writer"]

    def raw_client(self, world: World, prompt: str) -> Paths:
        @function_tool
        async def ask() -> str:
            """Asks a model of its own."""
            return await world.raw_async()

        world.engine.reply = programs.call_once("ask")
        self.run(world, lambda model: agent("writer", model, tools=[ask]), prompt)
        return ["writer"] * 3

    def program_error(self, world: World, prompt: str, error: Exception) -> Paths:
        @function_tool(failure_error_function=None)
        def break_down() -> str:
            """Breaks down."""
            raise error

        world.engine.reply = programs.call_once("break_down")
        self.run(world, lambda model: agent("writer", model, tools=[break_down]), prompt)
        return ["writer"]

    def duplicates(self, world: World, prompt: str) -> Paths:
        async def program(model: Model) -> None:
            for role in ("poet", "critic"):
                await Runner.run(Agent(name="writer", instructions=f"You are a {role}.", model=model), prompt)

        self.serve(world, program)
        return ["writer", "writer"]

    def tiny(self, world: World) -> Callable[[], object]:
        writer = agent("writer", programs.Scripted())
        return lambda: asyncio.run(Runner.run(writer, "q"))


class Responses(OpenAIAgents):
    kind: ClassVar[str] = "responses"


class TestChat(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return OpenAIAgents()


class TestResponsesUntraced(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        agents.set_tracing_disabled(True)
        return Responses()


def test_nothing_of_the_suite_is_left_in_force():
    assert current() is None
