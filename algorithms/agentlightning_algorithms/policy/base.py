"""The contract of a policy back end: it serves a trainable model and learns from rows of its own tokens.

A back end is named in the entry-point group `agentlightning.policies`; the entry is a callable that takes
`PolicySettings` and gives a `Policy`. A setting that a back end cannot honour raises `ConfigError` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agentlightning.schema import Endpoint, Floats, Ids


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an algorithm asks of a back end. These and an algorithm's own fields are the training knobs."""

    model: str
    """Folder of a Hugging Face model, a `.gguf` file, or a name the back end knows. Never fetched by us."""
    selectors: tuple[str, ...]
    """The entries of `agents=`; with LoRA each has an adapter of its own, named like it."""
    lora: int = 0
    """Rank of the adapters; 0 trains all weights, shared by all selected agents."""
    learning_rate: float = 1e-5
    seed: int = 0
    options: dict[str, object] = {}
    """The back end's own options, refused where unknown: `device`, `threads`, `max_batch`, `max_context`, ..."""


class Row(msgspec.Struct):
    """One sequence to learn from; all arrays have shape [tokens]. Prompt and environment tokens have weight 0.

    The loss of a batch is `sum(weight * token_loss)` over all rows: aggregation is in the weights alone, so a batch may be
    split in any way without changing the gradient.
    """

    selector: str
    """Whose adapter learns."""
    ids: Ids
    logprobs: Floats
    """What the engine reported when it sampled; 0 where nothing was sampled."""
    advantages: Floats
    weights: Floats
    """0 exactly where the policy did not sample the token."""
    temperature: float = 1.0
    """The temperature that the log-probabilities were taken at; 0 (greedy) counts as 1."""


class Update(msgspec.Struct):
    """What one call of `Policy.update` does: `epochs` passes over `rows`, one optimiser step each."""

    rows: Sequence[Row]
    loss: str = "clip"
    """`clip` (PPO) or `likelihood` (supervised: -log p, advantages as weights)."""
    clip: tuple[float, float] = (0.2, 0.2)
    """Lower and upper bound of the probability ratio: [1 - low, 1 + high]."""
    kl: float = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy), added per token."""
    epochs: int = 1
    learning_rate: float | None = None
    """Instead of the one in the settings, for schedules."""


class Policy(Protocol):
    """A running back end. `version` grows by one with each update and is stamped on all that it serves."""

    version: int

    def start(self) -> Endpoint:
        """Loads the weights and serves them. Raises PolicyError with the cause, never hangs."""

    def update(self, update: Update) -> dict[str, float]:
        """Learns, and serves the new weights as `version + 1` from then on.

        Metrics: `loss`, `grad_norm`, `kl` (old to new, k3), `clip_fraction`, `tokens` (trained), `seconds`, and
        `logprob_error`: the largest |log p now - log p reported| over sampled tokens, taken before the first step.
        """

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """Log-probability of every token of each row at today's weights, shape [tokens]; the first one is 0."""

    def save(self, folder: Path) -> None:
        """Writes weights (Hugging Face folder; adapters as peft folders `adapters/<name>`) and optimiser state,
        atomically: the folder exists complete or not at all."""

    def load(self, folder: Path) -> None:
        """Takes up a saved state, its version included."""

    def close(self) -> None:
        """Ends processes and frees ports; safe to call twice."""
