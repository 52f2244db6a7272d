"""What CrewAI programs do, one by one: who is named, what is below what, which tools failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.context import Scope
from agentlightning.listening import Trouble
from agentlightning.schema import Span, SpanKind
from tests.adapters.world import World
from tests.conformance.adapter_proof import HANDOFF, prove
from tests.fakes.engine import Fault

pytest.importorskip("crewai", reason="the crewai extra is not installed")

from crewai import LLM, Crew, Task
from crewai.events import BaseEventListener, ToolUsageFinishedEvent, ToolUsageStartedEvent, crewai_event_bus
from crewai.flow.flow import Flow, listen, start
from crewai.llms.base_llm import BaseLLM
from crewai.tools import tool
from pydantic import BaseModel

from tests.adapters.crewai import programs
from tests.adapters.crewai.programs import agent, crew, serving, task


def run(world: World, program: Callable[[BaseLLM], Any], **settings: Any) -> tuple[Scope, list[str]]:
    """Runs `program(model)` in an attempt; returns that and the agents of its requests, after all was proved."""
    troubles = Trouble.count
    with agl.install("crewai"), world.attempt() as scope, serving(world, **settings) as model:
        program(model)
    assert Trouble.count == troubles, "an ear of ours failed"
    return scope, prove(world, scope, {"chat"})


def only(world: World, scope: Scope, kind: SpanKind) -> Span:
    (span,) = world.spans(scope, kind)
    return span


def edges(world: World, scope: Scope) -> list[tuple[str, str]]:
    """Who gave work, and who took it."""
    agents = world.spans(scope, SpanKind.AGENT)
    return [(span.attributes[HANDOFF], span.path) for span in agents if HANDOFF in span.attributes]


@pytest.mark.parametrize("name", [None, "support"])
def test_a_crew_with_a_name_is_a_level_of_the_path(world, name):
    def program(model: BaseLLM) -> None:
        crew("hello", agent("triage", model), agent("billing", model), **({"name": name} if name else {})).kickoff()

    made = world()
    scope, found = run(made, program)
    above = f"{name}/" if name else ""
    assert found == [f"{above}triage", f"{above}billing"]
    assert edges(made, scope) == [], "the next task of a process is no hand-over"


@pytest.mark.parametrize("way", ["kickoff", "kickoff_async", "akickoff"])
def test_every_way_to_begin_is_one_agent_span(world, way):
    def program(model: BaseLLM) -> None:
        begun = getattr(crew("hello", agent("writer", model), name="team"), way)()
        if way != "kickoff":
            asyncio.run(wait(begun, model))

    made = world()
    scope, found = run(made, program)
    assert found == ["team/writer"]
    assert [span.path for span in made.spans(scope, SpanKind.AGENT)] == ["team", "team/writer"]
    call = only(made, scope, SpanKind.LLM)
    assert call.attributes["gen_ai.request.model"] == "base" and call.status == "ok"


async def wait(running: Any, model: BaseLLM) -> None:
    await running
    await programs.close(model)


def test_kickoff_for_each_names_agents_by_their_inputs(world):
    def program(model: BaseLLM) -> None:
        crew("about {topic}", agent("{topic} expert", model)).kickoff_for_each([{"topic": "tea"}, {"topic": "rice"}])

    assert run(world(), program)[1] == ["tea expert", "rice expert"]


@pytest.mark.parametrize("way", ["kickoff", "kickoff_async", "akickoff"])
def test_b49_an_agent_without_a_crew(world, way):
    def program(model: BaseLLM) -> None:
        begun = getattr(agent("writer", model), way)("hello")
        if way != "kickoff":
            asyncio.run(wait(begun, model))

    made = world()
    scope, found = run(made, program)
    assert found == ["writer"]
    assert only(made, scope, SpanKind.AGENT).attributes["gen_ai.operation.name"] == "invoke_agent"


def test_a_flow_whose_starts_run_at_once(world):
    def program(model: BaseLLM) -> None:
        class Work(Flow):
            @start()
            def one(self) -> None:
                crew("hello", agent("a", model)).kickoff()

            @start()
            async def two(self) -> None:
                await agent("b", model).kickoff_async("hello")

            @listen(one)
            def after(self) -> None:
                crew("hello", agent("c", model)).kickoff()

        Work().kickoff()

    assert sorted(run(world(), program)[1]) == ["a", "b", "c"]


def test_a_model_that_is_asked_directly_belongs_to_who_asks(world):
    def program(model: BaseLLM) -> None:
        model.call("hello")
        with agl.agent("mine"):
            model.call("hello")

    assert run(world(), program)[1] == ["", "mine"]


def test_planning_has_an_agent_of_its_own(world):
    plans = json.dumps({"list_of_plans_per_task": [{"task_number": 1, "task": "hello", "plan": "say it"}]})

    def program(model: BaseLLM) -> None:
        crew("hello", agent("writer", model), planning=True, planning_llm=model).kickoff()

    found = run(world(plans), program)[1]
    assert found[-1] == "writer" and set(found[:-1]) == {"Task Execution Planner"}


def test_delegation_is_below_the_tool_and_says_who_gave(world):
    def script(request: dict[str, Any]) -> Any:
        may = programs.offers(request, programs.ASK) and not programs.answered(request)
        asks = {"question": "why?", "context": "none", "coworker": "expert"}
        return programs.calls(programs.ASK, asks) if may else "because"

    def program(model: BaseLLM) -> None:
        boss, expert = agent("boss", model, allow_delegation=True), agent("expert", model)
        Crew(agents=[boss, expert], tasks=[task("hello", boss)]).kickoff()

    made = world(script)
    scope, found = run(made, program)
    assert found == ["boss", "boss/expert", "boss"]
    assert edges(made, scope) == [("boss", "boss/expert")]
    used = only(made, scope, SpanKind.TOOL)
    assert (used.path, used.status) == ("boss", "ok")
    (expert,) = [span for span in made.spans(scope, SpanKind.AGENT) if span.name == "expert"]
    assert expert.parent_id == used.id


def test_an_agent_in_a_tool_of_the_users_is_nested_but_took_nothing_over(world):
    def program(model: BaseLLM) -> None:
        @tool
        def consult() -> str:
            """Asks someone."""
            return str(agent("expert", model).kickoff("why?"))

        crew("hello", agent("boss", model, tools=[consult])).kickoff()

    made = world(programs.call_once("consult"))
    scope, found = run(made, program)
    assert found == ["boss", "boss/expert", "boss"] and edges(made, scope) == []


def test_an_answer_that_a_guardrail_sends_back_is_the_same_agents(world):
    seen: list[str] = []

    def check(output):
        seen.append(output.raw)
        return len(seen) > 1, output.raw

    def program(model: BaseLLM) -> None:
        writer = agent("writer", model)
        Crew(agents=[writer], tasks=[task("hello", writer, guardrail=check)]).kickoff()

    made = world()
    scope, found = run(made, program)
    assert found == ["writer", "writer"] and only(made, scope, SpanKind.AGENT).status == "ok"


def test_turning_an_answer_into_an_object_is_its_agents_work(world):
    class Fact(BaseModel):
        word: str

    def program(model: BaseLLM) -> None:
        writer = agent("writer", model)
        result = Crew(agents=[writer], tasks=[task("hello", writer, output_pydantic=Fact)]).kickoff()
        assert result.pydantic == Fact(word="x")

    made = world(lambda request: '{"word": "x"}' if len(made.engine.requests) > 1 else "a word")
    scope, found = run(made, program)
    assert len(found) > 1 and set(found) == {"writer"}
    assert only(made, scope, SpanKind.AGENT).status == "ok"


def test_b14_the_end_of_a_tool_that_never_began_is_flagged(world):
    """So it is where a model's input for a tool makes no sense; nothing of the program fails for it."""
    when: Any = "2026-01-01T00:00:00"

    def program(model: BaseLLM) -> None:
        end = ToolUsageFinishedEvent(tool_name="t", tool_args={}, output="x", started_at=when, finished_at=when)
        crewai_event_bus.emit(None, event=end)
        crewai_event_bus.emit(None, event=ToolUsageStartedEvent(tool_name="t", tool_args={}))
        crewai_event_bus.emit(None, event=end)

    made = world()
    scope, _ = run(made, program)
    orphan, whole = made.spans(scope, SpanKind.TOOL)
    assert orphan.attributes["crewai.tool.never_began"] is True and orphan.end_ns is not None
    assert "crewai.tool.never_began" not in whole.attributes and whole.status == "ok"


