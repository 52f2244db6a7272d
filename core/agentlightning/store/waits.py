"""Calls that wait on the server: woken by the writes that pass through it, without a thread for each.

What other processes write to the same database, and leases that ran out, are looked for every `POLL_S` and `REAP_S`, once
for all who wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from agentlightning.errors import StoreError
from agentlightning.store.base import Store
from agentlightning.store.records import News

POLL_S = 0.1
REAP_S = 1.0
LONGEST_S = 25.0
"""Proxies end requests that stay silent for longer than some 30 s."""
PAUSE_S = 0.003
"""What is written within this time wakes a waiting call once."""

WAKES: dict[str, tuple[str, ...]] = {
    "enqueue": ("wait_for_work",),
    "lease": (),
    "begin_run": ("wait", "wait_for_work"),
    "finish": ("wait", "wait_for_work"),
    "cancel": ("wait", "wait_for_work"),
    "add": ("follow",),
}
"""Method -> the waiting calls that it may answer."""


class Waits:
    """All methods run on the server's loop; the store is asked in `pool`."""

    def __init__(self, store: Store, pool: Executor) -> None:
        self._store, self._pool = store, pool
        self._events = {name: asyncio.Event() for name in ("wait", "wait_for_work", "follow")}
        self._shared: tuple[asyncio.Event, asyncio.Future[Any]] | None = None
        self._poller: asyncio.Task[None] | None = None
        self.waiting = 0
        self._closing = False

    def wake(self, method: str) -> None:
        """A call of `method` has changed the store."""
        for name in WAKES.get(method, ()):
            self._wake(name)

    def close(self) -> None:
        """Whoever waits is answered at once."""
        self._closing = True
        self._wake_all()

    async def answer(self, name: str, arguments: dict[str, Any], gone: Callable[[], Awaitable[object]]) -> Any:
        """The result of a waiting method, after at most its `timeout_s` or `LONGEST_S`; or as soon as `gone` returns."""
        asked = arguments.get("timeout_s")
        give_up_at = time.monotonic() + (LONGEST_S if asked is None else min(asked, LONGEST_S))
        event = self._events[name]
        found = await self._ask(name, arguments)
        if _is_news(found) or time.monotonic() >= give_up_at or not arguments.get("rollout_ids", True):
            return found
        self.waiting += 1
        self._poller = self._poller or asyncio.create_task(self._poll())
        left = asyncio.ensure_future(gone())
        try:
            while not _is_news(found) and (seconds := give_up_at - time.monotonic()) > 0:
                if left.done() or self._closing:
                    break
                woken = asyncio.ensure_future(event.wait())
                await asyncio.wait((woken, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                await asyncio.sleep(PAUSE_S)
                event = self._events[name]
                found = await self._look(name, arguments, event)
            return found
        finally:
            left.cancel()
            self.waiting -= 1

    async def _look(self, name: str, arguments: dict[str, Any], event: asyncio.Event) -> Any:
        """Whoever waits for work asks the same: one look for all that were woken at once."""
        if name != "wait_for_work":
            return await self._ask(name, arguments)
        if self._shared is None or self._shared[0] is not event:
            self._shared = (event, asyncio.ensure_future(self._ask(name, arguments)))
        return await asyncio.shield(self._shared[1])

    def _ask(self, name: str, arguments: dict[str, Any]) -> asyncio.Future[Any]:
        now = arguments | {"timeout_s": 0.0}
        return asyncio.get_running_loop().run_in_executor(self._pool, lambda: getattr(self._store, name)(**now))

    def _wake(self, name: str) -> None:
        self._events[name].set()
        self._events[name] = asyncio.Event()

    def _wake_all(self) -> None:
        for name in self._events:
            self._wake(name)

    async def _poll(self) -> None:
        """While anyone waits."""
        loop, reaped = asyncio.get_running_loop(), time.monotonic()
        try:
            while self.waiting:
                await asyncio.sleep(POLL_S)
                if time.monotonic() - reaped > REAP_S:
                    reaped = time.monotonic()
                    with suppress(StoreError):  # whoever waits asks the same store, and is told
                        await loop.run_in_executor(self._pool, self._store.lease, "agl-store", 0)
                self._wake_all()
        finally:
            self._poller = None


def _is_news(found: Any) -> bool:
    if isinstance(found, News):
        return bool(found.spans or found.completions or found.rewards)
    return bool(found)
