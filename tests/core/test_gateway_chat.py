"""Whole answers: the client sees what it asked for, the store sees the tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.fakes import tokenizer
from tests.fakes.answers import logprob
from tests.fakes.world import HELLO, World

TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


def test_the_record_holds_exactly_the_tokens_of_the_engine(tmp_path: Path) -> None:
    with World(tmp_path, "SELECT 1") as world:
        attempt = world.attempt()
        answer = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, temperature=0.5)
        (call,) = world.calls(attempt)
    expected = [*tokenizer.encode("SELECT 1"), tokenizer.END]
    assert answer.choices[0].message.content == "SELECT 1"
    assert call.prompt_ids.dtype == np.int32 and call.prompt_ids.tolist() == tokenizer.render(HELLO)
    assert call.response_ids.dtype == np.int32 and call.response_ids.tolist() == expected
    assert call.logprobs.dtype == np.float32
    np.testing.assert_allclose(call.logprobs, [logprob(t, i) for i, t in enumerate(expected)])
    assert (call.defect, call.finish_reason, call.attempt_id, call.path) == (None, "stop", attempt.id, "agent")
    assert (call.model, call.policy, call.version) == ("base", "policy", 3)
    assert call.request["messages"] == HELLO and call.response == {"role": "assistant", "content": "SELECT 1"}
    assert call.sampling["temperature"] == 0.5 and call.start_ns <= call.end_ns


def test_the_client_sees_no_field_that_it_did_not_ask_for(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        direct = world.http.post(f"{world.engine.base_url}/chat/completions", json={"model": "base", "messages": HELLO})
        through = world.post(attempt).json()
        assert through.keys() == direct.json().keys()
        assert through["choices"][0].keys() == direct.json()["choices"][0].keys()
        assert through["choices"][0]["logprobs"] is None
        assert through["usage"] == direct.json()["usage"]


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_fields_that_were_asked_for_stay(tmp_path: Path, ids: bool, logprobs: bool) -> None:
    with World(tmp_path, "hi") as world:
        answer = world.post(world.attempt(), return_token_ids=ids, logprobs=logprobs).json()
    choice = answer["choices"][0]
    assert ("prompt_token_ids" in answer, "token_ids" in choice) == (ids, ids)
    assert (choice["logprobs"] is not None) == logprobs
    if logprobs:
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["h", "i", "<|im_end|>"]


def test_each_choice_is_a_record(tmp_path: Path) -> None:
    texts = iter(["one", "two", "three"])
    with World(tmp_path, lambda _: next(texts)) as world:
        attempt = world.attempt()
        response = world.post(attempt, n=3)
        calls = world.calls(attempt)
    assert [c["message"]["content"] for c in response.json()["choices"]] == ["one", "two", "three"]
    assert [tokenizer.decode(c.response_ids) for c in calls] == ["one", "two", "three"]
    assert [c.choice for c in calls] == [0, 1, 2] and not any(c.defect for c in calls)
    first = response.headers["x-agl-completion"]
    assert [c.id for c in calls] == [first, f"{first}-1", f"{first}-2"]


def test_b33_b39_parallel_tool_calls_and_their_results_pass_byte_for_byte(tmp_path: Path) -> None:
    arguments = '{"q": "<&\\"\'>ü😀", "n": 1.50}'
    reply = {"content": None, "tool_calls": [{"name": "search", "arguments": arguments}] * 2}
    with World(tmp_path, lambda _: reply) as world:
        attempt = world.attempt()
        answer = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, tools=TOOLS)
        calls = answer.choices[0].message.tool_calls or []
        assert [call.function.arguments for call in calls] == [arguments, arguments]
        history = [*HELLO, answer.choices[0].message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "<&\"'> é"} for call in calls]
        world.post(attempt, messages=history, tools=TOOLS)
        first, second = world.calls(attempt)
    assert world.engine.requests[1].body["messages"] == history
    assert world.engine.requests[0].body["tools"] == TOOLS and first.request["tools"] == TOOLS
    assert first.finish_reason == "tool_calls" and first.response["tool_calls"][1]["function"]["arguments"] == arguments
    assert second.prompt_ids.tolist() == tokenizer.render(history) and not second.defect


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_reaches_the_client_and_its_tokens_the_record(tmp_path: Path, stream: bool) -> None:
    with World(tmp_path, lambda _: {"reasoning_content": "let me see", "content": "2"}) as world:
        attempt = world.attempt()
        response = world.post(attempt, stream=stream)
        (call,) = world.calls(attempt)
    assert call.response == {"role": "assistant", "content": "2", "reasoning_content": "let me see"}
    assert tokenizer.decode(call.response_ids) == "<think>let me see</think>2" and call.defect is None
    if not stream:
        assert response.json()["choices"][0]["message"]["reasoning_content"] == "let me see"


def test_b31_special_tokens_within_an_answer_are_ids_like_all_others(tmp_path: Path) -> None:
    """The text does not show them; whatever cuts by the length of a text would cut wrongly here."""
    with World(tmp_path, "ab") as world:
        attempt = world.attempt()
        world.engine.before_ids = lambda ids: [ids[0], tokenizer.START, *ids[1:]]
        answer = world.post(attempt).json()
        (call,) = world.calls(attempt)
    assert answer["choices"][0]["message"]["content"] == "ab"
    assert call.response_ids.tolist() == [tokenizer.encode("a")[0], tokenizer.START, tokenizer.encode("b")[0], 2]
    assert len(call.logprobs) == 4 and call.defect is None


def test_a_cut_by_length_is_a_good_sample(tmp_path: Path) -> None:
    with World(tmp_path, "a long answer") as world:
        attempt = world.attempt()
        world.post(attempt, max_tokens=4)
        (call,) = world.calls(attempt)
    assert (call.finish_reason, call.defect, len(call.response_ids)) == ("length", None, 4)


def test_stop_and_seed_reach_the_engine(tmp_path: Path) -> None:
    with World(tmp_path, "one\ntwo") as world:
        attempt = world.attempt()
        answer = world.post(attempt, stop=["\n"], top_k=7)
        (call,) = world.calls(attempt)
    assert answer.json()["choices"][0]["message"]["content"] == "one"
    assert call.sampling["stop"] == ["\n"] and call.sampling["top_k"] == 7
    assert call.sampling["seed"] == world.engine.requests[0].body["seed"]


def test_b35_a_character_split_over_tokens_stays_whole(tmp_path: Path) -> None:
    with World(tmp_path, "a😀b") as world:
        attempt = world.attempt()
        assert world.post(attempt, max_tokens=3).json()["choices"][0]["message"]["content"] == "a�"
        world.post(attempt)
        cut, whole = world.calls(attempt)
    assert cut.response_ids.tolist() == whole.response_ids.tolist()[:3] and not cut.defect
    assert whole.response["content"] == "a😀b"


def test_b35_a_lone_surrogate_passes_in_both_directions(tmp_path: Path) -> None:
    """Half an emoji, cut by somebody's tool: no UTF-8 text can hold it, JSON escapes can."""
    with World(tmp_path, lambda _: "cut \ud83d here") as world:
        attempt = world.attempt()
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "tool said \ud83d"}]}).encode()
        response = world.http.post(f"{world.base_url(attempt)}/chat/completions", content=body)
        (call,) = world.calls(attempt)
    assert world.engine.requests[0].body["messages"][0]["content"] == "tool said \ud83d"
    assert response.json()["choices"][0]["message"]["content"] == "cut � here"
    assert call.request["messages"][0]["content"] == "tool said \ud83d" and call.defect is None


