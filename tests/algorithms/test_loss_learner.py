"""Losses in the torch back end: each field changes the step or raises, whatever the batches; sequences stay whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

import msgspec

from agentlightning.errors import PolicyError
from agentlightning.schema import Completion, Group, Trajectory, Transition, decode, encode, floats, ids
from agentlightning_algorithms.policy.base import Loss, Row, Update
from agentlightning_algorithms.presets import LOSSES, PRESETS
from agentlightning_algorithms.rows import rows_of
from tests.algorithms.learning import values_of, weights_of
from tests.fakes.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def rows() -> list[Row]:
    """Two conversations of two answers, some tokens sampled by an engine that thought otherwise."""
    found = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        weights = np.zeros(24)
        weights[6:11], weights[14:22] = 0.05, 0.05
        advantages = np.where(np.arange(24) < 12, 1.0, -0.7) * (1 if seed else -1)
        logprobs = rng.normal(-6.0, 0.6, 24)
        found.append(
            Row("writer", ids(rng.integers(3, 400, 24)), floats(logprobs), floats(advantages), floats(weights))
        )
    return found


def stepped(model: Path, loss: Loss, given: list[Row] | None = None, epochs: int = 2, **options: Any) -> Any:
    """The weights after an update, and its metrics."""
    weights = weights_of(model, options=options)
    metrics = weights.update(Update(given or rows(), loss=loss, epochs=epochs))
    return torch.cat([p.flatten() for p in values_of(weights, "writer").values()]), metrics


MUTATIONS = [
    (Loss(), Loss(clip=(0.05, 0.2))),
    (Loss(), Loss(clip=(0.2, 0.9))),
    (Loss(), Loss(dual=1.01)),
    (Loss(), Loss(trust=0.5)),
    (Loss(kl=0.5), Loss(kl=0.9)),
    (Loss(kl=0.5), Loss(kl=0.5, kl_form="k2")),
    (Loss(kl=0.5), Loss(kl=0.5, kl_form="k1")),
    (Loss(), Loss("gspo")),
    (Loss("gspo", (0.05, 0.05)), Loss("gspo", (0.9, 0.9))),
    (Loss(), Loss("cispo")),
    (Loss("cispo", (1.0, 4.0)), Loss("cispo", (0.1, 0.1))),
    (Loss(), Loss("sapo")),
    (Loss("sapo"), Loss("sapo", taus=(2.0, 1.05))),
    (Loss("sapo"), Loss("sapo", taus=(1.0, 3.0))),
    (Loss(), Loss("importance")),
    (Loss("importance"), Loss("dppo", (1e-3, 1e-3))),
    (Loss(), Loss("likelihood")),
    (Loss(), Loss(correction="tis")),
    (Loss(correction="tis"), Loss(correction="tis", bounds=(0.0, 0.6))),
    (Loss(correction="tis"), Loss(correction="decoupled")),
    (Loss(correction="tis"), Loss(correction="icepop")),
    (Loss(correction="decoupled"), Loss(correction="sequence_mask", bounds=(0.0, 0.5))),
    (Loss(correction="decoupled"), Loss(correction="sequence_tis")),
    (Loss(correction="decoupled"), Loss(correction="geometric_mask")),
]


@pytest.mark.parametrize(
    ("one", "other"), MUTATIONS, ids=lambda loss: " ".join(map(str, msgspec.structs.astuple(loss)))
)
def test_every_field_changes_the_step(model: Path, one: Loss, other: Loss) -> None:
    first, second = stepped(model, one)[0], stepped(model, other)[0]
    assert not torch.allclose(first, second, rtol=0, atol=1e-7)


def test_every_field_is_among_the_mutations() -> None:
    """`aggregation` and `length` are in the rows' weights: `test_advantage_golden.py`."""
    plain = msgspec.structs.asdict(Loss())
    changed = {
        name
        for pair in MUTATIONS
        for loss in pair
        for name, value in msgspec.structs.asdict(loss).items()
        if value != plain[name]
    }
    assert changed | {"aggregation", "length"} == set(plain)


NAMED = {**LOSSES, **{name: preset.loss for name, preset in PRESETS.items()}}
ALL = {f"{loss.kind}-{loss.correction}-{loss.kl > 0}": loss for loss in NAMED.values()}
"""One of each sort."""


@pytest.mark.parametrize("name", list(ALL))
def test_batches_of_any_size_give_the_same_step(model: Path, name: str) -> None:
    """One row after the other, or all at once."""
    _, first = stepped(model, ALL[name], epochs=1)
    _, second = stepped(model, ALL[name], epochs=1, micro_tokens=8)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-3)
    assert set(first) == set(second) and all(np.isfinite(value) for value in first.values())


