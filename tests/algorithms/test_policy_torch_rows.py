"""Micro-batches: every trained token is in exactly one, budgets hold, and shared prompts change no number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.schema import floats, ids
from agentlightning_algorithms.policy import torch_rows
from agentlightning_algorithms.policy.base import PolicySettings, Row, Update
from agentlightning_algorithms.policy.torch_objective import Objective
from agentlightning_algorithms.policy.torch_options import parse_options
from agentlightning_algorithms.policy.torch_rows import Micro, micros
from agentlightning_algorithms.policy.torch_weights import Weights
from tests.fakes.tiny import save_tiny

CPU = torch.device("cpu")


def group(prompt: int, tails: list[int], seed: int = 0, selector: str = "a") -> list[Row]:
    """Rows with one prompt and answers of these lengths; ids, weights and advantages are all different."""
    rng = np.random.default_rng(seed)
    head = rng.integers(3, 400, prompt)
    rows = []
    for tail in tails:
        length = prompt + tail
        trained = (np.arange(length) >= prompt) * rng.uniform(0.01, 0.1, length)
        sequence = np.concatenate([head, rng.integers(3, 400, tail)])
        old = rng.normal(-5.5, 0.1, length)
        rows.append(Row(selector, ids(sequence), floats(old), floats(rng.normal(size=length)), floats(trained)))
    return rows


def told(batch: list[Micro]) -> dict[tuple[int, int], tuple[int, float, float, float]]:
    """(row, position) -> id, old log-probability, advantage and weight, as the micro-batches hold them."""
    found: dict[tuple[int, int], tuple[int, float, float, float]] = {}
    for micro in batch:
        for k in range(len(micro.row)):
            row, place = int(micro.row[k]), int(micro.place[k])
            key = (micro.numbers[row], place + int(micro.start[row]))
            assert key not in found, "a token is trained twice"
            values = (micro.old[k], micro.advantages[k], micro.weights[k])
            found[key] = (int(micro.ids[row, place]), *map(float, values))
    return found


def sequence_of(micro: Micro, row: int) -> list[int]:
    start = int(micro.start[row])
    before = micro.prefix[int(micro.group[row]), :start].tolist() if micro.prefix is not None else []
    return [*before, *micro.ids[row].tolist()]


groups = st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 30), min_size=1, max_size=6)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(groups, st.integers(8, 300))
def test_every_trained_token_is_in_exactly_one_micro_batch(shapes: Any, budget: int) -> None:
    rows = [row for seed, (prompt, tails) in enumerate(shapes) for row in group(prompt, tails, seed, "ab"[seed % 2])]
    batch = list(micros(rows, budget, CPU))
    wanted = {
        (n, t): (int(row.ids[t]), float(row.logprobs[t]), float(row.advantages[t]), float(row.weights[t]))
        for n, row in enumerate(rows)
        for t in np.flatnonzero(row.weights)
    }
    assert told(batch) == wanted
    for micro in batch:
        assert {rows[n].selector for n in micro.numbers} == {micro.selector}
        for row, number in enumerate(micro.numbers):
            assert sequence_of(micro, row)[: len(rows[number].ids)] == rows[number].ids.tolist()
        size = micro.ids.numel() + (micro.prefix.numel() if micro.prefix is not None else 0)
        assert size <= budget or len(micro.numbers) == 1


def test_a_group_s_prompt_is_there_once() -> None:
    [micro] = micros(group(40, [5, 9, 7]) + group(30, [4, 4], seed=1), 4096, CPU)
    assert micro.prefix is not None and micro.prefix.shape == (2, 39)
    assert micro.ids.shape == (5, 10), "the last token of the prompt predicts the first trained one"
    assert micro.start.tolist() == [39, 39, 39, 29, 29]


def test_what_is_not_worth_sharing_is_not() -> None:
    [short] = micros(group(torch_rows.WORTH_SHARING, [5, 5]), 4096, CPU)
    assert short.prefix is None
    [single] = micros(group(100, [5]), 4096, CPU)
    assert single.prefix is None
    assert list(micros(group(100, [5], selector="a")[:0], 4096, CPU)) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("lora", [0, 4])
def test_sharing_changes_no_number(model: Path, lora: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = group(60, [5, 20, 11]) + group(35, [9, 9], seed=1) + group(50, [12], seed=2)
    results = []
    for worth in (torch_rows.WORTH_SHARING, 10**9):
        monkeypatch.setattr(torch_rows, "WORTH_SHARING", worth)
        values = PolicySettings(model=str(model), selectors=("a",), lora=lora, learning_rate=1e-3)
        weights = Weights(values, parse_options(values), model)
        assert any(micro.prefix is not None for micro in weights.learner._micros(rows)) == (worth < 10**9)
        first = weights.update(Update(rows, kl=0.1))
        results.append((first, weights.update(Update(rows, kl=0.1)), weights.logprobs(rows)))
    for step in (0, 1):
        for key in ("loss", "grad_norm", "kl", "logprob_error", "tokens", "clip_fraction"):
            assert results[0][step][key] == pytest.approx(results[1][step][key], rel=1e-3, abs=1e-5), key
    for shared, plain in zip(results[0][2], results[1][2], strict=True):
        assert shared == pytest.approx(plain, abs=1e-3)


@pytest.mark.parametrize("lora", [0, 4])
def test_sharing_gives_the_gradient_of_the_rows_one_by_one(model: Path, lora: int) -> None:
    from agentlightning_algorithms.policy.torch_learner import Tally

    rows = group(60, [5, 20, 11]) + group(35, [9, 9], seed=1)
    values = PolicySettings(model=str(model), selectors=("a",), lora=lora)
    weights = Weights(values, parse_options(values), model)
    parameters = weights.parameters(weights.key("a"))
    gradients = []
    for batches in ([rows], [[row] for row in rows]):
        for parameter in parameters.values():
            parameter.requires_grad_(True)
            parameter.grad = None
        for batch in batches:
            for micro in weights.learner._micros(batch):
                weights.learner._backward(micro, Objective(Update(batch).spec), Tally())
        gradients.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    scale = max(float(g.abs().max()) for g in gradients[1].values())
    for name, gradient in gradients[0].items():
        assert float((gradient - gradients[1][name]).abs().max()) < 1e-5 * scale, name
