"""Learns from rows of tokens, in micro-batches; only the positions that have a weight meet the output layer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentlightning.errors import PolicyError
from agentlightning.schema import Floats

from ..loss import k3
from .base import Row, Update
from .torch_model import Network
from .torch_objective import Objective, check_loss
from .torch_rows import Micro, check, micros

MAX_NORM = 1.0
LOGITS_AT_ONCE = 2**24
"""Numbers in a block of logits: bounds the memory of large vocabularies."""
KL_TOKENS = 2048
"""Tokens on which the step's KL is measured afterwards."""


class Trainable(Protocol):
    """What the learner needs of the weights."""

    def current(self, selector: str) -> tuple[Network, AbstractContextManager[None]]:
        """The network of a selector's policy, and the context to run it in."""

    def initial(self, selector: str) -> tuple[Network, AbstractContextManager[None]]:
        """The same at the weights that training began with."""

    def key(self, selector: str) -> str:
        """What is trained for a selector: equal keys share their weights."""

    def parameters(self, key: str) -> dict[str, torch.nn.Parameter]:
        """The trained tensors of a key, by name."""

    def changed(self) -> None:
        """Called after values have changed."""


@dataclass
class Tally:
    """Sums over the tokens of one pass."""

    loss: float = 0.0
    tokens: int = 0
    clipped: int = 0
    error: float = 0.0
    norms: list[float] = field(default_factory=list)


