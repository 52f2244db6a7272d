"""`kill -9` of the trainer, again and again, each time followed by the same command: the run comes to its end, once."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from agentlightning.evaluation import evaluation_of
from agentlightning.loop import EVALUATIONS
from agentlightning.schema import Outcome, RolloutState
from agentlightning.store import open_store
from tests.algorithms.killable import BEGUN, MOMENTS, POLICIES, ROLLOUTS, STEPS, STORE, TASKS, VAL
from tests.fakes.tiny import save_tiny

pytestmark = pytest.mark.timeout(900)  # six processes that import torch, one after the other

ROOT = Path(__file__).parents[2]
DONE = {"evaluating": 0, "sampling": 0, "updating": 1, "saving": 1, "recorded": 2}
"""Steps that are recorded when the trainer is killed at a moment."""


def run(folder: Path, moment: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.algorithms.killable", str(folder), moment]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("killed")
    save_tiny(made / "model")
    return made


@pytest.fixture(scope="module")
def killed(folder: Path) -> dict[str, list[int]]:
    """Moment -> numbers of the steps that were in the store then. All of it is one run."""
    found = {}
    for moment in MOMENTS:
        ended = run(folder, moment)
        assert ended.returncode == -signal.SIGKILL, f"{moment}: {ended.stderr}"
        store = open_store(f"sqlite:///{folder}/{STORE}")
        (held,) = store.runs()
        found[moment] = [step.number for step in store.steps(held.id)]
        assert held.state == "running", "nobody could say that it ended"
        store.close()
    return found


@pytest.fixture(scope="module")
def store(folder: Path, killed: dict[str, list[int]]) -> Iterator[Any]:
    """After the last run of the command, which nobody disturbed."""
    ended = run(folder)
    assert ended.returncode == 0, ended.stderr
    opened = open_store(f"sqlite:///{folder}/{STORE}")
    yield opened
    opened.close()


def test_it_was_killed_at_each_moment(killed: dict[str, list[int]]) -> None:
    assert killed == {moment: list(range(1, done + 1)) for moment, done in DONE.items()}


def test_the_same_command_finishes_the_same_run(store: Any) -> None:
    (finished,) = store.runs()
    assert finished.state == "finished"
    assert [step.number for step in store.steps(finished.id)] == list(range(1, STEPS + 1))


def test_no_rollout_is_missing_and_none_is_there_twice(store: Any) -> None:
    rollouts = store.rollouts()
    places = Counter((r.mode, r.step, r.task_id) for r in rollouts)
    trained = {place: count for place, count in places.items() if place[0] == "train"}
    assert Counter(step for _, step, _ in trained) == dict.fromkeys(range(1, STEPS + 1), TASKS)
    assert set(trained.values()) == {ROLLOUTS}
    measured = {(f"{when}-{how}", step) for when, step in (("before", 0), ("after", STEPS)) for how in EVALUATIONS}
    assert places - Counter(trained) == {(mode, step, task["id"]): 1 for mode, step in measured for task in VAL}
    assert {r.state for r in rollouts} == {RolloutState.SUCCEEDED}


def test_each_step_counts_its_rollouts_once(store: Any) -> None:
    for step in store.steps(store.runs()[0].id):
        assert step.metrics["rollouts"] == TASKS * ROLLOUTS and step.metrics["failed"] == 0
        assert step.metrics["logprob_error"] < 1e-4, "what was sampled before the kill was sampled by these weights"
        ledger = step.ledger
        assert ledger["attributed"] == ledger["complete"] + ledger["dropped"].get("superseded", 0)
        assert ledger["trained"] == TASKS * ROLLOUTS


def test_only_what_was_running_began_again(folder: Path, store: Any) -> None:
    begun = Counter((folder / BEGUN).read_text().split())
    attempts = {r.id: store.attempts(r.id) for r in store.rollouts()}
    assert set(begun) == set(attempts)
    again = {name for name, count in begun.items() if count > 1}
    assert 2 <= len(again) <= 4, "two kills hit programs that ran, at most two at a time"
    for name, tries in attempts.items():
        assert begun[name] <= len(tries) <= 2
        assert tries[-1].outcome is Outcome.OK


def test_tables_and_evaluations_are_whole(folder: Path, store: Any) -> None:
    (finished,) = store.runs()
    results = folder / "runs" / finished.id[:12]
    with (results / "learning_curve.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
    for mode in ("before-greedy", "after-sampled"):
        episodes = store.episodes([r.id for r in store.rollouts(finished.id, mode=mode)])
        assert evaluation_of(mode, episodes).missing == 0 and len(episodes) == len(VAL)


def test_the_policy_learned_once_in_each_step(folder: Path, store: Any) -> None:
    (finished,) = store.runs()
    results = folder / "runs" / finished.id[:12]
    checkpoints = [path.name for path in results.iterdir() if "checkpoint" in path.name]
    assert checkpoints == [f"checkpoint-{STEPS:06d}"], "nothing half-written is left"
    assert json.loads((results / checkpoints[0] / "policy.json").read_text())["version"] == STEPS
    for step in range(1, STEPS + 1):
        episodes = store.episodes([r.id for r in store.rollouts(finished.id, step=step, mode="train")])
        versions = {call.version for episode in episodes for call in episode.completions}
        assert versions == {step - 1}, "each step was sampled by what the one before it had learned"


def test_no_process_of_a_policy_is_left(folder: Path, store: Any) -> None:
    processes = [int(line) for line in (folder / POLICIES).read_text().split()]
    assert len(processes) == len(MOMENTS) + 1
    left = [psutil.Process(pid).cmdline() for pid in processes if psutil.pid_exists(pid)]
    assert not [command for command in left if "agentlightning_algorithms.policy.torch_worker" in command]
