"""Where the running code belongs, and how that is written on the wire."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.context import (
    Scope,
    agent,
    baggage,
    current,
    join,
    parse_baggage,
    parse_traceparent,
    reset_scope,
    set_scope,
    surrounding,
    traceparent,
    use,
)
from agentlightning.errors import ConfigError
from agentlightning.recorder import Recorder
from agentlightning.schema import Span, SpanKind
from tests.fakes.sink import Sink

ATTEMPT = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.fixture
def sink() -> Sink:
    return Sink()


def scope(path: str = "", **kwargs: Any) -> Scope:
    return Scope(ATTEMPT, path, **kwargs)


def here() -> str | None:
    found = current()
    return None if found is None else found.path


# Entering and leaving.


def test_outside_there_is_no_scope():
    assert current() is None
    with use(scope("a")) as inside:
        assert current() is inside
    assert current() is None


def test_an_error_leaves_the_scope():
    with pytest.raises(ValueError), use(scope("a")):
        raise ValueError
    assert current() is None


def test_tokens_may_be_reset_in_any_order_and_twice():
    outer, inner = set_scope(scope("outer")), set_scope(scope("inner"))
    reset_scope(outer)
    assert here() is None, "what was entered inside the outer one is over with it"
    reset_scope(inner)
    reset_scope(inner)
    assert here() is None


def test_interleaved_calls_in_one_context():
    """Two model calls that stream in turns: the second stays in force when the first ends, and then neither does."""
    with use(scope("node")):
        first = set_scope(scope("first"), lasting=False)
        second = set_scope(scope("second"), lasting=False)
        reset_scope(first)
        assert here() == "second"
        reset_scope(second)
        assert here() == "node"


def test_reset_in_another_context_does_not_raise():
    token = set_scope(scope("a"))
    contextvars.Context().run(reset_scope, token)
    assert current() is None, "it was entered here, so it ends here"


def test_what_was_never_left_ends_with_what_is_around_it():
    with use(scope("attempt")):
        set_scope(scope("call"), lasting=False)
        set_scope(scope("node"))
        assert here() == "node"
    assert current() is None


def test_a_call_does_not_last_in_copies_of_the_context_but_an_agent_does():
    with use(scope("attempt")):
        node = set_scope(scope("node"))
        call = set_scope(scope("call"), lasting=False)
        copy = contextvars.copy_context()
        seen: list[str | None] = []

        def elsewhere() -> None:
            thread = threading.Thread(target=lambda: seen.append(copy.run(here)))
            thread.start()
            thread.join()

        elsewhere()
        reset_scope(call)
        elsewhere()
        reset_scope(node)
        elsewhere()
        assert here() == "attempt"
    elsewhere()
    assert seen == ["call", "node", "node", "node"]


def test_surrounding_skips_calls():
    with use(scope("node")):
        token = set_scope(scope("call"), lasting=False)
        found = surrounding()
        assert found is not None and (found.path, here()) == ("node", "call")
        reset_scope(token)
    assert surrounding() is None


def test_tasks_have_scopes_of_their_own():
    async def rollout(number: int) -> list[str | None]:
        seen = []
        with use(scope(str(number))):
            for _ in range(5):
                await asyncio.sleep(0)
                seen.append(here())
        return [*seen, here()]

    async def program() -> list[list[str | None]]:
        return await asyncio.gather(*(rollout(number) for number in range(20)))

    assert asyncio.run(program()) == [[str(number)] * 5 + [None] for number in range(20)]


def test_a_scope_ended_by_another_task():
    """As frameworks do: the run begins here and ends in a task that got a copy of the context."""

    async def program() -> tuple[str | None, str | None]:
        gate = asyncio.Event()
        token = set_scope(scope("node"))

        async def helper() -> str | None:
            await gate.wait()
            return here()

        async def end() -> None:
            reset_scope(token)

        task = asyncio.create_task(helper())
        await asyncio.create_task(end())
        gate.set()
        return here(), await task

    assert asyncio.run(program()) == (None, "node")


# Agents.


def test_agents_nest_and_record_spans(sink: Sink):
    recorder = Recorder(sink)
    with use(scope(recorder=recorder)):
        with agent("team"), agent("writer"):
            assert here() == "team/writer"
        with pytest.raises(ValueError), agent("checker"):
            raise ValueError("no")
    recorder.close()
    team, writer, checker = sink.spans
    assert (team.path, writer.path, checker.path) == ("team", "team/writer", "checker")
    assert (team.parent_id, writer.parent_id, checker.parent_id) == (None, team.id, None)
    assert {span.kind for span in sink.spans} == {SpanKind.AGENT}
    assert (checker.status, checker.error) == ("error", "ValueError: no")


def test_agent_in_async_code_and_reused_by_tasks(sink: Sink):
    recorder = Recorder(sink)
    writer = agent("writer")

    async def work() -> str | None:
        with writer:
            await asyncio.sleep(0.001)
            return here()

    async def program() -> list[str | None]:
        return await asyncio.gather(*(work() for _ in range(10)))

    with use(scope(recorder=recorder)):
        assert asyncio.run(program()) == ["writer"] * 10
    recorder.close()
    assert len(sink.spans) == 10
    assert all(span.end_ns is not None and span.parent_id is None for span in sink.spans)


def test_agent_without_a_recorder_still_names_the_agent():
    with use(scope(span_id=SPAN)), agent("writer"):
        found = current()
        assert found is not None and (found.path, found.span_id) == ("writer", SPAN)


def test_agent_outside_an_attempt_does_nothing():
    with agent("writer"):
        assert current() is None


@pytest.mark.parametrize("name", ["", " ", "a//b", "/a", "a/", None, 3])
def test_agent_refuses_names_that_are_no_paths(name):
    with pytest.raises(ConfigError, match="non-empty name"):
        agent(name)


def test_join():
    assert (join("", "a"), join("a", "", "b/c"), join()) == ("a", "a/b/c", "")


# What an attempt remembers.


def test_latest_call_is_the_nearest_one():
    root = scope()
    spans = [
        Span(id="team", attempt_id=ATTEMPT, kind=SpanKind.AGENT, name="team"),
        Span(id="a", attempt_id=ATTEMPT, kind=SpanKind.AGENT, name="a", parent_id="team"),
        Span(id="b", attempt_id=ATTEMPT, kind=SpanKind.AGENT, name="b", parent_id="team"),
        Span(id="call-a", attempt_id=ATTEMPT, kind=SpanKind.LLM, name="m", parent_id="a"),
        Span(id="call-b", attempt_id=ATTEMPT, kind=SpanKind.LLM, name="m", parent_id="b"),
        Span(id="c", attempt_id=ATTEMPT, kind=SpanKind.AGENT, name="c", parent_id="team"),
    ]
    assert root.memory.latest_call("") is None
    for span in spans:
        root.memory.note(span)
    found = [root.memory.latest_call(place) for place in ("a", "b", "c", "team", "", "call-a", "unknown")]
    assert found == ["call-a", "call-b", "call-b", "call-b", "call-b", "call-a", "call-b"]


def test_memory_is_shared_within_an_attempt_and_with_no_other():
    first, second = scope(), scope()
    inner = first.inside(Span(id=SPAN, attempt_id=ATTEMPT, kind=SpanKind.AGENT, name="x", path="x"))
    assert inner.memory is first.memory is not second.memory
    assert (inner.path, inner.span_id, inner.attempt_id) == ("x", SPAN, ATTEMPT)


# On the wire.


def test_traceparent():
    assert traceparent(scope(span_id=SPAN)) == f"00-{ATTEMPT}-{SPAN}-01"
    assert parse_traceparent(traceparent(scope())) == (ATTEMPT, ATTEMPT[:16]), "the root has a valid header too"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f"00-{ATTEMPT}-{SPAN}-01", (ATTEMPT, SPAN)),
        (f" 00-{ATTEMPT}-{SPAN}-00 ", (ATTEMPT, SPAN)),
        (f"cc-{ATTEMPT}-{SPAN}-01-more", (ATTEMPT, SPAN)),
        (f"00-{ATTEMPT}-{SPAN}-01-more", None),
        (f"ff-{ATTEMPT}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{ATTEMPT}-{'0' * 16}-01", None),
        (f"00-{ATTEMPT.upper()}-{SPAN}-01", None),
        (f"00-{ATTEMPT}-{SPAN}", None),
        (f"00-{ATTEMPT[:-1]}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_parse_traceparent_keeps_to_the_standard(header, found):
    assert parse_traceparent(header) == found


@given(st.text(min_size=1).filter(lambda path: all(part for part in path.split("/"))))
def test_any_path_survives_the_wire(path):
    header = baggage(scope(path))
    header.encode("ascii")
    assert not set(header) & set(' ",;\\')
    assert parse_baggage(header)["agl.agent"] == path.encode("utf-8", "replace").decode()


def test_baggage_keeps_what_others_say():
    others = "user=7;secret=1, agl.agent=old ,region=eu%20west"
    assert parse_baggage(baggage(scope("new"), others)) == {"user": "7", "region": "eu west", "agl.agent": "new"}
    assert baggage(scope("new"), others).startswith("user=7;secret=1,")
    assert baggage(scope(), "agl.agent=old") == ""
    assert baggage(scope()) == ""


@pytest.mark.parametrize("header", ["", ",,,", "novalue", "=x", ";", "a;b=c"])
def test_malformed_baggage_is_skipped(header):
    assert parse_baggage(header) == {}


def test_importing_costs_no_http_client_and_no_framework():
    code = (
        "import sys, agentlightning.context, agentlightning.recorder, agentlightning.emit, agentlightning.plugins;"
        "heavy = {'httpx', 'httpx2', 'openai', 'langchain_core', 'langgraph', 'torch', 'sqlalchemy', 'asyncio'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
