"""Puts completions into the store, off the event loop: one thread, one transaction for all that has come in.

The gateway never waits for the store. `flush` is the barrier: what was handed in before it is committed when it returns.
A store that fails is tried again; what it still refuses is counted, logged, and makes the next `flush` raise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from agentlightning.errors import GatewayError
from agentlightning.schema import Completion, Span

logger = logging.getLogger("agentlightning.gateway")

Record = Completion | Span


class Sink(Protocol):
    """The part of a store that a writer needs. One that has `settle` too (`spool.py`) is asked for it by `flush`."""

    def add(self, spans: Sequence[Span] = (), completions: Sequence[Completion] = ()) -> None: ...


LINGER_S = 0.02
"""Seconds a record waits for others to share its transaction; `flush` ends the wait."""


SETTLE_S = 1.0
"""How long `flush` waits for a store that is away; whoever can wait longer asks again."""


REMEMBERED = 1_000
"""Attempts whose lost records are remembered by name."""


class Writer:
    """`sleep(seconds)` is called between tries; `tries` per transaction."""

    def __init__(self, store: Sink, *, tries: int = 6, sleep: Callable[[float], None] = time.sleep) -> None:
        self._store, self._tries = store, tries
        self._settle: Callable[[float], None] | None = getattr(store, "settle", None)
        self._changed = threading.Condition()
        self._waiting: list[Record] = []
        self._handed_in = self._settled = 0
        self._hurry = self._closing = False
        self._lost: dict[str | None, list[str]] = {}
        """Attempt -> why each of its records was refused."""
        self._sleep = sleep
        self._thread = threading.Thread(target=self._run, name="agl-gateway-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, *records: Record) -> None:
        """Never blocks, never raises."""
        with self._changed:
            if self._closing:
                logger.error("%d records came after the gateway was closed and are lost", len(records))
                self._lose(records, "the gateway was closed")
                return
            self._waiting.extend(records)
            self._handed_in += len(records)
            if len(self._waiting) == len(records):
                self._changed.notify_all()

    def flush(self, attempt_ids: Collection[str] | None = None) -> None:
        """Returns when all that was handed in is committed. Raises GatewayError when some of these attempts (None: of any)
        could not be, once, and StoreUnavailable when some of it waits on disk for a store that is away (`spool.py`)."""
        with self._changed:
            goal = self._handed_in
            while self._settled < goal and self._thread.is_alive():
                self._hurry = True
                self._changed.notify_all()
                self._changed.wait()
            asked = list(self._lost) if attempt_ids is None else attempt_ids
            causes = [cause for attempt_id in asked for cause in self._lost.pop(attempt_id, ())]
        if causes:
            raise GatewayError(
                f"{len(causes)} records of model calls could not be stored ({causes[-1]}): mend the store (space, "
                "permissions, other processes that lock it) and run the step again."
            )
        if self._settle is not None and not self._closing:
            self._settle(SETTLE_S)

    def _lose(self, records: Sequence[Record], cause: str) -> None:
        for record in records:
            if record.attempt_id in self._lost or len(self._lost) < REMEMBERED:
                self._lost.setdefault(record.attempt_id, []).append(cause)

    def close(self) -> None:
        """Stores what is left and ends the thread; raises like `flush`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()

    def _run(self) -> None:
        while batch := self._next():
            self._store_all(batch)
            with self._changed:
                self._settled += len(batch)
                self._changed.notify_all()

    def _next(self) -> list[Record]:
        """The next batch; empty when the writer is closed and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._hurry and not self._closing:
                self._changed.wait_for(lambda: self._hurry or self._closing, LINGER_S)
            self._hurry = False
            batch, self._waiting = self._waiting, []
            return batch

    def _store_all(self, batch: list[Record]) -> None:
        """All at once; when that does not work, one by one, so that one bad record takes none with it."""
        cause = self._try(batch)
        if cause is None:
            return
        logger.warning("the store refused %d records (%s); trying them one by one", len(batch), cause)
        for record in batch:
            cause = self._try([record], tries=1)
            if cause is not None:
                logger.error("model call %s is lost: the store refused it: %s", record.id, cause)
                with self._changed:
                    self._lose([record], cause)

    def _try(self, batch: list[Record], tries: int | None = None) -> str | None:
        """None when stored, else why not."""
        completions = [record for record in batch if isinstance(record, Completion)]
        spans = [record for record in batch if isinstance(record, Span)]
        cause = ""
        for again in range(tries or self._tries):
            if again:
                self._sleep(0.05 * 2**again)
            try:
                self._store.add(spans=spans, completions=completions)
                return None
            except Exception as error:  # noqa: BLE001  # whatever a store raises, the thread must live on for the calls that follow
                cause = f"{type(error).__name__}: {error}"
        return cause
