"""What happens while the store is away: records go to disk, in order, and from there into the store when it is back.

A `Spooled` stands between a store and those who add to it. `add` returns at once; `settle` is the barrier that waits until
nothing is left on disk. The file is bounded, and what does not fit is refused, so that whoever added it counts it as lost. A
process that dies leaves its file; the next one that opens the same store on this machine sends it. Records carry ids, so one
that is sent twice is one record.
"""

from __future__ import annotations

import getpass
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from agentlightning.errors import NotFound, StoreError, StoreUnavailable, Superseded
from agentlightning.schema import Completion, Reward, Span
from agentlightning.spoolfile import SpoolFile, orphans

log = logging.getLogger(__name__)

SPOOL_BYTES = 256 << 20
"""How much may wait on disk, for each process."""
AT_ONCE = 500
"""Records that are sent in one transaction."""
LONGEST_PAUSE_S = 2.0

Record: TypeAlias = Span | Completion | Reward


class Adding(Protocol):
    """The part of a store that is spooled."""

    @property
    def identity(self) -> str: ...

    def add(
        self, spans: Sequence[Span] = (), completions: Sequence[Completion] = (), rewards: Sequence[Reward] = ()
    ) -> None: ...


def may_pass(error: Exception) -> bool:
    """Whether the same write may succeed later."""
    return isinstance(error, (StoreError, OSError)) and not isinstance(error, (NotFound, Superseded))


class Spooled:
    """`add` and `settle` may be called from any thread. `folder`: where files are kept; `limit`: bytes on disk."""

    def __init__(self, store: Adding, *, folder: Path | None = None, limit: int = SPOOL_BYTES) -> None:
        self._store, self._limit = store, limit
        self._folder = folder or default_folder()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._files: list[SpoolFile] = []
        """Oldest first; the last one may be ours."""
        self._mine: SpoolFile | None = None
        self._thread: threading.Thread | None = None
        self._trouble = ""
        self._give_up_at: float | None = None
        self._told: dict[str, str] = {}
        self.spooled = self.replayed = self.dropped = 0
        """Records that went to disk, that came into the store from there, and that no store would take."""
        self.left = 0
        """Records that were still on disk at the end."""
        self._prefix = hashlib.sha256(store.identity.encode()).hexdigest()[:16]
        self._adopt()

    @property
    def waiting(self) -> int:
        """Records on disk now."""
        with self._lock:
            return sum(map(len, self._files))

    def add(
        self, spans: Sequence[Span] = (), completions: Sequence[Completion] = (), rewards: Sequence[Reward] = ()
    ) -> None:
        """Into the store, or onto the disk behind what waits there. Raises what the store raises for records that it will
        never take, and StoreUnavailable when there is no room."""
        if not self._files:
            try:
                return self._store.add(spans, completions, rewards)
            except Exception as error:
                if not isinstance(error, (StoreUnavailable, OSError)):
                    raise
                self._trouble = str(error)
        self._keep([*spans, *completions, *rewards])

    def settle(self, timeout_s: float) -> None:
        """Returns when nothing waits on disk. Raises StoreUnavailable when that takes longer, and StoreError when records
        were refused since the last call that said so."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._files, timeout_s)
            left, told = sum(map(len, self._files)), dict(self._told)
            self._told.clear()
        if told:
            raise StoreError(f"records of {len(told)} attempt(s) were refused: {next(iter(told.values()))}.")
        if not done:
            raise StoreUnavailable(
                f"the store is away ({self._trouble}); {left} records wait on disk in {self._folder} and are sent when it is "
                "back: start it again."
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Sends what waits, as far as that goes; the rest stays on disk for the next process. Safe to call twice."""
        with self._changed:
            self._give_up_at = time.monotonic() + timeout_s
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s + 60.0)
        with self._lock:
            self.left = left = sum(map(len, self._files))
            for file in self._files:
                file.close()
            self._files, self._mine = [], None
        if left:
            log.warning("%d records wait in %s: the next process that opens this store sends them", left, self._folder)

    def _adopt(self) -> None:
        for file in orphans(self._folder, self._prefix):
            log.info("%d records of a process that is gone wait in %s and are sent now", len(file), file.path)
            self._files.append(file)
        if self._files:
            with self._changed:
                self._begin()

    def _keep(self, records: list[Record]) -> None:
        with self._changed:
            if self._give_up_at is not None:
                raise StoreUnavailable(f"the store is away ({self._trouble}) and this process is ending.")
            size = sum(file.size for file in self._files)
            try:
                if self._mine is None:
                    self._mine = SpoolFile.create(self._folder, self._prefix)
                    self._files.append(self._mine)
                self._mine.append(records, self._limit - size)
            except OSError as error:
                self._forget_if_empty()
                raise StoreUnavailable(
                    f"the store is away ({self._trouble}) and {self._folder} takes no more records ({error}): start the store "
                    "again, or make room."
                ) from error
            self.spooled += len(records)
            self._begin()

    def _forget_if_empty(self) -> None:
        if self._mine is not None and not len(self._mine):
            self._files.remove(self._mine)
            self._mine.remove()
            self._mine = None
            self._changed.notify_all()

    def _begin(self) -> None:
        """One thread while something waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._replay, name="agl-spool", daemon=True)
            self._thread.start()

    def _replay(self) -> None:
        pause = 0.05
        while True:
            with self._changed:
                if not self._files:
                    self._thread = None
                    return
                file = self._files[0]
                records = file.first(AT_ONCE)
            try:
                self._send(records)
            except (StoreError, OSError) as error:
                self._trouble = str(error)
                with self._changed:
                    if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                        self._thread = None
                        return
                    self._changed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            pause = 0.05
            with self._changed:
                file.drop(len(records))
                if not len(file):
                    self._files.remove(file)
                    file.remove()
                    self._mine = None if file is self._mine else self._mine
                    self._changed.notify_all()

    def _send(self, records: list[Record]) -> None:
        """Raises only what may pass."""
        try:
            self._store.add(
                [record for record in records if isinstance(record, Span)],
                [record for record in records if isinstance(record, Completion)],
                [record for record in records if isinstance(record, Reward)],
            )
            self.replayed += len(records)
        except Exception as error:
            if isinstance(error, (StoreUnavailable, OSError)):
                raise
            if len(records) > 1:  # one that no store takes must not take its neighbours along
                self._send(records[: len(records) // 2])
                self._send(records[len(records) // 2 :])
                return
            log.error("a record of attempt %s is lost: the store refused it: %s", records[0].attempt_id, error)
            with self._lock:
                self.dropped += 1
                self._told[str(records[0].attempt_id)] = str(error)


def default_folder() -> Path:
    """`AGL_SPOOL`, or a folder of the user's own among the temporary ones."""
    given = os.environ.get("AGL_SPOOL")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"agl-spool-{getpass.getuser()}"
