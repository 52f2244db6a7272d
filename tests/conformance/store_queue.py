"""What every store must do with rollouts and attempts."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.errors import NotFound, StoreError, Superseded
from agentlightning.schema import (
    Outcome,
    RolloutState,
)
from agentlightning.store.base import RETRIED, Store
from tests.conformance.store_records import (
    LONG,
    begin,
    rollout,
    state_of,
)


class Queue:
    def test_a_rollout_comes_back_as_it_was_given(self, store: Store) -> None:
        given = rollout(
            "r1",
            task={"deep": [1, None, 2.5, {"ü": "snow \u2603"}]},
            step=4,
            mode="val",
            resources={"policy": 3},
            sampling={"temperature": 0.5},
            seed=2**63,
            timeout_s=1.5,
            max_attempts=3,
            priority=-2,
            created_ns=5,
        )
        store.enqueue([given])
        assert store.rollouts() == [given]

    def test_b35_lone_surrogates_in_a_task_survive(self, store: Store) -> None:
        store.enqueue([rollout("r1", task={"text": "half \ud83d emoji"})])
        assert store.rollouts()[0].task == {"text": "half \ud83d emoji"}

    def test_the_same_id_is_one_rollout_and_always_begins_queued(self, store: Store) -> None:
        begun = rollout("r1", task=1, state=RolloutState.FAILED, outcome=Outcome.OK, attempts=7, ended_ns=1)
        store.enqueue([begun, rollout("r1", task=2)])
        store.enqueue([rollout("r1", task=3), rollout("r2")])
        first, _ = store.rollouts()
        assert (first.task, first.state, first.outcome, first.attempts, first.ended_ns) == (1, "queued", None, 0, None)

    def test_what_cannot_be_stored_is_refused_and_nothing_is_queued(self, store: Store) -> None:
        with pytest.raises(StoreError, match=r"Rollout r2 cannot be stored: .* plain data"):
            store.enqueue([rollout("r1"), rollout("r2", task=object())])
        with pytest.raises(StoreError, match="max_attempts=0: give at least 1"):
            store.enqueue([rollout("r3", max_attempts=0)])
        store.enqueue([])
        assert store.rollouts() == []

    def test_leases_go_by_priority_then_age(self, store: Store) -> None:
        store.enqueue([rollout("old"), rollout("new"), rollout("urgent", priority=1), rollout("idle", priority=-1)])
        assert [found.id for found, _ in store.lease("w", limit=3)] == ["urgent", "old", "new"]
        assert [found.id for found, _ in store.lease("w", limit=3)] == ["idle"]
        assert store.lease("w") == []

    def test_a_lease_can_be_kept_to_one_run(self, store: Store) -> None:
        store.enqueue([rollout("a", run_id="A", priority=1), rollout("b", run_id="B")])
        assert [found.id for found, _ in store.lease("w", limit=9, run_id="B")] == ["b"]
        assert store.lease("w", limit=9, run_id="B") == []

    def test_a_lease_gives_a_running_rollout_and_its_attempt(self, store: Store) -> None:
        store.enqueue([rollout("r1")])
        ((found, attempt),) = store.lease("w7", lease_s=LONG)
        assert (found.state, found.attempts) == ("running", 1)
        assert (attempt.rollout_id, attempt.number, attempt.worker, attempt.outcome) == ("r1", 1, "w7", None)
        assert len(attempt.id) == 32 and int(attempt.id, 16)
        assert store.attempts("r1") == [attempt]
        assert store.attempt(attempt.id) == (found, attempt)

    @pytest.mark.parametrize("outcome", list(Outcome))
    def test_an_outcome_decides_or_retries(self, store: Store, outcome: Outcome) -> None:
        attempt = begin(store, max_attempts=2)
        good = {Outcome.OK: "succeeded", Outcome.TRUNCATED: "succeeded", Outcome.CANCELLED: "cancelled"}
        expected = "queued" if outcome in RETRIED else good.get(outcome, "failed")
        assert store.finish(attempt.id, outcome, "why") == expected
        (found,), (ended,) = store.rollouts(), store.attempts("r1")
        assert found.state == expected
        assert found.outcome == (None if expected == "queued" else outcome)
        assert (found.ended_ns is None) == (expected == "queued")
        assert (ended.outcome, ended.error) == (outcome, "why") and ended.ended_ns is not None

    def test_retries_end_with_the_last_attempt(self, store: Store) -> None:
        attempt = begin(store, max_attempts=2)
        assert store.finish(attempt.id, Outcome.TIMEOUT) == "queued"
        ((found, second),) = store.lease("w")
        assert (found.attempts, second.number) == (2, 2)
        assert store.finish(second.id, Outcome.MODEL_ERROR) == "failed"
        assert [one.outcome for one in store.attempts("r1")] == [Outcome.TIMEOUT, Outcome.MODEL_ERROR]

    def test_of_two_attempts_that_end_alike_the_last_decides(self, store: Store) -> None:
        store.finish(begin(store, max_attempts=2).id, Outcome.TIMEOUT)
        ((_, second),) = store.lease("w")
        store.finish(second.id, Outcome.TIMEOUT)
        (episode,) = store.episodes(["r1"])
        assert episode.attempt is not None and episode.attempt.number == 2

    def test_finishing_twice_alike_is_once_and_otherwise_superseded(self, store: Store) -> None:
        attempt = begin(store)
        assert store.finish(attempt.id, Outcome.OK) == store.finish(attempt.id, Outcome.OK) == "succeeded"
        with pytest.raises(Superseded, match="ended as ok before"):
            store.finish(attempt.id, Outcome.AGENT_ERROR)
        assert store.attempts("r1")[0].outcome == Outcome.OK
        with pytest.raises(NotFound):
            store.finish("nothing", Outcome.OK)

    def test_b102_a_lost_lease_begins_the_next_attempt(self, store: Store) -> None:
        first = begin(store, lease_s=0, max_attempts=2)
        ((found, second),) = store.lease("w2", lease_s=LONG)
        assert (found.id, second.number) == ("r1", 2)
        lost = store.attempts("r1")[0]
        assert lost.outcome == Outcome.INFRA_ERROR and "no sign of life from worker worker" in (lost.error or "")
        with pytest.raises(Superseded, match="Heartbeats in time"):
            store.finish(first.id, Outcome.OK)
        assert store.finish(second.id, Outcome.OK) == "succeeded"

    def test_a_lost_lease_without_attempts_left_fails(self, store: Store) -> None:
        attempt = begin(store, lease_s=0)
        assert store.lease("w2") == []
        (found,) = store.rollouts()
        assert (found.state, found.outcome) == ("failed", Outcome.INFRA_ERROR)
        with pytest.raises(Superseded):
            store.finish(attempt.id, Outcome.OK)

    def test_a_lost_lease_still_counts_until_another_takes_over(self, store: Store) -> None:
        attempt = begin(store, lease_s=0)
        assert store.finish(attempt.id, Outcome.OK) == "succeeded"

    def test_a_heartbeat_keeps_an_attempt_and_names_the_dead(self, store: Store) -> None:
        first = begin(store, lease_s=0)
        assert store.heartbeat([first.id], LONG) == []
        assert store.lease("w2") == [], "the heartbeat kept the first attempt alive"
        ended = begin(store, "r2")
        store.finish(ended.id, Outcome.OK)
        cancelled = begin(store, "r3")
        store.cancel(["r3"])
        assert store.heartbeat([cancelled.id, first.id, "unknown", ended.id]) == [cancelled.id, "unknown", ended.id]
        assert store.heartbeat([]) == []

    def test_a_shorter_heartbeat_takes_nothing_away(self, store: Store) -> None:
        first = begin(store, lease_s=LONG)
        store.heartbeat([first.id], 0)
        assert store.attempt(first.id)[1].lease_until == first.lease_until

    def test_cancelling_ends_what_has_not_ended(self, store: Store) -> None:
        done = begin(store, "done")
        store.finish(done.id, Outcome.OK)
        running = begin(store, "running")
        store.enqueue([rollout("queued")])
        store.cancel(["done", "running", "queued"])
        store.cancel(["running"])
        assert [found.state for found in store.rollouts()] == ["succeeded", "cancelled", "cancelled"]
        assert store.attempts("running")[0].outcome == Outcome.CANCELLED
        assert store.lease("w") == []
        with pytest.raises(Superseded):
            store.finish(running.id, Outcome.OK)
        assert store.finish(running.id, Outcome.CANCELLED) == "cancelled"

    def test_cancelling_the_unknown_cancels_nothing(self, store: Store) -> None:
        store.enqueue([rollout("r1")])
        with pytest.raises(NotFound, match="nothing"):
            store.cancel(["r1", "nothing"])
        assert state_of(store) == "queued"

    def test_rollouts_are_filtered_and_paged_in_order_of_creation(self, store: Store) -> None:
        for number in range(6):
            mode, run_id = "val" if number % 2 else "train", "A" if number < 4 else "B"
            store.enqueue([rollout(f"r{9 - number}", step=number // 2, mode=mode, run_id=run_id)])
        found = [one.id for one in store.rollouts()]
        assert found == ["r9", "r8", "r7", "r6", "r5", "r4"]

        def get(*args: Any, **wanted: Any) -> list[str]:
            return [one.id for one in store.rollouts(*args, **wanted)]

        assert get("A") == found[:4]
        assert get("A", step=1) == found[2:4]
        assert get(mode="val") == found[1::2]
        assert get(ids=["r4", "r9", "unknown"]) == ["r9", "r4"]
        assert get(ids=[]) == []
        assert get(limit=2) == found[:2]
        assert get(limit=2, after="r8") == found[2:4]
        assert get(limit=2, after="r4") == []
        store.lease("w")
        assert get(state=RolloutState.RUNNING) == ["r9"]
        assert get(state=RolloutState.QUEUED, mode="train") == ["r7", "r5"]
        with pytest.raises(NotFound):
            store.rollouts(after="unknown")

    def test_unknown_attempts_are_not_found(self, store: Store) -> None:
        for ask in (store.attempt, store.trace):
            with pytest.raises(NotFound, match="no attempt nothing"):
                ask("nothing")
        assert store.attempts("nothing") == []

    def test_more_ids_than_a_statement_takes(self, store: Store) -> None:
        many = [f"r{number}" for number in range(1201)]
        store.enqueue([rollout(one) for one in many])
        leased = store.lease("w", limit=1101, lease_s=LONG)
        assert len(leased) == 1101
        assert store.heartbeat([attempt.id for _, attempt in leased]) == []
        assert len(store.rollouts(ids=many)) == len(store.episodes(many)) == 1201
        store.cancel(many)
        assert store.wait(many) == set(many)
