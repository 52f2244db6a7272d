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
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from agentlightning.errors import NotFound, RewardError, RunInUse, StoreError, Superseded
from agentlightning.schema import (
    Attempt,
    Completion,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Span,
    SpanKind,
    Step,
    floats,
    ids,
    new_id,
    new_span_id,
)
from agentlightning.store.base import RETRIED, Store
from tests.conformance.store_machine import LONG, StoreMachine

ME = f"{socket.gethostname()}:{os.getpid()}:me"
RIVAL = f"{socket.gethostname()}:{os.getpid()}:rival"


def rollout(rollout_id: str, **fields: Any) -> Rollout:
    given = {"run_id": "run", "task": {"question": "?"}, "task_id": "t1", "group_id": "g1"} | fields
    return Rollout(rollout_id, **given)


def completion(attempt_id: str | None, **fields: Any) -> Completion:
    given: dict[str, Any] = {
        "path": "team/writer",
        "span_id": None,
        "model": "m",
        "policy": "policy",
        "version": 3,
        "prompt_ids": ids([1, 2, 3]),
        "response_ids": ids([4, 2**31 - 1]),
        "logprobs": floats([-0.1, -1e-30]),
        "finish_reason": "stop",
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "response": {"choices": []},
    }
    return Completion(**({"id": new_id(), "attempt_id": attempt_id} | given | fields))


def span(attempt_id: str, **fields: Any) -> Span:
    return Span(**({"id": new_span_id(), "attempt_id": attempt_id, "kind": SpanKind.LLM, "name": "call"} | fields))


def reward(attempt_id: str, value: float = 1.0, **fields: Any) -> Reward:
    return Reward(**({"id": new_id(), "attempt_id": attempt_id, "value": value} | fields))


def begin(store: Store, rollout_id: str = "r1", lease_s: float = LONG, **fields: Any) -> Attempt:
    """The first attempt of a new rollout."""
    store.enqueue([rollout(rollout_id, **fields)])
    ((_, attempt),) = store.lease("worker", lease_s=lease_s)
    return attempt


def state_of(store: Store, rollout_id: str = "r1") -> RolloutState:
    return store.rollouts(ids=[rollout_id])[0].state


