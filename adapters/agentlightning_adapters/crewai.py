"""CrewAI: its own methods say who is at work, its events which tool, and both run where the request will leave.

Handlers on CrewAI's event bus run in other threads, too late to mark a request. So we listen at the methods themselves:
a task's work, an agent's, a model's call; and at the bus's `emit`, which runs in place, for tools. What is open is kept
on the attempt (`Scope.memory`), never here: it goes when the attempt goes.

Agent path: an agent's role, below the crew's name where it was given one (`support/triage`). A coworker that is
delegated to is below the agent that delegates, `manager/researcher`, and its span says who gave it the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from crewai import Crew, Task
from crewai.agents.agent_builder.base_agent import BaseAgent
from crewai.events.event_bus import CrewAIEventsBus
from crewai.events.types.llm_events import LLMCallCompletedEvent
from crewai.events.types.tool_usage_events import ToolUsageErrorEvent, ToolUsageFinishedEvent, ToolUsageStartedEvent
from crewai.lite_agent import LiteAgent
from crewai.tools.agent_tools.base_agent_tools import BaseAgentTool

from agentlightning.context import Scope, Token, join, reset_scope, set_scope, surrounding
from agentlightning.hooks import hookimpl
from agentlightning.listening import Installation, Patches, guarded, hear_subclasses, path_of
from agentlightning.plain import brief
from agentlightning.schema import Span, SpanKind, leaf
from agentlightning_adapters.crewai_models import hear_models, heard, heard_async, note_answer, opened

_UNNAMED = ("", "crew")
"""What a crew is called that was given no name."""


class Work:
    """A crew, agent or tool that has begun."""

    lasting = True

    def __init__(self, kind: SpanKind, name: str, path: str, told: dict[str, Any], around: Scope, doer: Any) -> None:
        if path:
            told["gen_ai.agent.name"] = leaf(path)
        assert around.recorder is not None  # as `_here` made sure of
        given = {key: value for key, value in told.items() if value is not None}
        self.span: Span = around.recorder.start(kind, name, path=path, attributes=given, scope=around)
        self.scope = around.inside(self.span)
        self.doer = doer
        """The crew or agent of CrewAI; None for tools."""
        self.delegates = False
        """Whether the agent that begins inside was given work by the one around."""
        self.token: Token | None = None
        """Of tools: how to leave the scope."""
        opened(around)[self.span.id] = self

    def hear(self, answer: Any) -> None:
        """The agents' answers are in their model calls."""

    @guarded
    def end(self, error: BaseException | str | None = None, told: dict[str, Any] | None = None) -> None:
        everything = opened(self.scope)
        everything.pop(self.span.id, None)
        for left in [one for one in list(everything.values()) if self.is_around(one.span)]:
            left.end(error or f"{self.span.name} ended before it")
        if self.token is not None:
            reset_scope(self.token)
        if self.scope.recorder is not None:
            self.scope.recorder.end(self.span, error=error, attributes=told)

    def is_around(self, span: Span) -> bool:
        return self.span.id in self.scope.memory.up(span.parent_id or "")


def _here() -> Scope | None:
    """The scope to record in; None where nothing is recorded."""
    scope = surrounding()
    return scope if scope is not None and scope.recorder is not None else None


def _around(scope: Scope) -> Work | None:
    """The innermost crew, agent or tool around this code."""
    works = opened(scope)
    return next((works[span] for span in scope.memory.up(scope.span_id) if span in works), None)


