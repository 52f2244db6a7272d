"""What a program may say about itself, inside attempts and outside."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import inspect

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.context import Scope, current, use
from agentlightning.errors import ConfigError, RewardError
from agentlightning.recorder import Recorder
from agentlightning.schema import SpanKind, new_id
from tests.fakes.sink import Sink


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def recorder(sink):
    made = Recorder(sink)
    yield made
    made.close()


@pytest.fixture
def attempt(recorder):
    with use(Scope(new_id(), "writer", recorder=recorder)) as scope:
        yield scope


@pytest.fixture
def spans(sink, recorder, attempt):
    def flushed():
        recorder.flush()
        return sink.spans

    return flushed


@pytest.fixture
def rewards(sink, recorder, attempt):
    def flushed():
        recorder.flush()
        return [(reward.name, reward.value, reward.target) for reward in sink.rewards]

    return flushed


# Rewards.


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (-1, -1.0),
        (0, 0.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (decimal.Decimal("0.25"), 0.25),
        (fractions.Fraction(1, 4), 0.25),
    ],
)
def test_b65_numbers_of_any_kind(rewards, value, number):
    agl.emit_reward(value)
    assert rewards() == [("reward", number, "rollout")]


BAD = ["1", b"1", None, float("nan"), float("inf"), [1], object(), {"a": 1.0, "b": None}, 10**400]


@pytest.mark.parametrize("value", BAD)
def test_b65_what_is_no_number_is_refused(rewards, value):
    with pytest.raises(RewardError, match="finite number"):
        agl.emit_reward(value)
    assert rewards() == [], "of several by name, none is kept when one is refused"


@pytest.mark.parametrize("value", BAD)
def test_mistakes_show_outside_attempts_too(value):
    with pytest.raises(RewardError):
        agl.emit_reward(value)


def test_named_rewards_and_targets(rewards):
    agl.emit_reward({"correct": 1, "style": 0.3}, target="agent:team/writer")
    agl.emit_reward(0.5, name="step", target="call:abc")
    assert rewards() == [
        ("correct", 1.0, "agent:team/writer"),
        ("style", 0.3, "agent:team/writer"),
        ("step", 0.5, "call:abc"),
    ]


@pytest.mark.parametrize("target", ["", "agent:", "call:", "writer", "Rollout", "agents:x"])
def test_unknown_targets_are_refused_everywhere(target):
    with pytest.raises(ConfigError, match="use rollout, agent:<path>, call or call:<id>"):
        agl.emit_reward(1.0, target=target)


def test_target_call_is_the_latest_call_here(recorder, attempt, rewards):
    first = recorder.start(SpanKind.LLM, "m")
    recorder.end(first)
    agl.emit_reward(0.1, target="call")
    with agl.agent("inner"):
        agl.emit_reward(0.2, target="call")
        second = recorder.start(SpanKind.LLM, "m")
        agl.emit_reward(0.3, target="call")
    agl.emit_reward(0.4, target="call")
    targets = [f"call:{span.id}" for span in (first, first, second, second)]
    assert rewards() == [("reward", value, target) for value, target in zip([0.1, 0.2, 0.3, 0.4], targets, strict=True)]


def test_target_call_without_a_call_says_what_to_do(rewards):
    with pytest.raises(ConfigError, match=r"agl\.callback"):
        agl.emit_reward(1.0, target="call")
    assert rewards() == []


# Notes.


def test_annotations_messages_and_objects(spans):
    agl.emit_annotation({"hint": 3, "set": {1}})
    agl.emit_message("half-way", attributes={"step": 2})
    agl.emit_object([1, {"a": b"x"}], name="state")
    note, message, kept = spans()
    assert (note.kind, note.attributes) == (SpanKind.ANNOTATION, {"hint": 3, "set": [1]})
    assert (message.kind, message.attributes) == (SpanKind.MESSAGE, {"step": 2, "message": "half-way"})
    assert (kept.kind, kept.name, kept.attributes) == (SpanKind.OBJECT, "state", {"object": [1, {"a": "b'x'"}]})
    assert {span.status for span in spans()} == {"ok"}
    assert {span.path for span in spans()} == {"writer"}


def test_exceptions(spans):
    try:
        raise LookupError("no such table")
    except LookupError as error:
        agl.emit_exception(error)
    (span,) = spans()
    assert (span.kind, span.name, span.status) == (SpanKind.EXCEPTION, "LookupError", "error")
    assert span.attributes["exception.message"] == "no such table"
    assert "raise LookupError" in span.attributes["exception.stacktrace"]


def test_an_exception_that_cannot_be_told(spans):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    agl.emit_exception(Mute())
    assert "str() failed" in spans()[0].attributes["exception.message"]


@pytest.mark.parametrize(
    ("emit", "value"),
    [
        (agl.emit_annotation, ["a"]),
        (agl.emit_message, 3),
        (agl.emit_exception, "error"),
        (agl.emit_exception, ValueError),
    ],
)
def test_wrong_kinds_are_refused_also_outside_attempts(emit, value):
    with pytest.raises(ConfigError):
        emit(value)


def test_outside_an_attempt_nothing_happens(sink, recorder):
    agl.emit_reward(1.0)
    agl.emit_reward(1.0, target="call")
    agl.emit_annotation({"a": 1})
    agl.emit_message("m")
    agl.emit_object(object())
    agl.emit_exception(ValueError())
    with agl.operation("op") as step:
        step.output = 1
    recorder.flush()
    assert sink.batches == []


def test_a_scope_without_a_recorder_takes_nothing_and_breaks_nothing():
    with use(Scope(new_id())):
        agl.emit_reward(1.0, target="call")
        agl.emit_message("m")
        with agl.operation("op"):
            pass


# Operations.


def test_operation_as_a_block(spans):
    with agl.operation("search", input={"q": 1}) as step:
        agl.emit_message("inside")
        step.output = ["found"]
    block, inside = spans()
    assert (block.kind, block.name, block.status) == (SpanKind.OPERATION, "search", "ok")
    assert block.attributes == {"input": {"q": 1}, "output": ["found"]}
    assert inside.parent_id == block.id and block.path == inside.path == "writer"


def test_operation_as_a_decorator(spans):
    @agl.operation
    def add(a: int, *, b: int = 1) -> int:
        """Adds."""
        return a + b

    @agl.operation("named")
    def other() -> None: ...

    class Thing:
        @agl.operation
        def method(self, x: int) -> int:
            return x

    assert (add(1, b=2), other(), Thing().method(3)) == (3, None, 3)
    assert (add.__name__, add.__doc__) == ("add", "Adds.")
    assert [(s.name, s.attributes) for s in spans()] == [
        ("add", {"input": {"a": 1, "b": 2}, "output": 3}),
        ("named", {"input": {}}),
        ("method", {"input": {"x": 3}, "output": 3}),
    ]


def test_operation_around_async_code(spans):
    @agl.operation
    async def fetch(n: int) -> int:
        await asyncio.sleep(0)
        agl.emit_message(str(n))
        return n * 2

    async def program() -> list[int]:
        async with agl.operation("all") as step:
            step.output = await asyncio.gather(*(fetch(n) for n in range(5)))
            return step.output

    assert inspect.iscoroutinefunction(fetch)
    assert asyncio.run(program()) == [0, 2, 4, 6, 8]
    found = {span.id: span for span in spans()}
    (outer,) = (span for span in found.values() if span.name == "all")
    fetches = {span.id: span for span in found.values() if span.name == "fetch"}
    assert {span.parent_id for span in fetches.values()} == {outer.id}
    for message in (span for span in found.values() if span.kind is SpanKind.MESSAGE):
        assert str(fetches[message.parent_id].attributes["input"]["n"]) == message.attributes["message"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_operation_that_raises(spans, asynchronous):
    @agl.operation
    def sync() -> None:
        raise KeyError("x")

    @agl.operation
    async def awaited() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(awaited()) if asynchronous else sync()
    assert (spans()[0].status, spans()[0].error) == ("error", "KeyError: 'x'")
    assert current().span_id == "", "the scope is left"


def test_arguments_that_do_not_fit_fail_as_they_would(spans):
    @agl.operation
    def one(a: int) -> None: ...

    with pytest.raises(TypeError, match="positional argument"):
        one(1, 2)
    assert spans()[0].attributes["input"] == {"args": [1, 2], "kwargs": {}}


def test_generators_are_refused():
    with pytest.raises(ConfigError, match="inside it instead"):

        @agl.operation
        def numbers():
            yield 1

    with pytest.raises(ConfigError, match="inside it instead"):

        @agl.operation("named")
        async def more():
            yield 1


def test_operation_takes_names_and_functions_only():
    with pytest.raises(ConfigError):
        agl.operation(3)


def test_an_open_operation_cannot_be_entered_again(spans):
    step = agl.operation("once")
    with step, pytest.raises(ConfigError, match="open already"), step:
        pass
    with step:
        pass
    assert [span.name for span in spans()] == ["once", "once"]
