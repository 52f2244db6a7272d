"""Learning and adapters in this process, against plain transformers and plain peft."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM

from agentlightning.errors import PolicyError
from agentlightning.schema import Route
from agentlightning_algorithms.policy.base import Update
from agentlightning_algorithms.policy.torch_checkpoint import save
from agentlightning_algorithms.policy.torch_job import Job
from agentlightning_algorithms.policy.torch_lora import folder_name, selector_of
from agentlightning_algorithms.policy.torch_sampling import Uniforms
from tests.algorithms.learning import a_row, moved, plain_logits, trained, values_of, weights_of
from tests.fakes.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_logprobs_are_those_of_plain_transformers(model: Path) -> None:
    rows = [a_row(seed=s, length=n, temperature=t) for s, n, t in ((0, 20, 1.0), (1, 7, 0.5), (2, 33, 0.0))]
    values = weights_of(model).logprobs(rows)
    plain = AutoModelForCausalLM.from_pretrained(model)
    for row, value in zip(rows, values, strict=True):
        logits = plain_logits(plain, row.ids)[:-1] / (row.temperature or 1.0)
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(row.ids[1:].astype(np.int64))[:, None])[:, 0]
        assert value == pytest.approx(np.concatenate([[0], wanted.numpy()]), abs=1e-5)


def test_the_gradient_is_that_of_the_loss_written_out(model: Path) -> None:
    """One step of our learner against the same step on plain transformers, written in ten lines."""
    weights = weights_of(model)
    rows = [a_row(seed=s, length=10 + 5 * s, advantage=(-1) ** s) for s in range(4)]
    metrics = weights.update(Update(rows, clip=(0.2, 0.3)))

    plain = AutoModelForCausalLM.from_pretrained(model)
    optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    loss = torch.zeros(())
    for row in rows:
        tokens = torch.tensor(row.ids.astype(np.int64))
        logp = torch.log_softmax(plain(input_ids=tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
        old, advantage, weight = (torch.from_numpy(a[1:]) for a in (row.logprobs, row.advantages, row.weights))
        ratio = (logp - old).exp()
        loss = loss - (weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimiser.step()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    theirs = dict(plain.named_parameters())
    for name, value in weights.parameters("writer").items():
        assert torch.allclose(value, theirs[name], atol=2e-5), name


@pytest.mark.parametrize("lora", [0, 3])
def test_the_step_does_not_depend_on_the_micro_batches(model: Path, lora: int) -> None:
    results = []
    for micro_tokens in (8, 64, 4096):
        weights = weights_of(model, lora=lora, options={"micro_tokens": micro_tokens})
        metrics = weights.update(Update([a_row(seed=s, length=8 + 3 * s) for s in range(9)], kl=0.1))
        results.append((metrics["loss"], metrics["grad_norm"], weights.logprobs([a_row(seed=99)])[0]))
    for loss, norm, logps in results[1:]:
        assert (loss, norm) == (pytest.approx(results[0][0], rel=1e-5), pytest.approx(results[0][1], rel=1e-4))
        assert logps == pytest.approx(results[0][2], abs=2e-4)


def test_the_head_is_run_in_parts_without_a_change(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = weights_of(model), weights_of(model)
    rows = [a_row(seed=s, length=180) for s in range(3)]
    first = whole.update(Update(rows))
    monkeypatch.setattr("agentlightning_algorithms.policy.torch_learner.LOGITS_AT_ONCE", 400)
    second = parts.update(Update(rows))
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)


def test_a_rate_of_zero_changes_nothing_and_a_schedule_is_obeyed(model: Path) -> None:
    weights = weights_of(model)
    before = values_of(weights, "policy")
    weights.update(Update([a_row()], learning_rate=0.0))
    assert not moved(weights, "policy", before) and weights.version == 1
    weights.update(Update([a_row()]))
    assert moved(weights, "policy", before)


def test_a_step_that_is_not_finite_is_refused_with_the_weights_as_they_were(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(model)
    weights.update(Update([a_row()]))
    before = values_of(weights, "policy")
    state = {k: v.clone() for k, v in next(iter(weights.learner.optimisers["policy"].state.values())).items()}
    huge = a_row(advantage=3e38)
    huge.weights *= 3e38
    for epochs in (1, 3):
        with pytest.raises(PolicyError, match="refused.*as before.*learning rate"):
            weights.update(Update([a_row(), huge], epochs=epochs))
    assert weights.version == 1 and not moved(weights, "policy", before)

    real, passes = type(weights.learner)._step, []

    def breaks_later(self: Any, *arguments: Any) -> Any:
        passes.append(1)
        if len(passes) == 3:
            raise PolicyError("loss nan")
        return real(self, *arguments)

    monkeypatch.setattr(type(weights.learner), "_step", breaks_later)
    with pytest.raises(PolicyError, match="loss nan"):
        weights.update(Update([a_row()], epochs=4))
    assert not moved(weights, "policy", before), "the epochs before the bad one are taken back too"
    after = next(iter(weights.learner.optimisers["policy"].state.values()))
    assert all(torch.equal(after[k], v) for k, v in state.items())


# ---- names and routes


def test_routes_of_full_weights(model: Path) -> None:
    weights = weights_of(model, "writer", "team/*")
    assert weights.routes() == (
        Route("writer", "policy", True),
        Route("team/*", "policy", True),
        Route("*", "base", False),
    )
    assert weights_of(model, "*").routes() == (Route("*", "policy", True),)


def test_routes_of_adapters(model: Path) -> None:
    assert weights_of(model, "writer", lora=2).routes() == (Route("writer", "writer", True), Route("*", "base", False))
    assert weights_of(model, "*", "base", lora=2).routes() == (Route("base", "base", True), Route("*", "*", True))
    weights = weights_of(model, "base", lora=2)
    assert weights.routes()[-1] == Route("*", "base_", False), "an agent may be called base"
    assert weights.served()["base_"].adapter is None


@pytest.mark.parametrize("selector", ["writer", "team/*", "a.b", "..", "*", "größe %", "x\\y"])
def test_selectors_as_folders(selector: str) -> None:
    name = folder_name(selector)
    assert "/" not in name and name not in (".", "..")
    assert selector_of(Path(name)) == selector


# ---- adapters


def test_a_new_adapter_changes_nothing_and_depends_on_seed_and_name_alone(model: Path) -> None:
    row = a_row("b")
    plain = weights_of(model, "b").logprobs([row])[0]
    one, other = weights_of(model, "a", "b", lora=3), weights_of(model, "b", "c", lora=3)
    assert one.logprobs([row])[0] == pytest.approx(plain, abs=1e-6)
    for name, value in one.parameters("b").items():
        assert torch.equal(value, other.parameters("b")[name])


def test_only_the_adapters_with_rows_move(model: Path) -> None:
    weights = weights_of(model, "a", "b", lora=3)
    before = {key: values_of(weights, key) for key in "ab"}
    base = {n: p.clone() for n, p in weights.network.model.named_parameters() if "lora_" not in n}
    for _ in range(3):
        weights.update(Update([a_row("a")]))
    assert moved(weights, "a", before["a"]) and not moved(weights, "b", before["b"])
    weights.update(Update([a_row("b")]))
    now = dict(weights.network.model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in base.items()), "the base is never touched"


def test_one_agent_s_outlier_does_not_slow_the_others(model: Path) -> None:
    alone, together = weights_of(model, "a", "b", lora=3), weights_of(model, "a", "b", lora=3)
    for _ in range(2):
        alone.update(Update([a_row("a", seed=1)]))
        together.update(Update([a_row("a", seed=1), a_row("b", seed=2, advantage=-1e4)]))
    for name, value in alone.parameters("a").items():
        assert torch.allclose(value, together.parameters("a")[name], atol=1e-6)


def test_agents_answer_side_by_side_each_with_its_own_adapter(model: Path) -> None:
    """A mixed batch through the engine, against peft's own forward pass, one adapter at a time."""
    weights = trained(model, "a", "b")
    assert weights.adapters is not None
    prompt = [int(i) for i in a_row(length=15).ids]
    with torch.inference_mode():
        jobs = {}
        for adapter in ("a", "b", None, "a"):
            job = Job(prompt=prompt, model="x", max_tokens=10, uniforms=Uniforms(len(jobs), 0))
            assert weights.lane.admit(job, adapter) or weights.lane.step() is None or weights.lane.admit(job, adapter)
            jobs[job] = adapter
        while not all(job.finish for job in jobs):
            weights.lane.step()
    peers = weights.adapters.peft
    for layer in weights.adapters.layers:
        del layer.module.forward  # peft's own again
    for job, adapter in jobs.items():
        tokens = np.array(job.prompt + job.out)
        if adapter is None:
            with peers.disable_adapter():
                logits = plain_logits(peers, tokens)
        else:
            peers.set_adapter(weights.adapters.names[adapter])
            logits = plain_logits(peers, tokens)
        wanted = torch.log_softmax(logits[14:-1], -1).gather(1, torch.tensor(job.out)[:, None])[:, 0]
        assert job.logps == pytest.approx(wanted.tolist(), abs=2e-5)


def test_kl_is_measured_from_the_initial_policy(model: Path, tmp_path: Path) -> None:
    """Of a fresh adapter that is the base; of one that came with the model, what it was then."""
    row = a_row("a")
    fresh = weights_of(model, "a", lora=3)
    assert fresh.update(Update([row], kl=1.0))["loss"] == pytest.approx(
        weights_of(model, "a", lora=3).update(Update([row]))["loss"], abs=1e-6
    ), "before the first step the policy is the initial one"
    later = fresh.update(Update([row], kl=1.0, learning_rate=0.0))["loss"]
    assert later > fresh.update(Update([row], kl=0.0, learning_rate=0.0))["loss"] + 1e-4

    save(trained(model, "a"), tmp_path / "saved")
    continued = weights_of(tmp_path / "saved", "a", lora=3)
    losses = [continued.update(Update([row], kl=kl, learning_rate=0.0))["loss"] for kl in (0.0, 1.0)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
