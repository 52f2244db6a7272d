"""Summaries of rollouts: what is missing is counted as missing, never as 0."""

import msgspec
import pytest

from agentlightning.evaluation import Evaluation, evaluation_of
from agentlightning.schema import Attempt, Completion, Episode, Outcome, Reward, Rollout, RolloutState, floats, ids


def call(name: str, tokens: int = 2) -> Completion:
    return Completion(
        id=name,
        attempt_id="a",
        path="writer",
        span_id=None,
        model="m",
        policy="policy",
        version=0,
        prompt_ids=ids([1]),
        response_ids=ids(range(tokens)),
        logprobs=floats([-0.5] * tokens),
        finish_reason="stop",
        request={},
        response={},
    )


def episode(task: str, value: float | None, *calls: Completion, decided: bool = True) -> Episode:
    rollout = Rollout(f"r-{task}", "run", {}, task, "g", state=RolloutState.SUCCEEDED, outcome=Outcome.OK)
    rewards = [] if value is None else [Reward("x", "a", value)]
    return Episode(rollout, Attempt("a", rollout.id, 1, "w") if decided else None, [], list(calls), rewards)


def test_each_task_keeps_its_rewards_and_its_calls() -> None:
    found = evaluation_of(
        "greedy", [episode("a", 1.0, call("1"), call("2", 3)), episode("a", 0.0, call("3")), episode("b", 0.5)]
    )
    assert found.name == "greedy" and found.missing == 0
    assert found.rewards == {"a": [1.0, 0.0], "b": [0.5]} and found.values == [1.0, 0.0, 0.5]
    assert found.mean == 0.5
    assert found.calls == [2, 1, 0] and found.mean_calls == 1.0
    assert found.tokens == [5, 2, 0]


def test_a_rollout_without_a_reward_is_missing_and_changes_no_mean() -> None:
    found = evaluation_of("greedy", [episode("a", 1.0, call("1")), episode("b", None, call("2"), call("3"))])
    assert (found.missing, found.mean, found.mean_calls, found.rewards) == (1, 1.0, 1.0, {"a": [1.0]})


def test_a_rollout_that_no_attempt_decided_is_missing() -> None:
    assert evaluation_of("greedy", [episode("a", 1.0, decided=False)]).missing == 1


def test_choices_of_one_call_are_one_call() -> None:
    assert evaluation_of("greedy", [episode("a", 1.0, call("x-0"), call("x-1"), call("y"))]).calls == [2]


def test_a_reward_of_0_is_a_reward() -> None:
    found = evaluation_of("greedy", [episode("a", 0.0)])
    assert (found.missing, found.mean) == (0, 0.0)


def test_of_nothing_there_is_no_mean() -> None:
    found = evaluation_of("greedy", [episode("a", None)])
    assert found.mean is None and found.mean_calls is None and found.values == []


def test_it_is_written_and_read_again() -> None:
    found = evaluation_of("greedy", [episode("a", 1.0, call("1"))])
    text = msgspec.json.encode(found)
    assert msgspec.json.decode(text, type=Evaluation) == found
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"name"', b'"title"'), type=Evaluation)
