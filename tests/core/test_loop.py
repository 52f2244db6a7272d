"""What an algorithm works with, and how runs stop and go on: no step is lost, none is done twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, NothingToTrain, RolloutError, UnknownAgent
from agentlightning.loop import PATIENCE, Loop
from agentlightning.prompts import PromptTemplate, resource_of
from agentlightning.schema import Episode
from tests.core.trainer_world import TRAIN, VAL, Trainers, post, solve
from tests.fakes.engine import Fault
from tests.fakes.policy import Learner


def versions_of(episode: Episode) -> set[int | None]:
    return {call.version for call in episode.completions}


# The ledger of a step.


def test_the_ledger_accounts_for_every_call(trainers: Trainers) -> None:
    (step,) = trainers(Learner(total=1)).fit(solve, train=TRAIN).steps
    assert step.ledger == {
        "seen": 8,
        "attributed": 8,
        "selected": 4,
        "complete": 4,
        "trained": 4,
        "dropped": {"not_selected": 4},
        "agents": {"writer": 4, "critic": 4},
        "chosen": {"writer": 4},
        "sequences": 4,
        "forks": {},
    }
    assert trainers.store.steps(trainers.run.id) == [step]


def test_calls_without_ids_are_left_out_and_their_neighbours_stay(trainers: Trainers) -> None:
    def reply(request: dict[str, Any]) -> Any:
        return Fault("no_ids") if "write 1" in request["messages"][-1]["content"] else "an answer"

    learner = Learner(total=1, tasks_per_step=4, reply=reply)
    (step,) = trainers(learner).fit(solve, train=TRAIN).steps
    assert step.ledger["dropped"] == {"no_token_ids": 2, "not_selected": 8} and step.ledger["complete"] == 6
    assert {t.rollout_id for g in learner.groups for t in g.trajectories} == {
        episode.rollout.id for episode in learner.episodes if episode.rollout.task["x"] != 1
    }


def test_groups_are_rollouts_of_one_task_in_one_step(trainers: Trainers) -> None:
    learner = Learner(total=2, rollouts=3)
    trainers(learner).fit(solve, train=TRAIN)
    assert [len(group.trajectories) for group in learner.groups] == [3] * 4
    assert len({group.key for group in learner.groups}) == 4
    for group in learner.groups:
        tasks = {e.rollout.task_id for e in learner.episodes if e.rollout.group_id == group.key[0]}
        assert len(tasks) == 1 and group.key[1] == "writer"


# What rollouts read.


def test_a_step_samples_with_what_the_last_one_learned(trainers: Trainers) -> None:
    learner = Learner(total=3)
    trainers(learner).fit(solve, train=TRAIN)
    assert [versions_of(episode) for episode in learner.episodes] == [{1}] * 4 + [{2}] * 4 + [{3}] * 4
    assert [e.rollout.resources for e in learner.episodes[::4]] == [{"policy": n} for n in (1, 2, 3)]


def test_a_resource_reaches_the_program_by_name_at_the_version_that_was_current(trainers: Trainers) -> None:
    read = []

    class Prompting(Learner):
        def run(self, loop: Loop) -> None:
            self.serve(loop)
            for number in loop.steps(2):
                loop.publish(resource_of("hint", number, PromptTemplate(f"hint {number}")))
                loop.sample(loop.draw(1))
                loop.report({})

    def program(task: Any, policy: Any, hint: Any) -> float:
        read.append(hint.text)
        return solve(task, policy)

    trainers(Prompting()).fit(program, train=TRAIN)
    assert read == ["hint 1", "hint 2"]


def test_there_is_nothing_to_publish_before_a_policy_is_served(trainers: Trainers) -> None:
    class Hasty(Learner):
        def run(self, loop: Loop) -> None:
            loop.publish()

    with pytest.raises(ConfigError, match=r"loop.serve\(policy\) first"):
        trainers(Hasty()).fit(solve, train=TRAIN)


def test_sampling_is_overridden_for_trained_agents_alone(trainers: Trainers) -> None:
    class Hot(Learner):
        def run(self, loop: Loop) -> None:
            self.serve(loop)
            for _ in loop.steps(1):
                loop.collect(loop.sample(loop.draw(1), sampling={"temperature": 0.7}), self.agents)
                loop.report({})

    learner = Hot()
    trainers(learner).fit(solve, train=TRAIN)
    asked = {
        s.body["messages"][-1]["content"][:5]: s.body.get("temperature") for s in learner.policies[0].engine.requests
    }
    assert asked == {"write": 0.7, "judge": None}


def test_evaluations_are_greedy_and_sampled(trainers: Trainers) -> None:
    learner = Learner(total=0)
    trainers(learner).fit(solve, train=TRAIN, val=VAL[:1])
    asked = [s.body["temperature"] for s in learner.policies[0].engine.requests if "temperature" in s.body]
    assert sorted(asked) == [0.0, 0.0, 1.0, 1.0], "before and after, by the writer"


def test_the_same_seed_asks_the_same_and_another_does_not(trainers: Trainers) -> None:
    def seeds(name: str, seed: int) -> list[int]:
        learner = Learner(total=1)
        trainers(learner, name=name, seed=seed).fit(solve, train=TRAIN)
        return sorted(request.body["seed"] for request in learner.policies[0].engine.requests)

    first, again, other = seeds("first", 0), seeds("again", 0), seeds("other", 1)
    assert first == again and not set(first) & set(other)
    assert len(set(first)) == 8, "no two calls have the same seed"


# What stops a run.


def test_a_name_that_no_call_has_stops_the_run_with_the_names_that_were_seen(trainers: Trainers) -> None:
    learner = Learner(agents=("writer", "revewer"))
    with pytest.raises(UnknownAgent) as error:
        trainers(learner).fit(solve, train=TRAIN)
    told = str(error.value)
    assert "no call came from 'revewer'." in told and "writer (4 calls)" in told and "critic (4 calls)" in told
    assert "agents=" in told, "it says what to correct"
    assert trainers.run.state == "failed", "it can never learn, so it is not resumed"
    assert learner.policies[0].updates == 0 and learner.policies[0].closed == 1


def test_an_agent_that_comes_later_may_be_selected_by_a_glob_now(trainers: Trainers) -> None:
    (step,) = trainers(Learner(agents=("w*", "critic"), total=1)).fit(solve, train=TRAIN).steps
    assert step.ledger["chosen"] == {"w*": 4, "critic": 4}


def test_an_agent_that_only_evaluations_saw_is_known(trainers: Trainers) -> None:
    """Rare agents may be absent from the first step: the evaluation before it counts too."""

    def program(task: Any, policy: Any) -> float:
        if str(task["id"]).startswith("v"):
            post(policy.agent("rare").base_url, "hello")
        return solve(task, policy)

    result = trainers(Learner(agents=("writer", "rare"), total=1)).fit(program, train=TRAIN, val=VAL)
    assert result.trained_agents == ["writer"]


def test_a_program_that_calls_no_model_stops_the_run(trainers: Trainers) -> None:
    with pytest.raises(NothingToTrain, match=r"(?s)no model call that reached the gateway.*policy\.base_url"):
        trainers().fit(lambda task: 1.0, train=TRAIN)
    assert trainers.run.state == "failed"


def test_a_program_without_rewards_stops_the_run(trainers: Trainers) -> None:
    def program(task: Any, policy: Any) -> None:
        post(policy.agent("writer").base_url, "write")

    with pytest.raises(NothingToTrain, match=r"(?s)reward_missing 4.*emit_reward"):
        trainers().fit(program, train=TRAIN)


def test_calls_that_name_no_attempt_stop_the_run(trainers: Trainers) -> None:
    trainer = trainers()
    stray = trainer.base_url

    def program(task: Any) -> float:
        thread = threading.Thread(target=post, args=(stray, "who am I?"))  # it does not know its attempt
        thread.start()
        thread.join()
        return 1.0

    with pytest.raises(NothingToTrain, match=r"(?s)unattributed.*policy\.base_url"):
        trainer.fit(program, train=TRAIN[:1])


def test_an_engine_without_ids_stops_the_run(trainers: Trainers) -> None:
    learner = Learner(reply=lambda request: Fault("no_ids"))
    with pytest.raises(NothingToTrain, match=r"(?s)no_token_ids.*return_token_ids"):
        trainers(learner).fit(solve, train=TRAIN)


def test_a_program_that_always_fails_stops_the_run_with_its_error(trainers: Trainers) -> None:
    def program(task: Any, policy: Any) -> float:
        raise KeyError("the user's own mistake")

    with pytest.raises(RolloutError) as error:
        trainers(max_attempts=1).fit(program, train=TRAIN)
    told = str(error.value)
    assert "none of 4 rollouts" in told and "agent_error 4" in told and "agl show" in told
    assert "in program" in told and 'KeyError: "the user\'s own mistake"' in told, "the traceback"
    assert trainers.run.state == "paused", "the program may be mended and the same command run again"


def test_a_program_that_fails_now_and_then_does_not(trainers: Trainers) -> None:
    def program(task: Any, policy: Any, rollout: Any) -> float:
        reward = solve(task, policy)
        if task["x"] == 0:
            raise KeyError("a hard task")
        return reward

    (step,) = trainers(Learner(total=1, tasks_per_step=4)).fit(program, train=TRAIN).steps
    assert step.metrics["failed"] == 2 and step.ledger["dropped"] == {"not_selected": 8, "outcome_agent_error": 2}


def test_a_step_that_is_not_reported_is_an_error(trainers: Trainers) -> None:
    class Forgetful(Learner):
        def run(self, loop: Loop) -> None:
            self.serve(loop)
            for _ in loop.steps(2):
                pass

    with pytest.raises(RolloutError, match=r"step 1 was not reported: call loop\.report"):
        trainers(Forgetful()).fit(solve, train=TRAIN)


def test_steps_that_train_nothing_stop_the_run_after_a_while(trainers: Trainers) -> None:
    class Idle(Learner):
        def run(self, loop: Loop) -> None:
            self.serve(loop)
            for _ in loop.steps(99):
                batch = loop.collect(loop.sample(loop.draw(1)), self.agents)
                batch.ledger.drop("zero_variance", batch.ledger.complete)
                loop.report({})

    with pytest.raises(NothingToTrain, match=rf"(?s){PATIENCE} steps in a row.*zero_variance.*same reward"):
        trainers(Idle()).fit(solve, train=TRAIN)
    assert len(trainers.store.steps(trainers.run.id)) == PATIENCE and trainers.run.state == "failed"


def test_a_plug_in_that_fails_to_give_a_reward_stops_the_run(trainers: Trainers) -> None:
    class Paying(Learner):
        def run(self, loop: Loop) -> None:
            self.serve(loop)
            for _ in loop.steps(1):
                assert loop.pays_spans
                for episode in loop.sample(loop.draw(1)):
                    for span in episode.spans:
                        loop.span_reward(span)

    class Broken:
        @agl.hookimpl
        def agl_reward_from_span(self, span: Any) -> Any:
            raise ZeroDivisionError("no spans, no mean")

    def program(task: Any, policy: Any) -> float:
        agl.emit_annotation({"seen": True})
        return solve(task, policy)

    with pytest.raises(agl.AgentLightningError, match=r"(?s)agl_reward_from_span failed.*ZeroDivisionError.*mend"):
        trainers(Paying(), plugins=[Broken()]).fit(program, train=TRAIN)


# Going on after an interruption.


class Breaking(Learner):
    """Stops like Ctrl-C in one step, after its update and before its report."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt, **fields: Any) -> None:
        super().__init__(**fields)
        self.at, self.error = at, error
        self.before_report = self._break

    def _break(self, step: int) -> None:
        if step == self.at:
            raise self.error


