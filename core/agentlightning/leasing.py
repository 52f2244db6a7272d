"""How a runner gets its rollouts: one call per run that has some, each with a secret, so that an answer that is lost on
its way loses nothing.

A store that fails is asked again, more and more rarely; `trouble` says so once that has gone on for long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from agentlightning.errors import RolloutError
from agentlightning.schema import Attempt, Rollout, new_id
from agentlightning.store.base import Store

log = logging.getLogger(__name__)

IDLE_S = 0.25
"""The longest wait for work without a look at whether to stop."""
BACKOFF_S = 5.0
"""The longest pause between two tries to lease from a store that fails."""
MOST_FAILURES = 12
"""Leases that may fail in a row (about 40 s) until `trouble` reports it."""


class Leasing:
    """Leases for `worker`. `runs()` names the runs to serve, in order; None stands for all. `halt`: ends every pause."""

    def __init__(
        self,
        store: Store,
        worker: str,
        lease_s: float,
        runs: Callable[[], Sequence[str | None]],
        halt: threading.Event,
    ) -> None:
        self._store, self._worker, self._lease_s, self._runs, self._halt = store, worker, lease_s, runs, halt
        self._asked: dict[str | None, tuple[int, str]] = {}
        """Run -> limit and secret of a call whose answer never came."""
        self._failures = self._fruitless = 0
        self.trouble: RolloutError | None = None

    def take(self, limit: int) -> Iterator[tuple[Rollout, Attempt]]:
        """Up to `limit` attempts that begin now; none when nothing came for a moment. Never raises."""
        found = 0
        try:
            for run_id in self._runs():
                for pair in self._lease(limit - found, run_id) if found < limit else ():
                    found += 1
                    yield pair
            waits = bool(found) or self._store.wait_for_work(IDLE_S)
        except Exception as error:  # noqa: BLE001  logged, and told by `trouble`
            self._failed(error)
            return
        self._failures, self.trouble = 0, None
        self._fruitless = self._fruitless + 1 if waits and not found else 0
        if self._fruitless > 1:  # what waits is another run's, and would make the caller spin
            self._halt.wait(IDLE_S)

    def _lease(self, limit: int, run_id: str | None) -> list[tuple[Rollout, Attempt]]:
        limit, secret = self._asked.setdefault(run_id, (limit, new_id()))
        batch = self._store.lease(self._worker, limit, self._lease_s, run_id, secret)
        del self._asked[run_id]
        return batch

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        log.warning("nothing could be leased (%d in a row): %s", self._failures, error)
        if self._failures >= MOST_FAILURES:
            self.trouble = RolloutError(
                f"no rollout can be leased, {self._failures} tries in a row failed; the last one with "
                f"{type(error).__name__}: {error}. Bring the store back, then run the same command again to resume."
            )
        self._halt.wait(min(BACKOFF_S, 0.05 * 2**self._failures))