class Learner:
    """AdamW without weight decay; one optimiser for each set of weights, so that an idle one never moves."""

    def __init__(self, weights: Trainable, learning_rate: float, micro_tokens: int, context: int) -> None:
        self.weights, self.learning_rate = weights, learning_rate
        self.micro_tokens, self.context = micro_tokens, context
        self.optimisers: dict[str, torch.optim.AdamW] = {}

    def optimiser(self, key: str) -> torch.optim.AdamW:
        """The optimiser of a set of weights, made when it is first needed."""
        if key not in self.optimisers:
            parameters = list(self.weights.parameters(key).values())
            self.optimisers[key] = torch.optim.AdamW(
                parameters, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
            )
        return self.optimisers[key]

    def update(self, update: Update) -> dict[str, float]:
        """See `Policy.update`. Raises PolicyError, with the weights as they were, for bad rows or a loss that is
        not finite."""
        started = time.perf_counter()
        self._check(update)
        batch = self._micros(update.rows)
        if not batch:
            raise PolicyError("no token of this update has a weight: there is nothing to learn from.")
        keys = sorted({self.weights.key(micro.selector) for micro in batch})
        backup = self._backup(keys) if update.epochs > 1 else {}
        first = last = Tally()
        objective = Objective(update.spec)
        try:
            objective.begin(batch, self._logps)
            for epoch in range(update.epochs):
                objective.epoch(batch, self._logps)
                last = self._step(batch, keys, update, objective)
                first = last if epoch == 0 else first
        except PolicyError:
            self._restore(backup)
            raise
        supervised = update.spec.kind == "likelihood"
        return objective.metrics | {
            "loss": first.loss,
            "grad_norm": max(last.norms),
            "kl": 0.0 if supervised else self._divergence(batch),
            "clip_fraction": last.clipped / last.tokens,
            "tokens": float(first.tokens),
            "logprob_error": 0.0 if supervised else first.error,
            "seconds": time.perf_counter() - started,
        }

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """See `Policy.logprobs`."""
        for number, row in enumerate(rows):
            self._check_row(row, number)
        everywhere = [
            Row(r.selector, r.ids, r.logprobs, r.advantages, np.ones(len(r.ids), np.float32), r.temperature)
            for r in rows
        ]
        result = [np.zeros(len(row.ids), np.float32) for row in rows]
        with torch.no_grad():
            for micro in self._micros(everywhere):
                values = self._logps(micro, initial=False)
                columns = micro.place + micro.start[micro.row]
                for row, column, value in zip(micro.row.tolist(), columns.tolist(), values.tolist(), strict=True):
                    result[micro.numbers[row]][column] = value
        return result

    # ---- rows to tensors

    def _check(self, update: Update) -> None:
        if update.epochs < 1:
            raise PolicyError("epochs must be 1 or more.")
        check_loss(update.spec)
        rate = self.learning_rate if update.learning_rate is None else update.learning_rate
        if not (math.isfinite(rate) and rate >= 0):
            raise PolicyError(f"the learning rate is {rate}: it must be a finite number, 0 or more.")
        for number, row in enumerate(update.rows):
            self._check_row(row, number)
            if len(row.weights) and row.weights[0] != 0:
                raise PolicyError(f"row {number}: the first token has a weight, but nothing comes before it.")

    def _check_row(self, row: Row, number: int) -> None:
        network, _ = self.weights.current(row.selector)
        check(row, number, network.vocabulary, self.context)

    def _micros(self, rows: Sequence[Row]) -> list[Micro]:
        return list(micros(rows, self.micro_tokens, self.weights.current(rows[0].selector)[0].device)) if rows else []

    # ---- passes

    def _logp(self, micro: Micro, network: Network, hidden: Tensor, part: slice) -> Tensor:
        logits = network.logits(hidden)
        if bool((micro.temperatures[part] != 1).any()):
            logits = logits / micro.temperatures[part, None]
        targets = micro.ids[micro.row[part], micro.place[part]]
        return -F.cross_entropy(logits, targets, reduction="none")

    def _parts(self, micro: Micro, network: Network) -> Iterator[slice]:
        size = max(64, LOGITS_AT_ONCE // network.vocabulary)
        return (slice(start, start + size) for start in range(0, len(micro.row), size))

    def _logps(self, micro: Micro, *, initial: bool) -> Tensor:
        """Log-probabilities of the trained tokens, without gradients."""
        network, context = (self.weights.initial if initial else self.weights.current)(micro.selector)
        with torch.no_grad(), context:
            hidden = micro.hidden(network)
            return torch.cat([self._logp(micro, network, hidden[p], p) for p in self._parts(micro, network)])

    def _step(self, batch: list[Micro], keys: list[str], update: Update, objective: Objective) -> Tally:
        """One pass over everything and one optimiser step."""
        tally = Tally()
        parameters = {key: list(self.weights.parameters(key).values()) for key in keys}
        every = [p for group in parameters.values() for p in group]
        try:
            for parameter in every:
                parameter.requires_grad_(True)
                parameter.grad = None
            for micro in batch:
                self._backward(micro, objective, tally)
            # Clipped for each set of weights by itself: one agent's outlier must not slow the others.
            tally.norms = [float(torch.nn.utils.clip_grad_norm_(parameters[key], MAX_NORM)) for key in keys]
            if not (math.isfinite(tally.loss) and all(map(math.isfinite, tally.norms))):
                raise PolicyError(
                    f"loss {tally.loss}, gradient norm {max(tally.norms)}: the step was refused and the weights are as "
                    "before. Lower the learning rate, or look for extreme advantages and log-probabilities."
                )
            for key in keys:
                optimiser = self.optimiser(key)
                optimiser.param_groups[0]["lr"] = (
                    self.learning_rate if update.learning_rate is None else update.learning_rate
                )
                optimiser.step()
            self.weights.changed()
        finally:
            for parameter in every:
                parameter.grad = None
                parameter.requires_grad_(False)
        return tally

    def _backward(self, micro: Micro, objective: Objective, tally: Tally) -> None:
        """Adds the gradient of one micro-batch. The head is run back in parts, the rest of the model once."""
        network, context = self.weights.current(micro.selector)
        with context:
            hidden = micro.hidden(network)
            leaf = hidden.detach().requires_grad_()
            for part in self._parts(micro, network):
                logp = self._logp(micro, network, leaf[part], part)
                loss, clipped = objective.loss(micro, part, logp)
                loss.backward()
                tally.loss += float(loss.detach())
                tally.tokens += len(logp)
                tally.clipped += int(clipped.sum())
                tally.error = max(tally.error, float((logp.detach() - micro.old[part]).abs().max()))
            hidden.backward(leaf.grad)

    def _divergence(self, batch: list[Micro]) -> float:
        """k3 estimate of KL(policy that sampled || policy after the step), on some of the tokens."""
        total, tokens = 0.0, 0
        for micro in sorted(batch, key=lambda m: m.ids.numel()):
            if tokens and tokens + len(micro.row) > KL_TOKENS:
                break
            values = k3(micro.old, self._logps(micro, initial=False))
            total, tokens = total + float(values.sum()), tokens + len(micro.row)
        return total / tokens

    # ---- going back

    def _backup(self, keys: list[str]) -> dict[str, tuple[list[Tensor], dict[str, object]]]:
        """Values and optimiser states before the first of several steps."""
        saved = {}
        for key in keys:
            values = [p.detach().clone() for p in self.weights.parameters(key).values()]
            state = self.optimiser(key).state_dict()
            state["state"] = {
                number: {name: value.clone() for name, value in slots.items()}
                for number, slots in state["state"].items()
            }
            saved[key] = (values, state)
        return saved

    def _restore(self, backup: dict[str, tuple[list[Tensor], dict[str, object]]]) -> None:
        for key, (values, state) in backup.items():
            with torch.no_grad():
                for parameter, value in zip(self.weights.parameters(key).values(), values, strict=True):
                    parameter.copy_(value)
            self.optimiser(key).load_state_dict(state)
        self.weights.changed()