def test_b15_a_tool_that_the_model_runs_itself_is_not_inside_its_call(world):
    """`available_functions`: CrewAI runs the tool before the call has returned."""

    def program(model: BaseLLM) -> None:
        schema = {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}
        tools: Any = [{"type": "function", "function": schema | {"description": "Looks up."}}]
        with agl.agent("writer"):
            model.call("hello", tools=tools, available_functions={"look_up": lambda word: made.raw()})

    made = world(lambda request: programs.calls("look_up", {"word": "x"}) if request.get("tools") else "done")
    scope, found = run(made, program)
    assert found == ["writer", "writer"]
    call, used = only(made, scope, SpanKind.LLM), only(made, scope, SpanKind.TOOL)
    assert used.parent_id == call.parent_id and call.status == used.status == "ok"


def test_a_tool_that_never_ended_ends_with_its_agent(world):
    class Stopped(BaseException):
        """Not an error of the tool's: CrewAI tells no end of it."""

    def program(model: BaseLLM) -> None:
        @tool
        def stop() -> str:
            """Stops all."""
            raise Stopped

        with pytest.raises(Stopped):
            agent("writer", model, tools=[stop]).execute_task(task("hello"))

    made = world(programs.call_once("stop"))
    scope, _ = run(made, program)
    assert {span.status for span in made.spans(scope, SpanKind.TOOL)} == {"error"}


