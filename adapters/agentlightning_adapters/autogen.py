"""AutoGen (AgentChat): its teams, agents and tools say who is at work, its model clients say when a request leaves.

We listen at the framework's own interfaces, whoever wrote the class behind them: `run_stream` of teams, `on_messages` and
`on_messages_stream` of agents, `call_tool` and `run_json` of tools, `create` and `create_stream` of model clients. What
is open is kept on the attempt (`Scope.memory`), never here: it goes when the attempt goes.

Agent path: names from the outside in, `team/writer`. A team that was given no name bears that of its class, as AutoGen
itself says. An agent that is a tool is below the one that uses it, the team inside a SocietyOfMindAgent below that agent.
A model call of a team itself, such as the choice of the next speaker, is by its manager: `team/SelectorGroupChatManager`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.teams import BaseGroupChat
from autogen_agentchat.teams._group_chat._sequential_routed_agent import SequentialRoutedAgent
from autogen_core import models, tools

from agentlightning.context import Scope, join, reset_scope, set_scope, surrounding
from agentlightning.hooks import hookimpl
from agentlightning.listening import Ear, Installation, Patches, attend, guarded, hear_subclasses, path_of, relay
from agentlightning.plain import brief
from agentlightning.schema import Span, SpanKind, leaf
from agentlightning_adapters.autogen_models import begin_call


class Heard:
    """A team, agent or tool at work."""

    lasting = True

    def __init__(self, who: object, span: Span, scope: Scope) -> None:
        self.who = who
        """The framework's object."""
        self.scope = scope.inside(span)
        self.said: dict[str, Any] = {}
        self.error: BaseException | str | None = None
        """What went wrong in it, though the program goes on."""
        self.complete = False
        """All has been said; what is left may be left."""
        self._span = span
        _open(scope)[span.id] = self

    @guarded
    def hear(self, answer: Any) -> None:
        """What it returned, or each thing that it yielded."""

    @guarded
    def end(self, error: BaseException | None = None) -> None:
        _open(self.scope).pop(self._span.id, None)
        if isinstance(error, GeneratorExit):
            error = None
            if not self.complete:
                self.said["agl.stopped_early"] = True
        if self.scope.recorder is not None:
            self.scope.recorder.end(self._span, error=error or self.error, attributes=self.said)


class Team(Heard):
    """A run of a group chat."""

    handed: tuple[str, str] | None = None
    """A participant that will begin, and the path of the one that handed over to it."""

    @guarded
    def hear(self, answer: Any) -> None:
        if hasattr(answer, "stop_reason"):
            self.complete = True
            self.said["autogen.stop_reason"] = answer.stop_reason

    def manager(self) -> Heard:
        """Begins the one that leads the talk; the framework does not say when, so it is there while it asks a model."""
        path = join(self.scope.path, path_of(getattr(self.who, "_group_chat_manager_name", "GroupChatManager")))
        return Heard(self.who, _agent_span(path, self.scope, {}), self.scope)


class Agent(Heard):
    """A turn of an agent."""

    team: Team | None = None
    """Where it takes part."""

    @guarded
    def hear(self, answer: Any) -> None:
        message = getattr(answer, "chat_message", None)
        if message is None:
            return
        self.complete = True
        self.said["output"] = brief(getattr(message, "content", None))
        goal = getattr(message, "target", None)
        if self.team is not None and goal is not None and goal in self.team.who._participant_names:  # type: ignore[attr-defined]
            self.said["agl.handoff.to"] = join(self.team.scope.path, path_of(goal))
            self.team.handed = goal, self.scope.path


class Tool(Heard):
    """A use of a tool."""

    begun = False
    """Whether the workbench has come to the tool itself."""
    answer: Any = None

    def hear(self, answer: Any) -> None:
        self.answer = answer

    @guarded
    def end(self, error: BaseException | None = None) -> None:
        text = getattr(self.answer, "result", self.answer)
        if isinstance(text, list):
            text = "\n".join(str(part.content) for part in text)
        if self.answer is not None:
            self.said["gen_ai.tool.call.result"] = brief(text)
        if getattr(self.answer, "is_error", False) and self.error is None:
            self.error = f"tool error: {brief(text)}"
        super().end(error)


class InTheTool:
    """The tool itself, inside a workbench that turns what it raises into text."""

    lasting = True

    def __init__(self, tool: Tool) -> None:
        tool.begun = True
        self.scope = tool.scope
        self._tool = tool

    def hear(self, answer: Any) -> None:
        """The workbench tells."""

    def end(self, error: BaseException | None = None) -> None:
        self._tool.error = error if isinstance(error, Exception) else None


_teams: WeakValueDictionary[str, Team] = WeakValueDictionary()
"""Finds a team that is at work by AutoGen's id for it; the attempt's memory is what keeps it alive."""


def _open(scope: Scope) -> dict[str, Heard]:
    """What is open in the attempt, by the id of our span."""
    return scope.memory.kept.setdefault((__name__, "open"), {})  # type: ignore[no-any-return]


def _around() -> tuple[Scope, Heard | None] | None:
    """Where we are, and the innermost of what is at work; None where nobody wants to know."""
    scope = surrounding()
    if scope is None or scope.recorder is None:
        return None
    heard = _open(scope)
    return scope, next((heard[span] for span in scope.memory.up(scope.span_id) if span in heard), None)


def _agent_span(path: str, scope: Scope, told: dict[str, Any]) -> Span:
    given = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": leaf(path), **told}
    assert scope.recorder is not None  # as `_around` made sure of
    return scope.recorder.start(SpanKind.AGENT, leaf(path), path=path, attributes=given, scope=scope)


