"""Cases of the field about rewards and groups: what else went wrong elsewhere, and what happens here."""

import logging
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from agentlightning.errors import RewardError
from agentlightning.schema import Completion, Group, Trajectory, Transition, finite, floats, ids
from agentlightning.trajectory import Ledger
from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.credit import USES, assign
from agentlightning_algorithms.rows import rows_of
from tests.algorithms.credit_world import CENTRED, call, credited, episode


def trajectory(number: int, reward: float, answers: list[int], tool_tokens: int = 0) -> Trajectory:
    """A conversation; `answers`: sampled tokens of each call, `tool_tokens` between them that nobody sampled."""
    prompt, calls = [number * 1000], []
    for count in answers:
        said = [7] * count
        done = Completion(
            "c", "a", "w", None, "m", "p", 0, ids(prompt), ids(said), floats([-1.0] * count), "stop", {}, {}
        )
        calls.append(Transition(done, "w", 0.0))
        prompt = [*prompt, *said, *[8] * tool_tokens]
    return Trajectory(f"r{number}", "a", "w", reward, calls)


@pytest.mark.parametrize("value", [2, -1, 0, True, np.float32(0.25), Decimal("0.5")])
def test_b65_whatever_is_a_number_is_kept_as_a_float(value: Any) -> None:
    assert finite(value) == float(value) and type(finite(value)) is float
    found, _, _ = credited(
        [episode([call("w", [1], [2])], finite(value)), episode([call("w", [1], [3])], 7.0)], "broadcast"
    )
    assert found[0] == [pytest.approx((float(value) - 7) / 2)]


@pytest.mark.parametrize("value", ["1", None, b"1", [1.0]])
def test_b65_what_is_none_is_refused_with_the_cure(value: Any) -> None:
    with pytest.raises(RewardError, match="finite number"):
        finite(value)


@pytest.mark.parametrize("kind", list(USES))
def test_b67_nan_is_left_out_and_the_statistics_are_those_of_the_rest(kind: str) -> None:
    def group(rewards: list[float]) -> list[Group]:
        return [Group(("g", "w"), [trajectory(n, r, [1]) for n, r in enumerate(rewards)])]

    ledger = Ledger()
    groups = group([1, math.nan, 0, 1])
    (kept,) = assign(groups, ledger, CENTRED, kind)
    clean = group([1, 0, 1])
    assign(clean, Ledger(), CENTRED, kind)
    told = [t.transitions[0].advantage for t in kept.trajectories]
    assert math.isnan(told.pop(1)) and told == [t.transitions[0].advantage for t in clean[0].trajectories]
    assert ledger.dropped["reward_not_finite"] == 1 and ledger.trained == 3
    rows = rows_of([kept])
    assert len(rows) == 3 and all(np.isfinite(row.advantages).all() for row in rows)
    assert sum(float(row.weights.sum()) for row in rows) == pytest.approx(1), "a left-out row weighs nothing"


@pytest.mark.parametrize("rewards", [[math.nan] * 3, [math.inf, -math.inf], [math.inf, math.nan, 1.0]])
def test_b67_a_group_without_numbers_is_dropped(rewards: list[float]) -> None:
    ledger = Ledger()
    groups = [Group(("g", "w"), [trajectory(n, r, [1]) for n, r in enumerate(rewards)])]
    assert assign(groups, ledger) == []
    assert sum(ledger.dropped.values()) == len(rewards)


@pytest.mark.parametrize(
    ("given", "final", "expected"),
    [({}, None, None), ({}, 1.0, 1.0), ({"call": 0.3}, None, 0.3), ({"call": 0.3}, 1.0, 1.3)],
)
def test_b68_a_reward_on_the_way_and_one_at_the_end_are_added(given: Any, final: Any, expected: Any) -> None:
    """Neither, either, or both: the rule of `trajectory.py`, and what reaches the call."""
    first = call("w", [1], [2])
    one = episode([first], final, given={f"call:{first.id}": value for value in given.values()})
    found, ledger, _ = credited([one, episode([call("w", [1], [3])], 5.0)], "turn")
    if expected is None:
        assert found[0] == [None] and ledger.dropped == {"reward_missing": 1, "single": 1}
    else:
        assert found[0] == [pytest.approx((expected - 5.0) / 2)]


