"""What goes wrong, is left, or happens at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import context
from agentlightning.errors import PluginError
from agentlightning.schema import SpanKind
from tests.adapters.autogen.test_teams import prove, run
from tests.fakes.engine import Fault

pytest.importorskip("autogen_agentchat", reason="the autogen extra is not installed")

from autogen_core import CancellationToken
from autogen_core.models import ChatCompletionClient
from autogen_ext.models.cache import ChatCompletionCache

from tests.adapters.autogen import programs
from tests.adapters.autogen.programs import agent, round_robin


def test_it_takes_no_object():
    with pytest.raises(PluginError, match="use `agl.install"):
        agl.callback("autogen")


def test_a_member_that_breaks(world):
    """Its turn and the team's run fail; the program gets what AutoGen makes of it."""

    async def program(model: ChatCompletionClient) -> None:
        team = round_robin(agent("writer", model), programs.Broken("broken", LookupError("no luck")))
        with pytest.raises((RuntimeError, LookupError), match="no luck"):
            await team.run(task="q")

    scope, paths = run(w := world(), program)
    assert paths == ["RoundRobinGroupChat/writer"]
    turns = {span.path: (span.status, span.error) for span in w.spans(scope, SpanKind.AGENT)}
    assert turns["RoundRobinGroupChat/writer"] == ("ok", None)
    assert turns["RoundRobinGroupChat/broken"] == ("error", "LookupError: no luck")
    assert turns["RoundRobinGroupChat"][0] == "error"


def test_a_server_that_refuses(world):
    async def program(model: ChatCompletionClient) -> None:
        with pytest.raises(Exception, match="500"):
            await agent("writer", model).run(task="q")

    scope, _ = run(w := world(lambda request: Fault("status", status=500)), program)
    assert {(span.kind, span.status) for span in w.spans(scope)} == {(SpanKind.AGENT, "error"), (SpanKind.LLM, "error")}


def test_a_team_that_is_cancelled(world):
    """By AutoGen's own token."""

    async def program(model: ChatCompletionClient) -> None:
        token = CancellationToken()
        running = asyncio.create_task(round_robin(agent("writer", model)).run(task="q", cancellation_token=token))
        while not w.engine.requests:
            await asyncio.sleep(0.001)
        token.cancel()
        with contextlib.suppress(asyncio.CancelledError, RuntimeError):
            await running

    scope, paths = run(w := world(lambda request: Fault("hang")), program)
    assert paths == ["RoundRobinGroupChat/writer"]
    assert {span.status for span in w.spans(scope)} == {"error"}


def test_a_team_that_is_left(world):
    """Nothing of it is in force in the program; what it still does belongs to it."""

    async def program(model: ChatCompletionClient) -> None:
        before = context.current()
        stream = round_robin(agent("writer", model), agent("critic", model)).run_stream(task="q")
        async for message in stream:
            if getattr(message, "source", "") == "writer":
                break
        assert context.current() is before
        await stream.aclose()

    scope, paths = run(w := world("fine"), program)
    assert paths == ["RoundRobinGroupChat/writer", "RoundRobinGroupChat/critic"]
    (team,) = [span for span in w.spans(scope) if span.path == "RoundRobinGroupChat"]
    assert (team.status, team.attributes["agl.stopped_early"]) == ("ok", True)


def test_a_tool_that_is_not_there(world):
    async def program(model: ChatCompletionClient) -> None:
        await agent("helper", model, tools=[programs.look_up], reflect_on_tool_use=True).run(task="q")

    scope, paths = run(w := world(programs.call_once("look_down", {"word": "x"})), program)
    assert paths == ["helper", "helper"]
    assert {span.status for span in w.spans(scope, SpanKind.TOOL)} <= {"error"}, (
        "newer releases do not even look for it"
    )


def test_b39_b47_two_uses_of_one_tool_at_once(world):
    def script(request: dict[str, Any]) -> Any:
        asked = [programs.calls("look_up", {"word": word}, f"call_{word}")["tool_calls"][0] for word in "ab"]
        return "done" if programs.answered(request) else {"content": "", "tool_calls": asked}

    async def program(model: ChatCompletionClient) -> None:
        await agent("helper", model, tools=[programs.look_up], reflect_on_tool_use=True).run(task="q")

    scope, _ = run(w := world(script), program)
    used = w.spans(scope, SpanKind.TOOL)
    assert [(s.attributes["gen_ai.tool.call.arguments"], s.attributes["gen_ai.tool.call.result"]) for s in used] == [
        ({"word": word}, f"{word} means {word}") for word in "ab"
    ]
    if programs.IDS_REACH_TOOLS:
        assert [span.attributes["gen_ai.tool.call.id"] for span in used] == ["call_a", "call_b"]


