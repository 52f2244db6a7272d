"""LangGraph passes the suite of all adapters: handed to the graph, and listening globally."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from tests.adapters.world import World
from tests.conformance.adapter import AdapterConformance, Driver, Paths

pytest.importorskip("langgraph", reason="the langgraph extra is not installed")

from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.tools import tool
from langchain_core.tracers import context as hooks
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from tests.adapters.langgraph import programs


class LangGraph(Driver):
    """`agl.install("langgraph")` around programs that know nothing of it."""

    name: ClassVar[str] = "langgraph"

    def config(self) -> Any:
        return {}

    def touched(self) -> list[object]:
        return [hooks._configure_hooks]

    def single(self, world: World, prompt: str, name: str = "writer") -> Paths:
        programs.single(name, programs.ask(world.llm(), "role")).invoke(programs.start(prompt), config=self.config())
        return [name]

    async def single_async(self, world: World, prompt: str) -> Paths:
        llm = world.llm()
        graph = programs.single("writer", programs.ask_async(llm, "role"))
        await graph.ainvoke(programs.start(prompt), config=self.config())
        await llm.http_async_client.aclose()
        return ["writer"]

    def nested(self, world: World, prompt: str) -> Paths:
        programs.nested(world.llm()).invoke(programs.start(prompt), config=self.config())
        return ["team/writer", "team/checker", "editor"]

    def handoff(self, world: World, prompt: str) -> Paths:
        llm = world.llm()

        def triage(state: programs.Notes) -> Command[Any]:
            return Command(goto="billing", update={"notes": [llm.invoke(state["question"]).content]})

        graph = StateGraph(programs.Notes)
        graph.add_node("triage", triage, destinations=("billing", "sales"))
        graph.add_node("billing", programs.ask(llm, "billing"))
        graph.add_node("sales", programs.ask(llm, "sales"))
        graph.add_edge(START, "triage")
        graph.compile().invoke(programs.start(prompt), config=self.config())
        return ["triage", "billing"]

    def parallel(self, world: World, prompt: str) -> Paths:
        programs.fan_out(world.llm(), 3).invoke(programs.start(prompt), config=self.config())
        return ["checker"] * 3

    def tool_ok(self, world: World, prompt: str) -> Paths:
        world.engine.reply = programs.call_tool_once
        self._helper(world, programs.look_up).invoke(programs.start(prompt), config=self.config())
        return ["helper", "helper"]

    def tool_error(self, world: World, prompt: str) -> Paths:
        @tool
        def look_up(word: str) -> str:
            """Looks a word up."""
            raise LookupError(f"no {word}")

        world.engine.reply = programs.call_tool_once
        with contextlib.suppress(LookupError):
            self._helper(world, look_up).invoke(programs.start(prompt), config=self.config())
        return ["helper"]

    def _helper(self, world: World, *tools: Any) -> Any:
        agent = create_agent(world.llm(), list(tools))
        return programs.single("helper", lambda state: {"notes": [programs.talk(agent, state["question"])]})

    def stream(self, world: World, prompt: str) -> Paths:
        graph = programs.pair(world.llm())
        assert list(graph.stream(programs.start(prompt), config=self.config(), stream_mode="messages"))
        return ["writer", "checker"]

    def stream_break(self, world: World, prompt: str) -> Paths:
        graph = programs.single("writer", programs.ask_async(world.llm(), "role"))

        async def program() -> None:
            async for _ in graph.astream(programs.start(prompt), config=self.config(), stream_mode="messages"):
                break
            await world.raw_async()

        world.run(program())
        return ["writer", ""]

    def retry(self, world: World, prompt: str) -> Paths:
        graph = programs.single("writer", programs.ask(world.llm(max_retries=3), "role"))
        graph.invoke(programs.start(prompt), config=self.config())
        return ["writer"] * 3

    def cancel(self, world: World, prompt: str) -> Paths:
        graph = programs.single("writer", programs.ask_async(world.llm(), "role"))

        async def program() -> None:
            running = asyncio.create_task(graph.ainvoke(programs.start(prompt), config=self.config()))
            while not world.engine.requests:
                await asyncio.sleep(0.001)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        world.run(program())
        return ["writer"]

    def raw_client(self, world: World, prompt: str) -> Paths:
        programs.single("writer", lambda state: {"notes": [world.raw()]}).invoke(
            programs.start(prompt), config=self.config()
        )
        return ["writer"]

    def program_error(self, world: World, prompt: str, error: Exception) -> Paths:
        llm = world.llm()

        def node(state: programs.Notes) -> dict[str, Any]:
            llm.invoke(state["question"])
            raise error

        programs.single("writer", node).invoke(programs.start(prompt), config=self.config())
        return ["writer"]

    def duplicates(self, world: World, prompt: str) -> Paths:
        llm = world.llm()
        graph = StateGraph(programs.Notes)
        for team in ("red", "blue"):
            graph.add_node(team, programs.single("writer", programs.ask(llm, team)))
        graph.add_edge(START, "red")
        graph.add_edge("red", "blue")
        graph.compile().invoke(programs.start(prompt), config=self.config())
        return ["red/writer", "blue/writer"]

    def tiny(self, world: World) -> Callable[[], object]:
        graph = programs.single("writer", programs.ask(FakeListChatModel(responses=["x"]), "writer"))
        config = self.config()
        return lambda: graph.invoke(programs.start(), config=config)


class LangGraphCallback(LangGraph):
    """`config={"callbacks": [agl.callback("langgraph")]}`."""

    listens_globally: ClassVar[bool] = False

    def config(self) -> Any:
        return {"callbacks": [agl.callback("langgraph")]}


class TestInstalled(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return LangGraph()


class TestHanded(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return LangGraphCallback()
