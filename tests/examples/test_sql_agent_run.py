"""The example's command from start to end, short: every figure is there, and what it promises of tokens and freezing holds."""

import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("langgraph")

from agentlightning.store import open_store
from examples.sql_agent.__main__ import main

KEYS = [
    "greedy_before",
    "greedy_after",
    "sampled_before",
    "sampled_after",
    "calls_before",
    "calls_after",
    "minutes",
    "max_logprob_error",
    "trained_agents",
    "frozen_unchanged",
]


def run(out: Path, *more: str) -> dict:
    found = out / "summary.json"
    base = ["--out", str(out), "--json", str(found), "--val", "6", "--warm", "60", "--steps", "2"]
    assert main([*base, "--tasks-per-step", "2", "--rollouts-per-task", "4", *more]) == 0
    return json.loads(found.read_text())


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_command_writes_every_figure_and_trains_the_engines_own_tokens(tmp_path):
    summary = run(tmp_path)
    assert sorted(summary) == sorted(KEYS)
    assert summary["trained_agents"] == ["rewrite_query", "write_query"]
    assert summary["frozen_unchanged"] is True
    assert summary["max_logprob_error"] <= 1e-4
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}", create=False)
    (first,) = store.runs()
    ledgers = [step.ledger for step in store.steps(first.id)]
    assert all(ledger["seen"] == sum(ledger["agents"].values()) for ledger in ledgers)
    assert all(ledger["dropped"]["not_selected"] == ledger["agents"]["check_query"] for ledger in ledgers)
    assert len(store.rollouts(first.id, mode="train")) == 2 * 2 * 4
    store.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_same_example_takes_spiders_data_and_a_model_folder(tmp_path, shared_data):
    spider = shared_data / "spider_sql"
    if not spider.is_dir():
        pytest.skip(f"no Spider data at {spider}")
    from tests.fakes.tiny import save_tiny

    model = save_tiny(tmp_path / "model", context=2048)
    before = sha(model / "model.safetensors")
    summary = run(tmp_path / "out", "--data", str(spider), "--model", str(model), "--val", "2")
    assert summary["trained_agents"] == ["rewrite_query", "write_query"] and summary["frozen_unchanged"] is True
    assert sha(model / "model.safetensors") == before


def test_a_folder_without_the_files_is_refused_with_the_cure(tmp_path):
    with pytest.raises(SystemExit, match="has no train.jsonl"):
        main(["--data", str(tmp_path), "--model", str(tmp_path)])