@guarded
def _begin_team(team: Any) -> Team | None:
    found = _around()
    if found is None:
        return None
    scope, around = found
    if isinstance(around, Team) and around.who is team:
        return None  # its own method, called by that of a subclass
    path = join(scope.path, path_of(getattr(team, "name", type(team).__name__)))
    _teams[team._team_id] = begun = Team(team, _agent_span(path, scope, {}), scope)
    return begun


@guarded
def _begin_agent(agent: Any) -> Agent | None:
    found = _around()
    if found is None:
        return None
    scope, around = found
    if isinstance(around, Agent) and around.who is agent:
        return None  # one of the two methods, called by the other
    told, path = {}, join(scope.path, path_of(agent.name))
    team = around if isinstance(around, Team) and agent.name in around.who._participant_names else None  # type: ignore[attr-defined]
    if team is not None:
        if team.handed is not None and team.handed[0] == agent.name:
            told["agl.handoff.from"] = team.handed[1]
        team.handed = None
    begun = Agent(agent, _agent_span(path, scope, told), scope)
    begun.team = team
    return begun


@guarded
def _begin_use(bench: Any, name: str, arguments: Any = None, *_: Any, **more: Any) -> Tool | None:
    """A workbench is asked for a tool."""
    found = _around()
    if found is None:
        return None
    scope, around = found
    if isinstance(around, Tool) and around.who is bench and not around.begun:
        return None
    return Tool(bench, _tool_span(name, arguments, more.get("call_id"), scope), scope)


@guarded
def _begin_tool(tool: Any, arguments: Any, *_: Any, **more: Any) -> Ear | None:
    """A tool is used, by a workbench or straight away. The tools that AutoGen makes for hand-offs are none."""
    found = _around()
    if found is None:
        return None
    scope, around = found
    if isinstance(around, Tool) and not around.begun and around.who is not tool:
        return InTheTool(around)
    ours = isinstance(around, Tool) and around.who is tool
    if ours or (isinstance(around, Agent) and tool.name in (getattr(around.who, "_handoffs", None) or ())):
        return None
    begun = Tool(tool, _tool_span(tool.name, arguments, more.get("call_id"), scope), scope)
    begun.begun = True
    return begun


def _tool_span(name: str, arguments: Any, call_id: object, scope: Scope) -> Span:
    told = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": call_id,
        "gen_ai.tool.call.arguments": brief(arguments),
        "gen_ai.agent.name": leaf(scope.path) or None,
    }
    given = {key: value for key, value in told.items() if value is not None}
    assert scope.recorder is not None  # as `_around` made sure of
    return scope.recorder.start(SpanKind.TOOL, name, path=scope.path, attributes=given, scope=scope)


@guarded
def _begin_call(client: Any, *_: Any, **given: Any) -> Ear | None:
    """A team that asks a model does so by its manager."""
    found = _around()
    team = found[1] if found is not None else None
    return begin_call(client, given, team.manager if isinstance(team, Team) else None) if found is not None else None


Begin = Callable[..., Ear | None]


def _coroutine(patches: Patches, begin: Begin) -> Callable[[Any], Any]:
    """Hears a method that is awaited; `begin` is given what the method is."""

    def make(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(original)
        async def method(*args: Any, **kwargs: Any) -> Any:
            ear = begin(*args, **kwargs) if patches.active else None
            return await attend(lambda: original(*args, **kwargs), ear)

        return method

    return make


def _generator(patches: Patches, begin: Begin) -> Callable[[Any], Any]:
    """Hears a method that yields."""

    def make(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            events = original(*args, **kwargs)
            return relay(events, lambda: begin(*args, **kwargs)) if patches.active else events

        return method

    return make


def _in_the_team(patches: Patches, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Members work in the team's scope, also on a runtime that was started elsewhere."""

    @functools.wraps(original)
    async def on_message_impl(member: Any, *args: Any, **kwargs: Any) -> Any:
        team = _teams.get(member.id.key) if patches.active else None
        if team is None:
            return await original(member, *args, **kwargs)
        token = set_scope(team.scope)
        try:
            return await original(member, *args, **kwargs)
        finally:
            reset_scope(token)

    return on_message_impl


def listen(patches: Patches) -> None:
    """Puts our ears into the framework."""
    awaited, yielded = functools.partial(_coroutine, patches), functools.partial(_generator, patches)
    hear_subclasses(patches, BaseGroupChat, {"run_stream": yielded(lambda team, **_: _begin_team(team))})
    turn = {
        "on_messages": awaited(lambda agent, *_, **__: _begin_agent(agent)),
        "on_messages_stream": yielded(lambda agent, *_, **__: _begin_agent(agent)),
    }
    hear_subclasses(patches, BaseChatAgent, turn)
    hear_subclasses(
        patches, tools.BaseTool, {"run_json": awaited(_begin_tool), "run_json_stream": yielded(_begin_tool)}
    )
    use = {"call_tool": awaited(_begin_use), "call_tool_stream": yielded(_begin_use)}
    hear_subclasses(patches, tools.Workbench, use)
    calls = {"create": awaited(_begin_call), "create_stream": yielded(_begin_call)}
    hear_subclasses(patches, models.ChatCompletionClient, calls)
    patches.replace(SequentialRoutedAgent, "on_message_impl", functools.partial(_in_the_team, patches))


_installation = Installation(listen)


@hookimpl
def agl_install() -> Callable[[], None]:
    """Listens to every team and agent of this process; returns the undo."""
    return _installation.add()
