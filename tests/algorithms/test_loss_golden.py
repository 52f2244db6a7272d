"""Every loss and every correction against its table, to a millionth, and gradients against finite differences."""

import math
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from agentlightning_algorithms.loss import KINDS, KL_FORMS, policy_loss
from agentlightning_algorithms.policy.base import Loss
from agentlightning_algorithms.policy.torch_corrections import BOUNDS, correct, diagnostics, means, segments_of
from agentlightning_algorithms.presets import LOSSES, PRESETS
from tests.golden import cases, name


def tensor(values: Any) -> "torch.Tensor":
    return torch.tensor(values, dtype=torch.float64)


def loss_of(loss: Loss, logp: "torch.Tensor", old: "torch.Tensor", case: dict[str, Any]) -> Any:
    weights = tensor(case.get("weights", [1.0] * len(logp)))
    sequence = (logp - old).detach().mean().expand(len(logp)) if loss.kind == "gspo" else None
    reference = tensor(case["ref"]) if "ref" in case else None
    return policy_loss(logp, old, tensor(case["advantages"]), weights, kind=loss, sequence=sequence, ref_logp=reference)


@pytest.mark.parametrize("case", cases("losses"), ids=name)
def test_losses(case: dict[str, Any]) -> None:
    loss = msgspec.convert(case["loss"], Loss)
    found = loss_of(loss, tensor(case["logp"]), tensor(case["old"]), case)
    assert found.loss.item() == pytest.approx(case["expected"], abs=1e-6)


def test_the_tables_have_all_of_them() -> None:
    assert {case["loss"]["kind"] for case in cases("losses")} == set(KINDS)
    assert {case["loss"]["kl_form"] for case in cases("losses") if "kl_form" in case["loss"]} == set(KL_FORMS)
    assert {case["correction"] for case in cases("corrections")} == set(BOUNDS) - {"none"}


@pytest.mark.parametrize("case", cases("corrections"), ids=name)
def test_corrections(case: dict[str, Any]) -> None:
    bounds = tuple(case["bounds"]) if case["bounds"] else None
    segments = tensor([n for n, row in enumerate(case["log_w"]) for _ in row]).long()
    log_w = tensor([value for row in case["log_w"] for value in row])
    found = correct(Loss(correction=case["correction"], bounds=bounds), log_w, segments)
    expected = [value for row in case["expected"] for value in row]
    assert found.factor.tolist() == pytest.approx(expected, abs=1e-6)
    assert found.masked.tolist() == [value == 0 for value in expected]


def test_cispo_has_one_name_and_several_bounds() -> None:
    """TRL's epsilon_high=5 is the largest weight itself, verl's epsilon_high=0.2 the distance from 1, and ART's defaults
    epsilon=1, epsilon_high=4 are distances that allow [0, 5]: the same as TRL's."""
    logp, old, one = tensor([-0.1]), tensor([-3.0]), tensor([1.0])
    weight = {
        project: policy_loss(logp, old, one, one, kind=Loss("cispo", clip)).loss.item() / 0.1
        for project, clip in {"trl": (1.0, 5.0 - 1), "verl": (10.0, 0.2), "art": PRESETS["art"].loss.clip}.items()
    }
    assert weight == pytest.approx({"trl": 5.0, "verl": 1.2, "art": 5.0})


ALL = [*LOSSES.values(), *(preset.loss for preset in PRESETS.values())]


@pytest.mark.parametrize("loss", [loss for loss in ALL if loss.kind not in ("gspo", "cispo")], ids=str)
def test_gradients_match_finite_differences(loss: Loss) -> None:
    """GSPO and CISPO hold something constant, its sequence and its weight: they are checked apart, below."""
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(24, dtype=torch.float64, generator=generator) * 3 - 0.1
    logp = (old + torch.randn(24, dtype=torch.float64, generator=generator) * 0.1).requires_grad_()
    advantages, weights = torch.randn(2, 24, dtype=torch.float64, generator=generator)

    def value(values: "torch.Tensor") -> "torch.Tensor":
        return policy_loss(values, old, advantages, weights, kind=loss, ref_logp=old - 0.1).loss

    assert torch.autograd.gradcheck(value, logp, eps=1e-7)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("shift", [0.0, 1e-4, 1e-2, -1e-2])
