"""Who is speaking: teams, teams inside agents, agents as tools, a team's own calls, and agents alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.context import Scope
from agentlightning.schema import SpanKind
from tests.adapters.world import World
from tests.conformance.adapter_proof import prove

pytest.importorskip("autogen_agentchat", reason="the autogen extra is not installed")

from autogen_agentchat.agents import SocietyOfMindAgent
from autogen_agentchat.conditions import HandoffTermination
from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams import SelectorGroupChat, Swarm
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.models import ChatCompletionClient

from tests.adapters.autogen import programs
from tests.adapters.autogen.programs import agent, round_robin, serving

Program = Callable[[ChatCompletionClient], Awaitable[Any]]


def run(world: World, program: Program, **client: Any) -> tuple[Scope, list[str]]:
    """Runs the program in an attempt; the agent paths of its requests, after all that must be true was checked."""

    async def whole() -> None:
        async with serving(world, **client) as model:
            await program(model)

    with agl.install("autogen"), world.attempt() as scope:
        asyncio.run(whole())
    return scope, prove(world, scope, {"chat"})


def edges(world: World, scope: Scope) -> list[tuple[str, str]]:
    return [
        (s.attributes["agl.handoff.from"], s.path) for s in world.spans(scope) if "agl.handoff.from" in s.attributes
    ]


def test_b49_an_agent_alone(world):
    scope, paths = run(w := world("fine"), lambda model: agent("writer", model).run(task="q"))
    assert paths == ["writer"]
    (turn,) = w.spans(scope, SpanKind.AGENT)
    assert (turn.name, turn.attributes["output"]) == ("writer", "fine")


def test_a_turn_is_a_span(world):
    """The span of the team is around those of its members, who take turns."""

    async def program(model: ChatCompletionClient) -> None:
        result = await round_robin(agent("writer", model), agent("critic", model), turns=3).run(task="q")
        assert [message.source for message in result.messages] == ["user", "writer", "critic", "writer"]

    scope, paths = run(w := world("fine"), program)
    names = ["writer", "critic", "writer"]
    assert paths == [f"RoundRobinGroupChat/{name}" for name in names]
    team, *turns = w.spans(scope, SpanKind.AGENT)
    assert (team.path, [turn.name for turn in turns]) == ("RoundRobinGroupChat", names)
    assert {turn.parent_id for turn in turns} == {team.id}
    assert "3" in team.attributes["autogen.stop_reason"]
    (call, *_) = w.spans(scope, SpanKind.LLM)
    assert call.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert call.attributes["gen_ai.usage.output_tokens"] > 0


@programs.named
def test_a_team_that_has_a_name(world):
    _, paths = run(world(), lambda model: round_robin(agent("writer", model), name="the house").run(task="q"))
    assert paths == ["the house/writer"]


def test_the_choice_of_the_next_speaker_is_the_managers(world):
    def script(request: dict[str, Any]) -> str:
        return "critic" if "Select" in programs.told(request) or "role" in str(request["messages"][0]) else "fine"

    def program(model: ChatCompletionClient) -> Awaitable[Any]:
        return SelectorGroupChat([agent("writer", model), agent("critic", model)], model, max_turns=1).run(task="q")

    scope, paths = run(w := world(script), program)
    assert paths == ["SelectorGroupChat/SelectorGroupChatManager", "SelectorGroupChat/critic"]
    assert {span.path: span.name for span in w.spans(scope, SpanKind.AGENT)} == {
        "SelectorGroupChat": "SelectorGroupChat",
        "SelectorGroupChat/SelectorGroupChatManager": "SelectorGroupChatManager",
        "SelectorGroupChat/critic": "critic",
    }


def test_hand_offs_there_and_back(world):
    def script(request: dict[str, Any]) -> Any:
        goal = {"triage": "billing", "billing": "triage"}[programs.told(request)]
        count = sum(message["role"] == "tool" for message in request["messages"])
        return "paid" if count > 1 else programs.calls(f"transfer_to_{goal}", id=f"call_{goal}_{count}")

    async def program(model: ChatCompletionClient) -> None:
        team = programs.swarm(model)
        team._max_turns = 3
        await team.run(task="q")

    scope, paths = run(w := world(script), program)
    assert paths == ["Swarm/triage", "Swarm/billing", "Swarm/triage"]
    assert edges(w, scope) == [("Swarm/triage", "Swarm/billing"), ("Swarm/billing", "Swarm/triage")]
    assert w.spans(scope, SpanKind.TOOL) == [], "a hand-off is no tool"
    first = next(span for span in w.spans(scope) if span.path == "Swarm/triage")
    assert first.attributes["agl.handoff.to"] == "Swarm/billing"


def test_a_hand_off_to_the_user_is_no_edge(world):
    """Nor does it leak into the run in which the user hands back."""

    async def program(model: ChatCompletionClient) -> None:
        helper = agent("helper", model, handoffs=["user"])
        team = Swarm([helper, agent("other", model)], termination_condition=HandoffTermination("user"))
        await team.run(task="q")
        back = HandoffMessage(source="user", target="helper", content="here you are")
        await team.run(task=back)

    scope, paths = run(w := world(lambda request: programs.calls("transfer_to_user")), program)
    assert paths == ["Swarm/helper"] * 2
    assert edges(w, scope) == []
    assert not any("agl.handoff.to" in span.attributes for span in w.spans(scope))


def test_b50_a_society_inside_a_team(world):
    """The inner talk belongs to the inner agents, once; the outer team is as long as without it."""

    async def program(model: ChatCompletionClient) -> None:
        inner = round_robin(agent("poet", model), agent("editor", model))
        society = SocietyOfMindAgent("society", inner, model)
        result = await round_robin(society, agent("critic", model)).run(task="q")
        assert [message.source for message in result.messages if message.type == "TextMessage"][-1] == "critic"

    scope, paths = run(w := world("fine"), program)
    inside = "RoundRobinGroupChat/society/RoundRobinGroupChat"
    outer = ["RoundRobinGroupChat/society", "RoundRobinGroupChat/critic"]
    assert paths == [f"{inside}/poet", f"{inside}/editor", *outer]
    turns = [span.path for span in w.spans(scope, SpanKind.AGENT)]
    assert sorted(turns) == sorted(["RoundRobinGroupChat", inside, *paths])


def test_b50_an_agent_as_a_tool(world):
    from autogen_agentchat.tools import AgentTool

    async def program(model: ChatCompletionClient) -> None:
        helper = AgentTool(agent("helper", model))
        await agent("boss", model, tools=[helper], reflect_on_tool_use=True).run(task="q")

    scope, paths = run(
        w := world(programs.call_once("helper", {"task": "help me"})), program, parallel_tool_calls=False
    )
    assert paths == ["boss", "boss/helper", "boss"]
    (tool,) = w.spans(scope, SpanKind.TOOL)
    assert (tool.name, tool.path, tool.status) == ("helper", "boss", "ok")
    inner = next(span for span in w.spans(scope, SpanKind.AGENT) if span.path == "boss/helper")
    assert inner.parent_id == tool.id


@programs.named
def test_b50_a_team_as_a_tool(world):
    from autogen_agentchat.tools import TeamTool

    async def program(model: ChatCompletionClient) -> None:
        team = round_robin(agent("poet", model), agent("editor", model), name="writers")
        tool = TeamTool(team, name="write", description="It writes.")
        await agent("boss", model, tools=[tool], reflect_on_tool_use=True).run(task="q")

    _, paths = run(world(programs.call_once("write", {"task": "a poem"})), program, parallel_tool_calls=False)
    assert paths == ["boss", "boss/writers/poet", "boss/writers/editor", "boss"]


@programs.named
def test_a_team_in_a_team(world):
    def program(model: ChatCompletionClient) -> Awaitable[Any]:
        writers = round_robin(agent("poet", model), agent("editor", model), name="writers")
        return round_robin(writers, agent("critic", model), name="house").run(task="q")

    _, paths = run(world(), program)
    assert paths == ["house/writers/poet", "house/writers/editor", "house/critic"]


def test_a_runtime_that_was_started_before(world):
    """Its tasks know nothing of the team; the team's members work in the team all the same."""

    async def program(model: ChatCompletionClient) -> None:
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
        await round_robin(agent("writer", model), runtime=runtime).run(task="q")
        await runtime.stop()

    assert run(world(), program)[1] == ["RoundRobinGroupChat/writer"]


def test_the_programs_own_agent_blocks_nest_with_teams(world):
    async def program(model: ChatCompletionClient) -> None:
        with agl.agent("house"):
            await agent("writer", model).run(task="q")

    assert run(world(), program)[1] == ["house/writer"]
