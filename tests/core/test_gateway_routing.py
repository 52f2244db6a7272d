"""Which model answers, with which sampling and which seed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentlightning.schema import Resource, Route
from tests.fakes.engine import FakeEngine, Fault
from tests.fakes.world import HELLO, World

ROUTES = (
    Route("team/writer", "lora-team-writer", True),
    Route("writer", "lora-writer", True),
    Route("crew/*", "lora-crew", True),
    Route("*", "base", False),
)


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("writer", "lora-writer"),
        ("other/writer", "lora-writer"),
        ("team/writer", "lora-team-writer"),
        ("crew/checker", "lora-crew"),
        ("crew/a/b", "lora-crew"),
        ("crew", "base"),
        ("stranger", "base"),
    ],
)
def test_the_first_route_that_means_the_agent_answers(tmp_path: Path, path: str, model: str) -> None:
    with World(tmp_path, routes=ROUTES) as world:
        attempt = world.attempt()
        world.client(attempt, path).chat.completions.create(model="policy", messages=HELLO)
        (call,) = world.calls(attempt)
    assert world.engine.requests[0].body["model"] == call.model == model


def test_an_agent_without_a_route_gets_the_cure(tmp_path: Path) -> None:
    with World(tmp_path, routes=[Route("writer", "m", True)]) as world:
        response = world.post(world.attempt())
    assert response.status_code == 404 and "add a route with the selector '*'" in response.json()["detail"]


def test_b9_the_model_of_the_request_chooses_the_resource(tmp_path: Path) -> None:
    """A judge beside the policy: served, kept in the trace, never a policy sample."""
    with World(tmp_path, "policy says") as world, FakeEngine("judge says") as judge:
        world.publish("judge", 7, judge.endpoint([Route("*", "big", False)]), kind="llm")
        attempt = world.attempt(resources={"policy": 3, "judge": 7}, sampling={"temperature": 0.1})
        texts = [
            world.post(attempt, model=model).json()["choices"][0]["message"]["content"]
            for model in ("policy", "judge", "some-name-in-the-users-code")
        ]
        calls = world.calls(attempt)
    assert texts == ["policy says", "judge says", "policy says"]
    assert [(c.policy, c.model) for c in calls] == [("policy", "base"), (None, "big"), ("policy", "base")]
    assert ["temperature" in c.sampling for c in calls] == [True, False, True]
    assert not any(call.defect for call in calls)


def test_an_endpoint_that_knows_no_token_ids_is_asked_without_them(tmp_path: Path) -> None:
    """OpenAI's own servers refuse unknown fields; a frozen helper may well live there."""

    def strict(request: dict[str, Any]) -> str | Fault:
        return Fault("status", status=400) if "return_token_ids" in request else "judged"

    with World(tmp_path) as world, FakeEngine(strict) as judge:
        world.publish("judge", 1, judge.endpoint(), kind="llm")
        attempt = world.attempt(resources={"policy": 3, "judge": 1})
        for _ in range(2):
            assert world.post(attempt, model="judge").json()["choices"][0]["message"]["content"] == "judged"
        calls = world.calls(attempt)
        assert ["return_token_ids" in seen.body for seen in judge.requests] == [True, False, False]
    assert [(call.defect, len(call.response_ids)) for call in calls] == [(None, 0), (None, 0)]


def test_a_policy_that_refuses_token_ids_is_not_asked_again(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("status", status=400)) as world:
        assert world.post(world.attempt()).status_code == 400
        assert len(world.engine.requests) == 1


def test_a_rollout_reads_its_pinned_version(tmp_path: Path) -> None:
    with World(tmp_path, "old") as world, FakeEngine("new", version=None) as newer:
        old = world.attempt()
        world.publish("policy", 4, newer.endpoint())
        new = world.attempt(resources={"policy": 4})
        for attempt in (old, new, old):
            world.post(attempt)
        assert [c.response["content"] for c in world.calls(old)] == ["old", "old"]
        (call,) = world.calls(new)
    assert (call.response["content"], call.version) == ("new", 4), "without a stamp, the resource's version counts"


def test_a_rollout_that_pins_nothing_reads_the_newest_policy(tmp_path: Path) -> None:
    with World(tmp_path, "served") as world:
        assert world.post(world.attempt(resources={})).status_code == 200


