"""`agl runs` and `agl show` by what they print and how they exit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentlightning.cli import main
from agentlightning.schema import Attempt, Outcome, RolloutState, SpanKind, Step, floats, ids, new_span_id
from agentlightning.store import open_store
from agentlightning.store.base import Store
from tests.conformance.store_records import begin, completion, reward, rollout, span

ROLLOUT = "abc" + "0" * 29


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'agl.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def agl(capsysbinary: Any, monkeypatch: pytest.MonkeyPatch, url: str) -> Callable[..., Done]:
    """Runs `agl` with these arguments against the test's store."""
    monkeypatch.setenv("AGL_STORE", url)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*args: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(list(args))
        out, err = capsysbinary.readouterr()
        return Done(int(ended.value.code or 0), out.decode(), err.decode())

    return run


def traced(store: Store, run_id: str = "run") -> Attempt:
    """A rollout in which a team's writer called a model and a tool, and the checker failed."""
    attempt = begin(store, ROLLOUT, run_id=run_id, task={"question": "how many?"})
    team = span(attempt.id, kind=SpanKind.AGENT, name="team", path="team", start_ns=1, end_ns=2 * 10**9 + 1)
    writer = span(attempt.id, kind=SpanKind.AGENT, name="writer", path="team/writer", parent_id=team.id)
    asked = span(attempt.id, name="chat", path="team/writer", parent_id=writer.id)
    tool = span(attempt.id, kind=SpanKind.TOOL, name="run_sql", parent_id=writer.id, status="error", error="no table")
    hung = span(attempt.id, kind=SpanKind.TOOL, name="search", parent_id=team.id, status="open")
    said = {"choices": [{"message": {"role": "assistant", "content": "SELECT [bold]1"}}]}
    used = {"choices": [{"message": {"tool_calls": [{"function": {"name": "run_sql"}}, "odd", {"function": "odd"}]}}]}
    first = completion(attempt.id, span_id=asked.id, response=said)
    second = completion(attempt.id, path="team/checker", response=used, version=None, defect="no_token_ids")
    store.add([tool, asked, writer, team, hung], [first, second])
    store.add(
        rewards=[
            reward(attempt.id, 0.5),
            reward(attempt.id, -1, name="style", target="agent:team/writer"),
            reward(attempt.id, 0.25, name="valid", target=f"call:{first.id}", source="emit"),
            reward(attempt.id, 0.75, name="seen", target=f"call:{asked.id}"),
            reward(attempt.id, 2, name="lost", target="call:unknown"),
        ]
    )
    store.finish(attempt.id, Outcome.OK)
    return attempt


def depth(text: str, sign: str) -> int:
    """How far the only line with `sign` is indented."""
    (found,) = [one for one in text.splitlines() if sign in one]
    return len(found) - len(found.lstrip(" │├└─┃"))


def test_runs_as_json_hold_everything(agl: Callable[..., Done], store: Store) -> None:
    run = store.begin_run("grpo", {"lr": 0.1}, "host:1:x")
    store.add_step(Step(run.id, 1, {"reward": 0.5, "kl": math.nan}, {}, None))
    done = agl("runs", "--json")
    (found,) = json.loads(done.out)
    assert done.code == 0 and done.err == ""
    assert (found["id"], found["name"], found["config"], found["state"]) == (run.id, "grpo", {"lr": 0.1}, "running")
    assert (found["steps"], found["metrics"]) == (1, {"reward": 0.5, "kl": "nan"})


def test_runs_for_people_are_one_line_each(agl: Callable[..., Done], store: Store) -> None:
    first = store.begin_run("grpo", {}, "host:1:x")
    store.add_step(Step(first.id, 1, {"reward": 0.125}, {}, None))
    store.end_run(first.id, "finished")
    second = store.begin_run("apo [red]", {}, "host:2:y")
    done = agl("runs")
    _, one, two = done.out.splitlines()
    assert done.code == 0
    assert first.id[:12] in one and "finished" in one and "reward 0.125" in one
    assert second.id[:12] in two and "apo [red]" in two and "host:2:y" in two