def test_b70_four_rollouts_are_a_group_of_four() -> None:
    rollouts = [episode([call("w", [1], [n])], r) for n, r in enumerate([1.0, 0.0, 1.0, 0.0])]
    found, ledger, (group,) = credited(rollouts, "broadcast")
    assert len(group.trajectories) == 4 and ledger.trained == 4
    assert [row[0] for row in found] == [0.5, -0.5, 0.5, -0.5] and sum(row[0] or 0 for row in found) == 0


def test_b70_groups_of_one_alone_raise_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [episode([call("w", [1], [2])], r, task=f"task {r}") for r in (1.0, 0.0)]
    with caplog.at_level(logging.WARNING):
        _, ledger, groups = credited(rollouts, "broadcast")
    assert groups == [] and ledger.dropped == {"single": 2}
    assert "every group has a single member" in caplog.text and "rollouts_per_task" in caplog.text


def test_b71_the_mean_is_over_rollouts_whatever_their_turns() -> None:
    rewards, turns = [0, 1, 0, 0], [1, 5, 1, 1]
    groups = [
        Group(("g", "w"), [trajectory(n, r, [2] * t) for n, (r, t) in enumerate(zip(rewards, turns, strict=True))])
    ]
    assign(groups, Ledger(), CENTRED)
    assert [t.transitions[0].advantage for t in groups[0].trajectories] == [-0.25, 0.75, -0.25, -0.25]


@pytest.mark.parametrize(
    ("aggregation", "shares"), [("rollout", [1 / 4] * 4), ("token", [2 / 16, 10 / 16, 2 / 16, 2 / 16])]
)
def test_b72_a_rollout_of_five_calls_weighs_as_much_as_asked(aggregation: str, shares: list[float]) -> None:
    groups = [Group(("g", "w"), [trajectory(n, n % 2, [2] * t) for n, t in enumerate([1, 5, 1, 1])])]
    assign(groups, Ledger(), CENTRED)
    rows = rows_of(groups, aggregation)
    assert [float(row.weights.sum()) for row in rows] == pytest.approx(shares)


@pytest.mark.parametrize(("flat", "tokens"), [("drop", 5), ("keep", 9)])
def test_b76_the_denominator_is_the_sampled_tokens_of_what_is_trained(flat: str, tokens: int) -> None:
    """By hand: a flat group of 4 tokens, a group of 3 + 2 tokens with a tool's 6 between. Advantages +-1/2, so the loss at
    ratio 1 is -(3/2 - 2/2) / N."""
    groups = [
        Group(("a", "w"), [trajectory(1, 1.0, [2]), trajectory(2, 1.0, [2])]),
        Group(("b", "w"), [trajectory(3, 1.0, [1, 2], tool_tokens=6), trajectory(4, 0.0, [2])]),
    ]
    rows = rows_of(assign(groups, Ledger(), Advantage(std="none", flat=flat)))
    loss = -sum(float((row.weights * row.advantages).sum()) for row in rows)
    assert loss == pytest.approx(-(3 * 0.5 - 2 * 0.5) / tokens)
    assert sorted({float(w) for row in rows for w in row.weights}) == pytest.approx([0.0, 1 / tokens])


def test_truncated_answers_may_be_masked_and_stay_in_the_statistics() -> None:
    cut = trajectory(1, 1.0, [2])
    cut.transitions[0].completion.finish_reason = "length"
    groups = [Group(("g", "w"), [cut, trajectory(2, 0.0, [2]), trajectory(3, 0.0, [2])])]
    ledger = Ledger()
    assign(groups, ledger, Advantage(std="none", truncated="mask"))
    assert math.isnan(cut.transitions[0].advantage) and ledger.dropped == {"truncated": 1}
    assert groups[0].trajectories[1].transitions[0].advantage == pytest.approx(-1 / 3)


def test_overlong_answers_lose_what_the_paper_says() -> None:
    """Longest 10, buffer 4: seven tokens lose a quarter."""
    groups = [Group(("g", "w"), [trajectory(1, 1.0, [7]), trajectory(2, 1.0, [6]), trajectory(3, 0.0, [1])])]
    assign(groups, Ledger(), Advantage(std="none", overlong=(10, 4)))
    assert [t.reward for t in groups[0].trajectories] == [0.75, 1.0, 0.0]
    assert groups[0].trajectories[0].transitions[0].advantage == pytest.approx(0.75 - 1.75 / 3)
