"""Programs in processes of their own: the same outcomes as in this one, and nothing left of them afterwards."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentlightning.children import Children
from agentlightning.errors import RolloutError
from agentlightning.runner import Runner
from agentlightning.schema import Outcome
from tests.core import children_programs as programs
from tests.core.runner_world import GATEWAY, WAIT_S, World, outcomes, values
from tests.fakes.engine import Fault
from tests.fakes.world import World as Gateway

REPO = Path(__file__).parents[2]
posix = pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")


def run(folder: Path, program: Any, count: int = 1, **fields: Any) -> list[Any]:
    with World(folder) as world:
        ids = world.enqueue(count, **fields)
        runner = world.start(program, processes=True, concurrency=4)
        episodes = world.wait(ids)
        runner.stop()
        assert runner.counts.late == 0
    return episodes


def gone(pid: int) -> bool:
    """Within a moment: whoever is killed is not gone at once."""
    give_up_at = time.monotonic() + WAIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.01)
    return True


class TestWhatComesBack:
    def test_each_rollout_has_a_process_of_its_own(self, tmp_path: Path) -> None:
        episodes = run(tmp_path, programs.plain, 6)
        assert [values(e) for e in episodes] == [{"reward": float(i)} for i in range(6)]
        pids = {span.attributes["pid"] for e in episodes for span in e.spans if span.kind == "annotation"}
        assert len(pids) == 6 and os.getpid() not in pids

    def test_async_agents_and_named_rewards(self, tmp_path: Path) -> None:
        (episode,) = run(tmp_path, programs.in_a_loop)
        assert values(episode) == {"on_the_way": 0.5, "number": 1.0, "task": 0.0}
        assert [(span.path, span.status) for span in episode.spans if span.kind == "agent"] == [("writer", "ok")]

    def test_no_returned_reward_is_none_and_what_was_emitted_is_there(self, tmp_path: Path) -> None:
        (episode,) = run(tmp_path, programs.nothing)
        assert (episode.rollout.outcome, values(episode)) == ("ok", {"reward": 1.0})

    @pytest.mark.parametrize(
        ("program", "outcome", "said"),
        [
            (programs.raises, Outcome.AGENT_ERROR, "ValueError: the real one"),
            (programs.refused, Outcome.GRADER_ERROR, "list, not a number"),
            (programs.leaves_abruptly, Outcome.AGENT_ERROR, "exit code 3"),
        ],
    )
    def test_b87_an_error_is_told_and_gives_no_reward(
        self, tmp_path: Path, program: Any, outcome: Outcome, said: str
    ) -> None:
        (episode,) = run(tmp_path, program)
        assert (episode.rollout.outcome, values(episode)) == (outcome, {})
        assert said in str(episode.attempt.error)

    def test_a_crash_of_the_interpreter_is_tried_again(self, tmp_path: Path) -> None:
        (episode,) = run(tmp_path, programs.crashes, max_attempts=2)
        assert (episode.rollout.outcome, episode.rollout.attempts) == (Outcome.OK, 2)

    def test_b89_the_error_of_a_clean_up_does_not_hide_the_real_one(self, tmp_path: Path) -> None:
        (episode,) = run(tmp_path, programs.cleans_up_badly)
        told = str(episode.attempt.error)
        assert told.index("ValueError: the real one") < told.index("RuntimeError: the clean-up")

    def test_model_calls_belong_to_the_attempt(self, tmp_path: Path) -> None:
        with Gateway(tmp_path, "yes") as gateway, World(tmp_path, gateway.store) as world:
            ids = world.enqueue(1, resources={"policy": 3}, run_id=gateway.run.id)
            door = gateway.gateway
            options: dict[str, Any] = {"barrier": door.flush, "on_cancel": door.cancel, "run_id": gateway.run.id}
            world.start(programs.calls, gateway_url=door.url, processes=True, **options)
            (episode,) = world.wait(ids)
        assert values(episode) == {"reward": 3.0}
        assert [call.path for call in episode.completions] == ["writer"]


@posix
class TestTheEnd:
    def test_b87_at_the_deadline_all_its_processes_are_killed(self, tmp_path: Path) -> None:
        """They ignore SIGTERM. What was recorded before is kept; the outcome is a timeout, never a success."""
        file = tmp_path / "pids"
        with World(tmp_path) as world:
            (rollout_id,) = world.enqueue(1, task=str(file), timeout_s=3.0)
            began = time.monotonic()
            runner = world.start(programs.starts_others, processes=True)
            (episode,) = world.wait([rollout_id])
            took = time.monotonic() - began
            runner.stop()
        assert (episode.rollout.outcome, values(episode)) == (Outcome.TIMEOUT, {"partial": 0.25})
        assert "its processes were killed" in str(episode.attempt.error)
        pids = [int(line) for line in file.read_text().split()]
        assert len(pids) == 3 and all(gone(pid) for pid in pids)
        assert 3.0 <= took < 30.0

    @pytest.mark.parametrize("program", [programs.tidies, programs.tidies_in_a_loop])
    def test_b88_before_that_it_may_tidy_up(self, tmp_path: Path, program: Any) -> None:
        file = tmp_path / "note"
        with World(tmp_path) as world:
            ids = world.enqueue(1, task=str(file), timeout_s=2.0)
            world.start(program, processes=True)
            (episode,) = world.wait(ids)
        assert (episode.rollout.outcome, file.read_text()) == (Outcome.TIMEOUT, "tidied")
        assert "killed" not in str(episode.attempt.error)

    def test_what_a_program_leaves_behind_ends_with_it(self, tmp_path: Path) -> None:
        file = tmp_path / "pids"
        (episode,) = run(tmp_path, programs.leaves_others, task=str(file))
        assert values(episode) == {"reward": 1.0} and gone(int(file.read_text()))

    def test_stop_without_drain_kills_and_hands_back(self, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        with World(tmp_path) as world:
            (rollout_id,) = world.enqueue(1, task=str(file), max_attempts=2)
            runner = world.start(programs.sleeps, processes=True)
            while not file.exists():
                time.sleep(0.01)
            runner.stop(drain=False)
            (rollout,) = world.store.rollouts(ids=[rollout_id])
        assert rollout.state == "queued" and gone(int(file.read_text()))

    def test_b91_a_cancelled_rollout_ends_its_requests_and_its_processes(self, tmp_path: Path) -> None:
        with Gateway(tmp_path, lambda request: Fault("hang")) as gateway, World(tmp_path, gateway.store) as world:
            ids = world.enqueue(1, resources={"policy": 3}, run_id=gateway.run.id, timeout_s=600.0)
            door = gateway.gateway
            options: dict[str, Any] = {"barrier": door.flush, "on_cancel": door.cancel, "run_id": gateway.run.id}
            runner = world.start(programs.calls_forever, gateway_url=door.url, processes=True, lease_s=0.6, **options)
            gateway.engine.wait(lambda engine: engine.active == 1, WAIT_S)
            world.store.cancel(ids)
            gateway.engine.wait(lambda engine: engine.active == 0, WAIT_S)
            runner.stop()
            assert {seen.state for seen in gateway.engine.requests} == {"aborted"}
            assert runner.counts.running == 0 and not runner._executor._children  # type: ignore[attr-defined]

    def test_children_end_when_their_parent_is_killed(self, tmp_path: Path) -> None:
        source = """
