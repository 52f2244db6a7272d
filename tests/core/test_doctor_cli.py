"""`agl doctor`, `agl agents` and `agl explain` by what they print and how they exit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.doctor import task_of
from agentlightning.errors import ConfigError
from agentlightning.explain import NOTE, explain
from agentlightning.loop import Loop
from agentlightning.schema import Episode, Reward, SpanKind, new_id
from agentlightning.store import open_store
from tests.core.test_cli import Done
from tests.core.test_cli import agl as agl_command
from tests.core.test_cli import url as url  # noqa: PLC0414  # a fixture
from tests.core.trainer_world import post
from tests.fakes.engine import FakeEngine
from tests.fakes.policy import Learner

run = agl_command

PROGRAM = """
import json, urllib.request

def ask(base_url, text):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def solve(task, policy):
    draft = ask(policy.agent("team/writer").base_url, task.get("question", "?"))
    ask(policy.agent("team/checker").base_url, draft)
    ask(policy.agent("team/writer").base_url, draft)
    return float(len(draft))

def silent(task, policy):
    ask(policy.agent("writer").base_url, "x")
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    yield str(tmp_path / "my_program.py")


@pytest.fixture
def agl_(run: Callable[..., Done]) -> Callable[..., Done]:
    return run


def test_a_good_program_and_a_stand_in(agl_: Callable[..., Done], program: str) -> None:
    done = agl_("doctor", f"{program}:solve", "--agents", "writer", "--task", '{"question": "how many?"}')
    assert done.code == 0 and done.err == ""
    assert "nothing keeps this program from being trained; answered by a stand-in that says 'ok'" in done.out
    assert "AGL-D30" in done.out and "fault" not in done.out


def test_a_fault_is_told_with_its_cure_and_exit_code_1(agl_: Callable[..., Done], program: str) -> None:
    done = agl_("doctor", f"{program}:silent")
    assert done.code == 1 and "1 to mend" in done.out
    assert "AGL-D30" in done.out and "agl.emit_reward" in done.out


def test_json_has_every_finding(agl_: Callable[..., Done], program: str) -> None:
    done = agl_("doctor", f"{program}:solve", "--agents", "reader,writer", "--json")
    said = json.loads(done.out)
    assert done.code == 1
    (fault,) = [finding for finding in said["findings"] if finding["level"] == "fault"]
    assert fault["code"] == "AGL-D13" and "'reader'" in fault["what"] and "team/writer (2 calls)" in fault["what"]


def test_a_real_server_answers(agl_: Callable[..., Done], program: str) -> None:
    with FakeEngine("an answer", models=["m"]) as engine:
        where = ("--endpoint", engine.base_url, "--model", "m", "--api-key", "secret")
        done = agl_("doctor", f"{program}:solve", *where)
        assert done.code == 0 and f"answered by {engine.base_url}" in done.out
        assert engine.requests[0].headers["authorization"] == "Bearer secret"
        assert engine.requests[0].body["model"] == "m" and engine.requests[0].body["return_token_ids"] is True


def test_a_module_is_found_from_the_working_directory(agl_: Callable[..., Done], program: str) -> None:
    assert agl_("doctor", "my_program:solve").code == 0
    assert agl_("doctor", "my_program:nothing").code == 1


def test_a_model_that_cannot_be_served_is_a_finding(agl_: Callable[..., Done], program: str) -> None:
    pytest.importorskip("torch", reason="the embedded engine needs torch: pip install '.[train]'")
    done = agl_("doctor", f"{program}:solve", "--model", "/no/such/folder")
    assert done.code == 1 and "AGL-D0" in done.out and "/no/such/folder" in done.out


def test_agents_by_the_names_that_training_takes(agl_: Callable[..., Done], program: str) -> None:
    rows = json.loads(agl_("agents", f"{program}:solve", "--json").out)["agents"]
    assert [(row["path"], row["name"], row["calls"]) for row in rows] == [
        ("team/writer", "writer", 2),
        ("team/checker", "checker", 1),
    ]
    assert all(row["response_tokens"] == 3 * row["calls"] for row in rows)
    table = agl_("agents", f"{program}:solve")
    assert table.code == 0 and "team/checker" in table.out and "sampled" in table.out


