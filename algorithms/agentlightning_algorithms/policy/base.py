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


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a sampled token is pushed. `r` is its ratio pi / pi_old, `w` pi_old / pi_engine, `A` its advantage.

    Formulas and sources: `loss.py`. Without a correction pi_old is the engine, whose log-probabilities are in the rows;
    with one it is the learner at the beginning of the update, and `w` is accounted for apart.
    """

    kind: str = "clip"
    """`clip` (PPO), `gspo`, `cispo`, `sapo`, `dppo`, `importance` (r A, unbounded), `likelihood` (-A log p)."""
    clip: tuple[float, float] = (0.2, 0.2)
    """`clip`, `gspo`, `cispo`: r is held within [1 - low, 1 + high]. `dppo`: how far a probability may have moved."""
    dual: float = 0.0
    """`clip`, `gspo`: where A < 0 the loss is at most `dual * |A|`; 0: no such bound."""
    taus: tuple[float, float] = (1.0, 1.05)
    """`sapo`: temperature where A > 0, and elsewhere."""
    kl: float = 0.0
    """Weight of an estimate of KL(policy || initial policy), added per token."""
    kl_form: str = "k3"
    """`k1`, `k2` or `k3`."""
    trust: float = 0.0
    """Weight of log(pi / pi_engine) squared, added per token."""
    correction: str = "none"
    """What is done about w: `tis`, `icepop`, `sequence_tis`, `sequence_mask`, `geometric_mask`, `decoupled`."""
    bounds: tuple[float, float] | None = None
    """Of the correction; None: its usual ones."""
    aggregation: str = "token"
    """How tokens are added up; see `rows.py`."""
    length: int = 0
    """`constant`: the number of tokens that a sequence is divided by, whatever its own."""

    @property
    def of_sequences(self) -> bool:
        """Whether a token's loss depends on the whole answer that it is in, and not on the token alone."""
        return self.kind == "gspo" or self.correction in ("sequence_tis", "sequence_mask", "geometric_mask")


class Update(msgspec.Struct):
    """What one call of `Policy.update` does: `epochs` passes over `rows`, one optimiser step each."""

    rows: Sequence[Row]
    loss: str | Loss = "clip"
    """All of a loss, or its kind alone, with `clip` and `kl` from below; `likelihood` is supervised learning."""
    clip: tuple[float, float] = (0.2, 0.2)
    """Lower and upper bound of the probability ratio: [1 - low, 1 + high]."""
    kl: float = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy), added per token."""
    epochs: int = 1
    learning_rate: float | None = None
    """Instead of the one in the settings, for schedules."""

    @property
    def spec(self) -> Loss:
        """The whole loss."""
        return self.loss if isinstance(self.loss, Loss) else Loss(self.loss, self.clip, kl=self.kl)


class Policy(Protocol):
    """A running back end. `version` grows by one with each update and is stamped on all that it serves."""

    version: int

    def start(self) -> Endpoint:
        """Loads the weights and serves them. Raises PolicyError with the cause, never hangs."""

    def update(self, update: Update) -> dict[str, float]:
        """Learns, and serves the new weights as `version + 1` from then on.

        Metrics: `loss`, `grad_norm`, `kl` (old to new, k3), `clip_fraction`, `tokens` (trained), `seconds`, and
        `logprob_error`: the largest |log p now - log p reported| over sampled tokens, taken before the first step.
        With a correction also `mismatch_k1`, `mismatch_k3` (engine to learner), `ess` (0 to 1) and `masked_fraction`.
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