import sys
from pathlib import Path
from tests.core import children_programs as programs
from tests.core.runner_world import World
if __name__ == "__main__":
    with World(Path(sys.argv[1])) as world:
        world.enqueue(1, task=sys.argv[1] + "/pid")
        world.start(programs.sleeps, processes=True)
        sys.stdin.read()
"""
        script = tmp_path / "parent.py"
        script.write_text(source)
        path = os.pathsep.join([str(REPO), str(REPO / "core"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(script), str(tmp_path)]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
        parent.communicate()
        assert gone(int((tmp_path / "pid").read_text()))


class TestB104WhatCannotBeSent:
    def test_b104_a_lambda_is_named(self, tmp_path: Path) -> None:
        with World(tmp_path) as world, pytest.raises(RolloutError, match=r"<lambda> of tests.core.test_children"):
            Runner(
                world.store,
                lambda task: 1.0,
                gateway_url=GATEWAY,
                recorder=world.recorder,
                run_id=None,
                processes=True,
            )

    def test_b104_a_task_that_holds_one_is_told(self, tmp_path: Path) -> None:
        with World(tmp_path) as world:
            children = Children(functools.partial(programs.plain), "plain", world.recorder)
            ended: list[Any] = []
            import contextvars

            from agentlightning.context import Scope, set_scope
            from agentlightning.execution import Call

            context = contextvars.copy_context()
            context.run(set_scope, Scope("a" * 32))
            call = Call(functools.partial(programs.plain, lambda: 0), False, context, ended.append)
            children.begin(call)
            while not ended:
                time.sleep(0.01)
            children.close()
        assert "the task or a resource of plain cannot be sent" in str(ended[0].error)

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_b104_each_way_of_making_processes_works(
        self, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.platform", "linux" if method == "forkserver" else "darwin")
        assert outcomes(run(tmp_path, programs.plain, 2)) == {"ok": 2}