def test_a_store_without_runs_says_so(agl: Callable[..., Done], store: Store) -> None:
    assert "No runs in sqlite:///" in agl("runs").out
    assert json.loads(agl("runs", "--json").out) == []


def test_the_tree_hangs_everything_where_it_happened(agl: Callable[..., Done], store: Store) -> None:
    attempt = traced(store)
    done = agl("show", ROLLOUT)
    text = done.out
    assert done.code == 0
    assert f"rollout {ROLLOUT[:12]}" in text and "succeeded (ok)" in text and "how many?" in text
    assert f"attempt 1  {attempt.id[:12]}  ok" in text
    assert depth(text, "agent team/writer") == depth(text, "agent team  ") + 4
    assert depth(text, "llm chat") == depth(text, "tool run_sql") == depth(text, "agent team/writer") + 4
    assert depth(text, "SELECT [bold]1") == depth(text, "llm chat") + 4
    assert depth(text, "reward 0.25") == depth(text, "SELECT [bold]1") + 4
    assert depth(text, "reward 0.75") == depth(text, "llm chat") + 4
    assert depth(text, "reward -1") == depth(text, "agent team/writer") + 4
    assert depth(text, "reward 0.5 ") == depth(text, "reward 2 ") == depth(text, "attempt 1") + 4
    assert depth(text, "agent team/checker") == depth(text, "agent team  "), "a call without a span hangs at its agent"


def test_the_tree_tells_tokens_versions_faults_and_times(agl: Callable[..., Done], store: Store) -> None:
    traced(store)
    lines = agl("show", ROLLOUT).out.splitlines()

    def about(sign: str) -> str:
        (found,) = [one for one in lines if sign in one]
        return found

    assert "call  m  v3  3 + 2 tokens  stop" in about("SELECT")
    assert "-> run_sql -> None -> None" in about("no_token_ids")
    assert "no table" in about("tool run_sql")
    assert "never closed" in about("tool search")
    assert "2.00 s" in about("agent team  ")


def test_an_attempt_is_shown_alone_and_a_beginning_is_enough(agl: Callable[..., Done], store: Store) -> None:
    first = begin(store, ROLLOUT, lease_s=0, max_attempts=2)
    ((_, second),) = store.lease("heir")
    assert "attempt 2" in agl("show", "abc").out and "attempt 1" in agl("show", "abc").out
    done = agl("show", second.id[:10])
    assert "attempt 2" in done.out and "running" in done.out and "attempt 1" not in done.out
    lost = agl("show", first.id).out
    assert "infra_error" in lost and "no sign of life" in lost


def test_a_queued_rollout_has_no_attempt_yet(agl: Callable[..., Done], store: Store) -> None:
    store.enqueue([rollout(ROLLOUT)])
    assert "no attempt yet" in agl("show", ROLLOUT).out
    assert json.loads(agl("show", ROLLOUT, "--json").out)["attempts"] == []


def test_show_as_json_holds_every_record(agl: Callable[..., Done], store: Store) -> None:
    attempt = traced(store)
    for record in (ROLLOUT, attempt.id):
        found = json.loads(agl("show", record, "--json").out)
        (tried,) = found["attempts"]
        assert found["rollout"]["id"] == ROLLOUT and tried["attempt"]["id"] == attempt.id
        assert (len(tried["spans"]), len(tried["completions"]), len(tried["rewards"])) == (5, 2, 5)
        call = tried["completions"][0]
        assert call["prompt_ids"] == [1, 2, 3] and len(call["logprobs"]) == 2


def test_b35_odd_values_can_always_be_printed(agl: Callable[..., Done], store: Store) -> None:
    attempt = begin(store, ROLLOUT, task={"half": "\ud83d", "snow": "\u2603"})
    odd = {"prompt_ids": ids([]), "response_ids": ids([]), "logprobs": floats([]), "response": {"choices": "\ud83d"}}
    nan = span(attempt.id, name="\x1b[31m\ud83d", attributes={"nan": math.nan, "half": "\ud83d"})
    store.add([nan], [completion(attempt.id, **odd)])
    assert agl("show", ROLLOUT).code == 0
    found = json.loads(agl("show", ROLLOUT, "--json").out)
    assert found["rollout"]["task"] == {"half": "?", "snow": "\u2603"}
    assert found["attempts"][0]["spans"][0]["attributes"] == {"nan": "nan", "half": "?"}