def test_b56_tools_with_threads_of_their_own(world):
    def program(model: BaseLLM) -> None:
        @tool
        def ask_all() -> str:
            """Asks three times at once."""
            with ThreadPoolExecutor(3) as pool:
                return " ".join(pool.map(lambda _: made.raw(), range(3)))

        crew("hello", agent("writer", model, tools=[ask_all])).kickoff()

    made = world(programs.call_once("ask_all"))
    scope, found = run(made, program)
    assert found == ["writer"] * 5
    used = only(made, scope, SpanKind.TOOL)
    assert [arrival.span_id for arrival in made.arrivals(scope.attempt_id)[1:4]] == [used.id] * 3


def test_tools_at_once_are_spans_of_their_own(world):
    def script(request: dict[str, Any]) -> Any:
        if programs.answered(request):
            return "done"
        several = [programs.calls("look_up", {"word": word}, f"call_{word}") for word in "abc"]
        return {"content": "", "tool_calls": [call for one in several for call in one["tool_calls"]]}

    def program(model: BaseLLM) -> None:
        crew("hello", agent("writer", model, tools=[programs.look_up])).kickoff()

    made = world(script)
    scope, _ = run(made, program)
    used = made.spans(scope, SpanKind.TOOL)
    results = {str(span.attributes["gen_ai.tool.call.result"]) for span in used}
    assert results == {"a means a", "b means b", "c means c"} and {span.status for span in used} == {"ok"}


def test_a_refused_request_is_one_failed_call(world):
    """CrewAI tells the failure twice."""

    def program(model: BaseLLM) -> None:
        with pytest.raises(Exception, match="400"):
            crew("hello", agent("writer", model, max_retry_limit=0)).kickoff()

    made = world(lambda request: Fault("status", status=400))
    scope, found = run(made, program)
    calls = made.spans(scope, SpanKind.LLM)
    assert len(calls) == len(found) and {call.status for call in calls} == {"error"}
    assert "400" in (calls[0].error or "")
    assert {span.status for span in made.spans(scope, SpanKind.AGENT)} == {"error"}


def test_a_listener_of_the_users_hears_what_it_heard_before(world):
    heard: list[str] = []

    class Mine(BaseEventListener):
        def setup_listeners(self, bus: Any) -> None:
            bus.on(ToolUsageFinishedEvent)(lambda source, event: heard.append(event.tool_name))

    def program(model: BaseLLM) -> None:
        with crewai_event_bus.scoped_handlers():
            Mine()
            crew("hello", agent("writer", model, tools=[programs.look_up])).kickoff()
            crewai_event_bus.flush()

    run(world(programs.call_once("look_up", {"word": "x"})), program)
    assert heard == ["look_up"]


def test_a_model_that_litellm_serves(world):
    pytest.importorskip("litellm", reason="litellm is not installed: CrewAI's native providers do without")

    def program(model: BaseLLM) -> None:
        settings = {"base_url": made.engine.base_url, "api_key": "none"}
        other = LLM(model="openai/base", is_litellm=True, **settings)
        assert other.is_litellm
        crew("hello", agent("writer", other)).kickoff()

    made = world()
    assert run(made, program)[1] == ["writer"]


def test_a_model_class_that_is_made_later_is_heard(world):
    def program(model: BaseLLM) -> None:
        class Later(programs.Scripted):
            def call(self, *args: Any, **kwargs: Any) -> str:
                return super().call(*args, **kwargs)

        Task(description="hello", expected_output="x", agent=agent("writer", Later(model="later"))).execute_sync()

    made = world()
    scope, found = run(made, program)
    call = only(made, scope, SpanKind.LLM)
    assert found == [] and (call.name, call.path) == ("later", "writer")
