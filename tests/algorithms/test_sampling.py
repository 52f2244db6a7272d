"""Drawing tokens: right frequencies, right log-probabilities, and nobody's draw depends on the neighbours."""

import math

import pytest

torch = pytest.importorskip("torch")

from agentlightning_algorithms.policy.torch_sampling import Draw, Uniforms, sample


def draw(uniforms: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Draw:
    rows = len(uniforms)
    return Draw([temperature] * rows, [top_p] * rows, [top_k] * rows, uniforms)


def test_uniforms_repeat_and_differ() -> None:
    one, again, other_choice, other_seed = Uniforms(7, 0), Uniforms(7, 0), Uniforms(7, 1), Uniforms(8, 0)
    assert one[999] == again[999], "the k-th number does not depend on which were asked for before"
    assert [one[k] for k in range(300)] == [again[k] for k in range(300)]
    assert len({one[0], other_choice[0], other_seed[0]}) == 3


def test_large_and_negative_seeds_are_seeds() -> None:
    assert Uniforms(-1, 0)[0] == Uniforms(2**64 - 1, 0)[0]


def test_the_inverse_cdf_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.0, 0.25]]).log().repeat(6, 1)
    tokens, logps = sample(logits, draw([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 1e-12]))
    assert tokens == [0, 0, 1, 1, 3, 3]
    assert logps == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)])


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]]).repeat(2, 1)
    assert sample(logits, draw([0.0, 1.0]))[0] == [1, 1]


def test_temperature_is_part_of_the_reported_distribution() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    [token], [logp] = sample(logits, draw([0.0], temperature=0.5))
    assert (token, logp) == (0, pytest.approx(-math.log1p(math.exp(-4.0)), abs=1e-6))


def test_greedy_takes_the_likeliest_and_reports_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]])
    [token], [logp] = sample(logits, draw([0.0], temperature=0.0))
    assert (token, logp) == (1, pytest.approx(float(torch.log_softmax(logits, -1)[0, 1])))


def test_top_p_and_top_k_cut_what_is_drawn_not_what_is_reported() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    seen = {sample(logits, draw([u / 50], top_p=0.6))[0][0] for u in range(50)}
    assert seen == {0, 1}, "0.4 does not reach 0.6, 0.4 + 0.3 does"
    assert {sample(logits, draw([u / 50], top_k=3))[0][0] for u in range(50)} == {0, 1, 2}
    assert {sample(logits, draw([u / 50], top_p=0.01))[0][0] for u in range(50)} == {0}
    [_], [logp] = sample(logits, draw([0.0], top_p=0.6))
    assert logp == pytest.approx(math.log(0.4))


def test_top_p_of_a_flat_distribution_looks_beyond_the_likeliest_thousand() -> None:
    logits = torch.zeros(1, 5000)
    tokens = [sample(logits, draw([u / 200], top_p=0.8))[0][0] for u in range(200)]
    assert len(set(tokens)) > 150


def test_frequencies_are_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    stream, count = Uniforms(3, 0), 4000
    tokens, _ = sample(probabilities.log().repeat(count, 1), draw([stream[k] for k in range(count)]))
    for token, probability in enumerate(probabilities.tolist()):
        error = 4 * math.sqrt(probability * (1 - probability) / count)
        assert abs(tokens.count(token) / count - probability) < error


def test_rows_do_not_see_each_other() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    mixed = Draw([1.0, 0.0, 0.7, 1.0, 0.3], [1.0, 1.0, 0.9, 0.5, 1.0], [0, 0, 5, 0, 2], [0.1, 0.2, 0.3, 0.4, 0.5])
    together = sample(logits, mixed)
    for row in range(5):
        alone = sample(logits[row : row + 1], Draw(*([column[row]] for column in mixed)))
        assert (alone[0][0], alone[1][0]) == (together[0][row], pytest.approx(together[1][row], abs=1e-6))
