"""Workers: rollouts of a trainer elsewhere, an orderly end, and stores that come and go."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.gateway import Gateway
from agentlightning.gateways import RESOURCE, Gateways, gateway_resource, reachable
from agentlightning.schema import Outcome, Resource
from agentlightning.store import open_store
from tests.core.runner_world import World, outcomes, values
from tests.core.trainer_world import TRAIN, VAL, Trainers, post
from tests.core.worker_world import FOLDER, Command, solve, until, worker
from tests.fakes.engine import FakeEngine
from tests.fakes.policy import Learner

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are ended by POSIX signals")


@pytest.fixture(params=["file", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a store for several processes."""
    url = f"sqlite:///{tmp_path}/runs.db"
    if request.param == "file":
        yield url
        return
    with Command("store", "serve", url, "--port", "0") as server:
        yield server.first_line().split("served at ")[1].split(";")[0]
        server.process.terminate()
        assert server.end() == 0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


def url_of(world: World) -> str:
    return str(world.store.url)


def test_a_trainer_without_runners_is_served_by_workers(trainers: Trainers, place: str) -> None:
    """Two workers, one of them with a process for each rollout; every call is recorded before its rollout is final."""
    learner = Learner(total=3, tasks_per_step=4, rollouts=2)
    trainer = trainers(learner, store=place, concurrency=0)
    more = (["-n", "2"], ["-n", "1", "--processes"])
    workers = [worker("solve", place, *extra, "--run", "fit") for extra in more]
    result = trainer.fit(solve, train=TRAIN, val=VAL)
    codes = [one.end() for one in workers]
    reports = [one.events[-1] for one in workers]
    assert codes == [0, 0], "a worker of one run ends with it"
    assert [step.metrics["failed"] for step in result.steps] == [0.0] * 3
    assert all(step.ledger["seen"] == 16 for step in result.steps), "two calls in each of eight rollouts"
    assert sum(report["finished"] for report in reports) == 3 * 8 + 2 * 2 * len(VAL)
    assert all(report["lost"] == report["superseded"] == 0 for report in reports)
    with_store = open_store(place)
    seen = {one.id: one for one in with_store.workers()}
    assert {report["worker"] for report in reports} == set(seen)
    assert {(one.program, one.state, one.running) for one in seen.values()} == {("solve", "ended", 0)}
    assert {attempt.worker for r in with_store.rollouts() for attempt in with_store.attempts(r.id)} == set(seen)
    with_store.close()


def test_a_worker_takes_only_rollouts_of_its_program(world: World, tmp_path: Path) -> None:
    held = world.store.begin_run("other", {"program": "another"}, f"{socket.gethostname()}:{os.getpid()}:x")
    other = world.enqueue(1, run_id=held.id, resources={})
    mine = world.enqueue(1, run_id=world.store.begin_run("m", {"program": "quick"}, "h:1:x").id, resources={})
    with worker("quick", url_of(world)) as one:
        (episode,) = world.wait(mine)
        one.process.terminate()
        assert one.end() == 0
    assert values(episode) == {"reward": 1.0}
    assert world.store.rollouts(ids=other)[0].state == "queued"


def test_a_queue_that_somebody_filled_by_hand(world: World) -> None:
    ids = world.enqueue(3, run_id="nightly", resources={})
    with worker("quick", url_of(world), "--run", "nightly") as one:
        assert [values(episode)["reward"] for episode in world.wait(ids)] == [0.0, 1.0, 2.0]
        one.process.terminate()
        assert one.end() == 128 + signal.SIGTERM, "told to end before its run was over"


class TestTheEnd:
    def begun(self, world: World, tmp_path: Path, *more: str) -> tuple[Command, list[str]]:
        """A worker in the middle of two rollouts of three."""
        ids = world.enqueue(3, run_id="r", resources={}, max_attempts=1)
        one = worker("slow", url_of(world), "--run", "r", "-n", "2", *more, **{FOLDER: str(tmp_path)})
        until(lambda: (tmp_path / "begun").exists() and len((tmp_path / "begun").read_text().split()) == 2)
        return one, ids

    def test_sigterm_finishes_what_it_holds_and_takes_nothing_new(self, world: World, tmp_path: Path) -> None:
        one, ids = self.begun(world, tmp_path)
        with one:
            one.process.terminate()
            until(lambda: [w.state for w in world.store.workers()] == ["draining"])
            (tmp_path / "go").touch()
            assert one.end() == 128 + signal.SIGTERM
        states = [rollout.state for rollout in world.store.rollouts(ids=ids)]
        assert sorted(states) == ["queued", "succeeded", "succeeded"]
        assert one.events[-1]["finished"] == 2

    @pytest.mark.parametrize("how", ["second signal", "time is over", "second signal, processes"])
    def test_what_it_cannot_finish_is_given_back(self, world: World, tmp_path: Path, how: str) -> None:
        """With no attempt left, and yet it begins again: the fault was not the program's."""
        extra = ["--drain", "0.2"] if how == "time is over" else []
        extra += ["--processes"] if "processes" in how else []
        one, ids = self.begun(world, tmp_path, *extra)
        with one:
            one.process.terminate()
            if "signal" in how:  # two at once would be one
                until(lambda: [w.state for w in world.store.workers()] == ["draining"])
                one.process.terminate()
            assert one.end() == 128 + signal.SIGTERM
        assert {rollout.state for rollout in world.store.rollouts(ids=ids)} == {"queued"}
        tried = [attempt for one_id in ids for attempt in world.store.attempts(one_id)]
        assert [attempt.outcome for attempt in tried] == [Outcome.INFRA_ERROR] * 2
        (tmp_path / "go").touch()
        with worker("slow", url_of(world), "--run", "r", "-n", "3", **{FOLDER: str(tmp_path)}) as heir:
            assert outcomes(world.wait(ids)) == {"ok": 3}
            heir.process.terminate()

    def test_a_killed_worker_is_replaced(self, world: World, tmp_path: Path) -> None:
        ids = world.enqueue(1, run_id="r", resources={}, max_attempts=2)
        more = ["--run", "r", "--lease", "1"]
        with worker("slow", url_of(world), *more, **{FOLDER: str(tmp_path)}) as doomed:
            until(lambda: (tmp_path / "begun").exists())
            doomed.process.kill()
            doomed.end()
        (tmp_path / "go").touch()
        with worker("slow", url_of(world), *more, **{FOLDER: str(tmp_path)}) as heir:
            (episode,) = world.wait(ids)
            heir.process.terminate()
            heir.end()
        assert (episode.rollout.outcome, episode.rollout.attempts) == (Outcome.OK, 2)


