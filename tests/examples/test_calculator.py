"""The AutoGen team against a scripted model, and the example's command from start to end, short."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat", reason="the autogen extra is not installed")

from agentlightning.schema import SpanKind
from agentlightning.store import open_store
from examples.calculator.team import CRITIC, SOLVER, answer_of, build_team, client
from tests.fakes.engine import FakeEngine


def ask(*expressions: str | None, verdicts: list[str]) -> tuple[Any, list[dict[str, Any]]]:
    """What the team makes of a problem, and the requests; the solver's attempts are these expressions, None says 7."""
    given, said = iter(expressions), iter(verdicts)

    def reply(request: dict[str, Any]) -> Any:
        if request["messages"][0]["content"] == CRITIC:
            return next(said)
        expression = next(given)
        call = {"name": "calculator", "arguments": {"expression": expression}, "id": "call_0"}
        return "it is 7" if expression is None else {"content": "", "tool_calls": [call]}

    async def whole() -> Any:
        model = client(engine.base_url, "none", "base", max_tokens=400)
        try:
            return await build_team(model).run(task="What is 3 and 4?")
        finally:
            await model.close()

    with FakeEngine(reply) as engine:
        return asyncio.run(whole()), [seen.body for seen in engine.requests]


def agents(requests: list[dict[str, Any]]) -> list[str]:
    return [{SOLVER: "solver", CRITIC: "critic"}[request["messages"][0]["content"]] for request in requests]


def test_a_solution_that_is_approved_takes_two_calls():
    result, requests = ask("3 + 4", verdicts=["APPROVE"])
    assert agents(requests) == ["solver", "critic"]
    assert answer_of(result) == 7.0
    assert [message["content"] for message in requests[1]["messages"]][1:] == ["What is 3 and 4?", "3 + 4 = 7"]


def test_a_solution_that_is_sent_back_is_tried_once_more():
    result, requests = ask("3 * 4", "3 + 4", verdicts=["REVISE"])
    assert agents(requests) == ["solver", "critic", "solver"]
    assert answer_of(result) == 7.0
    roles = [message["role"] for message in requests[2]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user"]


def test_a_tool_that_fails_says_why_and_is_no_answer():
    result, _ = ask("3 plus 4", "4 -", verdicts=["REVISE"])
    assert answer_of(result) is None


def test_an_answer_without_the_tool_counts_too():
    assert answer_of(ask(None, verdicts=["APPROVE"])[0]) == 7.0


def test_the_team_knows_nothing_of_training():
    code = (
        "import sys, examples.calculator.team; print([n for n in sys.modules if 'agentlightning' in n or n == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run(out: Path, *more: str) -> dict[str, Any]:
    pytest.importorskip("torch", reason="the train extra is not installed")
    from examples.calculator.__main__ import main

    base = ["--out", str(out), "--json", str(out / "summary.json"), "--val", "6", "--warm", "60", "--steps", "2"]
    assert main([*base, "--tasks-per-step", "2", "--rollouts-per-task", "4", *more]) == 0
    return json.loads((out / "summary.json").read_text())


def test_the_command_trains_the_solver_and_leaves_the_critic(tmp_path):
    summary = run(tmp_path)
    assert summary["trained_agents"] == ["solver"]
    assert summary["frozen_unchanged"] is True
    assert summary["max_logprob_error"] <= 1e-4
    store = open_store(f"sqlite:///{tmp_path / 'runs.db'}", create=False)
    (first,) = store.runs()
    team = "RoundRobinGroupChat"
    for step in store.steps(first.id):
        assert set(step.ledger["agents"]) == {f"{team}/solver", f"{team}/critic"}
        assert step.ledger["dropped"]["not_selected"] == step.ledger["agents"][f"{team}/critic"]
    rollouts = store.rollouts(first.id, mode="train")
    assert len(rollouts) == 2 * 2 * 4
    spans = [span for episode in store.episodes([rollout.id for rollout in rollouts]) for span in episode.spans]
    assert {span.path for span in spans if span.kind is SpanKind.TOOL} <= {f"{team}/solver"}
    assert {span.path for span in spans if span.kind is SpanKind.AGENT} == {team, f"{team}/solver", f"{team}/critic"}
    store.close()


def test_the_same_example_takes_gsm8ks_data_and_a_model_folder(tmp_path, shared_data):
    folder = shared_data / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"no GSM8K data at {folder}")
    pytest.importorskip("torch", reason="the train extra is not installed")
    from tests.fakes.tiny import save_tiny

    model = save_tiny(tmp_path / "model", context=2048)
    before = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    summary = run(tmp_path / "out", "--data", str(folder), "--model", str(model), "--val", "2")
    assert summary["trained_agents"] == ["solver"] and summary["frozen_unchanged"] is True
    assert hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest() == before