@guarded
def _begin_crew(crew: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
    """A named crew. One that streams is asked again, from the thread or task that does the work."""
    scope, name = _here(), (crew.name or "").strip()
    if scope is None or name in _UNNAMED or crew.stream:
        return None
    around = _around(scope)
    if around is not None and around.doer is crew:  # kickoff_async does no more than kickoff, in a thread
        return None
    return _agent(name, {}, scope, crew)


@guarded
def _begin_task(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
    """All that an agent does for a task: its turns, the conversion of its answer, the guardrails and what they repeat."""
    agent = kwargs.get("agent", args[0] if args else None) or task.agent
    return _work_of(agent, task) if agent is not None else None


@guarded
def _begin_agent(agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work | None:
    """An agent at work: on a task that we have not heard of, on a coworker's, or on its own."""
    return _work_of(agent, kwargs.get("task", args[0] if args else None))


def _work_of(agent: Any, task: Any) -> Work | None:
    scope = _here()
    if scope is None:
        return None
    around = _around(scope)
    if around is not None and around.doer is agent:  # a task's agent begins, or kickoff asks kickoff_async
        return None
    told = {"crewai.task.name": getattr(task, "name", None)}
    if around is not None and around.delegates:
        told["agl.handoff.from"] = around.span.path
    return _agent(agent.role, told, scope, agent)


def _agent(said: str, told: dict[str, Any], scope: Scope, doer: Any) -> Work:
    path = join(scope.path, path_of(said))
    return Work(SpanKind.AGENT, leaf(path), path, {"gen_ai.operation.name": "invoke_agent", **told}, scope, doer)


def _begin_tool(event: Any) -> None:
    scope = _here()
    if scope is None:
        return
    told = _named(event) | {"gen_ai.tool.call.arguments": brief(event.tool_args)}
    work = Work(SpanKind.TOOL, str(event.tool_name), scope.path, told, scope, None)
    work.token = set_scope(work.scope)


def _end_tool(event: Any) -> None:
    """Ends the tool around this code. One that never began, for its input made no sense, is told as it is."""
    scope = _here()
    if scope is None or scope.recorder is None:
        return
    failure = getattr(event, "failure", None)
    error = getattr(event, "error", None) or (failure.message if failure is not None else None)
    if error is not None and not isinstance(error, BaseException):
        error = str(error)
    told = {"gen_ai.tool.call.result": brief(event.output)} if error is None else {}
    if getattr(event, "from_cache", False):
        told["crewai.tool.from_cache"] = True
    work = _around(scope)
    if work is not None and work.span.kind is SpanKind.TOOL:
        work.end(error, told)
        return
    told |= _named(event) | {"crewai.tool.never_began": True}
    if scope.path:
        told["gen_ai.agent.name"] = leaf(scope.path)
    orphan = scope.recorder.start(SpanKind.TOOL, str(event.tool_name), attributes=told, scope=scope)
    scope.recorder.end(orphan, error=error)


def _named(event: Any) -> dict[str, Any]:
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": str(event.tool_name)}


_EVENTS: dict[type, Callable[[Any], None]] = {
    ToolUsageStartedEvent: _begin_tool,
    ToolUsageFinishedEvent: _end_tool,
    ToolUsageErrorEvent: _end_tool,
    LLMCallCompletedEvent: note_answer,
}
"""What we hear of on the bus."""


@guarded
def _notice(event: Any) -> None:
    note = _EVENTS.get(type(event))
    if note is not None:
        note(event)


def _emitting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def emit(bus: Any, source: Any, event: Any) -> Any:
        _notice(event)
        return original(bus, source, event)

    return emit


@guarded
def _begin_delegation() -> Work | None:
    scope = _here()
    around = _around(scope) if scope is not None else None
    if around is not None:
        around.delegates = True
    return around


def _delegating(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute(tool: Any, *args: Any, **kwargs: Any) -> Any:
        work = _begin_delegation()
        try:
            return original(tool, *args, **kwargs)
        finally:
            if work is not None:
                work.delegates = False

    return execute


def listen(patches: Patches) -> None:
    """Puts our ears into CrewAI."""

    def sync(begin: Any) -> Any:
        return functools.partial(heard, patches, begin)

    def asynchronous(begin: Any) -> Any:
        return functools.partial(heard_async, patches, begin)

    patches.replace(Crew, "kickoff", sync(_begin_crew))
    patches.replace(Crew, "kickoff_async", asynchronous(_begin_crew))
    patches.replace(Crew, "akickoff", asynchronous(_begin_crew))
    patches.replace(Task, "_execute_core", sync(_begin_task))
    patches.replace(Task, "_aexecute_core", asynchronous(_begin_task))
    alone = {"kickoff": sync(_begin_agent), "kickoff_async": asynchronous(_begin_agent)}
    on_task = {"execute_task": sync(_begin_agent), "aexecute_task": asynchronous(_begin_agent)}
    hear_subclasses(patches, BaseAgent, alone | on_task)
    hear_subclasses(patches, LiteAgent, alone)
    patches.replace(CrewAIEventsBus, "emit", _emitting)
    patches.replace(BaseAgentTool, "_execute", _delegating)
    hear_models(patches)


_installation = Installation(listen)


@hookimpl
def agl_install() -> Callable[[], None]:
    """Listens to every crew, agent and model of CrewAI in this process; returns the undo."""
    return _installation.add()
