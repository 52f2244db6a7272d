"""Draws one token per row, all rows at once. Row i's draw depends on row i alone: its logits and its own uniform."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 256


class Uniforms:
    """The uniform numbers of one request: the k-th token uses the k-th number, whoever else is in the batch.

    A Philox stream keyed by (seed, choice): counter-based, so streams of different keys are independent.
    """

    def __init__(self, seed: int, choice: int) -> None:
        key = np.array([seed & 0xFFFFFFFFFFFFFFFF, choice], dtype=np.uint64)
        self._generator = np.random.Generator(np.random.Philox(key=key))
        self._drawn: list[float] = []

    def __getitem__(self, position: int) -> float:
        while position >= len(self._drawn):
            self._drawn.extend(self._generator.random(_BLOCK).tolist())
        return self._drawn[position]


class Draw(NamedTuple):
    """How the rows of a batch are drawn; each list has one entry per row."""

    temperatures: list[float]
    """0: greedy."""
    top_ps: list[float]
    top_ks: list[int]
    """0: no limit."""
    uniforms: list[float]


def sample(logits: Tensor, draw: Draw) -> tuple[list[int], list[float]]:
    """One token id per row of `logits` [rows, vocabulary], and its log-probability under softmax(logits / T).

    Greedy rows take the largest logit; their log-probability is taken at T = 1. `top_p` and `top_k` cut the
    distribution that is drawn from, not the log-probability reported: it is what a learner can compute again.
    """
    logits = logits.float()
    if any(t not in (0.0, 1.0) for t in draw.temperatures):
        divisors = torch.tensor([t or 1.0 for t in draw.temperatures], device=logits.device)
        logits = logits / divisors[:, None]
    logps = torch.log_softmax(logits, dim=-1)
    greedy = [t == 0.0 for t in draw.temperatures]
    chosen = logps.argmax(-1) if any(greedy) else None
    if not all(greedy):
        drawn = _inverse_cdf(_cut(logps, draw), draw.uniforms)
        chosen = drawn if chosen is None else torch.where(torch.tensor(greedy, device=drawn.device), chosen, drawn)
    assert chosen is not None
    return chosen.tolist(), logps.gather(1, chosen[:, None])[:, 0].tolist()


def _cut(logps: Tensor, draw: Draw) -> Tensor:
    """Probabilities with everything outside top-k and top-p set to 0; not normalised again."""
    probabilities = logps.exp()
    for row, (top_p, top_k) in enumerate(zip(draw.top_ps, draw.top_ks, strict=True)):
        if top_k or top_p < 1.0:
            probabilities[row] = _cut_row(probabilities[row], top_p, top_k)
    return probabilities


def _cut_row(probabilities: Tensor, top_p: float, top_k: int) -> Tensor:
    """The smallest set of likeliest tokens whose mass reaches `top_p`, of at most `top_k` tokens."""
    size = probabilities.numel()
    width = min(top_k or 1024, size)
    values, order = probabilities.topk(width)
    if not top_k and width < size and float(values.sum()) < top_p:
        values, order = probabilities.sort(descending=True)
    if top_p < 1.0:
        before = values.cumsum(0) - values
        values = values * (before < top_p)
    return torch.zeros_like(probabilities).scatter_(0, order, values)


def _inverse_cdf(probabilities: Tensor, uniforms: list[float]) -> Tensor:
    """The first token whose cumulated mass exceeds u * total; never one of probability 0."""
    cumulated = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:].contiguous()
    aim = torch.tensor(uniforms, dtype=torch.float64, device=probabilities.device)[:, None] * total
    last = torch.searchsorted(cumulated, total)
    return torch.minimum(torch.searchsorted(cumulated, aim, right=True), last)[:, 0]


def seed_of(values: npt.NDArray[np.int64]) -> int:
    """A stable 63-bit number from whole numbers: the seed of a request that names none."""
    return int(np.random.SeedSequence(values.tolist()).generate_state(1, np.uint64)[0] >> 1)
