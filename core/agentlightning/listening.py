"""What adapters listen with: methods are replaced by ones that tell us, and put back when nobody listens any more.

Nothing here may reach the user's program: our own failures are logged and counted, and what others have replaced since
stays as they left it.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from agentlightning.context import Scope, join, reset_scope, set_scope
from agentlightning.schema import DEFAULT_AGENT

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_END: Any = object()


class Trouble:
    """Our own failures: the first is logged, all are counted, and none is seen by the user's program."""

    count = 0


def guarded(function: F) -> F:
    """`function`, which gives None where it fails."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            Trouble.count += 1
            if Trouble.count == 1:
                logger.exception("%s failed; the program goes on, this event is not in the trace", function.__name__)
            return None

    return inner  # type: ignore[return-value]


class Patches:
    """Methods that were replaced, and how to put them back."""

    def __init__(self) -> None:
        self.active = True
        """False for calls that are still under way after the undo."""
        self._replaced: list[tuple[weakref.ref[type], str, Any, Any]] = []

    def replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        """Puts `make(original)` in the place of a method that the class itself has."""
        original = owner.__dict__[name]
        self._put(owner, name, original, make(original))

    def add(self, owner: type, name: str, ours: Any) -> None:
        """Gives a class a method that it inherited so far."""
        self._put(owner, name, None, ours)

    def close(self) -> None:
        """Puts all back, but for what someone else has replaced since: that one holds ours, which now only passes on."""
        self.active = False
        for known, name, original, ours in reversed(self._replaced):
            owner = known()
            if owner is None or owner.__dict__.get(name) is not ours:
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._replaced.clear()

    def _put(self, owner: type, name: str, original: Any, ours: Any) -> None:
        setattr(owner, name, ours)
        self._replaced.append((weakref.ref(owner), name, original, ours))


class Installation:
    """One set of patches, there once however often it is asked for. `listen` puts them in place."""

    def __init__(self, listen: Callable[[Patches], None]) -> None:
        self._listen = listen
        self._lock = threading.Lock()
        self._users = 0
        self._patches: Patches | None = None

    def add(self) -> Callable[[], None]:
        """One more user; returns what takes it away again, to be called once. A `listen` that fails leaves nothing."""
        with self._lock:
            if self._patches is None:
                patches = Patches()
                try:
                    self._listen(patches)
                except BaseException:
                    patches.close()
                    raise
                self._patches = patches
            self._users += 1
        return self._remove

    def _remove(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._patches is not None:
                self._patches.close()
                self._patches = None


def hear_subclasses(patches: Patches, base: Any, methods: Mapping[str, Callable[[Any], Any]]) -> None:
    """Replaces methods, by name, in `base` and every subclass that has its own, now and when a class is made later."""

    def hear(kind: type) -> None:
        for name, make in methods.items():
            method = kind.__dict__.get(name)
            if callable(method) and not getattr(method, "__isabstractmethod__", False):
                patches.replace(kind, name, make)

    own = base.__dict__.get("__init_subclass__")

    def __init_subclass__(kind: Any, /, **kwargs: Any) -> None:
        inherited = super(base, kind).__init_subclass__ if own is None else functools.partial(own.__func__, kind)
        inherited(**kwargs)
        if patches.active:
            hear(kind)

    for kind in dict.fromkeys((base, *_subclasses(base))):
        hear(kind)
    if own is None:
        patches.add(base, "__init_subclass__", classmethod(__init_subclass__))
    else:
        patches.replace(base, "__init_subclass__", lambda _: classmethod(__init_subclass__))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


class Ear(Protocol):
    """Listens to one call of a method."""

    scope: Scope
    """In force while the method works, not while its caller does."""
    lasting: bool
    """See `set_scope`."""

    def hear(self, answer: Any, /) -> None:
        """What it returned, or each thing that it yielded."""

    def end(self, error: BaseException | None = None) -> None:
        """The call is over."""


async def attend(work: Callable[[], Awaitable[T]], ear: Ear | None) -> T:
    """What `work` returns, heard by `ear`."""
    if ear is None:
        return await work()
    token = set_scope(ear.scope, lasting=ear.lasting)
    try:
        answer = await work()
    except BaseException as error:
        ear.end(error)
        raise
    finally:
        reset_scope(token)
    ear.hear(answer)
    ear.end()
    return answer


async def relay(events: AsyncIterator[T], begin: Callable[[], Ear | None]) -> AsyncIterator[T]:
    """What `events` yields, heard by the ear that `begin` gives at the first step; closes it when it is left early."""
    ear = begin()
    ended: BaseException | None = None
    try:
        steps = aiter(events)
        while (event := await _step(steps, ear)) is not _END:
            if ear is not None:
                ear.hear(event)
            yield event
    except BaseException as error:
        ended = error
        raise
    finally:
        try:
            if ended is not None and (close := getattr(events, "aclose", None)) is not None:
                await close()
        finally:
            if ear is not None:
                ear.end(ended)


async def _step(steps: AsyncIterator[Any], ear: Ear | None) -> Any:
    if ear is None:
        return await anext(steps, _END)
    token = set_scope(ear.scope, lasting=ear.lasting)
    try:
        return await anext(steps, _END)
    finally:
        reset_scope(token)


def path_of(said: object) -> str:
    """A name as a framework says it, as an agent path: `/` is a level, as everywhere."""
    return join(*(part.strip() for part in str(said).split("/"))) or DEFAULT_AGENT
