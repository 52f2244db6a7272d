"""Losses against values worked out by hand, and gradients against finite differences."""

import math

import pytest

torch = pytest.importorskip("torch")

from agentlightning_algorithms.loss import clip_loss, k3, policy_loss


def tensor(*values: float) -> "torch.Tensor":
    return torch.tensor(values, dtype=torch.float64)


LOG2 = math.log(2.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, False),
        (2.0, 1.0, -1.2, True),  # good and already likelier: no more than 1 + high
        (0.5, 1.0, -0.5, False),  # good but less likely: pulled back without limit
        (2.0, -1.0, 2.0, False),  # bad and likelier: pushed down without limit
        (0.5, -1.0, 0.9, True),  # bad and already less likely: no less than 1 - low
        (1.1, -2.0, 2.2, False),
        (1.0, 0.0, 0.0, False),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    values, cut = clip_loss(tensor(math.log(ratio)), tensor(0.0), tensor(advantage), (0.1, 0.2))
    assert values.item() == pytest.approx(loss)
    assert cut.tolist() == [clipped]


def test_clipped_tokens_have_no_gradient_and_the_others_the_policy_gradient() -> None:
    logp = tensor(LOG2, 0.0, -LOG2).requires_grad_()
    values, _ = clip_loss(logp, tensor(0.0, 0.0, 0.0), tensor(1.0, 3.0, 1.0), (0.2, 0.2))
    values.sum().backward()
    assert logp.grad.tolist() == pytest.approx([0.0, -3.0, -0.5])  # -ratio * advantage where it is free


def test_on_policy_the_gradient_is_that_of_advantage_times_likelihood() -> None:
    """At ratio 1, PPO's gradient is REINFORCE's (arXiv 1707.06347, section 2)."""
    advantages, weights = tensor(0.3, -2.0, 5.0), tensor(0.1, 0.2, 0.3)
    gradients = []
    for kind in ("clip", "likelihood"):
        logp = tensor(-0.5, -3.0, -0.01).requires_grad_()
        policy_loss(logp, logp.detach(), advantages, weights, kind=kind).loss.backward()
        gradients.append(logp.grad.tolist())
    assert gradients[0] == pytest.approx(gradients[1])


def test_likelihood_by_hand() -> None:
    loss, clipped = policy_loss(tensor(-1.0, -2.0), tensor(0, 0), tensor(1.0, 0.5), tensor(0.5, 0.5), kind="likelihood")
    assert loss.item() == pytest.approx(0.5 * 1.0 + 0.5 * 1.0)
    assert not clipped.any()


@pytest.mark.parametrize(("logp", "ref", "value"), [(0.0, 0.0, 0.0), (-LOG2, 0.0, 1 - LOG2), (0.0, -LOG2, LOG2 - 0.5)])
def test_k3_by_hand(logp: float, ref: float, value: float) -> None:
    assert k3(tensor(logp), tensor(ref)).item() == pytest.approx(value)


def test_k3_is_kl_in_the_mean() -> None:
    policy, reference = tensor(0.7, 0.2, 0.1), tensor(0.3, 0.3, 0.4)
    kl = (policy * (policy / reference).log()).sum()
    assert (policy * k3(policy.log(), reference.log())).sum().item() == pytest.approx(kl.item())


def test_kl_is_weighed_like_the_token() -> None:
    logp = tensor(-1.0, -1.0)
    loss, _ = policy_loss(logp, logp, tensor(0.0, 0.0), tensor(0.25, 0.0), kl=2.0, ref_logp=tensor(-2.0, -9.0))
    assert loss.item() == pytest.approx(0.25 * 2.0 * (math.exp(-1) - 1 + 1))


def test_gradients_match_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logp = (-torch.rand(40, dtype=torch.float64, generator=generator) * 3).requires_grad_()
    old = logp.detach() + torch.randn(40, dtype=torch.float64, generator=generator) * 0.3
    advantages, weights = torch.randn(2, 40, dtype=torch.float64, generator=generator)
    reference = old - 0.1

    def loss(values: "torch.Tensor") -> "torch.Tensor":
        return policy_loss(values, old, advantages, weights, clip=(0.2, 0.28), kl=0.3, ref_logp=reference).loss

    assert torch.autograd.gradcheck(loss, logp, eps=1e-7)


def test_a_batch_may_be_split_in_any_way() -> None:
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(4, 10, dtype=torch.float64, generator=generator)
    whole = policy_loss(*columns).loss
    parts = sum(policy_loss(*columns[:, part]).loss for part in (slice(0, 3), slice(3, 4), slice(4, 10)))
    assert whole.item() == pytest.approx(parts.item())


def test_huge_ratios_stay_finite() -> None:
    logp = tensor(0.0, -1000.0).requires_grad_()
    loss, _ = policy_loss(
        logp, tensor(-1000.0, 0.0), tensor(-1.0, 1.0), tensor(1.0, 1.0), kl=1.0, ref_logp=tensor(0, 0)
    )
    loss.backward()
    assert math.isfinite(loss.item()) and torch.isfinite(logp.grad).all()


def test_refusals_name_the_cure() -> None:
    one = tensor(0.0)
    with pytest.raises(ValueError, match="known: clip, likelihood, gspo"):
        policy_loss(one, one, one, one, kind="trust me")
    with pytest.raises(ValueError, match="ref_logp"):
        policy_loss(one, one, one, one, kl=0.1)
