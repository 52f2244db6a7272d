"""The store contract: the one meeting point of runners, gateway and algorithms.

* **Durable.** A method that returns has committed; a killed process loses nothing that was acknowledged.
* **Idempotent.** Records carry ids chosen by their creators; adding the same id again changes nothing.
* **Ordered.** The store numbers spans, completions and rewards (`seq`) in order of arrival; clocks never order data.
* **Fenced.** Only the attempt with the highest number decides its rollout. What an older attempt writes later is
  kept, and never used: `finish` raises `Superseded` for it.
* **Safe.** Every method may be called from any thread; several processes may open the same store.

State of a rollout moves only along `TRANSITIONS`:

| from | to | by |
|---|---|---|
| queued | running | `lease` |
| queued, running | cancelled | `cancel`, or `finish` as `cancelled` |
| running | succeeded | `finish` as `ok` or `truncated` |
| running | queued | `finish` as an outcome that is tried again, or a lease that ran out, with attempts left; `give_back` |
| running | failed | `finish` as any other outcome, or a lease that ran out, without attempts left |
 A lease that runs out lets the next `lease` begin another attempt if
`max_attempts` allows it; otherwise the rollout fails with `infra_error`. Adding a span, completion or reward to an
attempt, or calling `heartbeat`, extends its lease.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from agentlightning.schema import (
    Attempt,
    Completion,
    Episode,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Span,
    Step,
)
from agentlightning.store.records import News, Worker

LEASE_S = 30.0
"""Seconds without a sign of life after which an attempt is given up."""

RETRIED = frozenset({Outcome.MODEL_ERROR, Outcome.INFRA_ERROR, Outcome.TIMEOUT})
"""Outcomes that may pass when tried again; all others decide the rollout at once."""

TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUED: frozenset({RolloutState.RUNNING, RolloutState.CANCELLED}),
    RolloutState.RUNNING: frozenset(
        {RolloutState.QUEUED, RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED}
    ),
    RolloutState.SUCCEEDED: frozenset(),
    RolloutState.FAILED: frozenset(),
    RolloutState.CANCELLED: frozenset(),
}
"""Allowed moves. `RUNNING -> QUEUED` is a retry: the attempt ended with a retried outcome or lost its lease."""


class Store(Protocol):
    """What every store does. `open_store(url)` gives one."""

    url: str

    @property
    def identity(self) -> str:
        """The same through every door to this store and in every process; another store has another one."""

    # Runs and steps: what a trainer writes so that it can resume.
    def begin_run(self, name: str, config: dict[str, Any], owner: str, lease_s: float = LEASE_S) -> Run:
        """The newest unfinished run with this name and configuration, or a new one; held by `owner`.

        Raises RunInUse while another owner's lease lives (an owner `host:pid:nonce` whose process on this host is
        dead holds nothing).
        """

    def renew_run(self, run_id: str, owner: str, lease_s: float = LEASE_S) -> None:
        """Extends the hold. Raises RunInUse when another owner has taken the run."""

    def end_run(self, run_id: str, state: str, owner: str | None = None) -> None:
        """`finished` or `failed`; `paused` gives up the hold and leaves the run to be resumed. With `owner`, raises
        RunInUse when another holds the run by now."""

    def runs(self) -> list[Run]:
        """Oldest first."""

    def add_step(self, step: Step) -> None:
        """Records a finished step; the same number again is refused silently (idempotent)."""

    def steps(self, run_id: str) -> list[Step]:
        """By number."""

    # Resources.
    def publish(self, run_id: str, resources: Sequence[Resource], *, moved: bool = False) -> None:
        """Adds versions; a name and version that exist already stay as they are. `moved`: unless the same thing is now
        served elsewhere, as a policy is after a restart; then their values are replaced."""

    def resource(self, run_id: str, name: str, version: int | None = None) -> Resource:
        """That version, or the newest. Raises NotFound."""

    # Workers.
    def see(self, worker: Worker) -> None:
        """A worker says that it is there, and how it is; its `seen_ns` is set by the store."""

    def workers(self, seen_within_s: float | None = None) -> list[Worker]:
        """Last seen first."""

    # Rollouts.
    def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        """Creates rollouts; those whose id exists already stay as they are."""

    def lease(
        self, worker: str, limit: int = 1, lease_s: float = LEASE_S, run_id: str | None = None, token: str = ""
    ) -> list[tuple[Rollout, Attempt]]:
        """Up to `limit` queued or expired rollouts, by priority (high first) then age, each with a new attempt. A limit of
        0 only gives up the attempts whose lease ran out.

        `token`: a secret of this call. The same call again with the same token gives the attempts that it began, and
        begins none if it did: for callers whose answer may get lost on its way.
        """

    def heartbeat(self, attempt_ids: Sequence[str], lease_s: float = LEASE_S) -> list[str]:
        """Extends leases; returns the ids among them that are superseded, ended or cancelled."""

    def finish(self, attempt_id: str, outcome: Outcome, error: str | None = None) -> RolloutState:
        """Ends the attempt and moves its rollout: succeeded on `ok` and `truncated`, queued again on an outcome that its
        `retry` or `RETRIED` allows with attempts left, failed or cancelled otherwise. Idempotent for the same outcome.

        Raises Superseded when the attempt is no longer the one that decides.
        """

    def give_back(self, attempt_ids: Sequence[str], reason: str) -> None:
        """Ends attempts as `infra_error` and queues their rollouts again, whatever their retry policy; the attempts are not
        counted against `max_attempts`. For workers that stop, and for calls whose gateway died. Those that have ended or
        were superseded are left alone."""

    def cancel(self, rollout_ids: Sequence[str]) -> None:
        """Ends rollouts that have not ended yet, and their attempts."""

    def rollouts(
        self,
        run_id: str | None = None,
        *,
        ids: Sequence[str] | None = None,
        step: int | None = None,
        mode: str | None = None,
        state: RolloutState | None = None,
        limit: int | None = None,
        after: str | None = None,
    ) -> list[Rollout]:
        """In order of creation; `after` is the id of the last one of the page before."""

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """By number."""

    def attempt(self, attempt_id: str) -> tuple[Rollout, Attempt]:
        """Raises NotFound."""

    def wait(self, rollout_ids: Sequence[str], timeout_s: float | None = None) -> set[str]:
        """Blocks until at least one of these is in a final state (all that are, are returned) or the time is over."""

    def wait_for_work(self, timeout_s: float) -> bool:
        """Blocks until something may be there to lease, or the time is over."""

    def backlog(self, run_id: str | None = None) -> dict[str, int]:
        """How many rollouts are `queued` and how many are `running`."""

    # What happened.
    def add(
        self,
        spans: Sequence[Span] = (),
        completions: Sequence[Completion] = (),
        rewards: Sequence[Reward] = (),
    ) -> None:
        """Appends in one transaction. A span with a known id replaces an open one; other known ids change nothing."""

    def episodes(self, rollout_ids: Sequence[str]) -> list[Episode]:
        """Each rollout with the spans, completions and rewards of its deciding attempt, in the order asked for."""

    def trace(self, attempt_id: str) -> Episode:
        """All that is known of one attempt so far, whether it decides or not. Raises NotFound."""

    def find(self, prefix: str, limit: int = 10) -> list[str]:
        """Ids of rollouts and attempts that begin with `prefix`, at most `limit`."""

    def unattributed(self, after_seq: int = 0) -> list[Completion]:
        """Calls that named no attempt, or one that this store does not know."""

    def follow(
        self,
        after: int = 0,
        *,
        run_id: str | None = None,
        attempt_id: str | None = None,
        kinds: Collection[str] = ("span", "completion", "reward"),
        limit: int = 1000,
        timeout_s: float = 0.0,
    ) -> News:
        """What arrived after the number `after`, at most `limit` of each kind, in order; blocks until something has or
        the time is over. Nothing is ever skipped by going on from the `cursor` of the answer. A span that closes is not
        news again: read its attempt's `trace`."""

    def prune(self, run_id: str | None = None, *, before_step: int | None = None, before_ns: int | None = None) -> int:
        """Removes spans and completions of rollouts that have ended and belong to an earlier step, or ended earlier
        (Unix nanoseconds); with both, those that meet both. Rollouts, attempts, rewards, steps and resources stay.
        Returns how many records were removed."""

    def close(self) -> None:
        """Ends connections and threads; safe to call twice."""
