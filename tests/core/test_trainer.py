"""`fit`, `evaluate` and what they leave, over a real store, gateway and runner; an engine without a model serves."""

from __future__ import annotations

import asyncio
import csv
import re
import threading
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, PolicyError, RolloutError, RunInUse
from tests.core.trainer_world import TRAIN, VAL, Trainers, post, solve
from tests.fakes.policy import FakePolicy, Learner


def rows_of(path: Any) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_fit_measures_before_and_after(trainers: Trainers) -> None:
    learner = Learner(total=3)
    result = trainers(learner).fit(solve, train=TRAIN, val=VAL)
    assert [step.number for step in result.steps] == [1, 2, 3]
    assert [step.metrics["loss"] for step in result.steps] == pytest.approx([1, 1 / 2, 1 / 3])
    assert set(result.before) == set(result.after) == {"greedy", "sampled"}
    assert result.before["greedy"].rewards == {"v0": [0.0], "v1": [0.25], "v2": [0.5]}
    assert result.before["greedy"].mean_calls == 2
    assert result.trained_agents == ["writer"]
    assert learner.policies[0].closed == 1


def test_fit_leaves_tables_beside_the_store(trainers: Trainers) -> None:
    pytest.importorskip("matplotlib")
    result = trainers(Learner(total=3)).fit(solve, train=TRAIN, val=VAL)
    assert result.folder == trainers.folder / "runs" / result.run_id[:12]
    assert {path.name for path in result.folder.iterdir()} == {
        "learning_curve.csv",
        "learning_curve.png",
        "evaluations.csv",
        "tasks.csv",
        "checkpoint-000003",  # those before are no longer needed
    }
    curve = rows_of(result.folder / "learning_curve.csv")
    assert [(row["step"], row["rollouts"], row["calls_per_task"]) for row in curve] == [
        (n, "4.0", "2.0") for n in "123"
    ]
    first = rows_of(result.folder / "evaluations.csv")[0]
    assert (first["what"], first["tasks"], float(first["before"])) == ("greedy reward", "3", 0.25)
    assert len(rows_of(result.folder / "tasks.csv")) == 2 * len(VAL)
    assert (result.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_val_nothing_is_measured(trainers: Trainers) -> None:
    result = trainers(Learner(total=1)).fit(solve, train=TRAIN)
    assert result.before == result.after == {}
    assert not (result.folder / "evaluations.csv").exists()


def test_a_folder_of_one_s_own(trainers: Trainers) -> None:
    result = trainers(Learner(total=1), folder=trainers.folder / "mine").fit(solve, train=TRAIN)
    assert result.folder.parent == trainers.folder / "mine"


# How programs call.


def test_a_client_that_is_built_once_is_joined_by_the_trace(trainers: Trainers) -> None:
    trainer = trainers(Learner(total=1))
    client = openai.OpenAI(base_url=trainer.base_url, api_key="unused", max_retries=0)

    def program(task: Any) -> float:
        with agl.agent("writer"):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": str(task)}])
        return 1.0

    with client:
        (step,) = trainer.fit(program, train=TRAIN).steps
    assert step.ledger["agents"] == {"writer": 4} and step.ledger["trained"] == 4


def test_the_base_url_of_a_rollout_needs_no_trace(trainers: Trainers) -> None:
    """A thread of the program's own knows no attempt; its URL does."""

    def program(task: Any, policy: Any) -> float:
        thread = threading.Thread(target=post, args=(policy.agent("writer").base_url, str(task)))
        thread.start()
        thread.join()
        return 1.0

    (step,) = trainers(Learner(total=1)).fit(program, train=TRAIN).steps
    assert step.ledger["agents"] == {"writer": 4} and step.ledger["attributed"] == 4


def test_async_programs_share_a_loop(trainers: Trainers) -> None:
    loops = set()

    async def program(task: Any, policy: Any) -> float:
        loops.add(id(asyncio.get_running_loop()))
        client = openai.AsyncOpenAI(base_url=policy.agent("writer").base_url, api_key=policy.api_key, max_retries=0)
        async with client:
            await client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "hi"}])
        return 0.5

    (step,) = trainers(Learner(total=1)).fit(program, train=TRAIN).steps
    assert step.metrics["reward"] == 0.5 and step.ledger["trained"] == 4 and len(loops) == 1


def test_calls_outside_attempts_are_served_counted_and_never_trained(trainers: Trainers) -> None:
    trainer = trainers(Learner(total=2))
    stray = trainer.base_url
    begun = []

    def program(task: Any, policy: Any) -> float:
        if not begun:  # one call in the whole run, from a thread that knows no attempt
            begun.append(task)
            thread = threading.Thread(target=post, args=(stray, "who am I?"))
            thread.start()
            thread.join()
        return solve(task, policy)

    first, second = trainer.fit(program, train=TRAIN).steps
    assert first.ledger["seen"] == 9 and first.ledger["attributed"] == 8
    assert first.ledger["dropped"] == {"unattributed": 1, "not_selected": 4}
    assert second.ledger["dropped"] == {"not_selected": 4}
    assert len(trainers.store.unattributed()) == 1


