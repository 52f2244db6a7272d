"""What a dialect is, what it may remember, and one call spoken in it.

Inside, the gateway knows chat completions alone: a dialect turns its own requests into them, and their answers back into
its own. So capture, checks, seeds, routing and records are the same for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from agentlightning.gateway.problems import Problem
from agentlightning.gateway.wire import dumps

Json = dict[str, Any]

REMEMBERED = 4096
"""Answers, and texts of tool arguments, that are remembered."""


class Memory:
    """What later requests refer to without repeating it; bounded, and apart for each attempt."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._entries: OrderedDict[tuple[str, str, str], Any] = OrderedDict()

    def of(self, attempt_id: str | None) -> Notes:
        return Notes(self, attempt_id or "")

    def put(self, key: tuple[str, str, str], value: Any) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def get(self, key: tuple[str, str, str]) -> Any:
        return self._entries.get(key)


class Notes:
    """The memory as one attempt sees it."""

    def __init__(self, memory: Memory, attempt_id: str) -> None:
        self._memory, self._attempt_id = memory, attempt_id

    def put(self, kind: str, name: str, value: Any) -> None:
        self._memory.put((self._attempt_id, kind, name), value)

    def get(self, kind: str, name: str) -> Any:
        """None: never known, or forgotten."""
        return self._memory.get((self._attempt_id, kind, name))


class Events(Protocol):
    """Chunks of a chat stream, in; events of the dialect, each with its `type`, out."""

    def feed(self, chunk: Json) -> Iterable[Json]: ...
    def end(self) -> Iterable[Json]:
        """What closes a stream that came to its end."""

    def fail(self, problem: Problem) -> Iterable[Json]:
        """What closes one that did not."""


class Dialect(Protocol):
    """One per module of this package; all functions are pure but for what they note."""

    PATH: str
    """Below `/v1/`."""

    def to_chat(self, request: Json, notes: Notes) -> Json:
        """The chat completion request. Raises Problem for what cannot be translated; nothing is left out in silence."""

    def answer(self, request: Json, call_id: str, chat: Json) -> Json:
        """`chat`: a whole chat completion."""

    def events(self, request: Json, call_id: str) -> Events: ...

    def remember(self, request: Json, call_id: str, chat: Json, message: Json, notes: Notes) -> None:
        """Called with the chat request and the message that answered it, when that is complete."""

    def error(self, problem: Problem) -> Json: ...


class Speech:
    """One call in a dialect."""

    def __init__(self, dialect: Dialect, request: Json, notes: Notes, call_id: str) -> None:
        self.dialect, self.request, self._notes, self._id = dialect, request, notes, call_id
        self.chat = dialect.to_chat(request, notes)
        """The request as chat completion."""
        self._events = dialect.events(request, call_id)

    def answer(self, chat: Json) -> bytes:
        return dumps(self.dialect.answer(self.request, self._id, chat))

    def chunk(self, chunk: Json) -> bytes:
        return _lines(self._events.feed(chunk))

    def end(self) -> bytes:
        return _lines(self._events.end())

    def fail(self, problem: Problem) -> bytes:
        return _lines(self._events.fail(problem))

    def error(self, problem: Problem) -> bytes:
        return dumps(self.dialect.error(problem))

    def remember(self, message: Json) -> None:
        self.dialect.remember(self.request, self._id, self.chat, message, self._notes)


def _lines(events: Iterable[Json]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), dumps(event)) for event in events)


def engine_problem(status: int, body: Any) -> Problem:
    """What an engine refused with, whatever shape it gave it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    code = error.get("code") if isinstance(error, dict) else None
    return Problem(status, code if isinstance(code, str) else "upstream_error", str(message or error)[:2000])
