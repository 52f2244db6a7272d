"""What others mean by "GRPO": the estimator and the loss that a project uses unless told otherwise, by its name.

Facts about these projects, read in their sources in 2025 and 2026, not their code; `docs/grpo-presets.md` shows who differs
where, and what of each cannot be carried over. Statistics are over rollouts here whatever the project does, a group
of one is never trained, and the engine's log-probabilities stand for those that a project computes again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from agentlightning.errors import ConfigError
from agentlightning_algorithms.advantage import ESTIMATORS, Advantage
from agentlightning_algorithms.policy.base import Loss
from agentlightning_algorithms.rows import AGGREGATIONS


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An estimator and a loss."""

    advantage: Advantage = Advantage()
    loss: Loss = Loss()


LOSSES: dict[str, Loss] = {
    "clip": Loss(),
    "dual_clip": Loss(dual=3.0),
    "dapo": Loss(clip=(0.2, 0.28)),
    "dr_grpo": Loss(aggregation="constant", length=1024),
    "gspo": Loss("gspo", (3e-4, 4e-4), aggregation="sequence-token-mean"),
    "cispo": Loss("cispo", (1.0, 4.0)),
    "sapo": Loss("sapo", aggregation="sequence-token-mean"),
    "dppo": Loss("dppo"),
    "importance": Loss("importance"),
    "tis": Loss(correction="tis"),
    "icepop": Loss(correction="icepop"),
    "decoupled": Loss(correction="decoupled"),
}
"""Losses by name, as their papers have them."""

_KEPT = Advantage(flat="keep")

PRESETS: dict[str, Preset] = {
    "verl": Preset(_KEPT, Loss(dual=3.0)),
    "trl": Preset(Advantage(epsilon=1e-4, flat="keep"), Loss(correction="sequence_mask", bounds=(0.0, 3.0))),
    "rllm": Preset(Advantage(std="population", flat="keep"), Loss(dual=3.0)),
    "skyrl": Preset(_KEPT, Loss(kl=1e-3)),
    "slime": Preset(_KEPT, Loss(aggregation="sequence-token-mean")),
    "openrlhf": Preset(Advantage(epsilon=1e-9, flat="keep"), Loss()),
    "nemo_rl": Preset(Advantage("loo", "loo", 0.0, flat="keep"), Loss(kl=0.01)),
    "prime_rl": Preset(Advantage(std="none", flat="keep"), Loss("dppo", (0.2, 0.2), trust=1e-3)),
    "tinker": Preset(Advantage(std="none", flat="keep"), Loss("importance", aggregation="sum")),
    "art": Preset(Advantage(std="population", flat="keep"), Loss("cispo", (1.0, 4.0))),
    "dapo": Preset(Advantage(flat="resample"), LOSSES["dapo"]),
    "dr_grpo": Preset(ESTIMATORS["dr_grpo"], LOSSES["dr_grpo"]),
}
"""What each project does by default."""


def resolve(preset: str | Preset, advantage: Any = None, loss: Any = None) -> Preset:
    """The estimator and the loss of a preset, changed as asked: by a name, by some fields, or replaced whole.

    Raises ConfigError for unknown names, fields and values.
    """
    base = _named("preset", preset, PRESETS) if isinstance(preset, str) else preset
    if not isinstance(base, Preset):
        raise ConfigError(f"preset={preset!r}: give a name ({', '.join(PRESETS)}) or a Preset.")
    chosen = Preset(
        _changed("advantage", base.advantage, advantage, ESTIMATORS, Advantage),
        _changed("loss", base.loss, loss, LOSSES, Loss),
    )
    check(chosen.loss)
    return chosen


def check(loss: Loss) -> None:
    """Raises ConfigError for values that no learner could use. Its names are checked by the back end too."""
    if loss.aggregation not in AGGREGATIONS:
        raise ConfigError(f"loss: aggregation={loss.aggregation!r}: choose one of {', '.join(AGGREGATIONS)}.")
    if (loss.aggregation == "constant") != (loss.length > 0):
        raise ConfigError(
            "loss: `length` (tokens that a sequence is divided by) and aggregation='constant' go together: give both."
        )
    if min(*loss.clip, loss.kl, loss.trust, loss.dual, loss.length) < 0 or min(loss.taus) <= 0:
        raise ConfigError(f"{loss}: clip, kl, trust, dual and length cannot be negative, and taus must be positive.")
    if loss.dual and loss.dual <= 1:
        raise ConfigError(f"loss: dual={loss.dual}: a bound of 1 or less would cut on-policy tokens off; 3 is usual.")
    if loss.bounds is not None and not 0 <= loss.bounds[0] < loss.bounds[1]:
        raise ConfigError(f"loss: bounds={loss.bounds}: give (low, high) with 0 <= low < high.")
    for name, used in UNUSED.items():
        if getattr(loss, name) != getattr(_PLAIN, name) and not used(loss):
            raise ConfigError(
                f"loss: {name}={getattr(loss, name)!r} changes nothing for kind={loss.kind!r}: leave it out."
            )


_PLAIN = Loss()
UNUSED = {
    "clip": lambda loss: loss.kind in ("clip", "gspo", "cispo", "dppo"),
    "dual": lambda loss: loss.kind in ("clip", "gspo"),
    "taus": lambda loss: loss.kind == "sapo",
    "kl_form": lambda loss: loss.kl > 0,
    "bounds": lambda loss: loss.correction not in ("none", "decoupled"),
}
"""When a field has an effect: a knob that would do nothing is refused."""


def _named(what: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"{what}={name!r}: choose one of {', '.join(known)}.")
    return known[name]


def _changed(what: str, base: Any, change: Any, known: dict[str, Any], kind: Any) -> Any:
    if change is None or isinstance(change, kind):
        return base if change is None else change
    if isinstance(change, str):
        return _named(what, change, known)
    if not isinstance(change, dict):
        raise ConfigError(f"{what}={change!r}: give a name, a dict of fields, or a {kind.__name__}.")
    try:
        return msgspec.convert(msgspec.to_builtins(base) | change, kind)
    except (msgspec.ValidationError, TypeError) as error:
        fields = ", ".join(kind.__struct_fields__)
        raise ConfigError(f"{what}: {error}. Its fields are: {fields}.") from error
