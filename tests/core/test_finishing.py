"""How attempts end: nothing comes after the end, and what one attempt lost spoils no other."""

from __future__ import annotations

import contextvars
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning.errors import NotFound, StoreError
from agentlightning.schema import Outcome
from agentlightning.store import open_store
from tests.core.runner_world import World, arrive, outcomes
from tests.core.trainer_world import TRAIN, Trainers, post
from tests.fakes.policy import Learner


class Picky:
    """A store that refuses some records."""

    def __init__(self, store: Any, refuse: Any) -> None:
        self._store, self._refuse = store, refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, spans: Any = (), completions: Any = (), rewards: Any = ()) -> None:
        self._refuse([*spans, *rewards])
        self._store.add(spans=spans, completions=completions, rewards=rewards)


def test_what_one_attempt_lost_spoils_no_other(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def refuse(records: Any) -> None:
        if any(getattr(record, "attributes", {}).get("poison") for record in records):
            raise NotFound("no such thing")

    def program(task: int) -> float:
        agl.emit_annotation({"poison": task == 3, "task": task})
        together.wait(30)
        return 1.0

    store = open_store(f"sqlite:///{tmp_path}/store.db")
    with World(tmp_path, Picky(store, refuse)) as world:
        episodes = world.run(program, 8, max_attempts=1)
    store.close()
    assert outcomes(episodes) == {"ok": 7, "infra_error": 1}
    (bad,) = [e for e in episodes if e.rollout.outcome is Outcome.INFRA_ERROR]
    assert bad.rollout.task == 3 and "no such thing" in str(bad.attempt.error) and not bad.rewards


def test_a_store_that_takes_nothing_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of the attempts that wait; and what they wrote is not lost when it comes back."""
    monkeypatch.setattr("agentlightning.finishing.AWAY_S", 0.2)
    away, together = threading.Event(), threading.Barrier(8)

    def refuse(records: Any) -> None:
        if not away.is_set() and records and not all(r.name == "reward" for r in records):
            raise StoreError("the disk is full")

    def program(task: int) -> float:
        agl.emit_annotation({"task": task})
        together.wait(30)
        return 1.0

    store = open_store(f"sqlite:///{tmp_path}/store.db")
    with World(tmp_path, Picky(store, refuse)) as world:
        episodes = world.run(program, 8, max_attempts=1)
        away.set()
        world.recorder.flush()
        traces = [store.trace(episode.attempt.id) for episode in episodes]
    store.close()
    assert outcomes(episodes) == {"infra_error": 8}
    assert all("disk is full" in str(episode.attempt.error) for episode in episodes)
    assert [[span.attributes["task"] for span in trace.spans] for trace in traces] == [[i] for i in range(8)]


def test_calls_after_the_end_get_410_and_are_in_no_rollout(trainers: Trainers) -> None:
    """A thread that a program leaves behind cannot add to a rollout that has ended, not even a moment later."""
    ended: dict[str, threading.Event] = {}
    statuses: list[int] = []
    threads: list[threading.Thread] = []

    class Ends:
        @agl.hookimpl
        def agl_rollout_finished(self, attempt: Any) -> None:
            ended[attempt.id].set()

    def late(url: str, over: threading.Event) -> None:
        arrive(over)
        try:
            post(url, "too late")
        except httpx.HTTPStatusError as error:
            statuses.append(error.response.status_code)

    def program(task: Any, policy: Any, attempt: Any) -> float:
        url = policy.agent("writer").base_url
        over = ended[attempt.id] = threading.Event()
        threads.append(threading.Thread(target=contextvars.copy_context().run, args=(late, url, over)))
        threads[-1].start()
        post(url, "in time")
        return 1.0

    learner = Learner(total=1)
    trainers(learner, plugins=[Ends()]).fit(program, train=TRAIN)
    for thread in threads:
        thread.join()
    assert statuses == [410] * 4
    assert all(len(e.completions) == 1 for e in trainers.store.episodes([e.rollout.id for e in learner.episodes]))


def test_a_gateway_that_cannot_be_told_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(attempt_id: str) -> None:
        raise RuntimeError("no gateway")

    with World(tmp_path) as world:
        ids = world.enqueue(1)
        world.start(lambda task: 1.0, on_cancel=refuse)
        (episode,) = world.wait(ids)
    assert episode.rollout.outcome is Outcome.OK and "could not be told" in caplog.text


def test_the_gateway_is_told_of_each_end_once(tmp_path: Path) -> None:
    def program(task: int) -> float:
        if task == 1:
            raise ValueError
        return 1.0

    with World(tmp_path) as world:
        episodes = world.run(program, 3)
    assert sorted(world.cancelled) == sorted(episode.attempt.id for episode in episodes)
