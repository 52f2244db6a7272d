"""Weights and rows that the tests of learning and of checkpoints share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from agentlightning.schema import floats, ids
from agentlightning_algorithms.policy.base import PolicySettings, Row, Update
from agentlightning_algorithms.policy.torch_options import parse_options
from agentlightning_algorithms.policy.torch_weights import Weights


def weights_of(model: Path, *selectors: str, lora: int = 0, options: dict[str, Any] | None = None) -> Weights:
    settings = PolicySettings(
        model=str(model), selectors=selectors or ("writer",), lora=lora, learning_rate=1e-2, options=options or {}
    )
    return Weights(settings, parse_options(settings), model)


def a_row(selector: str = "writer", seed: int = 0, length: int = 20, advantage: float = 1.0, **more: Any) -> Row:
    rng = np.random.default_rng(seed)
    weights = np.where(np.arange(length) >= length // 2, 0.1, 0.0)
    return Row(
        selector,
        ids(rng.integers(3, 400, length)),
        floats(rng.normal(-5.5, 0.2, length)),
        floats(np.full(length, advantage)),
        floats(weights),
        **more,
    )


def values_of(weights: Weights, key: str) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in weights.parameters(key).items()}


def moved(weights: Weights, key: str, before: dict[str, Any]) -> bool:
    return any(not torch.equal(p, before[name]) for name, p in weights.parameters(key).items())


def plain_logits(model: Any, tokens: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens[None].astype(np.int64))).logits[0]


def trained(model: Path, *selectors: str, lora: int = 3) -> Weights:
    weights = weights_of(model, *selectors, lora=lora)
    for number, selector in enumerate(selectors):
        for _ in range(3):
            weights.update(Update([a_row(selector, seed=number)]))
    return weights
