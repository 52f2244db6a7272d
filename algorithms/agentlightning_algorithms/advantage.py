"""How much better than its group each trajectory was. Pure NumPy; statistics over rollouts, never over rows.

A trajectory of nine calls and one of a single call count once each. A group of one, or of equal returns, says nothing
about what was better: it gives no advantage, and its calls are counted as `single` or `zero_variance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentlightning.schema import Group
from agentlightning.trajectory import Ledger

STANDARD_DEVIATIONS = ("sample", "population", "none")
EPSILON = 1e-6
"""Added to the standard deviation, as verl does."""


def grpo(returns: Sequence[float], std: str = "sample") -> npt.NDArray[np.float64]:
    """(R - mean) / (std + 1e-6), shape [group]; GRPO, arXiv 2402.03300 equation 3.

    `std`: `sample` divides by the standard deviation with ddof 1, `population` with ddof 0, `none` only centres
    (Dr.GRPO, arXiv 2503.20783). Raises ValueError for fewer than two returns.
    """
    values = np.asarray(returns, dtype=np.float64)
    if values.size < 2:
        raise ValueError("a group needs at least two returns; sample each task more than once.")
    centred = values - values.mean()
    if std == "none":
        return np.asarray(centred)
    return np.asarray(centred / (values.std(ddof={"sample": 1, "population": 0}[std]) + EPSILON))


def set_advantages(groups: Sequence[Group], ledger: Ledger, std: str = "sample") -> list[Group]:
    """Gives every transition the advantage of its trajectory; returns the groups that teach something."""
    teaching = []
    for group in groups:
        returns = [trajectory.reward for trajectory in group.trajectories]
        calls = sum(len(trajectory.transitions) for trajectory in group.trajectories)
        if len(returns) < 2:
            ledger.drop("single", calls)
        elif max(returns) == min(returns):
            ledger.drop("zero_variance", calls)
        else:
            for trajectory, advantage in zip(group.trajectories, grpo(returns, std), strict=True):
                for transition in trajectory.transitions:
                    transition.advantage = float(advantage)
            ledger.trained += calls
            teaching.append(group)
    return teaching
