"""OpenAI Agents: its spans say who is at work, its models say when a request leaves.

The SDK makes a span object for every agent, tool and guardrail, also where tracing is off (a `NoOpSpan` then): listening
to these objects works in both cases, and leaves every processor, exporter and provider of the user's as it is. Model
calls are heard at the SDK's own interface, `Model.get_response`, whoever wrote the model. What is open is kept on the
attempt (`Scope.memory`), never here: it goes when the attempt goes.

Agent path: names from the outside in. An agent that is used as a tool is below the one that uses it; one that was
handed over to is below the one that gave, `triage/billing`. Who is handed back to is at its own place again, `triage`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from agents.models.interface import Model
from agents.tool_context import ToolContext
from agents.tracing import get_current_trace
from agents.tracing.spans import NoOpSpan, SpanImpl

from agentlightning.context import Scope, Token, join, reset_scope, set_scope, surrounding
from agentlightning.hooks import hookimpl
from agentlightning.listening import Installation, Patches, guarded, path_of
from agentlightning.plain import brief
from agentlightning.schema import Span, SpanKind, leaf
from agentlightning_adapters.openai_agents_models import hear_models

_HEARD = "_agl_heard"
"""The attribute of an SDK span that is open and heard; it goes with the span."""


class Place(NamedTuple):
    """Where an agent stands: what is around its run, and who handed over to whom in the run."""

    base: str
    chain: tuple[str, ...]

    @property
    def path(self) -> str:
        return join(self.base, *self.chain)

    def handed_to(self, name: str) -> Place:
        """The place of the taker; one that gave before is where it was, so that paths do not grow in circles."""
        end = self.chain.index(name) + 1 if name in self.chain else 0
        return Place(self.base, self.chain[:end] or (*self.chain, name))


class Heard:
    """An agent, tool or guardrail that has begun."""

    __slots__ = ("before", "error", "goal", "home", "place", "span", "token")

    def __init__(self, span: Span, scope: Scope, place: Place | None = None) -> None:
        self.span = span
        self.place = place
        """Of agents only."""
        self.goal: str | None = None
        """The agent that this one handed over to."""
        self.error: BaseException | str | None = None
        """What went wrong in it, as far as we were told."""
        self.before = sys.exception()
        """What the program was handling already: no trouble of this span."""
        self.home = scope
        self.token: Token = set_scope(scope.inside(span))
        _open(scope)[span.id] = self


class Handed(NamedTuple):
    """An agent has left; the one that it handed over to has not begun."""

    trace: object
    scope: Scope
    place: Place
    goal: str


_handed: ContextVar[Handed | None] = ContextVar("agl_openai_agents_handed", default=None)


def _open(scope: Scope) -> dict[str, Heard]:
    """What is open in the attempt, by the id of our span."""
    return scope.memory.kept.setdefault((__name__, "open"), {})  # type: ignore[no-any-return]


def _around() -> Heard | None:
    """The innermost agent, tool or guardrail around this code."""
    scope = surrounding()
    if scope is None:
        return None
    heard = _open(scope)
    return next((heard[span] for span in scope.memory.up(scope.span_id) if span in heard), None)


def _run() -> object:
    """Stands for the run of the SDK that this code is in: equal within a run, and with nothing after it."""
    trace = get_current_trace()
    return weakref.ref(trace) if trace is not None else None


@guarded
def _begin(span: Any) -> None:
    """The SDK begins something, in the task that will do it."""
    begin = _BEGINNINGS.get(span.span_data.type)
    scope = surrounding() if begin is not None else None
    if begin is None or scope is None or scope.recorder is None or _HEARD in span.__dict__:
        return
    setattr(span, _HEARD, begin(span.span_data, scope))


def _agent(data: Any, scope: Scope) -> Heard:
    name, told = path_of(data.name), {"gen_ai.operation.name": "invoke_agent"}
    place, handed = Place(scope.path, (name,)), _handed.get()
    _handed.set(None)
    if handed is not None and (handed.goal, handed.trace) == (name, _run()) and handed.scope.memory is scope.memory:
        place = handed.place.handed_to(name)
        told["agl.handoff.from"] = handed.place.path
    return Heard(_start(SpanKind.AGENT, leaf(place.path), place.path, told, scope), scope, place)


def _tool(data: Any, scope: Scope) -> Heard:
    name = str(data.name)
    told = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
    return Heard(_start(SpanKind.TOOL, name, scope.path, told, scope), scope)


def _guardrail(data: Any, scope: Scope) -> Heard:
    return Heard(_start(SpanKind.OPERATION, str(data.name), scope.path, {}, scope), scope)


_BEGINNINGS: dict[str, Callable[[Any, Scope], Heard]] = {"agent": _agent, "function": _tool, "guardrail": _guardrail}
"""What we hear of, by the SDK's word for it."""