@pytest.mark.parametrize(("stamp", "version"), [("both", 9), ("body", 9), ("header", 9), ("none", 3)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_version_is_the_engines_stamp(tmp_path: Path, stamp: str, version: int, stream: bool) -> None:
    with World(tmp_path) as world:
        world.engine.version, world.engine.stamp = 9, stamp
        attempt = world.attempt()
        world.post(attempt, stream=stream)
        (call,) = world.calls(attempt)
    assert call.version == version


def test_a_resource_that_is_no_endpoint_gets_the_cure(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        world.store.publish(world.run.id, [Resource("policy", 5, "policy", {"prompt": "x"})])
        bad_url = msgspec.to_builtins(world.engine.endpoint()) | {"base_url": "localhost:1/v1"}
        world.store.publish(world.run.id, [Resource("policy", 6, "policy", bad_url)])
        world.store.publish(world.run.id, [Resource("words", 1, "prompt", {"text": "x"})])
        for version, cure in ((5, "publish msgspec.to_builtins"), (6, "starts with http://")):
            response = world.post(world.attempt(resources={"policy": version}))
            assert response.status_code == 500 and cure in response.json()["detail"]


def test_a_run_without_any_endpoint_gets_the_cure(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        empty = world.store.begin_run("empty", {}, "here:2:nonce")
        response = world.post(world.attempt(run_id=empty.id, resources={}))
    assert response.status_code == 404 and "publish a resource of that name" in response.json()["detail"]


@pytest.mark.parametrize(
    ("mode", "path", "temperature"),
    [("train", "writer", 1.0), ("train", "helper", 0.3), ("val", "writer", 1.0), ("val", "helper", 0.3)],
)
def test_overrides_apply_to_trained_routes_and_leave_all_others_to_the_program(
    tmp_path: Path, mode: str, path: str, temperature: float
) -> None:
    with World(tmp_path, routes=ROUTES) as world:
        attempt = world.attempt(mode=mode, sampling={"temperature": 1.0, "top_p": 1.0})
        client = world.client(attempt, path)
        client.chat.completions.create(model="policy", messages=HELLO, temperature=0.3)
        (call,) = world.calls(attempt)
    assert world.engine.requests[0].body["temperature"] == temperature
    assert call.sampling["temperature"] == temperature and call.request["temperature"] == 0.3


@pytest.mark.parametrize("asked", ["max_tokens", "max_completion_tokens"])
def test_an_override_of_the_length_replaces_both_of_its_names(tmp_path: Path, asked: str) -> None:
    with World(tmp_path) as world:
        world.post(world.attempt(sampling={"max_tokens": 5}), **{asked: 100})
    body = world.engine.requests[0].body
    assert body["max_tokens"] == 5 and "max_completion_tokens" not in body


def test_sampling_cannot_override_what_the_gateway_needs(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        response = world.post(world.attempt(sampling={"logprobs": False, "temperature": 1.0}))
    assert response.status_code == 422 and "sets logprobs" in response.json()["detail"]


def seeds(world: World, questions: list[str], **rollout: Any) -> dict[tuple[str, int], int]:
    """The seeds of these questions in one attempt: (question, repetition) -> seed."""
    attempt = world.attempt(**rollout)
    seen: dict[tuple[str, int], int] = {}
    for question in questions:
        repetition = next(i for i in itertools.count() if (question, i) not in seen)
        world.post(attempt, messages=[{"role": "user", "content": question}])
        seen[question, repetition] = world.engine.requests[-1].body["seed"]
    return seen


def test_seeds_depend_on_what_is_asked_and_not_on_the_order(tmp_path: Path) -> None:
    questions = ["a", "b", "c", "a", "a", "b"]
    with World(tmp_path) as world:
        first = seeds(world, questions, seed=5)
        shuffled = random.Random(0).sample(questions, len(questions))
        assert seeds(world, shuffled, seed=5) == first
        assert not set(seeds(world, questions, seed=6).values()) & set(first.values())
    assert len(set(first.values())) == 6 and all(0 <= seed < 2**31 for seed in first.values())


def test_each_agent_and_each_attempt_has_seeds_of_its_own(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt(max_attempts=2)
        for path in ("a", "b"):
            world.client(attempt, path).chat.completions.create(model="policy", messages=HELLO)
        world.store.finish(attempt.id, "model_error")  # type: ignore[arg-type]
        ((_, again),) = world.store.lease("worker", 1)
        world.client(again, "a").chat.completions.create(model="policy", messages=HELLO)
        assert len({seen.body["seed"] for seen in world.engine.requests}) == 3


def test_a_retry_after_a_failure_has_the_seed_of_the_first_try(tmp_path: Path) -> None:
    replies = iter([Fault("status", status=500), "good", "again"])
    with World(tmp_path, lambda _: next(replies)) as world:
        attempt = world.attempt()
        client = world.client(attempt, retries=1)
        client.chat.completions.create(model="policy", messages=HELLO)
        client.chat.completions.create(model="policy", messages=HELLO)
        calls = world.calls(attempt)
    failed, good, again = (seen.body["seed"] for seen in world.engine.requests)
    assert failed == good != again
    assert [call.defect for call in calls] == ["error_status", None, None]


def test_who_may_name_the_seed(tmp_path: Path) -> None:
    """The rollout's sampling always; the program only where nothing is trained: equal seeds would make a group equal."""
    with World(tmp_path, routes=ROUTES) as world:
        named, plain = world.attempt(sampling={"seed": 11}), world.attempt()
        world.client(named, "writer").chat.completions.create(model="policy", messages=HELLO, seed=1)
        world.client(plain, "writer").chat.completions.create(model="policy", messages=HELLO, seed=1)
        world.client(plain, "helper").chat.completions.create(model="policy", messages=HELLO, seed=1)
        first, second, third = (seen.body["seed"] for seen in world.engine.requests)
    assert first == 11 and second != 1 and third == 1