def dead_owner() -> str:
    """An owner on this host whose process has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return f"{socket.gethostname()}:{child.pid}:gone"


class Runs:
    def test_a_new_run_is_held_by_its_owner(self, store: Store) -> None:
        run = store.begin_run("grpo", {"lr": 0.1}, ME)
        assert (run.name, run.config, run.state, run.owner) == ("grpo", {"lr": 0.1}, "running", ME)
        assert store.runs() == [run]

    def test_an_unfinished_run_is_resumed_whatever_the_order_of_its_keys(self, store: Store) -> None:
        first = store.begin_run("grpo", {"lr": 0.1, "n": 4}, ME)
        again = store.begin_run("grpo", {"n": 4, "lr": 0.1}, ME)
        assert again.id == first.id and again.config_hash == first.config_hash
        assert len(store.runs()) == 1

    @pytest.mark.parametrize(("name", "config"), [("other", {"lr": 0.1}), ("grpo", {"lr": 0.2})])
    def test_another_name_or_configuration_is_another_run(
        self, store: Store, name: str, config: dict[str, object]
    ) -> None:
        first = store.begin_run("grpo", {"lr": 0.1}, ME)
        assert store.begin_run(name, config, ME).id != first.id

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_an_ended_run_is_not_resumed(self, store: Store, state: str) -> None:
        first = store.begin_run("grpo", {}, ME)
        store.end_run(first.id, state)
        ended = store.runs()[0]
        assert (ended.state, ended.owner) == (state, "") and ended.ended_ns is not None
        assert store.begin_run("grpo", {}, ME).id != first.id

    def test_a_paused_run_is_given_up_at_once_and_resumed_by_anyone(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, ME, LONG)
        store.end_run(first.id, "paused")
        assert store.runs()[0].ended_ns is None
        taken = store.begin_run("grpo", {}, RIVAL)
        assert (taken.id, taken.state, taken.owner) == (first.id, "running", RIVAL)

    def test_b95_a_second_owner_is_refused_while_the_first_lives(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, ME, LONG)
        with pytest.raises(RunInUse, match=r"held by .*another name"):
            store.begin_run("grpo", {}, RIVAL)
        assert store.runs() == [first]

    def test_a_run_whose_hold_ran_out_is_taken(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, "elsewhere:1:x", lease_s=0)
        assert store.begin_run("grpo", {}, ME).id == first.id
        with pytest.raises(RunInUse, match="no longer held by elsewhere"):
            store.renew_run(first.id, "elsewhere:1:x")

    def test_a_run_whose_process_died_is_taken_at_once(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, dead_owner(), LONG)
        assert store.begin_run("grpo", {}, ME).id == first.id

    @pytest.mark.parametrize("owner", ["elsewhere:999999999:x", "no-pid", "a:b:c", f"{socket.gethostname()}:x:y"])
    def test_an_owner_that_cannot_be_looked_up_is_believed_alive(self, store: Store, owner: str) -> None:
        store.begin_run("grpo", {}, owner, LONG)
        with pytest.raises(RunInUse):
            store.begin_run("grpo", {}, ME)

    def test_renewing_extends_the_hold(self, store: Store) -> None:
        run = store.begin_run("grpo", {}, ME, lease_s=0)
        store.renew_run(run.id, ME, LONG)
        assert store.runs()[0].lease_until > run.lease_until + LONG / 2
        with pytest.raises(RunInUse):
            store.begin_run("grpo", {}, RIVAL)

    def test_bad_ends_and_unknown_runs_are_refused(self, store: Store) -> None:
        run = store.begin_run("grpo", {}, ME)
        with pytest.raises(StoreError, match="finished, failed or paused"):
            store.end_run(run.id, "done")
        with pytest.raises(NotFound):
            store.end_run("nothing", "failed")
        with pytest.raises(NotFound):
            store.renew_run("nothing", ME)

    def test_a_configuration_that_is_not_data_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError, match="plain data"):
            store.begin_run("grpo", {"reward": lambda: 1}, ME)
        assert store.runs() == []

    def test_steps_come_by_number_and_the_first_record_of_a_number_stays(self, store: Store) -> None:
        second = Step("run", 2, {"loss": math.nan, "reward": 0.5}, {"calls": {"seen": 4}}, "ckpt/2", 7)
        first = Step("run", 1, {"loss": 1.0}, {}, None)
        for step in (second, first, Step("run", 2, {"loss": 9.0}, {}, None), Step("else", 1, {}, {}, None)):
            store.add_step(step)
        found = store.steps("run")
        assert [step.number for step in found] == [1, 2]
        assert found[1].checkpoint == "ckpt/2" and found[1].ledger == {"calls": {"seen": 4}}
        assert math.isnan(found[1].metrics["loss"]), "NaN must not become null or 0"

    def test_resources_are_read_by_version_or_newest(self, store: Store) -> None:
        versions = [Resource("prompt", version, "prompt", {"text": f"v{version}"}) for version in (1, 2, 10)]
        store.publish("run", versions)
        store.publish("run", [Resource("prompt", 2, "prompt", {"text": "changed"})])
        store.publish("run", [])
        assert store.resource("run", "prompt") == versions[2]
        assert store.resource("run", "prompt", 2) == versions[1], "a version never changes"

    def test_an_absent_resource_is_named(self, store: Store) -> None:
        store.publish("run", [Resource("prompt", 1, "prompt", {})])
        for run_id, name, version in (("run", "prompt", 7), ("run", "other", None), ("else", "prompt", None)):
            with pytest.raises(NotFound, match=name):
                store.resource(run_id, name, version)


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


class StoreSuite(Runs, Queue, Happenings, Waiting, Together):
    """The whole contract."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError("give the suite a `store` fixture: an empty, open store")
        yield