# Rewards.


def test_rewards_may_be_returned_by_name(trainers: Trainers) -> None:
    def program(task: Any, policy: Any) -> dict[str, float]:
        solve(task, policy)
        return {"right": 0.5, "short": 0.25}

    (step,) = trainers(Learner(total=1)).fit(program, train=TRAIN).steps
    assert step.metrics["reward"] == 0.75


def test_rewards_may_be_emitted_for_one_agent(trainers: Trainers) -> None:
    def program(task: Any, policy: Any) -> None:
        post(policy.agent("writer").base_url, "write")
        agl.emit_reward(0.25)
        agl.emit_reward(1.0, target="agent:writer", name="style")

    learner = Learner(total=1)
    (step,) = trainers(learner).fit(program, train=TRAIN).steps
    assert step.metrics["reward"] == 0.25
    assert [t.reward for group in learner.groups for t in group.trajectories] == [1.25] * 4


def test_what_is_returned_comes_after_what_was_emitted(trainers: Trainers) -> None:
    def program(task: Any, policy: Any) -> float:
        post(policy.agent("writer").base_url, "write")
        agl.emit_reward(0.25)
        return 0.75

    (step,) = trainers(Learner(total=1)).fit(program, train=TRAIN).steps
    assert step.metrics["reward"] == 0.75


@pytest.mark.parametrize("value", [float("nan"), "good"])
def test_what_is_no_number_is_a_failed_rollout_and_never_0(trainers: Trainers, value: Any) -> None:
    def program(task: Any, policy: Any) -> Any:
        reward = solve(task, policy)
        return value if task["x"] == 0 else reward + 1

    (step,) = trainers(Learner(total=1, tasks_per_step=4)).fit(program, train=TRAIN).steps
    assert step.metrics["failed"] == 2 and step.metrics["reward"] == pytest.approx(1.5)
    assert step.ledger["dropped"] == {"not_selected": 8, "outcome_grader_error": 2}


# Observers.


def test_observers_are_told_and_cannot_break_a_run(trainers: Trainers, caplog: pytest.LogCaptureFixture) -> None:
    class Seen:
        def __init__(self) -> None:
            self.started: list[str] = []
            self.finished: list[tuple[str, str]] = []
            self.versions: list[int] = []
            self.steps: list[tuple[int, float, int]] = []

        @agl.hookimpl
        def agl_rollout_started(self, rollout: Any, attempt: Any) -> None:
            self.started.append(attempt.id)

        @agl.hookimpl
        def agl_rollout_finished(self, rollout: Any, attempt: Any, outcome: Any) -> None:
            self.finished.append((attempt.id, outcome.value))

        @agl.hookimpl
        def agl_resource_published(self, resource: Any) -> None:
            self.versions.append(resource.version)

        @agl.hookimpl
        def agl_step_finished(self, step: int, metrics: Any, ledger: Any) -> None:
            self.steps.append((step, metrics["loss"], ledger["trained"]))
            raise ValueError("a logger that fails")

    seen = Seen()
    trainers(Learner(total=2), plugins=[seen]).fit(solve, train=TRAIN)
    assert seen.steps == [(1, 1.0, 4), (2, 0.5, 4)] and seen.versions == [1, 2, 3]
    assert sorted(seen.finished) == [(attempt, "ok") for attempt in sorted(seen.started)] and len(seen.started) == 8
    assert "a logger that fails" in caplog.text


# Evaluating alone.


def test_evaluate_measures_without_training(trainers: Trainers) -> None:
    learner = Learner()
    found = trainers(learner).evaluate(solve, VAL, n=2, sampling={"temperature": 0.5}, name="half")
    assert found.name == "half" and found.mean == pytest.approx(0.25) and len(found.values) == 6
    (policy,) = learner.policies
    assert policy.updates == 0 and policy.closed == 1
    temperatures = {seen.body.get("temperature") for seen in policy.engine.requests}
    assert temperatures == {0.5, None}, "the critic is not trained, so it keeps what the program asks for"
    assert trainers.run.state == "finished" and not trainers.store.steps(trainers.run.id)


def test_evaluate_begins_anew_each_time(trainers: Trainers) -> None:
    trainer = trainers(Learner())
    for _ in range(2):
        assert len(trainer.evaluate(solve, VAL).values) == 3
    assert len(trainers.store.rollouts()) == 6


def test_evaluate_of_an_algorithm_that_serves_nothing(trainers: Trainers) -> None:
    class Bare:
        def run(self, loop: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"Bare has no serve\(loop\)"):
        trainers(Bare()).evaluate(solve, VAL)


