"""Learning, adapters and checkpoints in this process, against plain transformers and plain peft."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import PolicyError
from agentlightning.schema import Route, floats, ids
from agentlightning_algorithms.policy.base import PolicySettings, Row, Update
from agentlightning_algorithms.policy.torch_checkpoint import load, save
from agentlightning_algorithms.policy.torch_job import Job
from agentlightning_algorithms.policy.torch_lora import folder_name, selector_of
from agentlightning_algorithms.policy.torch_options import parse_options
from agentlightning_algorithms.policy.torch_sampling import Uniforms
from agentlightning_algorithms.policy.torch_weights import Weights
from tests.fakes.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


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


def trained(model: Path, *selectors: str, lora: int = 3) -> Weights:
    weights = weights_of(model, *selectors, lora=lora)
    for number, selector in enumerate(selectors):
        for _ in range(3):
            weights.update(Update([a_row(selector, seed=number)]))
    return weights


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


# ---- checkpoints


def test_full_weights_reload_in_plain_transformers(model: Path, tmp_path: Path) -> None:
    weights = weights_of(model)
    weights.update(Update([a_row()]))
    save(weights, tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    row = a_row(seed=5)
    assert torch.equal(plain_logits(plain, row.ids), plain_logits(weights.network.model, row.ids))
    text = AutoTokenizer.from_pretrained(tmp_path / "saved").apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )
    assert text.startswith("<|im_start|>user")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("save_base", [False, True])
def test_adapters_reload_in_plain_peft(model: Path, tmp_path: Path, save_base: bool) -> None:
    weights = weights_of(model, "writer", "team/*", lora=3, options={"save_base": save_base})
    weights.update(Update([a_row("team/*")]))
    save(weights, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists() == save_base
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" if save_base else model)
    plain = peft.PeftModel.from_pretrained(base, tmp_path / "saved" / "adapters" / "team%2F%2A")
    row = a_row("team/*", seed=5)
    with weights.current("team/*")[1]:
        ours = plain_logits(weights.network.model, row.ids)
    assert torch.allclose(plain_logits(plain, row.ids), ours, atol=1e-5)
    config = json.loads((tmp_path / "saved" / "adapters" / "team%2F%2A" / "adapter_config.json").read_text())
    assert config["r"] == 3 and config["base_model_name_or_path"] == str(model)


def test_an_adapter_that_is_not_trained_is_saved_byte_for_byte(model: Path, tmp_path: Path) -> None:
    first = trained(model, "a", "b")
    save(first, tmp_path / "one")
    second = weights_of(tmp_path / "one", "a", lora=3)
    second.update(Update([a_row("a", seed=9)]))
    save(second, tmp_path / "two")
    files = ["adapter_model.safetensors", "adapter_config.json"]
    for file in files:
        paths = [tmp_path / run / "adapters" / "b" / file for run in ("one", "two")]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    one, two = (tmp_path / run / "adapters" / "a" / files[0] for run in ("one", "two"))
    assert one.read_bytes() != two.read_bytes()
    save(second, tmp_path / "three")
    for path in (tmp_path / "two").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "three" / path.relative_to(tmp_path / "two")).read_bytes()


def test_adapters_beside_the_model_are_served_to_their_agents(model: Path, tmp_path: Path) -> None:
    save(trained(model, "a", "b"), tmp_path / "one")
    weights = weights_of(tmp_path / "one", "a", lora=3)
    assert weights.routes() == (Route("a", "a", True), Route("b", "b", False), Route("*", "base", False))
    assert weights.served()["b"].adapter == "b"
    row = a_row("a", seed=5)
    assert weights.logprobs([row])[0] == pytest.approx(trained(model, "a").logprobs([row])[0], abs=1e-5)
    with pytest.raises(PolicyError, match="'b' is not trained here; trained: a"):
        weights.update(Update([a_row("b")]))
    shutil.copytree(model, tmp_path / "whole")
    shutil.copytree(tmp_path / "one" / "adapters", tmp_path / "whole" / "adapters")
    assert weights_of(tmp_path / "whole", "c", lora=2).frozen_adapters == ["a", "b"]


def test_resuming_keeps_the_initial_weights_for_the_others(model: Path, tmp_path: Path) -> None:
    first = weights_of(model)
    row = a_row(seed=5)
    initial = plain_logits(first.network.model, row.ids)
    first.update(Update([a_row()]))
    save(first, tmp_path / "saved")
    second = weights_of(model)
    load(second, tmp_path / "saved")
    second.update(Update([a_row()]))
    assert torch.equal(plain_logits(second.frozen().model, row.ids), initial)
    assert not torch.equal(plain_logits(second.network.model, row.ids), initial)
    save(second, tmp_path / "again")
    third = weights_of(tmp_path / "saved")  # another start, but a checkpoint that tells where it all began
    load(third, tmp_path / "again")
    assert torch.equal(plain_logits(third.frozen().model, row.ids), initial)


@pytest.mark.parametrize("lora", [0, 3])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(model: Path, tmp_path: Path, lora: int) -> None:
    straight, stopped = weights_of(model, lora=lora), weights_of(model, lora=lora)
    for seed in range(2):
        straight.update(Update([a_row(seed=seed)]))
        stopped.update(Update([a_row(seed=seed)]))
    save(stopped, tmp_path / "saved")
    resumed = weights_of(model, lora=lora)
    load(resumed, tmp_path / "saved")
    assert resumed.version == 2
    for seed in range(2, 5):
        straight.update(Update([a_row(seed=seed)]))
        resumed.update(Update([a_row(seed=seed)]))
    key = straight.key("writer")
    for name, value in straight.parameters(key).items():
        assert torch.equal(value, resumed.parameters(key)[name]), name


def test_checkpoints_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    save(trained(model, "a", "b"), tmp_path / "two")
    save(weights_of(model), tmp_path / "full")
    with pytest.raises(PolicyError, match="lora=3.*lora=0"):
        load(weights_of(model), tmp_path / "two")
    with pytest.raises(PolicyError, match=r"adapters of \['a', 'b'\].*model="):
        load(weights_of(model, "a", lora=3), tmp_path / "two")
    with pytest.raises(PolicyError, match="rank 3, lora is 4: set lora=3"):
        weights_of(tmp_path / "two", "a", lora=4)
    with pytest.raises(PolicyError, match="holds adapters: set lora"):
        weights_of(tmp_path / "two", "a")
    other = save_tiny(tmp_path / "other", hidden=16)
    with pytest.raises(PolicyError, match="does not fit this model"):
        load(weights_of(other), tmp_path / "full")
    (tmp_path / "two" / "policy.json").write_text('{"version": 1, "base": "/gone", "lora": 3, "selectors": []}')
    with pytest.raises(PolicyError, match="belong to the model /gone, which is not there"):
        weights_of(tmp_path / "two", "a", lora=3)
    (tmp_path / "two" / "policy.json").write_text("{}")
    with pytest.raises(PolicyError, match="not a saved policy"):
        weights_of(tmp_path / "two", "a", lora=3)


def test_adapters_of_another_kind_are_refused(model: Path, tmp_path: Path) -> None:
    save(trained(model, "a"), tmp_path / "one")
    file = tmp_path / "one" / "adapters" / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, words in (({"use_dora": True}, "use_dora"), ({"bias": "all"}, "biases")):
        file.write_text(json.dumps({**config, **change}))
        with pytest.raises(PolicyError, match=words):
            weights_of(tmp_path / "one", "a", lora=3)
    file.write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(PolicyError, match="does not fit"):
        weights_of(tmp_path / "one", "a", lora=3)


def test_a_save_that_fails_leaves_the_old_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(model)
    save(weights, tmp_path / "saved")
    before = {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()}
    weights.update(Update([a_row()]))

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("agentlightning_algorithms.policy.torch_checkpoint._save_optimisers", full)
    with pytest.raises(PolicyError, match="No space left on device"):
        save(weights, tmp_path / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == before


# ---- models that are not served


def test_an_architecture_that_computes_otherwise_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(weights_of(model).network).logits
    monkeypatch.setattr(
        "agentlightning_algorithms.policy.torch_model.Network.logits", lambda self, h: 2 * real(self, h)
    )
    with pytest.raises(PolicyError, match="LlamaForCausalLM computes differently.*full attention"):
        weights_of(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"layer_types": ["linear_attention"] * 2}, "linear_attention"), ({}, "max_context 999 is more than the 256")],
)
def test_limits_of_the_model_are_told(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = save_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(PolicyError, match=words):
        weights_of(folder, options={} if change else {"max_context": 999})
