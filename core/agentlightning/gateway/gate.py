"""Stops calls of the policy at the door while its weights change, and says when those inside have left.

Calls that come meanwhile wait; calls of frozen endpoints pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Runs on the gateway's loop."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._inside = 0

    @property
    def inside(self) -> int:
        return self._inside

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def drained(self) -> None:
        """Returns when nobody is inside."""
        await self._empty.wait()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Waits while the gate is closed; inside until the end of the block."""
        while not self._open.is_set():  # it may close again before a waiter has woken
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()
