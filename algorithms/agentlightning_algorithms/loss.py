"""Losses of single tokens. How tokens are added up is not decided here: it is in the weights of the rows.

Every function takes tensors of one shape, [tokens], and is differentiable in `logp` alone. The loss of a batch is
`sum(weight * token_loss)`, so that it may be split over batches in any way without changing its gradient. What a token
must know of its whole sequence (GSPO's ratio, sequence masks) comes as a column beside it, computed before and held
constant: that is exact, since the derivative of a sequence's ratio is the sum of its tokens' parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from agentlightning_algorithms.policy.base import Loss

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it a ratio says only that something is broken, and float32 must not overflow."""


class PolicyLoss(NamedTuple):
    """What `policy_loss` gives."""

    loss: Tensor
    """Scalar: sum(weight * token_loss)."""
    clipped: Tensor
    """[tokens], bool: the clip took the gradient of this token away, or bounded it."""


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    kind: str | Loss = "clip",
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.0,
    ref_logp: Tensor | None = None,
    proximal: Tensor | None = None,
    sequence: Tensor | None = None,
    correction: Tensor | None = None,
) -> PolicyLoss:
    """`sum(weights * (correction * token loss + kl * KL estimate + trust * log(pi / pi_engine)^2))`.

    All arguments have shape [tokens]. `kind`: a whole `Loss`, or its kind with `clip` and `kl` from here. `old_logp`: the
    engine's. `proximal`: the learner's own at the beginning of the update, if ratios are to be taken to it. `sequence`:
    mean of log(pi / pi_old) over the token's sequence, at today's weights. `correction`: see `policy/torch_corrections.py`.
    Raises ValueError for an unknown kind, or where a column is missing that it needs.
    """
    loss = kind if isinstance(kind, Loss) else Loss(kind, clip, kl=kl)
    if loss.kind not in KINDS:
        raise ValueError(f"unknown loss {loss.kind!r}; known: {', '.join(KINDS)}")
    anchor = old_logp if proximal is None else proximal
    token_loss, clipped = KINDS[loss.kind](logp, anchor, advantages, loss, sequence)
    if correction is not None:
        token_loss = correction * token_loss
    if loss.kl:
        if ref_logp is None:
            raise ValueError("kl needs ref_logp, the log-probabilities under the initial policy")
        token_loss = token_loss + loss.kl * KL_FORMS[loss.kl_form](logp, ref_logp)
    if loss.trust:
        token_loss = token_loss + loss.trust * (logp - old_logp).square()
    return PolicyLoss((weights * token_loss).sum(), clipped)


def clip_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - old_logp): PPO (arXiv 1707.06347, equation 7).

    The second result says where the clipped side was the smaller one: such a token has no gradient.
    """
    return _clipped(ratio(logp, old_logp), advantages, clip)


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """exp(logp - old_logp), within exp(-20) and exp(20)."""
    return torch.exp(torch.clamp(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(ratio: Tensor, advantages: Tensor, clip: tuple[float, float]) -> tuple[Tensor, Tensor]:
    low, high = clip
    free = ratio * advantages
    bounded = torch.clamp(ratio, 1 - low, 1 + high) * advantages
    return -torch.minimum(free, bounded), (bounded < free).detach()


def _dual(loss: Tensor, clipped: Tensor, advantages: Tensor, dual: float) -> tuple[Tensor, Tensor]:
    """Where A < 0, no more than dual |A| (arXiv 1912.09729, equation 8)."""
    if not dual:
        return loss, clipped
    most = -dual * advantages
    over = (advantages < 0) & (loss > most)
    return torch.where(over, most, loss), clipped | over.detach()


_Column: TypeAlias = Tensor | None
_Result: TypeAlias = tuple[Tensor, Tensor]


def _clip(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    return _dual(*clip_loss(logp, anchor, advantages, loss.clip), advantages, loss.dual)


def _gspo(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    """The clip at s = exp(mean of the sequence's log-ratios); its derivative in each token's own (arXiv 2507.18071,
    equations 7 and 17: with equal advantages in a sequence GSPO-token is GSPO)."""
    if sequence is None:
        raise ValueError("gspo needs sequence, the mean log-ratio of the sequence that each token belongs to")
    value = sequence.detach() + logp - logp.detach()
    ratios = torch.exp(torch.clamp(value, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return _dual(*_clipped(ratios, advantages, loss.clip), advantages, loss.dual)


def _cispo(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    """-sg[clip(r)] A log p (arXiv 2506.13585, equation 4): no token loses its gradient."""
    free = ratio(logp, anchor).detach()
    bounded = torch.clamp(free, 1 - loss.clip[0], 1 + loss.clip[1])
    return -bounded * advantages * logp, bounded != free


def _sapo(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    """-4/tau sigmoid(tau (r - 1)) A: a soft gate instead of the clip (arXiv 2511.20347)."""
    tau = torch.where(advantages > 0, loss.taus[0], loss.taus[1]).to(logp.dtype)
    gate = 4 / tau * torch.sigmoid(tau * (ratio(logp, anchor) - 1))
    return -gate * advantages, torch.zeros_like(logp, dtype=torch.bool)


def _dppo(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    """-r A, without the tokens whose probability has moved too far in the direction of A (arXiv 2602.04879)."""
    moved = (torch.exp(logp) - torch.exp(anchor)).detach()
    out = torch.where(advantages > 0, moved > loss.clip[1], moved < -loss.clip[0])
    return torch.where(out, torch.zeros_like(logp), -ratio(logp, anchor) * advantages), out


def _importance(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    return -ratio(logp, anchor) * advantages, torch.zeros_like(logp, dtype=torch.bool)


def _likelihood(logp: Tensor, anchor: Tensor, advantages: Tensor, loss: Loss, sequence: _Column) -> _Result:
    return -advantages * logp, torch.zeros_like(logp, dtype=torch.bool)


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, Loss, _Column], _Result]] = {
    "clip": _clip,
    "likelihood": _likelihood,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo": _dppo,
    "importance": _importance,
}
"""What `Loss.kind` may be."""


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """logp - ref_logp. Unbiased as a value; its gradient is 0 in the mean, so it holds nothing back as a loss."""
    return torch.clamp(logp - ref_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(logp - ref_logp)^2 / 2. Biased as a value; its gradient is that of KL(policy || reference) in the mean."""
    return k1(logp, ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = ref_logp - logp, at tokens sampled from the policy.

    Never negative, and in the mean KL(policy || reference) (J. Schulman, "Approximating KL divergence", 2020).
    """
    difference = torch.clamp(ref_logp - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(difference) - 1 - difference


KL_FORMS = {"k1": k1, "k2": k2, "k3": k3}
