"""How much better than its group each rollout was. Pure NumPy, in float64; statistics over rollouts, never over rows.

A rollout of nine calls and one of a single call count once each. A group of one, or of equal returns, says nothing
about what was better: its calls are counted as `single` or `zero_variance`, and are not trained unless asked.

An estimator is a baseline and a scale: advantage = (return - baseline) / scale. Each has a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from agentlightning.errors import ConfigError

Values: TypeAlias = npt.NDArray[np.float64]

BASELINES = ("mean", "loo", "length", "batch", "none")
STANDARD_DEVIATIONS = ("sample", "population", "batch", "loo", "mean", "none")
FLAT = ("drop", "keep", "resample")
EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""


class Advantage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How returns of a group become advantages. Raises ConfigError for what cannot work."""

    baseline: str = "mean"
    """`mean` of the group; `loo`: of the others in it; `length`: mean weighted by tokens (OPO, arXiv 2505.23585);
    `batch`: mean of the step; `none`."""
    std: str = "sample"
    """The scale: `sample` or `population` standard deviation of the group; `loo`: sample deviation of the others, and 1
    where that is 0; `batch`: sample deviation of the step's returns less their baselines; `mean` of the group; `none`: 1."""
    epsilon: float = EPSILON
    """Added to every scale but `none`."""
    flat: str = "drop"
    """Groups of equal returns: `drop`; `keep` (advantage 0: they fill denominators and feel the KL term); `resample`
    (DAPO's dynamic sampling, arXiv 2503.14476: other tasks are drawn instead, twice at most in a step)."""
    overlong: tuple[int, int] | None = None
    """DAPO's soft punishment, `(longest, buffer)` in tokens of one answer; see `overlong_penalty`."""
    truncated: str = "train"
    """`mask`: answers that were cut off by the token limit stay in the statistics and are not trained."""

    def __post_init__(self) -> None:
        for name, known in (("baseline", BASELINES), ("std", STANDARD_DEVIATIONS), ("flat", FLAT)):
            if getattr(self, name) not in known:
                raise ConfigError(f"advantage: {name}={getattr(self, name)!r}: choose one of {', '.join(known)}.")
        if self.truncated not in ("train", "mask"):
            raise ConfigError(f"advantage: truncated={self.truncated!r}: choose train or mask.")
        if not self.epsilon >= 0:
            raise ConfigError(f"advantage: epsilon={self.epsilon}: it cannot be negative.")
        if self.overlong is not None and not 0 < self.overlong[1] <= self.overlong[0]:
            raise ConfigError(f"advantage: overlong={self.overlong}: (longest, buffer) with 0 < buffer <= longest.")


ESTIMATORS: dict[str, Advantage] = {
    "grpo": Advantage(),
    "dr_grpo": Advantage(std="none"),
    "rloo": Advantage("loo", "none"),
    "loo": Advantage("loo", "loo", 0.0),
    "reinforce++": Advantage("batch", "batch"),
    "reinforce++_baseline": Advantage("mean", "batch"),
    "maxrl": Advantage("mean", "mean", 0.0),
    "opo": Advantage("length", "none"),
}
"""arXiv 2402.03300, 2503.20783, 2402.14740, -, 2501.03262 (twice), 2602.02710, 2505.23585."""


def grpo(returns: Sequence[float], std: str = "sample") -> Values:
    """(R - mean) / (std + 1e-6), shape [group]; GRPO, arXiv 2402.03300 equation 3.

    Raises ValueError for fewer than two returns.
    """
    if len(returns) < 2:
        raise ValueError("a group needs at least two returns; sample each task more than once.")
    return advantages([returns], Advantage(std=std))[0]


def advantages(
    groups: Sequence[Sequence[float]], how: Advantage = ESTIMATORS["grpo"], lengths: Sequence[Sequence[float]] = ()
) -> list[Values]:
    """Advantages of all groups of a step, one array of shape [group] each.

    `lengths`: tokens of each rollout, for the baseline `length`. A group of one is centred on itself by `mean`, and by
    `loo` too: it has no others.
    """
    returns = [np.asarray(group, dtype=np.float64) for group in groups]
    centred = [values - base for values, base in zip(returns, baselines(returns, how, lengths), strict=True)]
    return [values / scale for values, scale in zip(centred, scales(returns, centred, how), strict=True)]


def baselines(returns: Sequence[Values], how: Advantage, lengths: Sequence[Sequence[float]] = ()) -> list[Values]:
    """What is taken off each return."""
    if how.baseline == "none" or not returns:
        return [np.zeros_like(values) for values in returns]
    if how.baseline == "batch":
        return [np.full_like(values, np.concatenate(returns).mean()) for values in returns]
    if how.baseline == "length":
        if len(lengths) != len(returns):
            raise ValueError("the baseline `length` needs the lengths of all rollouts.")
        return [
            np.full_like(values, np.average(values, weights=np.asarray(length, dtype=np.float64)))
            for values, length in zip(returns, lengths, strict=True)
        ]
    if how.baseline == "loo":
        return [_others(values).mean(1) if len(values) > 1 else values for values in returns]
    return [np.full_like(values, values.mean()) for values in returns]


def scales(returns: Sequence[Values], centred: Sequence[Values], how: Advantage) -> list[Values]:
    """What each return, less its baseline, is divided by."""
    if how.std == "none" or not returns:
        return [np.ones_like(values) for values in returns]
    if how.std == "batch":
        everyone = np.concatenate(centred)
        deviation = everyone.std(ddof=1) if len(everyone) > 1 else 1.0
        return [np.full_like(values, deviation + how.epsilon) for values in returns]
    return [_scale(values, how) for values in returns]


def _scale(values: Values, how: Advantage) -> Values:
    if how.std == "mean":
        return np.full_like(values, _safe(values.mean() + how.epsilon))
    if how.std == "loo":
        spread = _others(values).std(axis=1, ddof=1) if len(values) > 2 else np.zeros_like(values)
        equal = np.ptp(_others(values), axis=1) == 0 if len(values) > 2 else np.ones(len(values), bool)
        return np.where(equal, 1.0, spread + how.epsilon)
    ddof = 1 if how.std == "sample" and len(values) > 1 else 0
    return np.full_like(values, _safe(values.std(ddof=ddof) + how.epsilon))


def _safe(scale: float) -> float:
    """A scale of 0 belongs to a group whose returns are all equal: what it divides is 0."""
    return scale if scale != 0 else 1.0


def _others(values: Values) -> Values:
    """Row i: the returns of all but i, shape [group, group - 1]."""
    count = len(values)
    return np.tile(values, (count, 1))[~np.eye(count, dtype=bool)].reshape(count, count - 1)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """0 up to `longest - buffer` tokens, then falling to -1 at `longest`, and -1 beyond (DAPO, equation 13)."""
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
