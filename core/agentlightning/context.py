"""Where we are: which attempt, agent and span the running code belongs to, and how that is written on the wire.

A `Scope` lives in one context variable, so it follows async tasks by itself. An attempt's id is a W3C trace id; the
headers `traceparent` and `baggage` therefore tell the gateway everything (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.schema import Span, SpanKind, leaf

if TYPE_CHECKING:
    from types import TracebackType

    from agentlightning.recorder import Recorder

AGENT_KEY = "agl.agent"
"""The baggage key of the agent path."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


class Memory:
    """What is remembered of one attempt while it runs. It hangs on the attempt's scopes, so it goes when they go."""

    __slots__ = ("calls", "kept", "parents")

    def __init__(self) -> None:
        self.parents: dict[str, str] = {}
        """Span id -> parent span id ("" at the root)."""
        self.calls: dict[str, str] = {}
        """Span id -> id of the latest model call below it."""
        self.kept: dict[Any, Any] = {}
        """Free for plug-ins; use your own module as the first part of the key."""

    def note(self, span: Span) -> None:
        """Remembers the place of a span that begins."""
        above = span.parent_id or ""
        if span.kind is not SpanKind.LLM:
            self.parents[span.id] = above
            return
        self.calls[span.id] = span.id
        for place in self.up(above):
            self.calls[place] = span.id

    def up(self, span_id: str) -> Iterator[str]:
        """`span_id`, its parent, and so on; "" is the last."""
        while span_id:
            yield span_id
            span_id = self.parents.get(span_id, "")
        yield ""

    def latest_call(self, span_id: str) -> str | None:
        """The latest model call below this span, else below the nearest span around it that has one."""
        return next((self.calls[place] for place in self.up(span_id) if place in self.calls), None)


class Scope(msgspec.Struct, frozen=True, eq=False):
    """One place in one attempt."""

    attempt_id: str
    path: str = ""
    """Agent path; "" where no agent is known."""
    span_id: str = ""
    """The span that is open here; "" at the root of the attempt."""
    recorder: Recorder | None = None
    memory: Memory = msgspec.field(default_factory=Memory)
    """Shared by all scopes that come from the same one."""

    def inside(self, span: Span) -> Scope:
        """The scope within a span of this attempt."""
        return Scope(self.attempt_id, span.path, span.id, self.recorder, self.memory)


class Token:
    """What `set_scope` returns: one entry of the stack of scopes."""

    __slots__ = ("above", "done", "lasting", "owner", "scope")

    def __init__(self, scope: Scope, above: Token | None, lasting: bool) -> None:
        self.scope = scope
        self.above = above
        self.lasting = lasting
        self.owner = _here() if lasting else None
        self.done = False

    def in_force(self) -> bool:
        """Once left, it holds only for tasks that were started inside, not for the one that entered.

        Frameworks end a run in another task than the one that began it, whose context cannot be reached from there.
        """
        return not self.done or (self.lasting and self.owner != _here())


def _here() -> object:
    """The running task (weakly), or the thread where there is none."""
    asyncio = sys.modules.get("asyncio")  # not imported, no task
    loop = asyncio._get_running_loop() if asyncio is not None else None
    task = asyncio.current_task(loop) if asyncio is not None and loop is not None else None
    return threading.get_ident() if task is None else weakref.ref(task)


_top: ContextVar[Token | None] = ContextVar("agl_scope", default=None)


def current() -> Scope | None:
    """The scope that this code runs in; None outside attempts."""
    token = _open(_top.get())
    return token.scope if token is not None else None


def surrounding() -> Scope | None:
    """Like `current`, without the scopes that do not last: the agent or tool around a model call that may be open."""
    token = _open(_top.get())
    while token is not None and not token.lasting:
        token = token.above
    return token.scope if token is not None else None


def set_scope(scope: Scope, *, lasting: bool = True) -> Token:
    """Enters a scope, for callbacks that cannot use a `with` block.

    `lasting`: tasks that were started inside keep it after its end, as for an agent whose helper still runs. A model
    call's scope does not last: after its end it is gone in every copy of the context, also where no one resets it.
    """
    token = Token(scope, _open(_top.get()), lasting)
    _top.set(token)
    return token


