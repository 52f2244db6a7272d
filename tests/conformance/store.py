"""What every store must do. Subclass `StoreSuite`, give it a `store` fixture, and pytest runs the whole contract.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self, tmp_path):
            store = open_store(f"mine:///{tmp_path}")
            yield store
            store.close()

Nothing here looks at a clock: a lease of 0 seconds has run out by the next `lease`, a lease of `LONG` never does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from agentlightning.errors import NotFound, RewardError, RunInUse, StoreError
from agentlightning.schema import (
    Outcome,
    Run,
    floats,
    ids,
    new_id,
)
from agentlightning.store.base import Store
from tests.conformance.store_life import Following, Life, Pruning
from tests.conformance.store_machine import StoreMachine
from tests.conformance.store_queue import Queue
from tests.conformance.store_records import (
    LONG,
    ME,
    begin,
    completion,
    reward,
    rollout,
    span,
)
from tests.conformance.store_runs import Runs


class Happenings:
    def test_arrays_come_back_bit_for_bit(self, store: Store) -> None:
        attempt = begin(store)
        given = completion(attempt.id, logprobs=floats([-math.inf, math.nan]), sampling={"top_p": 0.9}, choice=1)
        store.add(completions=[given])
        (found,) = store.trace(attempt.id).completions
        assert found.prompt_ids.dtype == np.int32 and found.logprobs.dtype == np.float32
        assert found.response_ids.tolist() == [4, 2**31 - 1]
        assert found.logprobs.tobytes() == given.logprobs.tobytes()
        for name in (
            "path",
            "model",
            "policy",
            "version",
            "finish_reason",
            "request",
            "response",
            "sampling",
            "choice",
        ):
            assert getattr(found, name) == getattr(given, name)

    def test_a_defect_is_kept_with_its_empty_arrays(self, store: Store) -> None:
        attempt = begin(store)
        empty = {"prompt_ids": ids([]), "response_ids": ids([]), "logprobs": floats([])}
        store.add(completions=[completion(attempt.id, defect="no_token_ids", policy=None, version=None, **empty)])
        (found,) = store.trace(attempt.id).completions
        assert (found.defect, found.version, len(found.prompt_ids)) == ("no_token_ids", None, 0)

    def test_records_are_numbered_in_order_of_arrival_across_kinds(self, store: Store) -> None:
        attempt = begin(store)
        store.add([span(attempt.id, start_ns=99)], [completion(attempt.id)], [reward(attempt.id)])
        store.add([span(attempt.id, start_ns=1)], rewards=[reward(attempt.id)])
        store.add()
        seen = store.trace(attempt.id)
        assert [one.start_ns for one in seen.spans] == [99, 1], "clocks never order data"
        numbers = [one.seq for one in (seen.spans[0], *seen.completions, seen.rewards[0], seen.spans[1])]
        assert numbers == sorted(set(numbers)) and seen.rewards[1].seq > numbers[-1]

    def test_a_known_id_changes_nothing_but_closes_an_open_span(self, store: Store) -> None:
        attempt = begin(store)
        opened = span(attempt.id, status="open", path="team", attributes={"a": 1})
        call, gain = completion(attempt.id), reward(attempt.id)
        store.add([opened], [call], [gain])
        first = store.trace(attempt.id)
        closed = span(attempt.id, id=opened.id, status="error", end_ns=5, error="boom", attributes={"a": 2})
        store.add([closed], [completion(attempt.id, id=call.id, model="x")], [reward(attempt.id, 9, id=gain.id)])
        store.add([span(attempt.id, id=opened.id, name="late")])
        seen = store.trace(attempt.id)
        (found,) = seen.spans
        assert (found.status, found.error, found.end_ns, found.attributes) == ("error", "boom", 5, {"a": 2})
        assert found.seq == first.spans[0].seq and found.name == "call"
        assert seen.completions[0].model == "m" and seen.rewards == first.rewards

    def test_one_span_id_in_two_attempts_is_two_spans(self, store: Store) -> None:
        first, second = begin(store, "r1"), begin(store, "r2")
        store.add([span(first.id, id="5" * 16, name="one"), span(second.id, id="5" * 16, name="two")])
        assert [store.trace(one.id).spans[0].name for one in (first, second)] == ["one", "two"]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_b67_a_reward_that_is_no_number_is_refused_whole(self, store: Store, value: float) -> None:
        attempt = begin(store)
        with pytest.raises(RewardError, match="finite"):
            store.add([span(attempt.id)], rewards=[reward(attempt.id), reward(attempt.id, value)])
        seen = store.trace(attempt.id)
        assert (seen.spans, seen.rewards) == ([], [])

    def test_b16_odd_attributes_never_lose_a_span(self, store: Store) -> None:
        attempt = begin(store)
        odd = {"nan": math.nan, "half": "\ud83d", "thing": object(), "big": 2**70, "keys": {1: "one"}}
        for name, value in odd.items():
            store.add([span(attempt.id, name=name, attributes={name: value})])
        found = {one.name: one.attributes[one.name] for one in store.trace(attempt.id).spans}
        assert math.isnan(found["nan"]) and found["half"] == "\ud83d" and found["big"] == 2**70
        assert found["thing"].startswith("<object object at") and list(found["keys"].values()) == ["one"]

    def test_odd_names_and_errors_are_kept_readable(self, store: Store) -> None:
        attempt = begin(store)
        store.add([span(attempt.id, path="team/\ud83d", name="\ud83d", error="\ud83d", status="error")])
        assert store.trace(attempt.id).spans[0].path == "team/?"
        store.finish(attempt.id, Outcome.AGENT_ERROR, "bad \ud83d")
        assert store.attempts("r1")[0].error == "bad ?"

    def test_b8_calls_of_no_known_attempt_are_kept_apart(self, store: Store) -> None:
        attempt = begin(store)
        calls = [completion(None, model="none"), completion(attempt.id), completion("f" * 32, model="unknown")]
        store.add(completions=calls)
        strays = store.unattributed()
        assert [stray.model for stray in strays] == ["none", "unknown"]
        assert strays[1].attempt_id == "f" * 32
        assert [stray.model for stray in store.unattributed(strays[0].seq)] == ["unknown"]
        assert len(store.trace(attempt.id).completions) == 1

    def test_episodes_hold_what_the_deciding_attempt_saw(self, store: Store) -> None:
        first = begin(store, max_attempts=2, lease_s=0)
        store.add([span(first.id, name="lost")], [completion(first.id)], [reward(first.id, -1)])
        ((_, second),) = store.lease("w", lease_s=LONG)
        store.add([span(second.id, name="won")], [completion(second.id)], [reward(second.id, 2)])
        store.finish(second.id, Outcome.OK)
        store.add([span(first.id, name="late")], rewards=[reward(first.id, -2)])
        (episode,) = store.episodes(["r1"])
        assert episode.attempt is not None and episode.attempt.id == second.id
        assert [one.name for one in episode.spans] == ["won"]
        assert [one.value for one in episode.rewards] == [2] and len(episode.completions) == 1
        assert episode.superseded == 1, "the call of the attempt that was lost"
        kept = store.trace(first.id)
        assert [one.name for one in kept.spans] == ["lost", "late"], "kept, and never used"

    def test_episodes_come_in_the_order_asked_for(self, store: Store) -> None:
        attempts = {name: begin(store, name) for name in ("a", "b", "c")}
        for name in ("c", "a"):
            store.add(rewards=[reward(attempts[name].id)])
            store.finish(attempts[name].id, Outcome.OK)
        found = store.episodes(["c", "b", "a"])
        assert [one.rollout.id for one in found] == ["c", "b", "a"]
        assert [one.attempt is None for one in found] == [False, True, False], "b has not ended"
        assert [one.superseded for one in found] == [0, 0, 0]
        assert store.episodes([]) == []
        with pytest.raises(NotFound, match="zzz"):
            store.episodes(["a", "zzz"])

    def test_an_attempt_that_timed_out_does_not_decide_a_cancelled_rollout(self, store: Store) -> None:
        attempt = begin(store, max_attempts=2)
        store.add(completions=[completion(attempt.id), completion(attempt.id)])
        store.finish(attempt.id, Outcome.TIMEOUT)
        store.cancel(["r1"])
        store.enqueue([rollout("r2")])
        store.cancel(["r2"])
        found = store.episodes(["r1", "r2"])
        assert [(one.attempt, one.superseded) for one in found] == [(None, 2), (None, 0)]

    def test_ids_are_found_by_their_beginning(self, store: Store) -> None:
        attempt = begin(store, "abc1")
        store.enqueue([rollout("abc2"), rollout("xyz")])
        assert store.find("abc") == ["abc1", "abc2"]
        assert store.find(attempt.id[:9]) == [attempt.id]
        assert store.find("xyz") == ["xyz"]
        assert store.find("%") == store.find("abcd") == []
        assert len(store.find("", limit=2)) == 2


class Waiting:
    def test_what_has_ended_is_returned_at_once(self, store: Store) -> None:
        for name in ("a", "b", "c"):
            attempt = begin(store, name)
            if name != "b":
                store.finish(attempt.id, Outcome.OK)
        assert store.wait(["a", "b", "c"]) == {"a", "c"}
        assert store.wait(["b"], timeout_s=0) == set()
        assert store.wait([]) == set()
        with pytest.raises(NotFound, match="nothing"):
            store.wait(["a", "nothing"])

    def test_a_waiter_wakes_when_a_rollout_ends(self, store: Store) -> None:
        attempt = begin(store)
        found: list[set[str]] = []
        waiter = threading.Thread(target=lambda: found.append(store.wait(["r1"], timeout_s=30)))
        waiter.start()
        store.finish(attempt.id, Outcome.OK)
        waiter.join(30)
        assert found == [{"r1"}]

    def test_a_waiter_sees_a_worker_die(self, store: Store) -> None:
        begin(store, lease_s=0)
        assert store.wait(["r1"], timeout_s=30) == {"r1"}, "nobody is left who would lease again"
        assert store.rollouts()[0].outcome == Outcome.INFRA_ERROR

    def test_workers_wait_for_work(self, store: Store) -> None:
        assert store.wait_for_work(0) is False
        found: list[bool] = []
        waiter = threading.Thread(target=lambda: found.append(store.wait_for_work(30)))
        waiter.start()
        store.enqueue([rollout("r1", max_attempts=2)])
        waiter.join(30)
        assert found == [True]
        store.lease("w", lease_s=LONG)
        assert store.wait_for_work(0) is False

    def test_a_lost_lease_is_work(self, store: Store) -> None:
        begin(store, lease_s=0, max_attempts=2)
        assert store.wait_for_work(30) is True

    def test_closing_twice_is_once_and_a_closed_store_says_so(self, store: Store) -> None:
        store.close()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.runs()
        with pytest.raises(StoreError, match="closed"):
            store.enqueue([rollout("r1")])

    def test_closing_wakes_a_waiter(self, store: Store) -> None:
        begin(store)
        said: list[str] = []

        def wait() -> None:
            try:
                store.wait(["r1"], timeout_s=60)
            except StoreError as error:
                said.append(str(error))

        waiter = threading.Thread(target=wait)
        waiter.start()
        store.close()
        waiter.join(30)
        assert len(said) == 1 and "closed" in said[0]


class Together:
    def test_threads_never_share_a_rollout_and_lose_nothing(self, store: Store) -> None:
        store.enqueue([rollout(f"r{number}") for number in range(120)])

        def work(worker: str) -> list[str]:
            done = []
            while pairs := store.lease(worker, limit=3, lease_s=LONG):
                for found, attempt in pairs:
                    store.add([span(attempt.id)], [completion(attempt.id)], [reward(attempt.id)])
                    store.finish(attempt.id, Outcome.OK)
                    done.append(found.id)
            return done

        with ThreadPoolExecutor(6) as pool:
            seen = [rollout_id for done in pool.map(work, "abcdef") for rollout_id in done]
        assert len(seen) == len(set(seen)) == 120
        episodes = store.episodes(seen)
        numbers = [one.seq for each in episodes for one in (*each.spans, *each.completions, *each.rewards)]
        assert len(numbers) == len(set(numbers)) == 360

    def test_only_one_of_many_owners_gets_the_run(self, store: Store) -> None:

        def hold(owner: str) -> Run | None:
            try:
                return store.begin_run("grpo", {}, owner, LONG)
            except RunInUse:
                return None

        with ThreadPoolExecutor(8) as pool:
            held = list(pool.map(hold, [f"{ME}{number}" for number in range(8)]))
        assert held.count(None) == 7 and len(store.runs()) == 1

    def test_any_order_of_moves_keeps_the_contract(self, store: Store) -> None:
        """Hypothesis drives three workers; every example has a run of its own in the same store."""

        def machine() -> StoreMachine:
            return StoreMachine(store, new_id())

        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            machine, settings=settings(max_examples=40, stateful_step_count=25, deadline=None)
        )


class StoreSuite(Runs, Queue, Life, Happenings, Following, Pruning, Waiting, Together):
    """The whole contract."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError("give the suite a `store` fixture: an empty, open store")
        yield
