"""What goes wrong is served as well as it can be, recorded with its reason, and never trained."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from agentlightning.schema import Route
from tests.fakes import tokenizer
from tests.fakes.engine import Fault
from tests.fakes.world import HELLO, World


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "defect"),
    [
        ("no_ids", "no_token_ids"),
        ("no_prompt_ids", "no_token_ids"),
        ("no_logprobs", "no_logprobs"),
        ("short_logprobs", "length_mismatch"),
        ("wrong_usage", "length_mismatch"),
        ("nan_logprobs", "bad_logprobs"),
        ("empty", "empty"),
        ("no_finish", "no_finish_reason"),
        ("no_usage", None),
    ],
)
def test_b1_b23_b36_a_doubtful_answer_is_served_and_marked(
    tmp_path: Path, kind: str, defect: str | None, stream: bool
) -> None:
    with World(tmp_path, lambda _: Fault(kind)) as world:
        attempt = world.attempt()
        response = world.post(attempt, stream=stream)
        (call,) = world.calls(attempt)
        assert world.gateway.stats.get(f"defect:{defect}", 0) == (1 if defect else 0)
    assert response.status_code == 200
    assert call.defect == defect


def test_b21_a_streamed_tool_call_that_loses_ids_is_marked(tmp_path: Path) -> None:
    reply: Any = {"content": "go", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}
    with World(tmp_path, lambda _: Fault("short_ids", reply)) as world:
        attempt = world.attempt()
        assert world.post(attempt, stream=True).status_code == 200
        (call,) = world.calls(attempt)
    assert call.defect == "length_mismatch" and call.response["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_an_end_that_the_engine_only_claims_is_marked(tmp_path: Path) -> None:
    """Of an endpoint that tells the ids that end a turn."""
    with World(tmp_path) as world:
        endpoint = msgspec.structs.replace(world.engine.endpoint(), stop_ids=(tokenizer.END,))
        world.publish("policy", 4, endpoint)
        good, bad = (world.attempt(resources={"policy": 4}) for _ in range(2))
        world.post(good)
        world.post(good, max_tokens=2)
        world.engine.before_ids = lambda ids: ids[:-1]
        world.post(bad)
        assert [call.defect for call in world.calls(good)] == [None, None]
        assert [call.defect for call in world.calls(bad)] == ["bad_ending"]


def test_an_endpoint_is_asked_in_its_own_way(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        endpoint = msgspec.structs.replace(world.engine.endpoint(), ask={"return_prompt_token_ids": True})
        world.publish("policy", 4, endpoint)
        attempt = world.attempt(resources={"policy": 4})
        world.post(attempt)
        (call,) = world.calls(attempt)
    body = world.engine.requests[0].body
    assert (body["return_prompt_token_ids"], body["return_token_ids"], body["logprobs"]) == (True, True, True)
    assert "return_prompt_token_ids" not in call.sampling


def test_one_bad_choice_of_usage_marks_all(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("wrong_usage")) as world:
        attempt = world.attempt()
        world.post(attempt, n=2)
        assert [call.defect for call in world.calls(attempt)] == ["length_mismatch"] * 2


def test_an_answer_that_is_no_json_is_passed_and_marked(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("bad_json")) as world:
        attempt = world.attempt()
        assert world.post(attempt).content == b'{"choices": ['
        (call,) = world.calls(attempt)
    assert call.defect == "bad_response"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 502])
def test_b92_other_statuses_are_passed_at_once(tmp_path: Path, status: int) -> None:
    with World(tmp_path, lambda _: Fault("status", status=status)) as world:
        attempt = world.attempt()
        response = world.post(attempt)
        (call,) = world.calls(attempt)
    assert response.status_code == status and response.json()["error"]["message"] == "scripted fault"
    assert len(world.engine.requests) == 1
    assert call.defect == "error_status" and call.response["error"]["status"] == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault("status", status=429), Fault("status", status=503), Fault("cut")], ids=["429", "503", "cut"]
)
def test_b92_what_may_pass_is_tried_again_and_the_tries_are_kept(tmp_path: Path, fault: Fault, stream: bool) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    replies = iter([fault, fault, "good"])
    with World(tmp_path, lambda _: next(replies), sleep=wait) as world:
        attempt = world.attempt()
        response = world.post(attempt, stream=stream)
        (call,), (span,) = world.calls(attempt), world.spans(attempt)
        assert world.gateway.stats["upstream_retries"] == 2
    assert response.status_code == 200 and response.headers["x-agl-tries"] == "3"
    assert call.defect is None and waits == [0.1, 0.2]
    assert span.name == "gateway.retry" and len(span.attributes["failed_tries"]) == 2
    assert span.attributes["completion"] == call.id


def test_tries_are_bounded(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("status", status=503)) as world:
        attempt = world.attempt()
        assert world.post(attempt).status_code == 503
        assert len(world.engine.requests) == 5
        (call,) = world.calls(attempt)
    assert call.defect == "error_status"


@pytest.mark.parametrize(("told", "waits"), [("2", [2.0]), ("0.5", [0.5]), ("soon", [0.1]), ("60", [])])
def test_retry_after_is_obeyed_up_to_a_limit(tmp_path: Path, told: str, waits: list[float]) -> None:
    slept: list[float] = []

    async def wait(seconds: float) -> None:
        slept.append(seconds)

    replies = iter([Fault("status", status=429, headers={"retry-after": told}), "good"])
    with World(tmp_path, lambda _: next(replies), sleep=wait) as world:
        response = world.post(world.attempt())
    assert slept == waits
    assert response.status_code == (200 if waits else 429)
    assert response.headers.get("retry-after") == (None if waits else "60")


def test_an_engine_that_is_not_there_gets_the_cure(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        dead = type(world.engine.endpoint())(f"http://127.0.0.1:{port}/v1", "k", (Route("*", "m", True),), 1)
        world.publish("policy", 4, dead)
        attempt = world.attempt(resources={"policy": 4})
        response = world.post(attempt)
        (call,) = world.calls(attempt)
        assert world.gateway.stats["upstream_retries"] == 4
    assert response.status_code == 502 and "Is it running?" in response.json()["detail"]
    assert call.defect == "upstream_unreachable"


@pytest.mark.parametrize("kind", ["cut", "error_chunk"])
def test_a_stream_that_breaks_raises_in_the_sdk_and_is_marked(tmp_path: Path, kind: str) -> None:
    with World(tmp_path, lambda _: Fault(kind, "a longer answer", after=3)) as world:
        attempt = world.attempt()
        client = world.client(attempt)
        with pytest.raises(openai.APIError, match="the engine"):
            list(client.chat.completions.create(model="policy", messages=HELLO, stream=True))
        (call,) = world.calls(attempt)
    assert call.defect == {"cut": "upstream_cut", "error_chunk": "upstream_error"}[kind]
    assert len(call.response_ids) == 8, "what was sampled until then is kept"


def test_b91_a_client_that_leaves_a_stream_ends_the_engines_work(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("slow", "x" * 40_000, delay=0.001)) as world:
        attempt = world.attempt()
        stream = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, stream=True)
        next(stream)
        stream.close()
        world.engine.wait(lambda engine: engine.requests[0].state == "aborted")
        eventually(lambda: world.gateway.in_flight == 0)
        (call,) = world.calls(attempt)
        assert world.engine.active == 0
    assert call.defect == "client_disconnected"


def test_a_client_that_leaves_before_the_answer_ends_the_engines_work(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("hang")) as world:
        attempt = world.attempt()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{world.base_url(attempt)}/chat/completions",
                json={"model": "policy", "messages": HELLO},
                timeout=httpx.Timeout(10, read=0.05),
            )
        world.engine.wait(lambda engine: bool(engine.requests) and engine.requests[0].state == "aborted")
        eventually(lambda: world.gateway.in_flight == 0)
        (call,) = world.calls(attempt)
    assert call.defect == "client_disconnected" and call.request["messages"] == HELLO


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    return thread, result


def test_b91_cancelling_an_attempt_aborts_its_calls_and_no_others(tmp_path: Path) -> None:
    with World(tmp_path, lambda r: Fault("hang") if r["messages"][0]["content"] == "hang" else "fine") as world:
        attempt, other = world.attempt(), world.attempt()
        hang = [{"role": "user", "content": "hang"}]
        thread, result = in_thread(lambda: world.post(attempt, messages=hang))
        stays, _ = in_thread(lambda: world.post(other, messages=hang))
        world.engine.wait(lambda engine: engine.active == 2)
        world.gateway.cancel(attempt.id)
        thread.join()
        assert result[0].status_code == 410 and "stop here" in result[0].json()["detail"]
        world.engine.wait(lambda engine: engine.active == 1)
        later = world.post(attempt)
        assert later.status_code == 410 and "was cancelled" in later.json()["detail"]
        assert world.post(other).status_code == 200
        (call,) = world.calls(attempt)
        world.gateway.cancel(other.id)
        stays.join()
    assert call.defect == "cancelled"


def test_cancelling_a_stream_raises_in_the_sdk(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("slow", "x" * 40_000, delay=0.001)) as world:
        attempt = world.attempt()
        stream = world.client(attempt).chat.completions.create(model="policy", messages=HELLO, stream=True)
        next(stream)
        world.gateway.cancel(attempt.id)
        with pytest.raises(openai.APIError, match="cancelled while the model answered"):
            list(stream)
        world.engine.wait(lambda engine: engine.requests[0].state == "aborted")
        (call,) = world.calls(attempt)
    assert call.defect == "cancelled"


def test_cancelling_ends_the_wait_for_the_next_try(tmp_path: Path) -> None:
    waiting = threading.Event()

    async def forever(seconds: float) -> None:
        waiting.set()
        await asyncio.Event().wait()

    with World(tmp_path, lambda _: Fault("status", status=503), sleep=forever) as world:
        attempt = world.attempt()
        thread, result = in_thread(lambda: world.post(attempt))
        waiting.wait()
        world.gateway.cancel(attempt.id)
        thread.join()
        (call,) = world.calls(attempt)
    assert result[0].status_code == 410 and call.defect == "cancelled"


def test_closing_the_gateway_keeps_what_is_known_of_open_calls(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("hang")) as world:
        attempt = world.attempt()
        thread, result = in_thread(lambda: world.post(attempt))
        world.engine.wait(lambda engine: engine.active == 1)
        world.gateway.close()
        thread.join()
        (call,) = world.calls(attempt)
    assert call.defect == "cancelled" and result[0].status_code == 410


def test_the_last_success_after_sdk_retries_is_the_good_one(tmp_path: Path) -> None:
    replies = iter([Fault("status", status=500), Fault("no_ids", "half good"), "good"])
    with World(tmp_path, lambda _: next(replies)) as world:
        attempt = world.attempt()
        client = world.client(attempt, retries=2)
        client.chat.completions.create(model="policy", messages=HELLO)
        client.chat.completions.create(model="policy", messages=HELLO)
        assert [call.defect for call in world.calls(attempt)] == ["error_status", "no_token_ids", None]


def test_a_defect_of_the_gateway_itself_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    with World(tmp_path) as world:
        attempt = world.attempt()
        monkeypatch.setattr("agentlightning.gateway.proxy.take", broken)
        response = world.post(attempt)
        (call,) = world.calls(attempt)
    assert response.status_code == 500 and "RuntimeError" in response.json()["detail"]
    assert call.defect == "gateway_error"


def test_a_store_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise OSError("disk gone")

    with World(tmp_path) as world:
        attempt = world.attempt()
        monkeypatch.setattr(world.store, "attempt", broken)
        response = world.post(attempt)
        assert response.status_code == 500 and "disk gone" in response.json()["detail"]
        monkeypatch.undo()
        assert world.post(attempt).status_code == 200, "a failed look-up is not remembered"