def conversation(number: int, touching: bool) -> Trajectory:
    """Two calls, the second on top of the first; `touching`: with nothing between answer and answer."""
    rng = np.random.default_rng(number)
    prompt, first, second = ([int(t) for t in rng.integers(3, 400, n)] for n in (5, 4, 6))
    between = [] if touching else [11, 12]

    def done(before: list[int], said: list[int]) -> Transition:
        logprobs = floats(rng.normal(-6, 0.5, len(said)))
        call = Completion("c", "a", "writer", None, "m", "p", 0, ids(before), ids(said), logprobs, "stop", {}, {})
        return Transition(call, "writer", 0.0, float(rng.normal()))

    calls = [done(prompt, first), done([*prompt, *first, *between], second)]
    return Trajectory(f"r{number}", "a", "writer", 0.0, calls)


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("touching", [False, True])
def test_a_conversation_in_one_row_is_its_calls_one_by_one(model: Path, name: str, touching: bool) -> None:
    """Loss and gradient are those of the separate calls, also where a sequence is judged as a whole."""
    loss = ALL[name]
    together = [conversation(n, touching) for n in range(3)]
    merged = rows_of([Group(("g", "w"), together)], loss.aggregation, loss.length, apart=loss.of_sequences)
    assert len(merged) == (6 if touching and loss.of_sequences else 3)
    single = []
    for trajectory in together:
        for transition in trajectory.transitions:
            call = transition.completion
            kept = [
                row
                for row in merged
                if len(row.ids) >= len(call.prompt_ids) and (row.ids[: len(call.prompt_ids)] == call.prompt_ids).all()
            ]
            start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.response_ids)
            row = next(
                row
                for row in kept
                if len(row.ids) >= end and row.weights[start] and (row.ids[start:end] == call.response_ids).all()
            )
            cut = [
                floats(np.where(np.arange(end) >= start, getattr(row, n)[:end], 0))
                for n in ("logprobs", "advantages", "weights")
            ]
            single.append(Row("writer", row.ids[:end], *cut))
    first, second = stepped(model, loss, merged, epochs=1)[1], stepped(model, loss, single, epochs=1)[1]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-3)
    assert first["tokens"] == second["tokens"]


def test_gspo_sees_today_s_weights_in_each_epoch(model: Path) -> None:
    """After the first step ratios have moved: a narrow clip cuts in the second epoch what it let through in the first."""
    weights = weights_of(model)
    given = rows()
    for row, values in zip(given, weights.logprobs(given), strict=True):
        row.logprobs[:] = values  # an engine that agrees with the learner
    first = weights.update(Update(given, loss=LOSSES["gspo"], epochs=1))
    assert first["clip_fraction"] == 0
    later = weights.update(Update(given, loss=LOSSES["gspo"], epochs=1))
    assert later["clip_fraction"] > 0


def test_an_engine_that_agrees_needs_no_correction(model: Path) -> None:
    weights = weights_of(model)
    given = rows()
    for row, values in zip(given, weights.logprobs(given), strict=True):
        row.logprobs[:] = values
    metrics = weights.update(Update(given, loss=Loss(correction="icepop"), epochs=1))
    assert metrics["ess"] == pytest.approx(1) and metrics["masked_fraction"] == 0
    assert metrics["mismatch_k1"] == pytest.approx(0, abs=1e-5) and metrics["mismatch_k3"] == pytest.approx(0, abs=1e-6)


def test_rejected_tokens_stay_in_the_denominator(model: Path) -> None:
    """All rejected: the loss is 0 and nothing moves, rather than a few tokens getting all the weight."""
    before = torch.cat([p.flatten() for p in values_of(weights_of(model), "writer").values()])
    after, metrics = stepped(model, Loss(correction="icepop", bounds=(50.0, 60.0)), epochs=1)
    assert metrics["masked_fraction"] == 1 and metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert torch.equal(before, after)


def test_diagnostics_are_told_only_where_they_were_taken(model: Path) -> None:
    assert "ess" not in stepped(model, Loss(), epochs=1)[1]
    assert {"ess", "mismatch_k1", "mismatch_k3", "mismatch_chi2", "masked_fraction"} <= set(
        stepped(model, Loss(correction="tis"), epochs=1)[1]
    )


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Loss("ppo"), "unknown loss 'ppo'.*clip"),
        (Loss(kl=0.1, kl_form="k4"), "unknown kl_form 'k4'"),
        (Loss(correction="ice"), "unknown correction 'ice'.*icepop"),
        (Loss("likelihood", correction="tis"), "likelihood.*no correction"),
        ("ppo", "unknown loss 'ppo'"),
    ],
)
def test_what_the_back_end_cannot_do_raises_and_nothing_changes(model: Path, loss: Any, words: str) -> None:
    weights = weights_of(model)
    before = values_of(weights, "writer")
    with pytest.raises(PolicyError, match=words):
        weights.update(Update(rows(), loss=loss))
    assert all(torch.equal(value, before[name]) for name, value in values_of(weights, "writer").items())


@pytest.mark.parametrize("loss", ["clip", "likelihood", LOSSES["gspo"], PRESETS["trl"].loss], ids=str)
def test_a_loss_travels_to_another_process(loss: Any) -> None:
    sent = decode(encode(Update(rows(), loss=loss, clip=(0.1, 0.3), kl=0.2)), Update)
    assert sent.loss == loss
    assert sent.spec == (loss if isinstance(loss, Loss) else Loss(loss, (0.1, 0.3), kl=0.2))