Breaking.__name__ = Learner.__name__  # the same configuration: it is the same run


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_goes_on_after_its_last_finished_step(trainers: Trainers, error: type[BaseException]) -> None:
    first, second = Breaking(3, error, total=4), Learner(total=4)
    with pytest.raises(error):
        trainers(first).fit(solve, train=TRAIN, val=VAL)
    assert trainers.run.state == "paused" and first.policies[0].closed == 1
    result = trainers(second).fit(solve, train=TRAIN, val=VAL)
    assert [step.number for step in result.steps] == [1, 2, 3, 4]
    assert [step.metrics["loss"] for step in result.steps] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert first.policies[0].updates == 3, "the third was never recorded, so"
    assert second.policies[0].updates == 4, "it was done again, from the checkpoint of the second"
    assert trainers.run.state == "finished"


def test_no_rollout_runs_twice_and_none_is_counted_twice(trainers: Trainers) -> None:
    begun: list[str] = []

    def program(task: Any, policy: Any, rollout: Any) -> float:
        begun.append(rollout.id)
        return solve(task, policy)

    first, second = Breaking(2, total=3), Learner(total=3)
    with pytest.raises(KeyboardInterrupt):
        trainers(first).fit(program, train=TRAIN, val=VAL)
    result = trainers(second).fit(program, train=TRAIN, val=VAL)
    assert len(begun) == len(set(begun)) == 3 * 4 + 4 * 3, "what had finished is read again"
    assert {r.id for r in trainers.store.rollouts(trainers.run.id)} == set(begun)
    assert [step.metrics["rollouts"] for step in result.steps] == [4, 4, 4]
    assert [e.rollout.id for e in first.episodes[4:]] == [e.rollout.id for e in second.episodes[:4]]
    assert result.before["greedy"].mean == pytest.approx(0.25), "the evaluation before is not lost"