def test_spans_that_name_each_other_or_nobody_are_all_shown(agl: Callable[..., Done], store: Store) -> None:
    attempt = begin(store, ROLLOUT)
    one, two = new_span_id(), new_span_id()
    store.add(
        [
            span(attempt.id, id=one, parent_id=two, name="hen"),
            span(attempt.id, id=two, parent_id=one, name="egg"),
            span(attempt.id, parent_id="f" * 16, name="orphan", path="team"),
        ]
    )
    text = agl("show", ROLLOUT).out
    assert sorted(word for word in text.split() if word in ("hen", "egg", "orphan")) == ["egg", "hen", "orphan"]


def test_a_run_is_shown_as_its_rollouts(agl: Callable[..., Done], store: Store) -> None:
    run = store.begin_run("grpo", {}, "host:1:x")
    store.add_step(Step(run.id, 1, {"reward": 1.0}, {}, "out/1"))
    traced(store, run.id)
    store.enqueue([rollout(f"q{number}", run_id=run.id, mode="val") for number in range(60)])
    text = agl("show", run.id[:8]).out
    assert "the newest 50 of 61 rollouts" in text and "q59" in text and ROLLOUT[:12] not in text
    found = json.loads(agl("show", run.id, "--json").out)
    assert found["id"] == run.id and len(found["rollouts"]) == 61 and found["all_steps"][0]["checkpoint"] == "out/1"
    store.cancel([f"q{number}" for number in range(20)])
    assert [one["state"] for one in found["rollouts"]][:2] == [RolloutState.SUCCEEDED, RolloutState.QUEUED]


@pytest.mark.parametrize(
    ("args", "cure"),
    [
        (("show", "fff"), "`agl runs` lists runs"),
        (("show", ""), "give an id"),
        (("show", "a"), "give more digits of aa1, aa2"),
        (("runs", "--store", "mysql://host/db"), "use sqlite:///"),
        (("runs", "--store", "sqlite:///nowhere/agl.db"), "check the URL"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_errors_are_one_line_with_the_cure_and_exit_2(
    agl: Callable[..., Done], store: Store, args: tuple[str, ...], cure: str, as_json: bool
) -> None:
    store.enqueue([rollout("aa1"), rollout("aa2")])
    done = agl(*args, *(["--json"] if as_json else []))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("agl: ") and done.err.count("\n") == 1 and cure in done.err


def test_looking_makes_no_store(agl: Callable[..., Done], tmp_path: Path) -> None:
    assert agl("runs").code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_option_wins_over_the_environment(agl: Callable[..., Done], store: Store, tmp_path: Path) -> None:
    other = open_store(f"sqlite:///{tmp_path}/other.db")
    other.begin_run("other", {}, "host:1:x")
    other.close()
    assert json.loads(agl("runs", "--json").out) == []
    (found,) = json.loads(agl("runs", "--json", "--store", f"sqlite:///{tmp_path}/other.db").out)
    assert found["name"] == "other"


def test_a_wrong_command_is_a_usage_error(agl: Callable[..., Done]) -> None:
    assert agl("fly").code == 2
    assert agl("show").code == 2


def test_help_imports_nothing_that_it_does_not_need() -> None:
    source = """
import sys
from agentlightning.cli import main
try:
    main(["--help"])
finally:
    print(sorted({"sqlalchemy", "numpy", "msgspec", "httpx", "starlette"} & set(sys.modules)), file=sys.stderr)
"""
    path = str(Path(__file__).parents[2] / "core")
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stderr.strip() == "[]"
    assert "runs" in done.stdout and "show" in done.stdout
