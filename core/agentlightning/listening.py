"""What adapters listen with: methods are replaced by ones that tell us, and put back when nobody listens any more.

Nothing here may reach the user's program: our own failures are logged and counted, and what others have replaced since
stays as they left it.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


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