def test_agents_of_a_program_that_makes_no_call(agl_: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def solve(task): return 1.0")
    done = agl_("agents", f"{tmp_path}/p.py:solve")
    assert done.code == 1 and "AGL-D10" in done.out


@pytest.mark.parametrize(
    ("text", "task"),
    [('{"a": 1}', {"a": 1}), ("[1]", [1]), ("@lines", {"n": 1}), ("@whole", {"n": [1, 2]}), ('"t"', "t")],
)
def test_tasks_are_json_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, task: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines").write_text('{"n": 1}\n{"n": 2}\n')
    Path("whole").write_text('{\n "n": [1,\n 2]\n}\n')
    assert task_of(text) == task


@pytest.mark.parametrize("text", ["{", "@nowhere", ""])
def test_a_task_that_is_no_json_gets_the_cure(text: str) -> None:
    with pytest.raises(ConfigError, match="--task @FILE"):
        task_of(text)


def test_no_agent_at_all_is_refused(agl_: Callable[..., Done], program: str) -> None:
    done = agl_("doctor", f"{program}:solve", "--agents", " , ")
    assert done.code == 2 and "--agents names none" in done.err


# agl explain


class Learns(Learner):
    """A learner that gives advantages: the return less the group's mean."""

    def run(self, loop: Loop) -> None:
        policy = self.serve(loop)
        for _ in loop.steps(self.total):
            batch = loop.collect(loop.sample(loop.draw(self.tasks_per_step), self.rollouts), self.agents)
            for group in batch.groups:
                returns = [trajectory.reward for trajectory in group.trajectories]
                for trajectory in group.trajectories if max(returns) > min(returns) else ():
                    for transition in trajectory.transitions:
                        transition.advantage = trajectory.reward - sum(returns) / len(returns)
                        batch.ledger.trained += 1
            loop.report(policy.update())


def graded(task: Any, policy: Any, rollout: Any) -> Any:
    """Two agents; the writer is paid twice for the rollout and once for itself."""
    post(policy.agent("writer").base_url, f"write {task['x']}")
    post(policy.agent("critic").base_url, "judge")
    agl.emit_reward(0.25, target="agent:writer")
    agl.emit_reward(9.0)
    return {"reward": 0.0 if task["x"] == 0 else float(rollout.seed % 97), "style": 0.5}


@pytest.fixture
def trained(url: str) -> Iterator[list[Episode]]:
    """The step's rollouts of two tasks, two each; those of task 0 all have the same reward."""
    trainer = agl.Trainer(Learns(total=1), store=url)
    trainer.fit(graded, [{"x": 0}, {"x": 1}])
    trainer.close()
    store = open_store(url)
    yield store.episodes([rollout.id for rollout in store.rollouts(store.runs()[0].id)])
    store.close()


def of_task(episodes: list[Episode], x: int) -> Episode:
    return next(e for e in episodes if e.rollout.task["x"] == x)


def test_explain_tells_reward_call_and_advantage_with_every_rule(
    agl_: Callable[..., Done], trained: Any, url: str
) -> None:
    episode = of_task(trained, 1)
    done = agl_("explain", episode.rollout.id[:16])
    (said,) = [
        c for c in json.loads(agl_("explain", episode.rollout.id, "--json").out)["calls"] if c["path"] == "writer"
    ]
    value = float(episode.rollout.seed % 97)
    assert said["selector"] == "writer" and said["total"] == value + 0.25 and said["left_out"] is None
    rollout, agent, call = said["parts"]
    assert rollout["value"] == value and "its reward named `reward`" in rollout["rule"]
    assert "1 earlier of the same name replaced" in rollout["rule"] and "not counted: style 0.5" in rollout["rule"]
    assert (agent["target"], agent["value"], call["value"]) == ("agent:writer", 0.25, None)
    mean = sum(said["group"]) / 2
    assert len(said["group"]) == 2 and said["advantage"] == pytest.approx(said["total"] - mean)
    assert "agent writer  chosen by agents=['writer']" in done.out and "agent critic  not chosen by agents=" in done.out
    assert f"advantage {said['advantage']:+.4g} on each of its {said['response_tokens']} tokens" in done.out
    assert "compared with 2 trajectories of this task" in done.out and "left out: not_selected" in done.out


def test_explain_tells_why_a_call_was_not_trained(agl_: Callable[..., Done], trained: Any) -> None:
    calls = json.loads(agl_("explain", of_task(trained, 0).rollout.id, "--json").out)["calls"]
    assert {c["path"]: c["left_out"] for c in calls} == {"writer": "zero_variance", "critic": "not_selected"}
    assert "finer reward" in calls[0]["cure"]


def test_an_attempt_is_explained_as_its_rollout(agl_: Callable[..., Done], trained: Any) -> None:
    episode = of_task(trained, 1)
    assert agl_("explain", episode.attempt.id).out == agl_("explain", episode.rollout.id).out


def test_a_run_is_not_explained(agl_: Callable[..., Done], trained: Any) -> None:
    done = agl_("explain", trained[0].rollout.run_id)
    assert done.code == 2 and "name one of its rollouts" in done.err


def test_the_note_of_a_step_is_small_and_written_once(trained: Any) -> None:
    for episode in trained:
        (note,) = [span for span in episode.spans if span.name == NOTE]
        assert note.kind == SpanKind.ANNOTATION and note.attributes["agl.step"] == 1
        assert len(note.attributes[NOTE]) == 1


def test_named_rewards_without_a_main_one_are_added_up(url: str, trained: Any) -> None:
    store = open_store(url)
    critic = of_task(trained, 1)
    rewards = [
        Reward(new_id(), critic.attempt.id, value, name, "agent:critic") for name, value in (("a", 1.0), ("b", 2.0))
    ]  # type: ignore[union-attr]
    store.add(rewards=rewards)
    story = next(c for c in explain(store, critic.rollout.id).calls if c.path == "critic")
    store.close()
    assert story.parts[1].value == 3.0 and "the sum of its named rewards: a 1 + b 2" in story.parts[1].rule


def test_an_unknown_rollout(agl_: Callable[..., Done], trained: Any) -> None:
    done = agl_("explain", "ffff")
    assert done.code == 2 and "nothing in" in done.err
