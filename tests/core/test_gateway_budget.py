"""Limits of tokens: nothing is sampled that does not fit, and what does fit is never refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.execution import Ended
from agentlightning.finishing import Job, judge
from agentlightning.gateway.budget import is_full
from agentlightning.outcomes import classify
from agentlightning.schema import Attempt, Budget, Outcome
from tests.fakes import tokenizer
from tests.fakes.engine import Fault
from tests.fakes.world import HELLO, World

PROMPT = len(tokenizer.render(HELLO))


class Limited(World):
    """A world whose policy, version 4, has this budget, and counts the tokens of prompts unless told otherwise."""

    def __init__(
        self, folder: Path, reply: Any = "x" * 400, *, context: int = 4096, counts: bool = True, **budget: Any
    ):
        super().__init__(folder, reply)
        endpoint = msgspec.structs.replace(
            self.engine.endpoint(context=context),
            budget=Budget(**budget),
            tokenize=f"{self.engine.url}/tokenize" if counts else "",
        )
        self.publish("policy", 4, endpoint)

    def attempt(self, **fields: Any) -> Attempt:
        return super().attempt(**{"resources": {"policy": 4}} | fields)

    def asked(self) -> list[int | None]:
        """`max_tokens` of each request that reached the engine."""
        return [seen.body.get("max_tokens", seen.body.get("max_completion_tokens")) for seen in self.engine.requests]


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(("asked", "sent"), [({}, 7), ({"max_tokens": 100}, 7), ({"max_completion_tokens": 3}, 3)])
def test_a_call_samples_no_more_than_its_budget(tmp_path: Path, asked: Any, sent: int) -> None:
    with Limited(tmp_path, response=7) as world:
        attempt = world.attempt()
        world.post(attempt, **asked)
        (call,) = world.calls(attempt)
        assert world.asked() == [sent] and world.engine.counted == 0
    assert (len(call.response_ids), call.finish_reason, call.defect) == (sent, "length", None)
    assert sent in call.sampling.values()


def test_without_limits_the_client_decides(tmp_path: Path) -> None:
    with Limited(tmp_path) as world:
        attempt = world.attempt()
        world.post(attempt)
        world.post(attempt, max_tokens=9)
        assert world.asked() == [None, 9]


@pytest.mark.parametrize("counts", [True, False])
def test_a_prompt_that_is_too_long_is_refused_in_the_apis_words(tmp_path: Path, counts: bool) -> None:
    """By us before the call where prompts can be counted, else by the engine; the agent sees no difference."""
    with Limited(tmp_path, context=200, counts=counts) as world:
        world.engine.context = 200
        attempt = world.attempt()
        world.post(attempt, max_tokens=5)
        client = world.client(attempt)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as caught:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "long " * 100}])
        first, second = world.calls(attempt)
        assert len(world.engine.requests) == (1 if counts else 2)
    assert caught.value.code == "context_length_exceeded" and caught.value.type == "invalid_request_error"
    assert classify(caught.value) is Outcome.TRUNCATED
    assert (first.defect, second.defect) == (None, "over_budget"), "earlier turns are kept"


def test_the_attempt_of_a_program_that_ends_so_is_truncated(tmp_path: Path) -> None:
    with Limited(tmp_path, prompt=10) as world:
        attempt = world.attempt()
        with pytest.raises(openai.BadRequestError) as caught:
            world.client(attempt).chat.completions.create(model="policy", messages=HELLO)
        (rollout,) = world.store.rollouts(ids=[attempt.rollout_id])
        verdict = judge(Job(rollout, attempt, 0.0), Ended(error=caught.value), "program")
    assert verdict.outcome is Outcome.TRUNCATED and "maximum context length" in (verdict.error or "")


def test_the_response_gets_what_the_prompt_leaves(tmp_path: Path) -> None:
    """Asked for more than fits, an engine would refuse; the client asked for at most so much, and gets what is there."""
    with Limited(tmp_path, window=PROMPT + 20) as world:
        attempt = world.attempt()
        world.post(attempt, max_tokens=100)
        assert world.asked() == [20]


@pytest.mark.parametrize(("room", "fits"), [(1, True), (0, False), (-20, False)])
def test_max_tokens_is_never_less_than_one(tmp_path: Path, room: int, fits: bool) -> None:
    with Limited(tmp_path, window=PROMPT + room) as world:
        response = world.post(world.attempt(), max_tokens=5)
        assert world.asked() == ([1] if fits else [])
    assert response.status_code == (200 if fits else 400)


@pytest.mark.parametrize("wrong", [0, -1, "5", 1.5, True])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, wrong: Any) -> None:
    with Limited(tmp_path) as world:
        response = world.post(world.attempt(), max_tokens=wrong)
        assert response.status_code == 400 and "at least 1 token" in response.json()["detail"]
        assert not world.engine.requests


def test_short_prompts_are_not_counted(tmp_path: Path) -> None:
    """Their bytes prove that they fit: no call pays for a limit that is far away."""
    with Limited(tmp_path, context=4096, prompt=3000, response=100) as world:
        attempt = world.attempt()
        world.post(attempt)
        assert world.engine.counted == 0
        world.post(attempt, messages=[{"role": "user", "content": "x" * 2000}])
        assert world.engine.counted == 1 and len(world.engine.requests) == 2


def test_images_are_counted_since_their_bytes_prove_nothing(tmp_path: Path) -> None:
    content: Any = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "http://x.test/y.png"}}]
    with Limited(tmp_path) as world:
        world.post(world.attempt(), messages=[{"role": "user", "content": content}])
        assert world.engine.counted == 1


def test_a_prompt_over_its_budget_is_marked_where_nobody_could_count_before(tmp_path: Path) -> None:
    with Limited(tmp_path, prompt=PROMPT - 1, counts=False) as world:
        attempt = world.attempt()
        assert world.post(attempt).status_code == 200
        (call,) = world.calls(attempt)
    assert call.defect == "over_budget"


def test_an_endpoint_that_cannot_count_after_all_is_not_asked_again(tmp_path: Path) -> None:
    with Limited(tmp_path, window=PROMPT + 5) as world:
        endpoint = msgspec.structs.replace(
            world.engine.endpoint(), budget=Budget(window=50), tokenize=f"{world.engine.url}/v1/tokens"
        )
        world.publish("policy", 5, endpoint)
        attempt = world.attempt(resources={"policy": 5})
        assert [world.post(attempt).status_code for _ in range(2)] == [200, 200]


def test_a_rollout_has_one_purse(tmp_path: Path) -> None:
    with Limited(tmp_path, rollout=25, response=10) as world:
        attempt, other = world.attempt(), world.attempt()
        statuses = [world.post(attempt).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 400] and world.asked() == [10, 10, 5]
        refused = world.post(attempt)
        assert code(refused) == (400, "context_length_exceeded") and "budget of 25 tokens" in refused.json()["detail"]
        assert world.post(other).status_code == 200
        calls = world.calls(attempt)
    assert [call.defect for call in calls] == [None, None, None, "over_budget", "over_budget"]
    assert sum(len(call.response_ids) for call in calls) == 25


def test_what_a_call_did_not_use_is_given_back(tmp_path: Path) -> None:
    with Limited(tmp_path, "x" * 4, rollout=20, response=15) as world:
        attempt = world.attempt()
        assert [world.post(attempt).status_code for _ in range(5)] == [200] * 4 + [400]
        assert world.asked() == [15, 15, 10, 5]


def test_failed_calls_cost_nothing(tmp_path: Path) -> None:
    replies = iter([Fault("status", status=500), Fault("status", status=500), "x" * 4, "y"])
    with Limited(tmp_path, lambda _: next(replies), rollout=10) as world:
        attempt = world.attempt()
        assert [world.post(attempt).status_code for _ in range(4)] == [500, 500, 200, 200]
        assert world.asked() == [10, 10, 10, 5]


def test_choices_share_the_purse(tmp_path: Path) -> None:
    with Limited(tmp_path, rollout=25) as world:
        attempt = world.attempt()
        world.post(attempt, n=3)
        world.post(attempt)
        assert world.asked() == [8, 1]


def test_calls_at_the_same_time_never_sample_more_than_is_left(tmp_path: Path) -> None:
    """One waits for the other where both do not fit; the second then gets what the first left."""

    async def slow(request: Any) -> str:
        await asyncio.sleep(0.02)
        return "x" * 400

    async def ask(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            messages: Any = HELLO
            asks = [client.chat.completions.create(model="policy", messages=messages) for _ in range(8)]
            return await asyncio.gather(*asks, return_exceptions=True)

    with Limited(tmp_path, slow, rollout=50, response=20) as world:
        attempt = world.attempt()
        answers = asyncio.run(ask(world.base_url(attempt)))
        calls = world.calls(attempt)
    assert sum(len(call.response_ids) for call in calls) == 50
    refused = [answer for answer in answers if isinstance(answer, openai.BadRequestError)]
    assert len(refused) == 5 and all(error.code == "context_length_exceeded" for error in refused)


def test_a_call_that_waits_for_its_share_can_be_cancelled(tmp_path: Path) -> None:
    import threading

    with Limited(tmp_path, lambda _: Fault("hang"), rollout=50) as world:
        attempt = world.attempt()
        threads = [threading.Thread(target=lambda: world.post(attempt)) for _ in range(2)]
        for thread in threads:
            thread.start()
        world.engine.wait(lambda engine: engine.active == 1)
        while world.gateway.in_flight < 2:
            pass
        world.gateway.cancel(attempt.id)
        for thread in threads:
            thread.join()
        assert [call.defect for call in world.calls(attempt)] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("field", ["prompt", "response", "rollout", "window"])
def test_a_budget_below_one_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0: give at least 1 token"):
        Budget(**{field: 0})


def test_b81_a_budget_with_a_key_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="max_seq_len"):
        msgspec.convert({"max_seq_len": 5}, Budget)


@pytest.mark.parametrize(
    ("status", "body", "full"),
    [
        (400, b'{"error": {"message": "This model\'s maximum context length is 5 tokens"}}', True),
        (400, b'{"error": {"code": "context_length_exceeded"}}', True),
        (422, b"prompt is too long", True),
        (500, b"maximum context length", False),
        (400, b"bad", False),
    ],
)
def test_engines_words_for_a_full_context(status: int, body: bytes, full: bool) -> None:
    assert is_full(status, body) is full


@settings(max_examples=60)
@given(
    contents=st.lists(st.text(max_size=40), min_size=1, max_size=4),
    names=st.lists(st.text(max_size=10), max_size=2),
)
def test_bytes_are_never_fewer_than_tokens(contents: list[str], names: list[str]) -> None:
    """What spares us the counting: the toy template, like real ones, adds little to each message."""
    from agentlightning.gateway.budget import MESSAGE_BYTES, TEMPLATE_BYTES
    from agentlightning.gateway.wire import dumps

    messages: list[Any] = [{"role": "user", "content": text} for text in contents]
    calls = [{"id": "c", "function": {"name": name, "arguments": "{}"}} for name in names]
    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    most = len(dumps({"messages": messages})) + TEMPLATE_BYTES + MESSAGE_BYTES * len(messages)
    assert len(tokenizer.render(messages)) <= most
