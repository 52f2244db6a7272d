"""Streams: forwarded as they arrive, recorded as if they had come whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.sampling import Keep
from agentlightning.gateway.stream import StreamCapture
from agentlightning.schema import Completion
from tests.fakes import tokenizer
from tests.fakes.engine import FakeEngine
from tests.fakes.http import Exchange, Server
from tests.fakes.world import HELLO, World

ARGUMENTS = '{"q": "ü<&\\"😀"}'
TOOL_REPLY: Any = {"content": "thinking 😀", "tool_calls": [{"name": "search", "arguments": ARGUMENTS}] * 2}


def text_of(chunks: Any, choice: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == choice)


def test_the_first_chunk_arrives_before_the_last_is_made(tmp_path: Path) -> None:
    go = threading.Event()

    async def gate(number: int) -> None:
        while number >= 2 and not go.is_set():
            await asyncio.sleep(0.001)

    with World(tmp_path, "twelve chars") as world:
        world.engine.before_chunk = gate
        attempt = world.attempt()
        stream = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, stream=True)
        head = [next(stream), next(stream)]
        assert text_of(head) == "twel" and world.engine.requests[0].state == "open"
        go.set()
        assert text_of(stream) == "ve chars"
        (call,) = world.calls(attempt)
    assert tokenizer.decode(call.response_ids) == "twelve chars" and call.defect is None


THINKING: Any = {"reasoning_content": "hm 😀", **TOOL_REPLY}


@pytest.mark.parametrize("reply", ["plain text", "😀 split 😀", TOOL_REPLY, THINKING, ""])
def test_a_stream_leaves_the_same_record_as_a_whole_answer(tmp_path: Path, reply: Any) -> None:
    with World(tmp_path, lambda _: reply) as world:
        attempt = world.attempt(sampling={"seed": 1})
        world.post(attempt)
        world.post(attempt, stream=True)
        whole, streamed = (comparable(call) for call in world.calls(attempt))
    streamed["response"]["content"] = streamed["response"]["content"] or None
    whole["response"]["content"] = whole["response"]["content"] or None
    assert streamed == whole and whole["defect"] is None


def comparable(call: Completion) -> dict[str, Any]:
    tokens = {k: getattr(call, k).tolist() for k in ("prompt_ids", "response_ids", "logprobs")}
    return tokens | {k: getattr(call, k) for k in ("response", "finish_reason", "sampling", "version", "defect")}


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_the_client_sees_the_same_stream_as_without_a_gateway(
    tmp_path: Path, include_usage: bool, ids: bool, logprobs: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    body = {"model": "base", "messages": HELLO, "stream": True, "seed": 1, **options}
    body |= {"return_token_ids": ids} if ids else {}
    body |= {"logprobs": logprobs} if logprobs else {}
    with World(tmp_path, lambda _: TOOL_REPLY) as world:
        direct = world.http.post(f"{world.engine.base_url}/chat/completions", json=body)
        through = world.post(world.attempt(), **body | {"model": "policy"})
    assert events(through) == events(direct)
    assert through.headers["content-type"] == direct.headers["content-type"] == "text/event-stream"


def events(response: httpx.Response) -> list[Any]:
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    parsed = [json.loads(item) for item in data[:-1]]
    assert data[-1] == "[DONE]"
    return [{k: v for k, v in chunk.items() if k != "id"} for chunk in parsed]


def test_b62_choices_that_arrive_interleaved_are_kept_apart(tmp_path: Path) -> None:
    texts = iter(["first choice", "second", "third one"])
    with World(tmp_path, lambda _: next(texts)) as world:
        attempt = world.attempt()
        client = world.client(attempt)
        chunks = list(client.chat.completions.create(model="policy", messages=HELLO, stream=True, n=3))
        calls = world.calls(attempt)
    assert [text_of(chunks, i) for i in range(3)] == ["first choice", "second", "third one"]
    assert [tokenizer.decode(c.response_ids) for c in calls] == ["first choice", "second", "third one"]
    assert not any(call.defect for call in calls)


def test_tool_calls_in_a_stream_reach_the_sdk_and_the_record(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: TOOL_REPLY) as world:
        attempt = world.attempt()
        client = world.client(attempt)
        with client.chat.completions.stream(model="policy", messages=HELLO) as stream:
            message = stream.get_final_completion().choices[0].message
        (call,) = world.calls(attempt)
    assert message.content == "thinking 😀"
    assert [c.function.arguments for c in message.tool_calls or []] == [ARGUMENTS, ARGUMENTS]
    assert [c["function"]["arguments"] for c in call.response["tool_calls"]] == [ARGUMENTS, ARGUMENTS]
    assert call.finish_reason == "tool_calls" and call.defect is None


def test_the_record_is_there_when_the_program_has_its_answer(tmp_path: Path) -> None:
    """Also when the program leaves at the finish reason, as some SDKs do."""
    with World(tmp_path, "hi") as world:
        for _ in range(10):
            attempt = world.attempt()
            stream = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, stream=True)
            for chunk in stream:
                if chunk.choices and chunk.choices[0].finish_reason:
                    break
            (call,) = world.calls(attempt)
            assert call.defect is None and call.finish_reason == "stop"
            stream.close()


def test_64_streams_at_once_each_in_its_own_attempt(tmp_path: Path) -> None:
    async def ask(url: str, nonce: str) -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="any") as client:
            messages: Any = [{"role": "user", "content": nonce}]
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them(urls: dict[str, str]) -> list[str]:
        return await asyncio.gather(*(ask(url, nonce) for nonce, url in urls.items()))

    with World(tmp_path, lambda request: f"you said {request['messages'][0]['content']} 😀") as world:
        attempts = {f"nonce-{i}": world.attempt() for i in range(64)}
        urls = {nonce: world.base_url(attempt) for nonce, attempt in attempts.items()}
        assert asyncio.run(all_of_them(urls)) == [f"you said {nonce} 😀" for nonce in attempts]
        for nonce, attempt in attempts.items():
            (call,) = world.calls(attempt)
            assert call.defect is None and tokenizer.decode(call.response_ids) == f"you said {nonce} 😀"
            assert nonce in tokenizer.decode(call.prompt_ids)
        assert world.gateway.in_flight == 0


def recorded_stream() -> bytes:
    """What an engine sends for a reply with multi-byte characters, ids, log-probabilities and usage."""
    body = {"model": "m", "messages": HELLO, "stream": True, "return_token_ids": True, "logprobs": True}
    with FakeEngine(lambda _: TOOL_REPLY) as engine:
        url = f"{engine.base_url}/chat/completions"
        return httpx.post(url, json=body | {"stream_options": {"include_usage": True}}).content


STREAM = recorded_stream()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12), st.booleans())
def test_cuts_may_be_anywhere(cuts: list[int], crlf: bool) -> None:
    data = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    whole, pieces = StreamCapture(Keep(False, False, False), 1), StreamCapture(Keep(False, False, False), 1)
    expected = whole.feed(data) + whole.tail()
    edges = [0, *sorted(cuts), len(data)]
    shown = b"".join(pieces.feed(data[a:b]) for a, b in itertools.pairwise(edges)) + pieces.tail()
    assert shown == expected and pieces.capture == whole.capture
    assert b"token_ids" not in shown and b"prompt_tokens" not in shown
    assert pieces.capture.choices[0].message["content"] == "thinking 😀"


def test_b35_a_character_cut_by_the_network_stays_whole(tmp_path: Path) -> None:
    async def bytewise(exchange: Exchange) -> None:
        exchange.start_stream()
        for i in range(0, len(STREAM), 7):
            exchange.chunk(STREAM[i : i + 7])
            await asyncio.sleep(0)
        exchange.end_stream()

    server = Server(bytewise)
    server.start()
    with World(tmp_path) as world:
        endpoint = world.engine.endpoint()
        world.publish("policy", 4, type(endpoint)(f"{server.url}/v1", "k", endpoint.routes, 1))
        attempt = world.attempt(resources={"policy": 4})
        stream = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, stream=True)
        assert text_of(stream) == "thinking 😀"
        (call,) = world.calls(attempt)
    server.stop()
    assert call.defect is None and call.response["content"] == "thinking 😀"


def test_comments_and_other_fields_of_events_pass(tmp_path: Path) -> None:
    capture = StreamCapture(Keep(False, False, True), 1)
    event = b'event: x\nid: 1\ndata: {"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[5]}]}\n\n'
    shown = capture.feed(b": ping\n\n" + event)
    assert shown == (b': ping\n\nevent: x\nid: 1\ndata: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    assert capture.capture.choices[0].ids == [5]
