"""Writes that come at the same time share one transaction: a commit costs as much for a hundred records as for one.

Nobody waits for company. What comes while a transaction runs goes into the next one, so groups grow by themselves under
load, and a lone write is written at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

from agentlightning.errors import StoreUnavailable

T = TypeVar("T")

MOST = 2_000
"""Records that one transaction may hold; a single write may be larger."""


class Group(Generic[T]):
    """`write` stores many writes in one transaction; `size` counts the records of one."""

    def __init__(self, pool: Executor, write: Callable[[Sequence[T]], None], size: Callable[[T], int]) -> None:
        self._pool, self._write, self._size = pool, write, size
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self.transactions = 0

    async def put(self, item: T) -> None:
        """Returns when it is committed. Raises what the store raises for it."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        await done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next():
            errors = await loop.run_in_executor(self._pool, self._store, [item for item, _ in batch])
            for (_, done), error in zip(batch, errors, strict=True):
                if not done.done():  # its client may have gone
                    done.set_result(None) if error is None else done.set_exception(error)
        self._task = None

    def _next(self) -> list[tuple[T, asyncio.Future[None]]]:
        records, count = 0, 0
        for item, _ in self._waiting:
            records += self._size(item)
            if count and records > MOST:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _store(self, items: list[T]) -> list[Exception | None]:
        """What went wrong with each. One write that no store can take takes none of its neighbours along."""
        self.transactions += 1
        try:
            self._write(items)
            return [None] * len(items)
        except Exception as error:  # noqa: BLE001  goes to the clients, whatever it is
            if len(items) == 1 or isinstance(error, StoreUnavailable):
                return [error] * len(items)
        return [error for item in items for error in self._store([item])]