def test_gspo_has_the_gradient_of_the_sequence_s_own_ratio(advantage: float, shift: float) -> None:
    old = tensor([-1.0, -0.5, -2.0, -0.1])
    logp = (old + tensor([1, 3, -1, 2]) * shift).requires_grad_()
    case = {"advantages": [advantage] * 4, "weights": [0.25] * 4}
    loss_of(LOSSES["gspo"], logp, old, case).loss.backward()
    exact = (old + tensor([1, 3, -1, 2]) * shift).requires_grad_()
    s = torch.exp((exact - old).mean())
    (-torch.minimum(s * advantage, torch.clamp(s, 1 - 3e-4, 1 + 4e-4) * advantage)).backward()
    assert logp.grad.tolist() == pytest.approx(exact.grad.tolist(), abs=1e-12)


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    logp = tensor([-0.1, -5.0]).requires_grad_()
    found = policy_loss(logp, tensor([-3.0, -1.0]), tensor([2.0, -1.0]), tensor([1.0, 1.0]), kind=LOSSES["cispo"])
    found.loss.backward()
    assert logp.grad.tolist() == pytest.approx([-5.0 * 2.0, math.exp(-4.0)])
    assert found.clipped.tolist() == [True, False]


@pytest.mark.parametrize("loss", ALL, ids=str)
def test_on_policy_every_loss_has_the_policy_gradient(loss: Loss) -> None:
    """At ratio 1, whatever bounds it later, each pushes a token by A: gradients differ by nothing (arXiv 1707.06347)."""
    old = tensor([-0.5, -2.0, -1.0])
    logp, advantages = old.clone().requires_grad_(), tensor([0.3, -2.0, 1.0])
    sequence = torch.zeros(3, dtype=torch.float64)
    policy_loss(
        logp, old, advantages, torch.ones(3, dtype=torch.float64), kind=loss, sequence=sequence, ref_logp=old
    ).loss.backward()
    assert logp.grad.tolist() == pytest.approx((-advantages).tolist(), abs=1e-9)


def test_sequences_are_told_by_the_gaps_between_them() -> None:
    row, place = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([3, 4, 7, 8, 9, 10])
    segments = segments_of(row, place)
    assert segments.tolist() == [0, 0, 1, 1, 2, 2]
    assert means(tensor([1, 3, 0, 1, 5, 5]), segments).tolist() == [2, 2, 0.5, 0.5, 5, 5]
    assert segments_of(row[:0], place[:0]).tolist() == []


def test_diagnostics_by_hand() -> None:
    """w = 1/2 and 3/2: ESS = 4 / (2 * 2.5); KL by k1 and k3; chi^2 = 1/4."""
    log_w = tensor([0.5, 1.5]).log()
    found = diagnostics(log_w, torch.tensor([False, True]))
    assert found == pytest.approx(
        {
            "ess": 0.8,
            "mismatch_k1": -math.log(0.75) / 2,
            "mismatch_k3": -math.log(0.75) / 2,
            "mismatch_chi2": 0.25,
            "masked_fraction": 0.5,
        }
    )


def test_k1_holds_nothing_back_and_k2_and_k3_do() -> None:
    """The mean gradient of k1 over tokens of the policy is 0 (sum of p * grad log p); those of k2 and k3 are KL's."""
    logits = tensor([0.3, -0.2, 1.0]).requires_grad_()
    reference = torch.log_softmax(tensor([1.0, 0.0, 0.0]), 0)
    p = torch.softmax(logits, 0).detach()
    gradients = {}
    for form, estimate in KL_FORMS.items():
        (gradients[form],) = torch.autograd.grad((p * estimate(torch.log_softmax(logits, 0), reference)).sum(), logits)
    q = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((q.exp() * (q - reference)).sum(), logits)
    assert gradients["k1"].abs().max() < 1e-12
    assert gradients["k2"].tolist() == pytest.approx(exact.tolist())
    reverse = p - reference.exp()
    assert gradients["k3"].tolist() == pytest.approx(reverse.tolist()), "k3's is that of KL(reference || policy)"
