"""Advantages and rows against values worked out by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.schema import Completion, Group, Trajectory, Transition, floats, ids
from agentlightning.trajectory import Ledger
from agentlightning_algorithms.advantage import Advantage, grpo
from agentlightning_algorithms.credit import assign
from agentlightning_algorithms.rows import rows_of


@pytest.mark.parametrize(
    ("returns", "std", "expected"),
    [
        ([1, 0, 0, 0], "sample", [1.5, -0.5, -0.5, -0.5]),
        ([1, 1, 0, 0], "sample", [0.8660, 0.8660, -0.8660, -0.8660]),
        ([1, 0.5, 0.25, 0], "sample", [1.3175, 0.1464, -0.4392, -1.0247]),
        ([1] + [0] * 7, "sample", [2.4749] + [-0.3536] * 7),
        ([1, 0, 0, 0], "population", [1.7320, -0.5773, -0.5773, -0.5773]),
        ([1, 0, 0, 0], "none", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_golden_values(returns, std, expected):
    assert grpo(returns, std) == pytest.approx(expected, abs=1e-4)


def test_one_return_has_nothing_to_be_compared_with():
    with pytest.raises(ValueError, match="at least two"):
        grpo([1.0])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_advantages_have_mean_zero(returns):
    assert abs(grpo(returns).mean()) < 1e-6


NUMBERS = itertools.count()


def completion(prompt, response):
    n = len(response)
    return Completion(
        "c", "a", "w", None, "m", "policy", 0, ids(prompt), ids(response), floats([-0.1] * n), "stop", {}, {}
    )


def trajectory(total, *calls):
    return Trajectory(f"r{next(NUMBERS)}", "a", "w", total, [Transition(completion(p, r), "w", 0.0) for p, r in calls])


def test_b71_a_long_rollout_counts_once_in_the_baseline():
    members = [
        trajectory(total, *[([1], [2])] * turns) for total, turns in zip([0, 1, 0, 0], [1, 5, 1, 1], strict=True)
    ]
    ledger = Ledger()
    assign([Group(("g", "w"), members)], ledger, Advantage(std="none"))
    assert [m.transitions[0].advantage for m in members] == [-0.25, 0.75, -0.25, -0.25]
    assert ledger.trained == 8


def test_b70_b78_groups_that_teach_nothing_are_counted():
    ledger = Ledger()
    single = Group(("a", "w"), [trajectory(1, ([1], [2]))])
    flat = Group(("b", "w"), [trajectory(1, ([1], [2]), ([3], [4])), trajectory(1, ([1], [2]))])
    assert assign([single, flat], ledger) == []
    assert ledger.dropped == {"single": 1, "zero_variance": 3} and ledger.trained == 0


def groups():
    first, second = trajectory(1, ([1, 2], [3, 4]), ([9], [5])), trajectory(0, ([1, 2], [6]))
    made = [Group(("g", "w"), [first, second])]
    assign(made, Ledger(), Advantage(std="none"))
    return made


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_weights_sum_to_one_and_prompts_weigh_nothing(aggregation):
    rows = rows_of(groups(), aggregation)
    assert sum(float(row.weights.sum()) for row in rows) == pytest.approx(1)
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4], [9, 5], [1, 2, 6]]
    assert [(row.weights > 0).tolist() for row in rows] == [
        [False, False, True, True],
        [False, True],
        [False, False, True],
    ]


def test_b72_a_rollout_weighs_the_same_whatever_its_calls():
    rows = rows_of(groups(), "rollout")
    assert float(rows[0].weights.sum() + rows[1].weights.sum()) == pytest.approx(0.5)
    assert rows_of(groups(), "token")[0].weights.max() == pytest.approx(1 / 4)


def test_turns_on_one_prefix_are_one_row_with_both_turns_trained():
    made = [Group(("g", "w"), [trajectory(1, ([1], [2]), ([1, 2, 7], [3])), trajectory(0, ([1], [4]))])]
    assign(made, Ledger(), Advantage(std="none"))
    row = rows_of(made)[0]
    assert row.ids.tolist() == [1, 2, 7, 3]
    assert (row.weights > 0).tolist() == [False, True, False, True]
    assert row.logprobs == pytest.approx([0, -0.1, 0, -0.1])
    assert np.isclose(row.advantages, [0, 0.5, 0, 0.5]).all()
