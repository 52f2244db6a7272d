"""From trajectories with advantages to rows of tokens. Aggregation is decided here, in the weights, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from agentlightning.forks import temperature
from agentlightning.schema import Group, Trajectory, Transition, floats, ids
from agentlightning.trajectory import lineages
from agentlightning_algorithms.policy.base import Row

AGGREGATIONS = ("token", "rollout", "sequence", "sequence-token-mean", "constant", "sum")


def rows_of(groups: Sequence[Group], aggregation: str = "token", length: int = 0, *, apart: bool = False) -> list[Row]:
    """One row per lineage. A sequence is one sampled answer; calls without an advantage (NaN) are context and count nowhere.

    What a token weighs, with S sequences and N tokens in all, n in its own sequence:
    `token` 1/N · `sequence` 1/S · `sequence-token-mean` 1/(S n) · `constant` 1/(S length) · `sum` 1 · `rollout`: every
    trajectory weighs the same, however many calls and tokens it took, and its tokens share that weight.
    `apart`: answers that follow each other without a token between become rows of their own, so that a learner that
    tells sequences by the gaps between them sees each.
    Raises ValueError for an unknown aggregation, and for `constant` without a length.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    weigh = _Weights(aggregation, length, [t for t in trajectories if _sampled(t)])
    rows: list[Row] = []
    for trajectory in trajectories:
        for chain in lineages(trajectory.transitions):
            for part in _parts(chain) if apart else [chain]:
                if any(trained(transition) for transition in part):
                    rows.append(_row(part, [weigh.token(trajectory, transition) for transition in part]))
    return rows


def trained(transition: Transition) -> bool:
    """Whether an algorithm gave it an advantage."""
    return not math.isnan(transition.advantage)


def _sampled(trajectory: Trajectory) -> int:
    return sum(len(t.completion.response_ids) for t in trajectory.transitions if trained(t))


class _Weights:
    def __init__(self, aggregation: str, length: int, trajectories: Sequence[Trajectory]) -> None:
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
        if aggregation == "constant" and length < 1:
            raise ValueError("the aggregation `constant` needs a length of 1 or more")
        self.aggregation, self.length = aggregation, length
        self.trajectories = len(trajectories)
        self.tokens = sum(map(_sampled, trajectories))
        self.sequences = sum(trained(t) for trajectory in trajectories for t in trajectory.transitions)

    def token(self, trajectory: Trajectory, transition: Transition) -> float:
        """What each token of a call weighs."""
        if not trained(transition):
            return 0.0
        if self.aggregation == "token":
            return 1 / self.tokens
        if self.aggregation == "rollout":
            return 1 / (self.trajectories * _sampled(trajectory))
        if self.aggregation == "sum":
            return 1.0
        own = {
            "sequence": 1,
            "sequence-token-mean": len(transition.completion.response_ids),
            "constant": self.length,
        }
        return 1 / (self.sequences * own[self.aggregation])


def _parts(chain: Sequence[Transition]) -> list[list[Transition]]:
    """The chain, cut where a prompt ends with the answer before it."""
    parts = [[chain[0]]]
    for before, transition in pairwise(chain):
        end = len(before.completion.prompt_ids) + len(before.completion.response_ids)
        if len(transition.completion.prompt_ids) == end:
            parts.append([])
        parts[-1].append(transition)
    return parts


def _row(chain: Sequence[Transition], token_weights: Sequence[float]) -> Row:
    last = chain[-1].completion
    tokens = ids(np.concatenate([last.prompt_ids, last.response_ids]))
    logprobs, advantages, weights = (floats(np.zeros(len(tokens))) for _ in range(3))
    for transition, weight in zip(chain, token_weights, strict=True):
        start = len(transition.completion.prompt_ids)
        sampled = slice(start, start + len(transition.completion.response_ids))
        logprobs[sampled] = transition.completion.logprobs
        if weight:
            advantages[sampled] = transition.advantage
            weights[sampled] = weight
    return Row(chain[0].selector, tokens, logprobs, advantages, weights, temperature(chain[0]))