def reset_scope(token: Token) -> None:
    """Leaves a scope. Safe in any order, twice, and from another context than the one that entered."""
    token.done = True
    top = _top.get()
    live = _open(top)
    if live is not top:
        _top.set(live)


def _open(top: Token | None) -> Token | None:
    """The innermost entry in force. What was entered inside a lasting one is over with it, ended or not."""
    found = token = top
    while token is not None:
        if not token.in_force() and (token.lasting or token is found):
            found = token.above
        token = token.above
    return found


@contextmanager
def use(scope: Scope) -> Iterator[Scope]:
    """Runs the block in a scope."""
    token = set_scope(scope)
    try:
        yield scope
    finally:
        reset_scope(token)


class agent:
    """`with agl.agent("writer"):` all that happens in the block was done by the agent `writer`.

    Blocks nest: `writer` inside `team` is the path `team/writer`. Works the same in async code; outside an attempt it
    does nothing. Raises ConfigError for a name that cannot be a path.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not all(part.strip() for part in name.split("/")):
            raise ConfigError(f"agent name {name!r} cannot be used: give a non-empty name such as 'writer'.")
        self._name = name
        self._entered: dict[Token, Span | None] = {}

    def __enter__(self) -> None:
        scope = current()
        if scope is None:
            return
        path = join(scope.path, self._name)
        if scope.recorder is None:
            inner, span = Scope(scope.attempt_id, path, scope.span_id, None, scope.memory), None
        else:
            told = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": leaf(path)}
            span = scope.recorder.start(SpanKind.AGENT, self._name, path=path, attributes=told)
            inner = scope.inside(span)
        self._entered[set_scope(inner)] = span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token = _top.get()
        while token is not None and token not in self._entered:
            token = token.above
        if token is None:
            return
        reset_scope(token)
        span = self._entered.pop(token)
        if span is not None and token.scope.recorder is not None:
            token.scope.recorder.end(span, error=error)


def join(*paths: str) -> str:
    """Agent paths, outer to inner, as one."""
    return "/".join(path for path in paths if path)


def traceparent(scope: Scope) -> str:
    """The W3C header value. At the root of an attempt, which has no span, the first half of its id stands in."""
    return f"00-{scope.attempt_id}-{scope.span_id or scope.attempt_id[:16]}-01"


def parse_traceparent(header: str) -> tuple[str, str] | None:
    """`(trace id, span id)`, or None for a header that the standard calls invalid."""
    match = _TRACEPARENT.fullmatch(header.strip())
    if match is None:
        return None
    version, trace_id, span_id, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return trace_id, span_id


def baggage(scope: Scope, others: str = "") -> str:
    """The W3C header value: the agent path, after what is already in the header; "" when there is nothing to say."""
    if not others:
        return _member(scope.path)
    members = [member.strip() for member in others.split(",")]
    kept = [member for member in members if member and member.partition("=")[0].strip() != AGENT_KEY]
    return ",".join([*kept, _member(scope.path)] if scope.path else kept)


@functools.lru_cache(maxsize=1024)
def _member(path: str) -> str:
    return f"{AGENT_KEY}={quote(path, safe='', errors='replace')}" if path else ""


def parse_baggage(header: str) -> dict[str, str]:
    """Decoded members of the header, properties left out; what is malformed is skipped, as the standard asks."""
    found = {}
    for member in header.split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        if key.strip() and equals:
            found[key.strip()] = unquote(value.strip())
    return found


def propagate_to(root_url: str) -> Callable[[], None]:
    """Puts the scope on every request that httpx or httpx2 sends below `root_url`; returns the undo.

    While anything is registered, work given to a `ThreadPoolExecutor` inside an attempt runs in a copy of the context
    it was submitted in. `threading.Thread` is left alone: a worker that outlives its rollout would be mis-attributed.
    """
    from agentlightning.propagation import propagate_to

    return propagate_to(root_url)