def test_the_async_sdk_is_served_too(tmp_path: Path) -> None:
    async def ask(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
            asks = [client.chat.completions.create(model="policy", messages=HELLO) for _ in range(3)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asks)]

    with World(tmp_path, "hi") as world:
        attempt = world.attempt()
        assert asyncio.run(ask(world.base_url(attempt))) == ["hi"] * 3
        assert len(world.calls(attempt)) == 3


def test_models_are_the_rollouts_endpoints(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        world.publish("judge", 1, world.engine.endpoint(), kind="llm")
        world.publish("prompt", 1, world.engine.endpoint(), kind="prompt")
        client = world.client(world.attempt(resources={"policy": 3, "judge": 1, "prompt": 1}))
        assert sorted(model.id for model in client.models.list()) == ["judge", "policy"]
        assert client.models.retrieve("judge").id == "judge"
        with pytest.raises(openai.NotFoundError, match="ask for one of these: "):
            client.models.retrieve("prompt")
        assert [model.id for model in world.client().models.list()] == ["policy"]


def test_a_dialect_that_is_not_spoken_gets_the_cure(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        client = world.client(world.attempt())
        with pytest.raises(openai.NotFoundError, match="chat completions, Responses and"):
            client.embeddings.create(model="policy", input="hello")
        response = world.http.post(f"{world.gateway.url}/v1/rerank", json={})
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["title"] == "unknown_dialect" and response.json()["status"] == 404


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"messages": 1}', b"\xff"])
def test_a_bad_request_never_reaches_the_engine(tmp_path: Path, body: bytes) -> None:
    with World(tmp_path) as world:
        response = world.http.post(f"{world.base_url(world.attempt())}/chat/completions", content=body)
        assert response.status_code == 400 and "send a chat" in response.json()["detail"]
        assert not world.engine.requests


def test_methods_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        assert world.http.get(f"{world.gateway.url}/v1/chat/completions").status_code == 405
        assert world.http.post(f"{world.gateway.url}/v1/models").status_code == 405
