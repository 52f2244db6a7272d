"""What every store must do with runs, steps and resources."""

from __future__ import annotations

import math
import socket

import pytest

from agentlightning.errors import NotFound, RunInUse, StoreError
from agentlightning.schema import (
    Resource,
    Step,
)
from agentlightning.store.base import Store
from tests.conformance.store_records import (
    LONG,
    ME,
    RIVAL,
    dead_owner,
)


class Runs:
    def test_a_new_run_is_held_by_its_owner(self, store: Store) -> None:
        run = store.begin_run("grpo", {"lr": 0.1}, ME)
        assert (run.name, run.config, run.state, run.owner) == ("grpo", {"lr": 0.1}, "running", ME)
        assert store.runs() == [run]

    def test_an_unfinished_run_is_resumed_whatever_the_order_of_its_keys(self, store: Store) -> None:
        first = store.begin_run("grpo", {"lr": 0.1, "n": 4}, ME)
        again = store.begin_run("grpo", {"n": 4, "lr": 0.1}, ME)
        assert again.id == first.id and again.config_hash == first.config_hash
        assert len(store.runs()) == 1

    @pytest.mark.parametrize(("name", "config"), [("other", {"lr": 0.1}), ("grpo", {"lr": 0.2})])
    def test_another_name_or_configuration_is_another_run(
        self, store: Store, name: str, config: dict[str, object]
    ) -> None:
        first = store.begin_run("grpo", {"lr": 0.1}, ME)
        assert store.begin_run(name, config, ME).id != first.id

    @pytest.mark.parametrize("state", ["finished", "failed"])
    def test_an_ended_run_is_not_resumed(self, store: Store, state: str) -> None:
        first = store.begin_run("grpo", {}, ME)
        store.end_run(first.id, state)
        ended = store.runs()[0]
        assert (ended.state, ended.owner) == (state, "") and ended.ended_ns is not None
        assert store.begin_run("grpo", {}, ME).id != first.id

    def test_a_paused_run_is_given_up_at_once_and_resumed_by_anyone(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, ME, LONG)
        store.end_run(first.id, "paused")
        assert store.runs()[0].ended_ns is None
        taken = store.begin_run("grpo", {}, RIVAL)
        assert (taken.id, taken.state, taken.owner) == (first.id, "running", RIVAL)

    def test_b95_a_second_owner_is_refused_while_the_first_lives(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, ME, LONG)
        with pytest.raises(RunInUse, match=r"held by .*another name"):
            store.begin_run("grpo", {}, RIVAL)
        assert store.runs() == [first]

    def test_a_run_whose_hold_ran_out_is_taken(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, "elsewhere:1:x", lease_s=0)
        assert store.begin_run("grpo", {}, ME).id == first.id
        with pytest.raises(RunInUse, match="no longer held by elsewhere"):
            store.renew_run(first.id, "elsewhere:1:x")

    def test_a_run_whose_process_died_is_taken_at_once(self, store: Store) -> None:
        first = store.begin_run("grpo", {}, dead_owner(), LONG)
        assert store.begin_run("grpo", {}, ME).id == first.id

    @pytest.mark.parametrize("owner", ["elsewhere:999999999:x", "no-pid", "a:b:c", f"{socket.gethostname()}:x:y"])
    def test_an_owner_that_cannot_be_looked_up_is_believed_alive(self, store: Store, owner: str) -> None:
        store.begin_run("grpo", {}, owner, LONG)
        with pytest.raises(RunInUse):
            store.begin_run("grpo", {}, ME)

    def test_renewing_extends_the_hold(self, store: Store) -> None:
        run = store.begin_run("grpo", {}, ME, lease_s=0)
        store.renew_run(run.id, ME, LONG)
        assert store.runs()[0].lease_until > run.lease_until + LONG / 2
        with pytest.raises(RunInUse):
            store.begin_run("grpo", {}, RIVAL)

    def test_bad_ends_and_unknown_runs_are_refused(self, store: Store) -> None:
        run = store.begin_run("grpo", {}, ME)
        with pytest.raises(StoreError, match="finished, failed or paused"):
            store.end_run(run.id, "done")
        with pytest.raises(NotFound):
            store.end_run("nothing", "failed")
        with pytest.raises(NotFound):
            store.renew_run("nothing", ME)

    def test_a_configuration_that_is_not_data_is_refused(self, store: Store) -> None:
        with pytest.raises(StoreError, match="plain data"):
            store.begin_run("grpo", {"reward": lambda: 1}, ME)
        assert store.runs() == []

    def test_steps_come_by_number_and_the_first_record_of_a_number_stays(self, store: Store) -> None:
        second = Step("run", 2, {"loss": math.nan, "reward": 0.5}, {"calls": {"seen": 4}}, "ckpt/2", 7)
        first = Step("run", 1, {"loss": 1.0}, {}, None)
        for step in (second, first, Step("run", 2, {"loss": 9.0}, {}, None), Step("else", 1, {}, {}, None)):
            store.add_step(step)
        found = store.steps("run")
        assert [step.number for step in found] == [1, 2]
        assert found[1].checkpoint == "ckpt/2" and found[1].ledger == {"calls": {"seen": 4}}
        assert math.isnan(found[1].metrics["loss"]), "NaN must not become null or 0"

    def test_resources_are_read_by_version_or_newest(self, store: Store) -> None:
        versions = [Resource("prompt", version, "prompt", {"text": f"v{version}"}) for version in (1, 2, 10)]
        store.publish("run", versions)
        store.publish("run", [Resource("prompt", 2, "prompt", {"text": "changed"})])
        store.publish("run", [])
        assert store.resource("run", "prompt") == versions[2]
        assert store.resource("run", "prompt", 2) == versions[1], "a version never changes"

    def test_an_absent_resource_is_named(self, store: Store) -> None:
        store.publish("run", [Resource("prompt", 1, "prompt", {})])
        for run_id, name, version in (("run", "prompt", 7), ("run", "other", None), ("else", "prompt", None)):
            with pytest.raises(NotFound, match=name):
                store.resource(run_id, name, version)
