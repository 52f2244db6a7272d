"""What is done when the engine that sampled is not exactly the learner: other kernels, other precision, older weights.

`log_w` is log(pi_learner / pi_engine) of each sampled token, before the first step of an update. A correction turns it
into a factor of the token's loss that is held constant. Rejected tokens get the factor 0 and stay in the denominators, as in
verl; where they left only the numerator, others have trained too much.

| name | factor | source |
|---|---|---|
| `tis` | min(w, high) | truncated importance sampling, Yao et al. 2025 |
| `icepop` | w within [low, high], else 0 | Ring-1T, arXiv 2510.18855 |
| `sequence_tis` | the same as `tis` with the product of w over the sequence | TRL `sequence_truncate` |
| `sequence_mask` | that product within [low, high], else 0 | TRL `sequence_mask` |
| `geometric_mask` | 1 where exp(mean log w) of the sequence is within [low, high], else 0 | verl, Geo-RS |
| `decoupled` | w | AReaL, arXiv 2505.24298, equation 5 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..loss import MAX_LOG_RATIO
from .base import Loss

BOUNDS: Mapping[str, tuple[float, float]] = {
    "none": (0.0, float("inf")),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_tis": (0.0, 3.0),
    "sequence_mask": (0.0, 3.0),
    "geometric_mask": (0.5, 2.0),
    "decoupled": (0.0, float("inf")),
}
"""The usual bounds; `Loss.bounds` says otherwise."""


class Correction(NamedTuple):
    factor: Tensor
    """[tokens]."""
    masked: Tensor
    """[tokens], bool: the factor is 0."""


def correct(loss: Loss, log_w: Tensor, segments: Tensor) -> Correction:
    """Factors of the tokens; `segments` numbers the sequence that each belongs to. Raises ValueError if unknown."""
    if loss.correction not in BOUNDS:
        raise ValueError(f"unknown correction {loss.correction!r}; known: {', '.join(BOUNDS)}")
    low, high = loss.bounds or BOUNDS[loss.correction]
    if loss.correction.startswith("sequence"):
        log_w = sums(log_w, segments)[segments]
    elif loss.correction == "geometric_mask":
        log_w = means(log_w, segments)
    w = torch.exp(torch.clamp(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    if loss.correction in ("tis", "sequence_tis", "decoupled"):
        return Correction(torch.clamp(w, low, high), torch.zeros_like(w, dtype=torch.bool))
    masked = (w < low) | (w > high)
    kept = torch.ones_like(w) if loss.correction in ("geometric_mask", "none") else w
    return Correction(torch.where(masked, torch.zeros_like(w), kept), masked)


def sums(values: Tensor, segments: Tensor) -> Tensor:
    """Sum over each segment, [segments]."""
    count = int(segments.max()) + 1 if len(segments) else 0
    return values.new_zeros(count).index_add(0, segments, values)


def means(values: Tensor, segments: Tensor) -> Tensor:
    """Mean over the segment that each value belongs to, [tokens]."""
    return (sums(values, segments) / sums(torch.ones_like(values), segments))[segments]


def segments_of(row: Tensor, place: Tensor) -> Tensor:
    """Numbers of the sampled sequences: tokens of one row with nothing between them are one call's answer.

    Both have shape [tokens] and are in order: the row of a token, and its column there.
    """
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = (row[1:] != row[:-1]) | (place[1:] != place[:-1] + 1)
    return torch.cumsum(first, 0) - 1


def diagnostics(log_w: Tensor, masked: Tensor) -> dict[str, float]:
    """How far the learner is from the engine, over tokens that the engine sampled.

    `ess`: effective share of the tokens, (sum w)^2 / (n sum w^2). `mismatch_k1`, `mismatch_k3`: estimates of KL(engine ||
    learner). `mismatch_chi2`: mean w^2 - 1.
    """
    w = torch.exp(torch.clamp(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO)).double()
    return {
        "ess": float(w.sum().square() / (len(w) * w.square().sum())),
        "mismatch_k1": float(-log_w.double().mean()),
        "mismatch_k3": float((w - 1 - log_w.double()).mean()),
        "mismatch_chi2": float(w.square().mean() - 1),
        "masked_fraction": float(masked.double().mean()),
    }