def test_b56_a_tool_in_a_thread_that_asks_a_model(world):
    """AutoGen runs a tool that is no coroutine in a pool of threads."""

    def ask() -> str:
        """Asks a model of its own."""
        return w.raw()

    async def program(model: ChatCompletionClient) -> None:
        await agent("helper", model, tools=[ask], reflect_on_tool_use=True).run(task="q")

    scope, paths = run(w := world(programs.call_once("ask")), program)
    assert paths == ["helper"] * 3
    (tool,) = w.spans(scope, SpanKind.TOOL)
    assert [arrival.span_id == tool.id for arrival in w.arrivals(scope.attempt_id)] == [False, True, False]


def test_b57_a_task_that_outlives_its_agent(world):
    started: list[asyncio.Task[str]] = []

    async def begin() -> str:
        """Starts a worker."""
        started.append(asyncio.create_task(late()))
        return "begun"

    async def late() -> str:
        await over.wait()
        return await w.raw_async()

    async def program(model: ChatCompletionClient) -> None:
        await agent("planner", model, tools=[begin]).run(task="q")
        over.set()
        await started[0]

    over = asyncio.Event()
    scope, paths = run(w := world(programs.call_once("begin")), program)
    assert paths == ["planner", "planner"]
    assert {arrival.attempt_id for arrival in w.arrivals()} == {scope.attempt_id}


def test_b55_b59_twenty_teams_at_once(world):
    async def program(model: ChatCompletionClient) -> None:
        teams = [round_robin(agent(f"a{i}", model), agent(f"b{i}", model)) for i in range(20)]
        await asyncio.gather(*(team.run(task=f"question {i}.") for i, team in enumerate(teams)))

    scope, paths = run(w := world("fine"), program)
    assert sorted(paths) == sorted(f"RoundRobinGroupChat/{letter}{i}" for letter in "ab" for i in range(20))
    for arrival in w.arrivals(scope.attempt_id):
        assert f"question {arrival.path.rpartition('/')[2][1:]}." in arrival.text


@pytest.mark.parametrize("asks", [True, False])
def test_b61_a_stream_counts_only_what_it_was_told(world, asks):
    async def program(model: ChatCompletionClient) -> None:
        await agent("writer", model, model_client_stream=True).run(task="q")

    options = {"stream_options": {"include_usage": True}} if asks else {}
    scope, _ = run(w := world("one two three"), program, **options)
    (call,) = w.spans(scope, SpanKind.LLM)
    assert ("gen_ai.usage.output_tokens" in call.attributes) is asks


def test_b63_a_users_own_tracer_goes_on(world):
    """AutoGen's own OpenTelemetry spans reach the provider that the program gave it."""
    from autogen_core import SingleThreadedAgentRuntime
    from opentelemetry.trace import NoOpTracer, NoOpTracerProvider

    names: list[str] = []

    class Tracer(NoOpTracer):
        def start_as_current_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return super().start_as_current_span(name, *args, **kwargs)

    class Provider(NoOpTracerProvider):
        def get_tracer(self, *args: Any, **kwargs: Any) -> Tracer:
            return Tracer()

    async def program(model: ChatCompletionClient) -> None:
        runtime = SingleThreadedAgentRuntime(tracer_provider=Provider())
        runtime.start()
        await round_robin(agent("writer", model), runtime=runtime).run(task="q")
        await runtime.stop()

    assert run(world(), program)[1] == ["RoundRobinGroupChat/writer"]
    assert any("writer" in name for name in names)


def test_a_cache_in_front_of_a_client_is_one_call(world):
    """And an answer out of the cache is one that makes no request."""

    async def program(model: ChatCompletionClient) -> None:
        cache = ChatCompletionCache(model)
        for _ in range(2):
            await agent("writer", cache).run(task="q")

    scope, paths = run(w := world("fine"), program)
    assert paths == ["writer"]
    assert [call.attributes.get("autogen.cached") for call in w.spans(scope, SpanKind.LLM)] == [None, True]


def test_settings_are_told(world):
    scope, _ = run(w := world(), lambda m: agent("writer", m).run(task="q"), temperature=0.5, seed=7, max_tokens=9)
    (call,) = w.spans(scope, SpanKind.LLM)
    told = {
        key: value for key, value in call.attributes.items() if key.startswith(("gen_ai.request", "gen_ai.provider"))
    }
    assert told == {
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "base",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 9,
    }


def test_a_class_that_is_made_while_we_listen(world):
    with agl.install("autogen"):

        class Late(programs.Broken):
            async def on_messages(self, *args: Any) -> Any:
                await w.raw_async()
                return await super().on_messages(*args)

        own = vars(Late)["on_messages"]
        with (w := world()).attempt() as scope, pytest.raises(LookupError):
            asyncio.run(Late("late", LookupError()).run(task="q"))
    assert prove(w, scope, {"chat"}) == ["late"]
    assert vars(Late)["on_messages"] is not own, "put back with the others"
    assert json.dumps([span.status for span in w.spans(scope, SpanKind.AGENT)]) == '["error"]'
