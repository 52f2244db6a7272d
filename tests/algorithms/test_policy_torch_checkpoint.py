"""Checkpoints: they reload in plain transformers and plain peft, and a resumed run goes on as if it had never stopped."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import PolicyError
from agentlightning.schema import Route
from agentlightning_algorithms.policy.base import Update
from agentlightning_algorithms.policy.torch_checkpoint import load, save
from tests.algorithms.learning import a_row, plain_logits, trained, weights_of
from tests.fakes.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


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


def test_what_a_killed_saver_left_is_gone_after_the_next_save(model: Path, tmp_path: Path) -> None:
    """Its own leftovers only: those of another checkpoint may still be written."""
    for name in (".step[1].12.part", ".step[1].12.old", ".step[11].12.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    save(weights_of(model), tmp_path / "step[1]")
    assert {path.name for path in tmp_path.iterdir()} == {"step[1]", ".step[11].12.part"}
    assert not (tmp_path / "step[1]" / "half").exists()


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
