"""How sure a mean is: 95 % intervals that hold for few values too.

Zeros and ones get Wilson's interval, which does not collapse to a point when all answers are right (E. B. Wilson, JASA
1927; Brown, Cai, DasGupta 2001). Other values get Student's t interval of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

import msgspec

from agentlightning.schema import finite

Z = 1.959964
"""97.5 % quantile of the normal distribution."""
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Interval(msgspec.Struct, frozen=True):
    """A mean and where its true value lies with 95 % confidence."""

    mean: float
    """NaN when there are no values."""
    low: float
    high: float
    """Unbounded when one value, not 0 or 1, is all there is."""
    n: int


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; from 31 degrees of freedom on by the first two terms of its expansion.

    Abramowitz and Stegun 26.7.5; the error is below 0.002.
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    return Z + (Z**3 + Z) / (4 * freedom) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)


def interval(values: Iterable[float]) -> Interval:
    """The interval of the mean of independent `values`. Raises RewardError for one that is not a finite number."""
    numbers = [finite(value, "value") for value in values]
    if numbers and all(number in (0.0, 1.0) for number in numbers):
        return _wilson(sum(numbers), len(numbers))
    return t_interval(numbers)


def t_interval(values: Sequence[float]) -> Interval:
    """The same for values that are no shares even when all are 0 or 1, such as counts and differences."""
    if len(values) < 2:
        return Interval(values[0] if values else math.nan, -math.inf, math.inf, len(values))
    mean, half = fmean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def per_task(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean reward of each task. Rollouts of one task are not independent, so tasks are what intervals count.

    E. Miller, Adding Error Bars to Evals, 2024 (arXiv 2411.00640), section 2.2.
    """
    return {task: fmean(values) for task, values in rewards.items() if values}


def paired(before: Mapping[str, float], after: Mapping[str, float]) -> Interval:
    """The interval of the change, over the tasks that have both values: narrower than two separate intervals tell."""
    return t_interval([after[task] - before[task] for task in before if task in after])


def unpaired(before: Sequence[float], after: Sequence[float]) -> Interval:
    """The interval of the change of the mean between independent samples (B. L. Welch, Biometrika 1947)."""
    if len(before) < 2 or len(after) < 2:
        mean = fmean(after) - fmean(before) if before and after else math.nan
        return Interval(mean, -math.inf, math.inf, min(len(before), len(after)))
    mean = fmean(after) - fmean(before)
    errors = [stdev(values) ** 2 / len(values) for values in (before, after)]
    weights = [error**2 / (len(values) - 1) for error, values in zip(errors, (before, after), strict=True)]
    freedom = sum(errors) ** 2 / sum(weights) if sum(weights) else math.inf
    half = t_quantile(max(1, math.floor(min(freedom, 1e9)))) * math.sqrt(sum(errors))
    return Interval(mean, mean - half, mean + half, min(len(before), len(after)))


def _wilson(successes: float, n: int) -> Interval:
    share = successes / n
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2)) / (1 + Z**2 / n)
    # Exact at the ends, where rounding would leave the mean outside by one bit.
    low, high = (0.0 if successes == 0 else middle - half), (1.0 if successes == n else middle + half)
    return Interval(share, low, high, n)
