"""Each fault that keeps a program from being trained, provoked, with its code and its cure."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import agentlightning as agl
from agentlightning.doctor import CODES, code_of, first_look, refuse
from agentlightning.errors import NothingToTrain, PolicyError, UnknownAgent
from agentlightning.loop import Loop
from agentlightning.rehearsal import Fixed, Rehearsal, rehearse
from agentlightning.schema import Attempt, Budget, Endpoint, Episode, Outcome, Rollout, Route
from agentlightning.standin import StandIn
from agentlightning.trajectory import Ledger
from tests.conformance.store_records import completion
from tests.fakes.engine import FakeEngine, Fault

MESSAGES = [{"role": "user", "content": "hello"}]


def post(base_url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{base_url}/chat/completions", json={"model": "policy", "messages": MESSAGES} | body, timeout=30)


def good(task: Any, policy: Any) -> float:
    """What all others here are a fault away from."""
    post(policy.agent("writer").base_url)
    return 1.0


class Serves:
    """A policy of this engine; `endpoint` changes what it announces."""

    version = 3

    def __init__(self, engine: FakeEngine, **endpoint: Any) -> None:
        self.engine, self.endpoint, self.closed = engine, endpoint, 0

    def __call__(self, loop: Loop) -> Serves:
        return loop.serve(self)

    def start(self) -> Endpoint:
        return msgspec.structs.replace(self.engine.endpoint(), **self.endpoint)

    def save(self, folder: Path) -> None:
        raise AssertionError("a rehearsal saves nothing")

    def load(self, folder: Path) -> None:
        raise AssertionError("a rehearsal loads nothing")

    def close(self) -> None:
        self.closed += 1


def stand_in(loop: Loop) -> StandIn:
    return loop.serve(StandIn())


def run(
    program: Any = good, reply: Any = "hi", selectors: Any = ("writer",), timeout_s: float = 30.0, **endpoint: Any
) -> Rehearsal:
    """A rehearsal in front of a fake engine."""
    budget = endpoint.pop("budget", None)
    with FakeEngine(reply, version=3) as engine:
        serves = Serves(engine, **endpoint)
        found = rehearse(program, {"x": 1}, serves, selectors=selectors, timeout_s=timeout_s, budget=budget)
        assert serves.closed == 1 or not found.episode
    return found


def levels(found: Rehearsal) -> dict[str, str]:
    """Code -> level of all that is not as it should be."""
    return {finding.code: finding.level for finding in found.findings if finding.level != "ok"}


def test_a_good_program_passes_every_check() -> None:
    found = run()
    assert levels(found) == {} and not found.faults
    assert [finding.code for finding in found.findings] == [c for c in CODES if c not in ("AGL-D03", "AGL-D40")]
    (call,) = found.calls
    assert (call.path, call.defect, len(call.logprobs)) == ("writer", None, len(call.response_ids))


def no_task() -> None: ...


def unknown_parameter(task: Any, judge: Any) -> float:
    return 1.0


def raises(task: Any, policy: Any) -> float:
    post(policy.base_url)
    raise LookupError("a bug in the program")


def slow(task: Any, policy: Any) -> float:
    post(policy.base_url)
    time.sleep(30)
    return 1.0


def says_text(task: Any, policy: Any) -> Any:
    post(policy.agent("writer").base_url)
    return "very good"


def calls_nobody(task: Any, policy: Any) -> float:
    return 1.0


def forgets_its_attempt(task: Any, policy: Any) -> float:
    """By a client that carries no trace context either."""
    url = policy.base_url.partition("/attempts")[0] + "/v1/chat/completions"
    body = json.dumps({"model": "policy", "messages": MESSAGES}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"})).close()
    return 1.0


def names_no_agent(task: Any, policy: Any) -> float:
    post(policy.base_url)
    return 1.0


def calls_a_judge(task: Any, policy: Any) -> float:
    post(policy.agent("judge").base_url)
    return 1.0


def earns_nothing(task: Any, policy: Any) -> None:
    post(policy.agent("writer").base_url)


PROGRAMS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("AGL-D01", "no_such_module:solve", {}, "cannot be imported"),
    ("AGL-D01", "agentlightning.schema:no_such_function", {}, "correct the name after the colon"),
    ("AGL-D01", "nothing", {}, "MODULE:FUNCTION"),
    ("AGL-D01", "/no/such/file.py:solve", {}, "there is no file"),
    ("AGL-D02", no_task, {}, "takes no task"),
    ("AGL-D02", unknown_parameter, {}, "'judge'"),
    ("AGL-D02", "agentlightning.schema:SCHEMA_VERSION", {}, "not a function"),
    ("AGL-D04", raises, {}, "a bug in the program"),
    ("AGL-D05", slow, {"timeout_s": 0.3}, "not done after"),
    ("AGL-D06", says_text, {}, "very good"),
    ("AGL-D10", calls_nobody, {}, "base_url=policy.base_url"),
    ("AGL-D11", forgets_its_attempt, {}, "Calls name no attempt"),
    ("AGL-D13", names_no_agent, {}, "Agents seen: agent (1 call)"),
    ("AGL-D13", good, {"selectors": ("reader",)}, "Agents seen: writer (1 call)"),
    ("AGL-D20", calls_a_judge, {"selectors": ("judge",), "routes": "judge"}, "not the policy"),
    ("AGL-D21", good, {"reply": lambda _: Fault("no_ids")}, "sends no token ids"),
    ("AGL-D21", good, {"reply": lambda _: Fault("empty")}, "sampled nothing"),
    ("AGL-D22", good, {"reply": lambda _: Fault("no_logprobs")}, "`logprobs` is allowed"),
    ("AGL-D23", good, {"reply": lambda _: Fault("short_logprobs")}, "contradicts itself"),
    ("AGL-D23", good, {"reply": lambda _: Fault("nan_logprobs")}, "contradicts itself"),
    ("AGL-D23", good, {"reply": lambda _: Fault("wrong_usage")}, "contradicts itself"),
    ("AGL-D23", good, {"stop_ids": (99999,)}, "contradicts itself"),
    ("AGL-D24", good, {"reply": lambda _: Fault("no_finish")}, "no_finish_reason"),
    ("AGL-D24", good, {"reply": lambda _: Fault("status", status=401)}, "error_status"),
    ("AGL-D25", good, {"budget": Budget(prompt=3)}, "raise the budget"),
    ("AGL-D30", earns_nothing, {}, "agl.emit_reward"),
]


@pytest.mark.parametrize(("code", "program", "given", "told"), PROGRAMS)
def test_each_fault_has_its_code_and_its_cure(code: str, program: Any, given: dict[str, Any], told: str) -> None:
    with FakeEngine("judged") as judge:
        if given.get("routes") == "judge":
            routes = (Route("judge", "m", False, judge.base_url), Route("*", "base", True))
            given = {k: v for k, v in given.items() if k != "routes"} | {"routes": routes}
        found = run(program, **given)
    (fault, *_) = [finding for finding in found.findings if finding.code == code]
    assert fault.level == "fault" and code in levels(found)
    assert told in f"{fault.what} {fault.cure}"


def test_d03_a_policy_that_does_not_start() -> None:
    def broken(loop: Loop) -> Any:
        raise PolicyError("no memory: take a smaller model")

    found = rehearse(good, {}, broken)
    assert levels(found) == {"AGL-D03": "fault"} and "smaller model" in str(found.faults[0])


def test_d03_an_engine_that_is_not_there() -> None:
    found = rehearse(good, {}, lambda loop: loop.serve(Fixed("http://127.0.0.1:9/v1", "m")))
    assert levels(found)["AGL-D03"] == "fault" and "Start the engine" in found.faults[-1].cure


def test_d12_agents_without_names_are_told_when_all_are_selected() -> None:
    found = run(names_no_agent, selectors=("*",))
    assert levels(found) == {"AGL-D12": "warning"}
    assert "agl.callback" in next(f.cure for f in found.findings if f.code == "AGL-D12")


def test_d26_weights_that_change_during_an_answer() -> None:
    def streams(task: Any, policy: Any) -> float:
        post(policy.agent("writer").base_url, stream=True)
        return 1.0

    found = run(streams, lambda _: Fault("new_weights", "a longer answer", after=2))
    assert levels(found) == {"AGL-D26": "fault"} and "Gateway.paused()" in found.faults[0].cure
    assert code_of("stale")[0] == "AGL-D26"


def test_d40_rewards_that_never_differ(tmp_path: Path) -> None:
    """Only a run shows this: it ends after some steps that taught nothing."""
    from tests.fakes.policy import Learner

    class Teaches(Learner):
        def run(self, loop: Loop) -> None:
            policy = self.serve(loop)
            for _ in loop.steps(9):
                batch = loop.collect(loop.sample(loop.draw(1), 2), self.agents)
                batch.ledger.drop("zero_variance", batch.ledger.complete)
                loop.report(policy.update())

    trainer = agl.Trainer(Teaches(), store=f"sqlite:///{tmp_path}/agl.db")
    with pytest.raises(NothingToTrain, match=r"5 steps in a row trained nothing.*finer reward.*\(AGL-D40\)"):
        trainer.fit(good, [{"x": 1}])
    trainer.close()


def test_d27_a_program_that_changes_what_the_model_said() -> None:
    def rewrites(task: Any, policy: Any) -> float:
        url = policy.agent("writer").base_url
        more = [{"role": "assistant", "content": "HI"}, {"role": "user", "content": "again"}]
        for messages in (MESSAGES, MESSAGES + more):
            post(url, messages=messages)
        return 1.0

    found = run(rewrites, "hi")
    assert levels(found) == {"AGL-D27": "warning"}
    told = next(f for f in found.findings if f.code == "AGL-D27")
    assert "1 of 2 calls" in told.what and "as it came" in told.cure


def test_every_code_is_provoked_here() -> None:
    source = Path(__file__).read_text("utf-8")
    unprovoked = [code for code in CODES if f'"{code}", ' not in source and f"test_{code[4:].lower()}" not in source]
    assert not unprovoked


def test_every_reason_of_the_ledger_has_a_code_and_a_cure() -> None:
    reasons = ["no_token_ids", "length_mismatch", "finish_abort", "outcome_timeout", "outcome_agent_error", "cancelled"]
    for code, cure in map(code_of, reasons):
        assert code in CODES and cure


def test_some_good_calls_make_a_fault_a_warning() -> None:
    kinds = itertools.cycle(["good", Fault("no_ids")])

    def twice(task: Any, policy: Any) -> float:
        for _ in range(2):
            post(policy.agent("writer").base_url)
        return 1.0

    found = run(twice, lambda _: next(kinds))
    assert levels(found) == {"AGL-D21": "warning"}
    assert "1 of 2 calls" in next(f.what for f in found.findings if f.code == "AGL-D21")


def test_async_programs_are_rehearsed_too() -> None:
    async def solve(task: Any, policy: Any) -> float:
        await asyncio.to_thread(post, policy.agent("writer").base_url)
        return 1.0

    assert not run(solve).faults


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stand_in_answers_where_there_is_no_model(stream: bool, n: int) -> None:
    def solve(task: Any, policy: Any) -> float:
        assert "ok" in post(policy.agent("writer").base_url, stream=stream, n=n).text
        return 1.0

    found = rehearse(solve, {}, stand_in, selectors=["writer"])
    assert not levels(found) and len(found.calls) == n
    assert all(bytes(call.response_ids[:-1].tolist()) == b"ok" for call in found.calls)


# What `fit` takes from here.


def episode(*calls: Any, outcome: Outcome = Outcome.OK) -> Episode:
    rollout = Rollout("r", "run", {}, "t", "g", outcome=outcome)
    return Episode(rollout, Attempt("a", "r", 1, "w"), [], list(calls), [])


@pytest.mark.parametrize("defect", ["no_token_ids", "no_logprobs", "length_mismatch", "bad_ending"])
def test_the_first_rollout_is_enough_for_what_lies_in_the_engine(defect: str) -> None:
    wrong = [completion("a", id=f"c{i}", policy="policy", defect=defect) for i in range(2)]
    with pytest.raises(NothingToTrain, match="AGL-D2"):
        first_look(episode(*wrong), 0)
    first_look(episode(wrong[0], completion("a", id="d", policy="policy")), 0)
    first_look(episode(*wrong, completion("a", id="e", policy="policy", defect="client_disconnected")), 0)
    first_look(episode(completion("a", id="f", policy=None, defect=defect)), 0)


def test_the_first_rollout_is_enough_for_calls_that_name_no_attempt() -> None:
    with pytest.raises(NothingToTrain, match="AGL-D11"):
        first_look(episode(), 2)
    first_look(episode(), 0)
    first_look(episode(completion("a", id="c", policy="policy")), 2)


def test_fit_looks_at_one_rollout_before_it_runs_all(tmp_path: Path) -> None:
    """And keeps what it has seen: a good one is not run again."""
    from tests.fakes.policy import Learner

    ran: list[int] = []

    def counted(task: Any, policy: Any) -> float:
        ran.append(task["x"])
        return good(task, policy)

    for reply, runs in ((lambda _: Fault("no_ids"), 1), ("fine", 4)):
        ran.clear()
        folder = tmp_path / str(runs)
        folder.mkdir()
        trainer = agl.Trainer(Learner(total=1, reply=reply), store=f"sqlite:///{folder}/agl.db")
        try:
            trainer.fit(counted, [{"x": 1}, {"x": 2}])
            assert runs == 4
        except NothingToTrain as error:
            assert runs == 1 and "AGL-D21" in str(error)
        trainer.close()
        assert len(ran) == runs


def test_a_step_whose_calls_all_fell_out_is_refused_with_the_reason() -> None:
    ledger = Ledger(seen=2, attributed=2, selected=2)
    ledger.drop("superseded", 2)
    with pytest.raises(NothingToTrain, match=r"no trainable call.*AGL-D04"):
        refuse(ledger, {"writer": 2}, ["writer"])
    with pytest.raises(UnknownAgent, match=r"AGL-D13.*'reader'.*writer \(2 calls\)"):
        refuse(ledger, {"writer": 2}, ["reader"])
