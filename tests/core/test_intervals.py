"""Intervals against published values, and the share of samples in which they hold."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import RewardError
from agentlightning.intervals import Z, interval, paired, per_task, t_interval, t_quantile, unpaired


def test_wilson_against_published_values() -> None:
    """Newcombe, Statistics in Medicine 1998, table I, method 3 (score without continuity correction)."""
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = interval([1] * successes + [0] * (n - successes))
        assert (found.mean, found.n) == (successes / n, n)
        assert found.low == pytest.approx(low, abs=6e-5) and found.high == pytest.approx(high, abs=6e-5)


def test_all_right_is_not_certainty() -> None:
    found = interval([True] * 10)
    assert (found.mean, found.high) == (1.0, 1.0) and 0.7 < found.low < 0.73


def test_student_by_hand() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - 2.0 == pytest.approx(4.303 * 1.0 / math.sqrt(3))
    assert 2.0 - found.low == pytest.approx(found.high - 2.0)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (30, 2.042), (31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799), (10**9, Z)],
)
def test_quantiles_of_t(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, abs=1e-3)


def test_few_values() -> None:
    none, one = interval([]), interval([0.5])
    assert math.isnan(none.mean) and none.n == 0
    assert (one.mean, one.low, one.high, one.n) == (0.5, -math.inf, math.inf, 1)
    assert interval([0.5, 0.5, 0.5]).low == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "1"])
def test_what_is_no_number_is_refused(bad: object) -> None:
    with pytest.raises(RewardError):
        interval([1.0, bad])  # type: ignore[list-item]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1))
def test_shares_stay_within_0_and_1(values: list[float]) -> None:
    found = interval(values)
    assert 0 <= found.low <= found.mean <= found.high <= 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_the_mean_is_inside(values: list[float]) -> None:
    found = t_interval(values)
    assert found.low <= found.mean <= found.high


def test_they_hold_as_often_as_they_say() -> None:
    """Coverage of the true mean over 2,000 samples of 20: near 95 % for shares and for numbers."""
    chance = random.Random(0)
    shares = [interval([float(chance.random() < 0.8) for _ in range(20)]) for _ in range(2000)]
    numbers = [interval([chance.gauss(3, 2) for _ in range(8)]) for _ in range(2000)]
    assert 0.93 < sum(i.low <= 0.8 <= i.high for i in shares) / 2000 < 0.975
    assert 0.94 < sum(i.low <= 3 <= i.high for i in numbers) / 2000 < 0.96


def test_the_change_task_by_task_is_narrower() -> None:
    """The tasks differ much and each gains a little: only the paired interval sees it."""
    before = {str(i): i / 10 for i in range(10)}
    after = {task: value + 0.1 + 0.01 * (int(task) % 2) for task, value in before.items()}
    change, apart = paired(before, after), unpaired(list(before.values()), list(after.values()))
    assert change.mean == pytest.approx(0.105) == apart.mean
    assert change.low > 0 > apart.low


def test_a_change_over_common_tasks_only() -> None:
    assert paired({"a": 0, "b": 1, "c": 0}, {"a": 1, "b": 1, "d": 9}).n == 2
    assert math.isnan(paired({"a": 1}, {"b": 1}).mean)
    assert paired({"a": 0}, {"a": 1}).mean == 1 and paired({"a": 0}, {"a": 1}).low == -math.inf


def test_welch_by_hand() -> None:
    """Equal sizes and variances: 2n - 2 degrees of freedom, as in the pooled test."""
    found = unpaired([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert found.mean == 1.0 and found.high - 1.0 == pytest.approx(2.776 * math.sqrt(2 / 3))
    assert unpaired([2.0, 2.0], [3.0, 3.0]).low == 1.0
    assert math.isnan(unpaired([], [1.0]).mean) and unpaired([1.0], [3.0]).mean == 2.0


def test_rollouts_of_a_task_count_as_one() -> None:
    assert per_task({"a": [0, 1], "b": [1.0], "none": []}) == {"a": 0.5, "b": 1.0}
