"""What is true of every trace, whatever the framework: the suite's proofs, from the requests and the spans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from agentlightning.context import Scope
from agentlightning.schema import Span, SpanKind, leaf
from tests.adapters.world import RAW, Arrival, World
from tests.fakes.engine import Fault

HANDOFF = "agl.handoff.from"
"""Attribute of an agent's span: the path of the agent that handed over to it."""


def failing_first(times: int, fault: Fault) -> Callable[[dict[str, Any]], Fault | str]:
    """A script that fails so often, and is fine from then on."""
    count = itertools.count()
    return lambda request: fault if next(count) < times else "fine"


def is_raw(arrival: Arrival) -> bool:
    """Whether the program's own client sent it, past its framework."""
    return arrival.last == RAW


def prove(world: World, scope: Scope, operations: Collection[str]) -> list[str]:
    """The agent paths of the attempt's requests in order of arrival, after all that must be true of them was checked."""
    spans = {span.id: span for span in world.spans(scope)}
    arrivals = world.arrivals(scope.attempt_id)
    assert not world.arrivals(""), "a request named no attempt"
    for arrival in arrivals:
        if is_raw(arrival):
            _prove_raw(arrival, spans, scope)
        else:
            _prove_call(arrival, spans)
    for span in spans.values():
        _prove_span(span, spans, operations)
    return [arrival.path for arrival in arrivals]


def _prove_call(arrival: Arrival, spans: dict[str, Span]) -> None:
    """A request comes from the span of its own model call, and bears that span's path."""
    assert arrival.span_id in spans, f"a request came from span {arrival.span_id}, which is not in the trace"
    span = spans[arrival.span_id]
    assert span.kind is SpanKind.LLM, f"a request came from {span.kind} {span.name!r}, not from its model call"
    assert span.path == arrival.path, f"the request says {arrival.path!r}, its span {span.path!r}"
    agent = next((s for s in up(span, spans) if s.kind is SpanKind.AGENT), None)
    assert (agent.path if agent else "") == span.path, f"a call of {span.path!r} is not below its agent's span"


def _prove_raw(arrival: Arrival, spans: dict[str, Span], scope: Scope) -> None:
    """No hook sees it; it belongs to the agent, tool or attempt around it."""
    if not arrival.path:
        root = scope.span_id or scope.attempt_id[:16]
        assert arrival.span_id == root, "a call outside all agents came from a span that is not the attempt's"
        return
    span = spans[arrival.span_id]
    assert span.kind is not SpanKind.LLM, "a raw call is attributed to another call's span"
    assert span.path == arrival.path


def _prove_span(span: Span, spans: dict[str, Span], operations: Collection[str]) -> None:
    said = span.attributes
    assert span.end_ns is not None, f"{span.kind} {span.name!r} was never closed"
    assert span.parent_id is None or span.parent_id in spans, f"{span.name!r} hangs below a span that is not there"
    if span.path:
        assert said.get("gen_ai.agent.name", leaf(span.path)) == leaf(span.path)
    if span.kind is SpanKind.LLM:
        assert said["gen_ai.operation.name"] in operations, said
        assert said["gen_ai.request.model"], said
        assert not span.path or said["gen_ai.agent.name"] == leaf(span.path)
    elif span.kind is SpanKind.AGENT:
        assert said["gen_ai.operation.name"] == "invoke_agent", said
        assert said["gen_ai.agent.name"] == leaf(span.path), said
    elif span.kind is SpanKind.TOOL:
        assert said["gen_ai.operation.name"] == "execute_tool", said
        assert said["gen_ai.tool.name"] == span.name, said


def up(span: Span, spans: dict[str, Span]) -> Iterator[Span]:
    """The spans around a span, inner to outer."""
    while span.parent_id is not None:
        span = spans[span.parent_id]
        yield span