def test_rollouts_of_the_interrupted_step_are_trained_at_the_version_that_sampled_them(trainers: Trainers) -> None:
    """The policy comes back from its checkpoint with the version it had, so that what was sampled is not stale."""
    first, second = Breaking(2, total=2), Learner(total=2)
    with pytest.raises(KeyboardInterrupt):
        trainers(first).fit(solve, train=TRAIN)
    result = trainers(second).fit(solve, train=TRAIN)
    assert [versions_of(e) for e in second.episodes] == [{2}] * 4
    assert result.steps[1].ledger["dropped"] == {"not_selected": 4}


def test_what_half_a_step_left_in_the_folder_is_replaced(trainers: Trainers) -> None:
    """Killed between the checkpoint and the record: the checkpoint of a step that does not exist."""
    first = Breaking(2, total=2)
    with pytest.raises(KeyboardInterrupt):
        trainers(first).fit(solve, train=TRAIN)
    stale = trainers.folder / "runs" / trainers.run.id[:12] / "checkpoint-000002"
    stale.mkdir()
    (stale / "rubbish").touch()
    result = trainers(Learner(total=2)).fit(solve, train=TRAIN)
    assert [path.name for path in stale.iterdir()] == ["state.json"] and result.checkpoint == stale


def test_a_finished_run_is_begun_anew(trainers: Trainers) -> None:
    one = trainers(Learner(total=1)).fit(solve, train=TRAIN)
    two = trainers(Learner(total=1)).fit(solve, train=TRAIN)
    assert one.run_id != two.run_id and len(trainers.store.rollouts()) == 8


@pytest.mark.parametrize(
    ("knobs", "options", "rows"),
    [({"rollouts": 3}, {}, TRAIN), ({}, {"seed": 1}, TRAIN), ({}, {"name": "other"}, TRAIN), ({}, {}, TRAIN[:3])],
    ids=["knobs", "seed", "name", "tasks"],
)
def test_other_settings_are_another_run(trainers: Trainers, knobs: Any, options: Any, rows: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainers(Breaking(2, total=2)).fit(solve, train=TRAIN)
    result = trainers(Learner(total=2, **knobs), **options).fit(solve, train=rows)
    first, second = trainers.store.runs()
    assert (first.state, second.state, second.id) == ("paused", "finished", result.run_id)
