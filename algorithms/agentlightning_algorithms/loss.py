"""Losses of single tokens. How tokens are added up is not decided here: it is in the weights of the rows.

Every function takes tensors of one shape, [tokens], and is differentiable in `logp` alone. The loss of a batch is
`sum(weight * token_loss)`, so that it may be split over batches in any way without changing its gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says only that something is broken, and float32 must not overflow."""


class PolicyLoss(NamedTuple):
    """What `policy_loss` gives."""

    loss: Tensor
    """Scalar: sum(weight * token_loss)."""
    clipped: Tensor
    """[tokens], bool: the clip took the gradient of this token away."""


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    kind: str = "clip",
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.0,
    ref_logp: Tensor | None = None,
) -> PolicyLoss:
    """`sum(weights * (token loss + kl * k3(policy || reference)))` over tokens; all arguments have shape [tokens].

    Raises ValueError for an unknown `kind`, or where `kl` is asked for without the log-probabilities to compare with.
    """
    if kind == "clip":
        token_loss, clipped = clip_loss(logp, old_logp, advantages, clip)
    elif kind == "likelihood":
        token_loss, clipped = -advantages * logp, torch.zeros_like(logp, dtype=torch.bool)
    else:
        raise ValueError(f"unknown loss {kind!r}; known: clip, likelihood")
    if kl:
        if ref_logp is None:
            raise ValueError("kl needs ref_logp, the log-probabilities under the initial policy")
        token_loss = token_loss + kl * k3(logp, ref_logp)
    return PolicyLoss((weights * token_loss).sum(), clipped)


def clip_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - old_logp): PPO (arXiv 1707.06347, equation 7).

    The second result says where the clipped side was the smaller one: such a token has no gradient.
    """
    low, high = clip
    ratio = torch.exp(torch.clamp(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    free = ratio * advantages
    bounded = torch.clamp(ratio, 1 - low, 1 + high) * advantages
    return -torch.minimum(free, bounded), (bounded < free).detach()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = ref_logp - logp, at tokens sampled from the policy.

    Never negative, and in the mean KL(policy || reference) (J. Schulman, "Approximating KL divergence", 2020).
    """
    difference = torch.clamp(ref_logp - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(difference) - 1 - difference