def _start(kind: SpanKind, name: str, path: str, told: dict[str, Any], scope: Scope) -> Span:
    if path:
        told["gen_ai.agent.name"] = leaf(path)
    assert scope.recorder is not None  # as `_begin` made sure of
    return scope.recorder.start(kind, name, path=path, attributes=told, scope=scope)


@guarded
def _end(span: Any) -> None:
    """The SDK ends something, well or not."""
    if span.span_data.type == "handoff":
        _hand_over(span.span_data)
    heard: Heard | None = span.__dict__.pop(_HEARD, None)
    if heard is None:
        return
    reset_scope(heard.token)
    _open(heard.home).pop(heard.span.id, None)
    raised = sys.exception()
    if raised is heard.before:
        raised = None
    told = _said(span.span_data)
    error: BaseException | str | None = raised or heard.error
    if isinstance(raised, GeneratorExit):
        error, told["agl.stopped_early"] = None, True
    if heard.place is not None and heard.goal is not None and error is None:
        _handed.set(Handed(_run(), heard.home, heard.place, heard.goal))
        told["agl.handoff.to"] = heard.place.handed_to(heard.goal).path
    if heard.home.recorder is not None:
        heard.home.recorder.end(heard.span, error=error, attributes=told)


def _hand_over(data: Any) -> None:
    """The taker is known only when the hand-off is over."""
    giver = _around()
    if giver is not None and giver.place is not None and data.to_agent is not None:
        giver.goal = path_of(data.to_agent)


def _said(data: Any) -> dict[str, Any]:
    """What an ended span of the SDK tells beyond its name."""
    if data.type == "function":
        told = {"gen_ai.tool.call.arguments": data.input, "gen_ai.tool.call.result": data.output}
    elif data.type == "guardrail":
        told = {"openai_agents.guardrail.triggered": bool(data.triggered)}
    else:
        told = {f"openai_agents.{key}": getattr(data, key) for key in ("handoffs", "tools", "output_type")}
    return {key: brief(value) for key, value in told.items() if value is not None}


def _told(error: Any) -> str | None:
    """An error as the SDK writes it into spans: a message, and data that says more."""
    if not error:
        return None
    detail = (error.get("data") or {}).get("error")
    return f"{error['message']}: {detail}" if detail else str(error["message"])


@guarded
def _note_error(span: Any, error: Any) -> None:
    """What went wrong, though the program may go on: the SDK says so while it handles it, and may black out why."""
    heard: Heard | None = span.__dict__.get(_HEARD)
    if heard is not None:
        raised = sys.exception()
        heard.error = raised if raised is not None and raised is not heard.before else _told(error)


@guarded
def _note_call(context: Any) -> None:
    """Which of the model's tool calls is being done: the SDK says so only to the tool."""
    heard = _around()
    if heard is not None and heard.span.kind is SpanKind.TOOL:
        heard.span.attributes.setdefault("gen_ai.tool.call.id", context.tool_call_id)


def listen(patches: Patches) -> None:
    """Puts our ears into the SDK."""
    for kind in (SpanImpl, NoOpSpan):
        patches.replace(kind, "start", functools.partial(_starting, patches))
        patches.replace(kind, "finish", _finishing)
        patches.replace(kind, "set_error", _failing)
    patches.replace(ToolContext, "from_agent_context", _calling)
    hear_models(patches, Model)


def _starting(patches: Patches, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(span: Any, mark_as_current: bool = False) -> None:
        original(span, mark_as_current)
        if mark_as_current and patches.active:
            _begin(span)

    return start


def _finishing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def finish(span: Any, reset_current: bool = False) -> None:
        _end(span)
        original(span, reset_current)

    return finish


def _failing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_error(span: Any, error: Any) -> None:
        _note_error(span, error)
        original(span, error)

    return set_error


def _calling(original: classmethod[Any, ..., Any]) -> classmethod[Any, ..., Any]:
    @functools.wraps(original.__func__)
    def from_agent_context(kind: Any, *args: Any, **kwargs: Any) -> Any:
        context = original.__func__(kind, *args, **kwargs)
        _note_call(context)
        return context

    return classmethod(from_agent_context)


_installation = Installation(listen)


@hookimpl
def agl_install() -> Callable[[], None]:
    """Listens to every run of the SDK in this process; returns the undo."""
    return _installation.add()