def test_a_store_that_restarts_is_only_a_pause(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    file, url = f"sqlite:///{tmp_path}/runs.db", f"http://127.0.0.1:{port}"
    server = Command("store", "serve", file, "--port", port)
    server.first_line()
    with World(tmp_path, open_store(url)) as world:
        ids = world.enqueue(2, run_id="r", resources={}, max_attempts=1)
        with worker("slow", url, "--run", "r", "-n", "2", **{FOLDER: str(tmp_path)}) as one:
            until(lambda: (tmp_path / "begun").exists() and len((tmp_path / "begun").read_text().split()) == 2)
            server.process.kill()
            server.end()
            (tmp_path / "go").touch()
            with Command("store", "serve", file, "--port", port) as again:
                again.first_line()
                assert outcomes(world.wait(ids)) == {"ok": 2}
                one.process.terminate()
                one.end()
        world.store.close()
    assert one.events[-1]["lost"] == 0


class TestTheTrainerDies:
    def test_a_run_that_nobody_holds_is_left_in_the_queue(self, trainers: Trainers, world: World) -> None:
        """What would find no gateway is not begun, so it costs no attempt."""
        run = world.store.begin_run("dead", {"program": "solve"}, "elsewhere:1:x", lease_s=0.0)
        ids = world.enqueue(1, run_id=run.id, resources={"policy": 1}, max_attempts=1)
        alive = world.enqueue(1, run_id="by hand", resources={})
        with worker("solve", url_of(world)) as one, worker("quick", url_of(world), "--run", "by hand") as other:
            world.wait(alive)
            one.process.terminate()
            other.process.terminate()
            one.end()
            other.end()
        assert world.store.rollouts(ids=ids)[0].state == "queued"

    def test_calls_that_died_with_their_gateway_are_made_again(self, tmp_path: Path, store_and_gateways: Any) -> None:
        """A trainer dies and comes back at the same address: its workers do not take the new one's word for the old."""
        world, again, gateways = store_and_gateways
        (episode,) = (world.enqueue(1, resources={"policy": 3}, max_attempts=1),)
        ids = episode
        calls: list[int] = []

        def program(task: Any, policy: Any) -> float:
            calls.append(1)
            post(policy.base_url, "hello")
            if len(calls) == 1:
                again()
            return 1.0

        runner = world.start(
            program, gateway_url=gateways.url, barrier=gateways.flush, on_cancel=gateways.cancel, concurrency=1
        )
        (found,) = world.wait(ids)
        runner.stop()
        one, two = world.store.attempts(ids[0])
        assert (one.outcome, two.outcome, len(calls)) == (Outcome.INFRA_ERROR, Outcome.OK, 2)
        assert "started again" in str(one.error) or "is gone" in str(one.error)
        assert [call.attempt_id for call in found.completions] == [two.id]


@pytest.fixture
def store_and_gateways(tmp_path: Path) -> Iterator[Any]:
    with World(tmp_path) as world, FakeEngine("yes", version=3) as engine:
        endpoint = msgspec.to_builtins(engine.endpoint())
        world.store.publish(world.run_id, [Resource("policy", 3, "policy", endpoint)])
        made = [Gateway(world.store).start()]
        port = int(made[0].url.rpartition(":")[2])
        world.store.publish(world.run_id, [gateway_resource(made[0].url, made[0].secret)], moved=True)

        def again() -> None:
            made[0].close()
            made.append(Gateway(world.store, port=port).start())
            place = gateway_resource(made[1].url, made[1].secret)
            world.store.publish(world.run_id, [place], moved=True)

        gateways = Gateways(world.store)
        yield world, again, gateways
        for runner in world.runners:
            runner.stop(drain=False)
        gateways.close()
        for gateway in made:
            gateway.close()


def test_a_trainer_publishes_where_its_gateway_is(trainers: Trainers) -> None:
    trainer = trainers(Learner(total=1), advertise="http://gateway.example:1234")
    trainer.fit(solve, train=TRAIN)
    value = trainers.store.resource(trainers.run.id, RESOURCE).value
    assert value["url"] == "http://gateway.example:1234" and len(value["secret"]) == 32


def test_an_address_that_is_everywhere_is_called_by_name() -> None:
    assert reachable("http://0.0.0.0:80") == f"http://{socket.gethostname()}:80"
    assert reachable("http://[::1]:80") == "http://[::1]:80"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["worker", "nowhere:f", "--store", "sqlite://"], "nowhere cannot be imported"),
        (["worker", "tests.core.worker_world:quick", "--store", "sqlite:///absent.db"], "no store at"),
        (["worker", "tests.core.worker_world:quick", "--store", "sqlite://", "-n", "0"], "at least 1"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(arguments: list[str], cure: str) -> None:
    command = Command(*arguments)
    assert command.end() == 2
    assert cure in "".join(command.errors) and len(command.errors) == 1
