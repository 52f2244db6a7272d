"""A loss at work in a learner: what it must know before tokens are pushed, and then their loss.

    objective = Objective(update.spec)
    objective.begin(batch, logps)            # once: references and corrections
    for each epoch:
        objective.epoch(batch, logps)        # what holds at today's weights: sequence ratios
        loss, clipped = objective.loss(micro, part, logp)      # any number of times, in any parts

A batch is a list of anything with the columns of `Columns`; `logps(one, initial=...)` gives the log-probabilities of its
tokens without gradients. Losses that need no more than their token cost no pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from agentlightning.errors import PolicyError

from ..loss import KINDS, KL_FORMS, PolicyLoss, policy_loss
from .base import Loss
from .torch_corrections import BOUNDS, correct, diagnostics, means, segments_of


class Columns(Protocol):
    """Trained tokens, all of shape [tokens], in order of row and place."""

    row: Tensor
    place: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor


Logps = Callable[..., Tensor]


def check_loss(loss: Loss) -> None:
    """Raises PolicyError for what no learner can do."""
    for name, value, known in (
        ("loss", loss.kind, KINDS),
        ("kl_form", loss.kl_form, KL_FORMS),
        ("correction", loss.correction, BOUNDS),
    ):
        if value not in known:
            raise PolicyError(f"unknown {name} {value!r}: use one of {', '.join(known)}.")
    if loss.kind == "likelihood" and (loss.correction != "none" or loss.dual or loss.trust):
        raise PolicyError("likelihood is supervised learning: it takes no correction, dual or trust.")


class Objective:
    """See the module. Raises PolicyError for an unknown loss."""

    def __init__(self, loss: Loss) -> None:
        check_loss(loss)
        self.spec = loss
        self.metrics: dict[str, float] = {}
        """Diagnostics of the correction, if there is one."""
        self._columns: dict[int, dict[str, Tensor]] = {}
        self._fresh = False

    def begin(self, batch: Sequence[Any], logps: Logps) -> None:
        """Before the first step."""
        for one in batch:
            columns = self._columns[id(one)] = {}
            if self.spec.kl:
                columns["ref_logp"] = logps(one, initial=True)
            if self.spec.correction != "none":
                columns["proximal"] = logps(one, initial=False)
        if self.spec.correction != "none" and batch:
            self._correct(batch)
        self._fresh = True

    def _correct(self, batch: Sequence[Any]) -> None:
        ratios, masks = [], []
        for one in batch:
            columns = self._columns[id(one)]
            log_w = columns["proximal"] - one.old
            columns["correction"], masked = correct(self.spec, log_w, segments_of(one.row, one.place))
            ratios.append(log_w)
            masks.append(masked)
        self.metrics = diagnostics(torch.cat(ratios), torch.cat(masks))

    def epoch(self, batch: Sequence[Any], logps: Logps) -> None:
        """Before each pass."""
        if self.spec.kind == "gspo":
            for one in batch:
                columns = self._columns[id(one)]
                proximal = columns.get("proximal")
                now = proximal if self._fresh and proximal is not None else logps(one, initial=False)
                log_ratio = now - (one.old if proximal is None else proximal)
                columns["sequence"] = means(log_ratio, segments_of(one.row, one.place))
        self._fresh = False

    def loss(self, one: Columns, part: slice, logp: Tensor) -> PolicyLoss:
        """Of some tokens of one of the batch; `logp` has their shape."""
        columns = {name: values[part] for name, values in self._columns.get(id(one), {}).items()}
        return policy_loss(logp, one.old[part], one.advantages[part], one.weights[part], kind=self.spec, **columns)
