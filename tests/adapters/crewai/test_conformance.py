"""CrewAI passes the suite of all adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest

from agentlightning.context import current
from tests.adapters.world import World
from tests.conformance.adapter import AdapterConformance, Driver, Paths

pytest.importorskip("crewai", reason="the crewai extra is not installed")

from crewai import Agent, Crew, Task
from crewai.events.event_bus import CrewAIEventsBus
from crewai.llms.base_llm import BaseLLM
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.tools import tool
from crewai.tools.agent_tools.base_agent_tools import BaseAgentTool

from tests.adapters.crewai import programs
from tests.adapters.crewai.programs import agent, crew, serving


class CrewAI(Driver):
    """`agl.install("crewai")` around programs that know nothing of it."""

    name: ClassVar[str] = "crewai"

    def touched(self) -> Iterable[object]:
        return [Agent, Crew, Task, CrewAIEventsBus, BaseAgentTool, BaseLLM, OpenAICompletion, programs.Scripted]

    def single(self, world: World, prompt: str, name: str = "writer") -> Paths:
        with serving(world) as model:
            agent(name, model).kickoff(prompt)
        return [name]

    async def single_async(self, world: World, prompt: str) -> Paths:
        model = programs.llm(world)
        await crew(prompt, agent("writer", model)).akickoff()
        await programs.close(model)
        return ["writer"]

    def nested(self, world: World, prompt: str) -> Paths:
        def script(request: dict[str, Any]) -> Any:
            may = programs.offers(request, programs.DELEGATE) and not programs.answered(request)
            return programs.delegates("helper") if may else "done"

        world.engine.reply = script
        with serving(world) as model:
            programs.hierarchy(prompt, model, "helper").kickoff()
        return ["Crew Manager", "Crew Manager/helper", "Crew Manager"]

    def handoff(self, world: World, prompt: str) -> Paths:
        world.engine.reply = lambda request: programs.delegates("billing") if request.get("tools") else "paid"
        with serving(world) as model:
            programs.office(model).kickoff(prompt)
        return ["triage", "triage/billing"]

    def parallel(self, world: World, prompt: str) -> Paths:
        with serving(world) as model:
            tasks = [programs.task(prompt, agent(role, model), async_execution=True) for role in "abc"]
            last = programs.task(prompt, agent("d", model), context=tasks)
            Crew(agents=[task.agent for task in [*tasks, last]], tasks=[*tasks, last]).kickoff()
        return ["a", "b", "c", "d"]

    def tool_ok(self, world: World, prompt: str) -> Paths:
        return self._tool(world, prompt, programs.look_up)

    def tool_error(self, world: World, prompt: str) -> Paths:
        @tool
        def look_up(word: str) -> str:
            """Looks a word up."""
            raise LookupError(f"no {word}")

        return self._tool(world, prompt, look_up)

    def _tool(self, world: World, prompt: str, used: Any) -> Paths:
        world.engine.reply = programs.call_once("look_up", {"word": "x"})
        with serving(world) as model:
            crew(prompt, agent("helper", model, tools=[used])).kickoff()
        return ["helper", "helper"]

    def stream(self, world: World, prompt: str) -> Paths:
        with serving(world, stream=True) as model:
            for _ in crew(prompt, agent("writer", model), stream=True).kickoff():
                pass
        return ["writer"]

    def stream_break(self, world: World, prompt: str) -> Paths:
        with serving(world, stream=True) as model:
            for _ in crew(prompt, agent("writer", model), stream=True).kickoff():
                break
            world.raw()
        return ["writer", ""]

    def retry(self, world: World, prompt: str) -> Paths:
        with serving(world, max_retries=3) as model:
            agent("writer", model).kickoff(prompt)
        return ["writer"] * 3

    def cancel(self, world: World, prompt: str) -> Paths:
        async def program(model: BaseLLM) -> None:
            running = asyncio.create_task(crew(prompt, agent("writer", model)).akickoff())
            while not world.engine.requests:
                await asyncio.sleep(0.001)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        with serving(world, timeout=0.5) as model:  # the call itself is in a thread, which no one can cancel
            asyncio.run(program(model))
        return ["writer"]

    def raw_client(self, world: World, prompt: str) -> Paths:
        @tool
        def ask() -> str:
            """Asks a model of its own."""
            return world.raw()

        world.engine.reply = programs.call_once("ask")
        with serving(world) as model:
            agent("writer", model, tools=[ask]).kickoff(prompt)
        return ["writer"] * 3

    def program_error(self, world: World, prompt: str, error: Exception) -> Paths:
        def check(output: Any) -> None:
            raise error

        with serving(world) as model:
            writer = agent("writer", model)
            Crew(agents=[writer], tasks=[programs.task(prompt, writer, callback=check)]).kickoff()
        return ["writer"]

    def duplicates(self, world: World, prompt: str) -> Paths:
        with serving(world) as model:
            crew(prompt, agent("writer", model), agent("writer", model)).kickoff()
        return ["writer", "writer"]

    def tiny(self, world: World) -> Callable[[], object]:
        task = programs.task("q", agent("writer", programs.Scripted(model="scripted")))
        return lambda: task.agent.execute_task(task)  # `kickoff` makes new classes each time, which stay


class TestCrewAI(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return CrewAI()


def test_nothing_of_the_suite_is_left_in_force():
    assert current() is None
