"""Putting the scope on outgoing requests: the one place where other people's classes are wrapped, and unwrapped.

`send` is the door that every httpx request passes, plain and streamed; a wrapper there costs microseconds and leaves the
client's transports, hooks and retries alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from agentlightning.context import baggage, current, traceparent
from agentlightning.errors import ConfigError

logger = logging.getLogger(__name__)

CLIENTS = ("httpx", "httpx2")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})
_DEFAULT_PORTS = {"http": 80, "https": 443}

_Origin = tuple[str, str, int | None]

_lock = threading.RLock()
_registered: Counter[tuple[_Origin, str]] = Counter()
_roots: dict[_Origin, tuple[str, ...]] = {}
"""Replaced as a whole, never changed: readers need no lock."""
_patches: list[tuple[type, str, Any, Any]] = []
_failures: Counter[str] = Counter()


def propagate_to(root_url: str) -> Callable[[], None]:
    """See `agentlightning.context.propagate_to`. Raises ConfigError for what is no http(s) URL."""
    root = _parse(root_url)
    with _lock:
        _registered[root] += 1
        _refresh()
        if not _patches:
            _install()
    undone = threading.Event()

    def undo() -> None:
        with _lock:
            if undone.is_set():
                return
            undone.set()
            _registered[root] -= 1
            _refresh()
            if not _roots:
                _uninstall()

    return undo


def _parse(root_url: str) -> tuple[_Origin, str]:
    try:
        parts = urlsplit(root_url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{root_url!r} is not a URL ({error}): give one such as http://127.0.0.1:4321.") from error
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(f"{root_url!r} is not an http(s) URL: give one such as http://127.0.0.1:4321.")
    return (parts.scheme, _host(parts.hostname), port or _DEFAULT_PORTS[parts.scheme]), parts.path.rstrip("/")


def _host(name: str) -> str:
    return "loopback" if name in _LOOPBACK else name


def _refresh() -> None:
    global _roots
    for root in [root for root, count in _registered.items() if count <= 0]:
        del _registered[root]
    found: dict[_Origin, tuple[str, ...]] = {}
    for origin, prefix in _registered:
        found[origin] = (*found.get(origin, ()), prefix)
    _roots = found


def _stamp(request: Any) -> None:
    """Writes the scope into the headers of a request to one of our roots. Never raises into the user's program."""
    scope = current()
    if scope is None:
        return
    try:
        url = request.url
        prefixes = _roots.get((url.scheme, _host(url.host), url.port or _DEFAULT_PORTS.get(url.scheme)))
        if prefixes is None or not _below(url.path, prefixes):
            return
        headers = request.headers
        headers["traceparent"] = traceparent(scope)
        carried = headers.get("baggage", "")
        if value := baggage(scope, carried):
            headers["baggage"] = value
        elif carried:
            del headers["baggage"]
    except Exception as error:
        _failures[type(error).__name__] += 1
        if _failures.total() == 1:
            logger.exception("a request could not be marked with its attempt; use the attempt-scoped policy.base_url")


def _below(path: str, prefixes: tuple[str, ...]) -> bool:
    for prefix in prefixes:
        if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "/"):
            return True
    return False


def _send(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _stamp(request)
        return original(self, request, *args, **kwargs)

    return send


def _send_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _stamp(request)
        return await original(self, request, *args, **kwargs)

    return send


def _submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @functools.wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if current() is None:
            return original(self, fn, *args, **kwargs)
        return original(self, copy_context().run, fn, *args, **kwargs)

    return submit


def _patch(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    wrapper = wrap(original)
    setattr(owner, name, wrapper)
    _patches.append((owner, name, original, wrapper))


def _patch_module(module: ModuleType) -> None:
    with _lock:
        if _roots and not any(owner is module.Client for owner, *_ in _patches):
            _patch(module.Client, "send", _send)
            _patch(module.AsyncClient, "send", _send_async)


def _install() -> None:
    _patch(ThreadPoolExecutor, "submit", _submit)
    for name in CLIENTS:
        if name in sys.modules:
            _patch_module(importlib.import_module(name))  # waits where another thread is still importing it
    sys.meta_path.insert(0, _watch)


def _uninstall() -> None:
    sys.meta_path.remove(_watch)
    for owner, name, original, wrapper in reversed(_patches):
        if vars(owner).get(name) is wrapper:  # else someone wrapped ours, which without roots does nothing
            setattr(owner, name, original)
    _patches.clear()


class _Watch(importlib.abc.MetaPathFinder):
    """Patches a client library that is imported after `propagate_to`, without importing it for those who never do."""

    def __init__(self) -> None:
        self._busy = threading.local()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in CLIENTS or getattr(self._busy, "now", False):
            return None
        self._busy.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.now = False
        if spec is not None and spec.loader is not None:
            _patch_after(spec.loader)
        return spec


def _patch_after(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        _patch_module(module)

    loader.exec_module = exec_module


_watch = _Watch()
