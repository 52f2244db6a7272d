"""Calls of OpenAI clients: every kind is one span with GenAI attributes, ends when it ends, and harms nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import pytest

import agentlightning as agl
from agentlightning import context
from agentlightning.context import Scope
from agentlightning.listening import Trouble
from agentlightning.recorder import Recorder
from agentlightning.schema import SpanKind
from tests.fakes.engine import Fault
from tests.fakes.world import World as Served

pytest.importorskip("openai", reason="the openai extra is not installed")

import openai
from pydantic import BaseModel

from agentlightning_adapters import openai as adapter
from tests.adapters.openai import programs

LONG = "one two three four five six seven eight"


@pytest.fixture(autouse=True)
def listening():
    with agl.install("openai"):
        yield


def test_a_call_has_the_genai_attributes(world):
    w = world("four")
    with w.attempt() as scope, programs.client(w) as client:
        programs.ask_as(client, "writer", "two and two?", temperature=0.5, seed=3)
    (call,) = w.spans(scope, SpanKind.LLM)
    usage = [call.attributes.pop(f"gen_ai.usage.{key}_tokens") for key in ("input", "output")]
    assert usage[1] == len("four") + 1 and usage[0] > 0
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.agent.name": "writer",
        "gen_ai.request.model": "base",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "base",
        "gen_ai.response.finish_reasons": ["stop"],
    }
    (writer,) = w.spans(scope, SpanKind.AGENT)
    assert call.parent_id == writer.id


@pytest.mark.parametrize("usage", [True, False])
def test_b61_a_stream_with_and_without_usage(world, usage):
    w = world("four")
    options = {"stream_options": {"include_usage": True}} if usage else {}
    with w.attempt() as scope, programs.client(w) as client:
        list(programs.ask(client, "hi", stream=True, **options))
    (call,) = w.spans(scope, SpanKind.LLM)
    assert call.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert call.attributes.get("gen_ai.usage.output_tokens") == (len("four") + 1 if usage else None)


class Answer(BaseModel):
    word: str


def test_parsed_answers_and_the_stream_helper(world):
    """Neither passes `create`; both pass `request`."""
    w = world('{"word": "x"}')
    ask: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "response_format": Answer}
    with w.attempt() as scope, programs.client(w) as client:
        assert client.chat.completions.parse(**ask).choices[0].message.parsed == Answer(word="x")
        with client.chat.completions.stream(**ask) as stream:
            assert [event for event in stream][-1].type == "content.done"
    assert w.check(scope) == ["", ""]
    assert [span.status for span in w.spans(scope, SpanKind.LLM)] == ["ok", "ok"]


def test_raw_and_streaming_responses_are_calls_too(world):
    w = world("four")
    ask: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
    with w.attempt() as scope, programs.client(w) as client:
        assert client.chat.completions.with_raw_response.create(**ask).parse().choices[0].message.content == "four"
        with client.chat.completions.with_streaming_response.create(**ask) as response:
            assert b"four" in response.read()
    assert w.check(scope) == ["", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_through_the_gateway(tmp_path, stream):
    with Served(tmp_path, "four") as served:
        attempt, recorder = served.attempt(), Recorder(served.store)
        client, undo = served.client(attempt), context.propagate_to(served.gateway.url)
        with context.use(Scope(attempt.id, recorder=recorder)), agl.agent("writer"):
            answer = client.responses.create(model="policy", input="two and two?", stream=stream)
            answer = [event for event in answer][-1].response if stream else answer
        undo()
        recorder.close()
        assert answer.output_text == "four"
        spans = served.spans(attempt)
        (call,) = [span for span in spans if span.kind is SpanKind.LLM]
        (completion,) = served.calls(attempt)
    said = call.attributes
    assert (call.path, said["gen_ai.operation.name"], said["gen_ai.response.id"]) == ("writer", "chat", answer.id)
    assert said["gen_ai.usage.output_tokens"] == len("four") + 1
    assert (completion.path, completion.defect) == ("writer", None)


def test_what_is_no_model_call_is_no_span(world):
    w = world()
    with w.attempt() as scope, programs.client(w) as client:
        assert [model.id for model in client.models.list()] == ["base"]
    assert w.spans(scope) == []


def test_an_error_of_the_server(world):
    w = world(lambda request: Fault("status", status=400))
    with w.attempt() as scope, programs.client(w) as client, pytest.raises(openai.BadRequestError):
        programs.ask(client, "hi")
    (call,) = w.spans(scope, SpanKind.LLM)
    assert call.status == "error" and "scripted fault" in (call.error or "")


def test_a_stream_that_breaks_in_the_middle(world):
    w = world(lambda request: Fault("error_chunk", LONG, after=2))
    with w.attempt() as scope, programs.client(w) as client, pytest.raises(openai.APIError):
        list(programs.ask(client, "hi", stream=True))
    (call,) = w.spans(scope, SpanKind.LLM)
    assert call.status == "error" and "broke" in (call.error or "")


@pytest.mark.parametrize("how", ["drop", "close", "with", "never read"])
def test_a_stream_that_is_left_early_ends_at_once(world, how):
    w = world(LONG)
    with w.attempt() as scope, programs.client(w) as client:
        stream = programs.ask(client, "hi", stream=True)
        if how == "with":
            with stream:
                next(stream)
        elif how == "never read":
            stream.response.close()
        else:
            next(stream)
        if how == "close":
            stream.close()
        else:
            stream.response.close()
            del stream
            gc.collect()
        programs.ask(client, "after")
    assert w.check(scope) == ["", ""]
    first, second = w.spans(scope, SpanKind.LLM)
    assert first.attributes["agl.stopped_early"] is True and first.status == "ok"
    assert second.parent_id is None and "agl.stopped_early" not in second.attributes
    assert first.end_ns is not None and first.end_ns <= second.start_ns


def test_an_async_stream_that_is_closed(world):
    w = world(LONG)

    async def program() -> None:
        async with programs.client_async(w) as client:
            stream = await programs.ask_async(client, "hi", stream=True)
            await anext(stream)
            await stream.close()
            await programs.ask_async(client, "after")

    with w.attempt() as scope:
        asyncio.run(program())
    assert w.check(scope) == ["", ""]
    assert w.spans(scope, SpanKind.LLM)[0].attributes["agl.stopped_early"] is True


def test_what_the_program_does_between_pieces_is_not_inside_the_call(world):
    w = world(LONG)
    with w.attempt() as scope, programs.client(w) as client, agl.agent("writer"):
        for _ in programs.ask(client, "hi", stream=True):
            pass
        for number, _ in enumerate(programs.ask(client, "hi", stream=True)):
            if number == 0:
                programs.ask_as(client, "helper", "in between")
    assert w.check(scope) == ["writer", "writer", "writer/helper"]
    spans = {span.id: span for span in w.spans(scope)}
    helper = next(span for span in spans.values() if span.kind is SpanKind.AGENT and span.name == "helper")
    assert spans[helper.parent_id or ""].name == "writer"


def test_the_undo_in_the_middle_of_a_stream(world):
    w = world(LONG)
    with w.attempt() as scope, programs.client(w) as client:
        with agl.install("openai"):
            stream = programs.ask(client, "hi", stream=True)
            next(stream)
        assert len(list(stream)) > 2
    (call,) = w.spans(scope, SpanKind.LLM)
    assert (call.status, call.attributes["gen_ai.response.finish_reasons"]) == ("ok", ["stop"])


def test_a_client_that_was_made_before_is_heard_and_after_the_undo_is_not(world):
    w = world()
    with programs.client(w) as client:
        completions = client.chat.completions
        with w.attempt() as scope:
            completions.create(model="base", messages=[{"role": "user", "content": "hi"}])
        assert len(w.spans(scope)) == 1


def test_someone_who_wraps_ours_keeps_what_they_wrapped(world, monkeypatch):
    w = world()
    with agl.install("openai"):
        ours = adapter.SyncAPIClient.request
        monkeypatch.setattr(adapter.SyncAPIClient, "request", lambda *a, **k: ours(*a, **k))
    with programs.client(w) as client:
        assert programs.ask(client, "hi").choices


def test_our_own_failures_never_reach_the_program(world, monkeypatch, caplog):
    """A broken recorder costs the trace, not the run; it is said once and counted."""
    w = world("four")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("recorder broke")

    monkeypatch.setattr(Trouble, "count", 0)
    with w.attempt(), programs.client(w) as client, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(w.recorder, "start", broken)
        for _ in range(2):
            assert programs.ask(client, "hi").choices[0].message.content == "four"
    assert Trouble.count == 2
    assert len([record for record in caplog.records if "recorder broke" in (record.exc_text or "")]) == 1


def test_langchain_and_this_adapter_record_one_call(world):
    """The framework's adapter knows the node; this one leaves the call to it."""
    pytest.importorskip("langchain_openai", reason="the langgraph extra is not installed")
    w = world()
    with agl.install("langgraph"), w.attempt() as scope:
        w.llm().with_config(metadata={"agent": "writer"}).invoke("hi")
        with programs.client(w) as client:
            programs.ask(client, "raw")
    assert w.check(scope) == ["writer", ""]
    assert len(w.spans(scope, SpanKind.LLM)) == 2
