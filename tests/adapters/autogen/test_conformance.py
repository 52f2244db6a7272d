"""AutoGen passes the suite of all adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar

import pytest

from agentlightning.context import current
from tests.adapters.world import World
from tests.conformance.adapter import AdapterConformance, Driver, Paths

pytest.importorskip("autogen_agentchat", reason="the autogen extra is not installed")

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_agentchat.teams import BaseGroupChat, DiGraphBuilder, GraphFlow, RoundRobinGroupChat, Swarm
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseTool, FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.adapters.autogen import programs
from tests.adapters.autogen.programs import agent, round_robin, serving


class AutoGen(Driver):
    """`agl.install("autogen")` around programs that know nothing of it."""

    name: ClassVar[str] = "autogen"
    odd_name: ClassVar[str] = "作家_Ünï"  # names are Python identifiers

    def touched(self) -> Iterable[object]:
        return [
            BaseChatAgent, AssistantAgent, programs.Broken, BaseGroupChat, RoundRobinGroupChat, Swarm, BaseTool,
            FunctionTool, ChatCompletionClient, OpenAIChatCompletionClient, *OpenAIChatCompletionClient.__mro__[1:3],
        ]  # fmt: skip

    def serve(self, world: World, program: Callable[[ChatCompletionClient], Awaitable[object]], **client: Any) -> None:
        async def whole() -> None:
            async with serving(world, **client) as model:
                await program(model)

        asyncio.run(whole())

    def single(self, world: World, prompt: str, name: str = "writer") -> Paths:
        self.serve(world, lambda model: agent(name, model).run(task=prompt))
        return [name]

    async def single_async(self, world: World, prompt: str) -> Paths:
        async with serving(world) as model:
            await round_robin(agent("writer", model)).run(task=prompt)
        return ["RoundRobinGroupChat/writer"]

    def nested(self, world: World, prompt: str) -> Paths:
        self.serve(world, lambda model: round_robin(agent("writer", model), agent("critic", model)).run(task=prompt))
        return ["RoundRobinGroupChat/writer", "RoundRobinGroupChat/critic"]

    def handoff(self, world: World, prompt: str) -> Paths:
        triage = programs.calls("transfer_to_billing")
        world.engine.reply = lambda request: triage if programs.told(request) == "triage" else "TERMINATE"

        async def program(model: ChatCompletionClient) -> None:
            team = programs.swarm(model)
            team._max_turns = 2  # an argument in newer releases
            await team.run(task=prompt)

        self.serve(world, program)
        return ["Swarm/triage", "Swarm/billing"]

    def parallel(self, world: World, prompt: str) -> Paths:
        def program(model: ChatCompletionClient) -> Awaitable[object]:
            one, *branches = [agent(name, model) for name in ("start", "left", "right")]
            graph = DiGraphBuilder().add_node(one)
            for branch in branches:
                graph.add_node(branch).add_edge(one, branch)
            return GraphFlow(graph.get_participants(), graph.build()).run(task=prompt)

        self.serve(world, program)
        return [f"GraphFlow/{name}" for name in ("start", "left", "right")]

    def tool_ok(self, world: World, prompt: str) -> Paths:
        return self._tool(world, prompt, programs.look_up)

    def tool_error(self, world: World, prompt: str) -> Paths:
        async def look_up(word: str) -> str:
            """Looks a word up."""
            raise LookupError(f"no {word}")

        return self._tool(world, prompt, look_up)

    def _tool(self, world: World, prompt: str, tool: Any) -> Paths:
        world.engine.reply = programs.call_once("look_up", {"word": "x"})
        self.serve(world, lambda model: agent("helper", model, tools=[tool], reflect_on_tool_use=True).run(task=prompt))
        return ["helper", "helper"]

    def stream(self, world: World, prompt: str) -> Paths:
        async def program(model: ChatCompletionClient) -> None:
            async for _ in round_robin(agent("writer", model, model_client_stream=True)).run_stream(task=prompt):
                pass

        self.serve(world, program)
        return ["RoundRobinGroupChat/writer"]

    def stream_break(self, world: World, prompt: str) -> Paths:
        async def program(model: ChatCompletionClient) -> None:
            async for event in agent("writer", model, model_client_stream=True).run_stream(task=prompt):
                if isinstance(event, ModelClientStreamingChunkEvent):
                    break
            await world.raw_async()

        self.serve(world, program)
        return ["writer", ""]

    def retry(self, world: World, prompt: str) -> Paths:
        self.serve(world, lambda model: agent("writer", model).run(task=prompt), max_retries=3)
        return ["writer"] * 3

    def cancel(self, world: World, prompt: str) -> Paths:
        async def program(model: ChatCompletionClient) -> None:
            running = asyncio.create_task(agent("writer", model).run(task=prompt))
            while not world.engine.requests:
                await asyncio.sleep(0.001)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        self.serve(world, program)
        return ["writer"]

    def raw_client(self, world: World, prompt: str) -> Paths:
        async def ask() -> str:
            """Asks a model of its own."""
            return await world.raw_async()

        world.engine.reply = programs.call_once("ask")
        self.serve(world, lambda model: agent("writer", model, tools=[ask], reflect_on_tool_use=True).run(task=prompt))
        return ["writer"] * 3

    def program_error(self, world: World, prompt: str, error: Exception) -> Paths:
        asyncio.run(programs.Broken("broken", error).run(task=prompt))
        return []

    def duplicates(self, world: World, prompt: str) -> Paths:
        async def program(model: ChatCompletionClient) -> None:
            for role in ("poet", "critic"):
                await AssistantAgent("writer", model, system_message=f"You are a {role}.").run(task=prompt)

        self.serve(world, program)
        return ["writer", "writer"]

    def tiny(self, world: World) -> Callable[[], object]:
        return lambda: asyncio.run(round_robin(agent("writer", programs.scripted("x"))).run(task="q"))


class TestAutoGen(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return AutoGen()


def test_nothing_of_the_suite_is_left_in_force():
    assert current() is None
