"""What every store must do with retries by outcome, repeated leases, workers, news and old records."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agentlightning.errors import NotFound, RunInUse, StoreError, Superseded
from agentlightning.schema import Outcome, RolloutState
from agentlightning.store.base import Store
from agentlightning.store.records import News, Worker
from tests.conformance.store_records import LONG, ME, RIVAL, begin, completion, reward, rollout, span, state_of


class Life:
    def test_retries_go_by_outcome(self, store: Store) -> None:
        retry = {"agent_error": 1, "timeout": 0}
        store.enqueue([rollout("r1", max_attempts=9, retry=retry)])
        assert store.rollouts()[0].retry == retry
        states = []
        for outcome in (Outcome.AGENT_ERROR, Outcome.MODEL_ERROR, Outcome.MODEL_ERROR, Outcome.AGENT_ERROR):
            ((_, attempt),) = store.lease("w", lease_s=LONG)
            states.append(store.finish(attempt.id, outcome))
        assert states == ["queued", "queued", "queued", "failed"], "one agent error is forgiven, a second is not"
        again = begin(store, "r2", max_attempts=9, retry=retry)
        assert store.finish(again.id, Outcome.TIMEOUT) == "failed", "0: never, though it is retried by default"

    def test_no_retry_goes_beyond_max_attempts(self, store: Store) -> None:
        attempt = begin(store, max_attempts=2, retry={"agent_error": 9})
        assert store.finish(attempt.id, Outcome.AGENT_ERROR) == "queued"
        ((_, second),) = store.lease("w")
        assert store.finish(second.id, Outcome.AGENT_ERROR) == "failed"

    def test_a_lost_lease_follows_the_policy_too(self, store: Store) -> None:
        begin(store, lease_s=0, max_attempts=9, retry={"infra_error": 1})
        assert len(store.lease("w", lease_s=0)) == 1
        assert store.lease("w") == []
        assert state_of(store) == "failed"

    @pytest.mark.parametrize("retry", [{"bad luck": 1}, {"timeout": -1}])
    def test_a_policy_that_means_nothing_is_refused(self, store: Store, retry: dict[str, int]) -> None:
        with pytest.raises(StoreError, match="at least 0.*truncated"):
            store.enqueue([rollout("r1", retry=retry)])
        assert store.rollouts() == []

    def test_what_is_given_back_begins_again_and_costs_no_attempt(self, store: Store) -> None:
        first = begin(store, max_attempts=1, retry={"infra_error": 0})
        store.give_back([first.id, "nothing"], "the worker stops")
        assert state_of(store) == "queued"
        ((_, second),) = store.lease("w", lease_s=LONG)
        assert second.number == 2
        store.give_back([first.id], "again, by somebody who did not hear of it")
        assert state_of(store) == "running", "an attempt that has ended gives nothing back"
        with pytest.raises(Superseded):
            store.finish(first.id, Outcome.OK)
        assert [(a.outcome, a.error) for a in store.attempts("r1")] == [
            ("infra_error", "the worker stops"),
            (None, None),
        ]
        assert store.finish(second.id, Outcome.AGENT_ERROR) == "failed"
        store.give_back([second.id], "too late")
        assert state_of(store) == "failed"

    def test_the_same_lease_again_is_the_same_lease(self, store: Store) -> None:
        store.enqueue([rollout(f"r{number}") for number in range(5)])
        first = store.lease("w", limit=3, lease_s=LONG, token="secret")
        again = store.lease("w", limit=3, lease_s=LONG, token="secret")
        assert again == first and len(first) == 3
        other = store.lease("w", limit=3, lease_s=LONG, token="another")
        assert [found.id for found, _ in other] == ["r3", "r4"]
        assert store.lease("w", limit=3, token="third") == []
        store.finish(first[0][1].id, Outcome.OK)
        assert [attempt.outcome for _, attempt in store.lease("w", limit=3, token="secret")] == [Outcome.OK, None, None]

    def test_a_run_is_ended_by_its_holder(self, store: Store) -> None:
        run = store.begin_run("grpo", {}, ME, LONG)
        with pytest.raises(RunInUse, match="held by .*leave it to its holder"):
            store.end_run(run.id, "failed", RIVAL)
        assert store.runs()[0].state == "running"
        store.end_run(run.id, "paused", ME)
        store.end_run(run.id, "finished", ME)
        assert store.runs()[0].state == "finished"
        with pytest.raises(NotFound):
            store.end_run("nothing", "failed", ME)

    def test_workers_are_seen(self, store: Store) -> None:
        store.see(Worker("a:1:x", program="mod:solve", concurrency=4, started_ns=7))
        store.see(Worker("b:1:y", run_id="run"))
        store.see(Worker("a:1:x", program="mod:solve", concurrency=4, running=3, state="draining", started_ns=7))
        found = {worker.id: worker for worker in store.workers()}
        assert set(found) == {"a:1:x", "b:1:y"} and found["b:1:y"].run_id == "run"
        first = found["a:1:x"]
        assert (first.running, first.state, first.started_ns) == (3, "draining", 7) and first.seen_ns > 0
        assert len(store.workers(seen_within_s=LONG)) == 2
        assert store.workers(seen_within_s=-LONG) == []

    def test_the_backlog_is_counted(self, store: Store) -> None:
        assert store.backlog() == {"queued": 0, "running": 0}
        begin(store, "a", run_id="A")
        store.enqueue([rollout("b", run_id="B"), rollout("c", run_id="B")])
        assert store.backlog() == {"queued": 2, "running": 1}
        assert store.backlog("A") == {"queued": 0, "running": 1}
        assert store.backlog("B") == {"queued": 2, "running": 0}


def read(store: Store, **wanted: Any) -> list[News]:
    """Page after page, to the end."""
    pages, cursor = [], 0
    while True:
        page = store.follow(cursor, **wanted)
        if not (page.spans or page.completions or page.rewards):
            return pages
        pages.append(page)
        cursor = page.cursor


class Following:
    def test_news_are_read_page_by_page_and_none_twice(self, store: Store) -> None:
        attempt = begin(store)
        for number in range(7):
            store.add([span(attempt.id, name=f"{number}")], rewards=[reward(attempt.id, number)] * (number % 3 == 0))
        pages = read(store, limit=2)
        assert [one.name for page in pages for one in page.spans] == [str(number) for number in range(7)]
        assert [one.value for page in pages for one in page.rewards] == [0, 3, 6]
        assert len(pages) >= 4
        end = pages[-1].cursor
        assert store.follow(end).cursor >= end

    def test_news_are_filtered_by_run_attempt_and_kind(self, store: Store) -> None:
        mine, other = begin(store, "r1", run_id="A"), begin(store, "r2", run_id="B")
        for attempt in (mine, other):
            store.add([span(attempt.id)], [completion(attempt.id)], [reward(attempt.id)])
        (page,) = read(store, run_id="A")
        assert {one.attempt_id for one in (*page.spans, *page.completions, *page.rewards)} == {mine.id}
        (page,) = read(store, attempt_id=other.id, kinds=["completion"])
        assert len(page.completions) == 1 and not page.spans and not page.rewards
        assert page.completions[0].response_ids.tolist() == [4, 2**31 - 1]
        assert read(store, run_id="none") == []
        with pytest.raises(StoreError, match="choose from span, completion, reward"):
            store.follow(kinds=["spam"])

    def test_a_follower_wakes_when_something_comes(self, store: Store) -> None:
        attempt = begin(store)
        found: list[News] = []
        waiter = threading.Thread(target=lambda: found.append(store.follow(0, timeout_s=30)))
        waiter.start()
        store.add([span(attempt.id, name="news")])
        waiter.join(30)
        assert [one.name for one in found[0].spans] == ["news"]
        assert store.follow(found[0].cursor, timeout_s=0).spans == []

    def test_a_follower_skips_nothing_however_many_write(self, store: Store) -> None:
        attempts = [begin(store, f"r{number}") for number in range(4)]
        over = threading.Event()
        names: list[str] = []

        def write(attempt_id: str) -> None:
            for number in range(40):
                store.add([span(attempt_id, name=f"{attempt_id} {number}")])

        def follow() -> None:
            cursor = 0
            while True:
                last = over.is_set()
                page = store.follow(cursor, timeout_s=0.0 if last else 0.05)
                names.extend(one.name for one in page.spans)
                cursor = page.cursor
                if last and not page.spans:
                    return

        reader = threading.Thread(target=follow)
        writers = [threading.Thread(target=write, args=(attempt.id,)) for attempt in attempts]
        for thread in (reader, *writers):
            thread.start()
        for thread in writers:
            thread.join(60)
        over.set()
        reader.join(60)
        assert len(names) == len(set(names)) == 160


class Pruning:
    def test_old_records_go_and_what_they_came_to_stays(self, store: Store) -> None:
        for step in (1, 2, 3):
            attempt = begin(store, f"r{step}", step=step)
            store.add([span(attempt.id)], [completion(attempt.id)], [reward(attempt.id, step)])
            if step < 3:
                store.finish(attempt.id, Outcome.OK)
        assert store.prune("else", before_step=9) == 0
        assert store.prune("run", before_step=2) == 2
        assert store.prune("run", before_step=2) == 0, "once"
        old, new, running = store.episodes(["r1", "r2", "r3"])
        assert (old.spans, old.completions, [one.value for one in old.rewards]) == ([], [], [1.0])
        assert len(new.spans) == len(new.completions) == 1
        assert running.rollout.state == RolloutState.RUNNING
        assert store.prune(before_ns=2**62) == 2, "what has not ended is kept"
        assert len(store.rollouts()) == 3

    def test_pruning_without_a_limit_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError, match="before_step or before_ns"):
            store.prune()

    def test_a_pruned_attempt_takes_late_records_like_any_other(self, store: Store) -> None:
        attempt = begin(store, step=1)
        store.finish(attempt.id, Outcome.OK)
        store.prune(before_step=2)
        store.add([span(attempt.id)])
        with pytest.raises(Superseded):
            store.finish(attempt.id, Outcome.TIMEOUT)