# Saving.


def test_save_copies_the_last_checkpoint_and_overwrites_nothing(trainers: Trainers) -> None:
    result = trainers(Learner(total=2)).fit(solve, train=TRAIN)
    out = trainers.folder / "out"
    out.mkdir()
    assert (result.save(out) / "state.json").read_text() == '{"updates": 2, "version": 3}'
    with pytest.raises(ConfigError, match="not empty"):
        result.save(out)


def test_save_without_a_checkpoint_says_so(trainers: Trainers) -> None:
    result = trainers(Learner(total=0)).fit(solve, train=TRAIN)
    assert result.checkpoint is None
    with pytest.raises(PolicyError, match="no checkpoint"):
        result.save(trainers.folder / "out")


# What cannot work.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"concurrency": -1}, "least that works is 0 and 1"),
        ({"max_attempts": 0}, "least that works is 0 and 1"),
        ({"address": "localhost"}, "host:port"),
        ({"address": "localhost:http"}, "host:port"),
        ({"algorithm": object()}, "no algorithm"),
    ],
)
def test_bad_settings_are_refused_with_the_cure(trainers: Trainers, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        trainers(**options)


@pytest.mark.parametrize(
    ("train", "val", "told"),
    [
        ([], None, "train holds no tasks"),
        ([{"x": object()}], None, "row 0 of train"),
        (TRAIN, [], "val holds no tasks"),
        (TRAIN, [1, {2}, object()], "row 2 of val"),
    ],
)
def test_bad_tasks_are_refused_with_the_row(trainers: Trainers, train: Any, val: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        trainers().fit(solve, train=train, val=val)
    assert not trainers.store.runs(), "nothing was begun"


def test_a_program_that_cannot_be_run_is_refused_before_anything_begins(trainers: Trainers) -> None:
    def program(*tasks: Any) -> float:
        return 1.0

    with pytest.raises(RolloutError, match="takes no task"):
        trainers().fit(program, train=TRAIN)
    assert not trainers.store.runs()


def test_a_parameter_that_is_no_resource_is_named(trainers: Trainers) -> None:
    def program(task: Any, polcy: Any) -> float:
        return 1.0

    learner = Learner()
    with pytest.raises(ConfigError, match="'polcy'.*resources of this run are 'policy'"):
        trainers(learner).fit(program, train=TRAIN)
    assert learner.policies[0].closed == 1 and trainers.run.state == "failed"


def test_a_policy_that_does_not_start_ends_the_run(trainers: Trainers) -> None:
    class Broken(FakePolicy):
        def start(self) -> Any:
            raise PolicyError("no memory: use a smaller model.")

    class Wrong(Learner):
        def serve(self, loop: Any) -> FakePolicy:
            self.policies.append(Broken())
            return loop.serve(self.policies[-1])

    learner = Wrong()
    with pytest.raises(PolicyError, match="no memory"):
        trainers(learner).fit(solve, train=TRAIN)
    assert learner.policies[0].closed == 1
    assert trainers.run.state == "paused", "another try may have the memory"


def test_one_run_has_one_process(trainers: Trainers) -> None:
    """The second trainer asks for the very run that the first one holds."""
    inside, go_on = threading.Event(), threading.Event()
    results: list[Any] = []

    def program(task: Any, policy: Any) -> float:
        inside.set()
        assert go_on.wait(30)
        return solve(task, policy)

    first, second = trainers(Learner(total=1)), trainers(Learner(total=1))
    thread = threading.Thread(target=lambda: results.append(first.fit(program, train=TRAIN)))
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(RunInUse, match=re.escape(trainers.run.owner.rpartition(":")[0])):
            second.fit(program, train=TRAIN)
    finally:
        go_on.set()
        thread.join()
    assert len(results[0].steps) == 1 and trainers.run.state == "finished", "the first one is not disturbed"


def test_a_run_that_another_took_is_given_up(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after a long sleep of the machine: the hold is lost while we work."""
    monkeypatch.setattr("agentlightning.trainer.LEASE_S", 0.03)
    trainer, other = trainers(Learner(total=1)), trainers.store

    def program(task: Any, policy: Any) -> float:
        raise AssertionError("never reached")

    lost = threading.Event()

    def renew_run(run_id: str, owner: str, lease_s: float = 30.0) -> None:
        lost.set()
        raise RunInUse("run is held by elsewhere:1: wait for it.")

    class Waiting(Learner):
        def run(self, loop: Any) -> None:
            assert lost.wait(30)

    trainer.algorithm = Waiting()
    monkeypatch.setattr(trainer.store, "renew_run", renew_run)
    with pytest.raises(RunInUse, match="elsewhere"):
        trainer.fit(program, train=TRAIN)
    assert other.runs()[0].state == "running", "it is the other's to end"
