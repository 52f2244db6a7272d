"""From trajectories with advantages to rows of tokens. Aggregation is decided here, in the weights, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentlightning.schema import Group, Trajectory, Transition, floats, ids
from agentlightning.trajectory import lineages, temperature
from agentlightning_algorithms.policy.base import Row

AGGREGATIONS = ("token", "rollout")


def rows_of(groups: Sequence[Group], aggregation: str = "token") -> list[Row]:
    """One row per lineage. The weights of all rows together sum to 1.

    `token`: every sampled token weighs the same. `rollout`: every trajectory weighs the same, however many calls and
    tokens it took, and its tokens share that weight.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    total = sum(_sampled(trajectory) for trajectory in trajectories)
    rows: list[Row] = []
    for trajectory in trajectories:
        weight = 1 / total if aggregation == "token" else 1 / (len(trajectories) * _sampled(trajectory))
        rows.extend(_row(chain, weight) for chain in lineages(trajectory.transitions))
    return rows


def _sampled(trajectory: Trajectory) -> int:
    return sum(len(transition.completion.response_ids) for transition in trajectory.transitions)


def _row(chain: Sequence[Transition], weight: float) -> Row:
    last = chain[-1].completion
    tokens = ids(np.concatenate([last.prompt_ids, last.response_ids]))
    logprobs, advantages, weights = (floats(np.zeros(len(tokens))) for _ in range(3))
    for transition in chain:
        start = len(transition.completion.prompt_ids)
        sampled = slice(start, start + len(transition.completion.response_ids))
        logprobs[sampled] = transition.completion.logprobs
        advantages[sampled] = transition.advantage
        weights[sampled] = weight
    return Row(chain[0].selector, tokens, logprobs, advantages, weights, temperature(chain[0]))
