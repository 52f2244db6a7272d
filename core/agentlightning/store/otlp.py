"""Spans of OpenTelemetry as spans of ours: their kind and agent by the GenAI conventions, their attempt by name or trace.

The attempt, strongest first: the attribute `agl.attempt.id` of the span or its resource, the trace id where it is an attempt
(`traceparent` from the runner makes it so), the attempt of the key. The agent path: `agl.agent`, else the names of the
agent spans around it, as far as they have come. `agl.reward` (a number, with `agl.reward.name` and `agl.reward.target`)
gives a reward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from agentlightning.context import AGENT_KEY, join
from agentlightning.errors import NotFound, RewardError
from agentlightning.schema import Reward, Span, SpanKind, finite, leaf
from agentlightning.store.base import Store
from agentlightning.store.keys import Caller
from agentlightning.store.otlp_wire import Heard
from agentlightning.store.requests import Refused

ATTEMPT = "agl.attempt.id"
REWARD = "agl.reward"
_KEPT = 10_000
"""Attempts, and places of spans, that are remembered."""

_OPERATIONS = {
    "chat": SpanKind.LLM,
    "text_completion": SpanKind.LLM,
    "generate_content": SpanKind.LLM,
    "invoke_agent": SpanKind.AGENT,
    "create_agent": SpanKind.AGENT,
    "execute_tool": SpanKind.TOOL,
}
_OTHER_NAMES = ("agl.kind", "openinference.span.kind", "traceloop.span.kind")
_KINDS = {kind.value: kind for kind in SpanKind}


class Intake:
    """Turns exports into records. `take` blocks, and may run on any thread; one at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, bool] = OrderedDict()
        self._paths: OrderedDict[tuple[str, str], str] = OrderedDict()

    def take(self, found: list[Heard], who: Caller) -> tuple[list[Span], list[Reward], dict[str, int]]:
        """The records of an export, and how many spans were left out for which reason. Raises Refused where one belongs
        to another attempt than the caller's."""
        spans: list[Span] = []
        rewards: list[Reward] = []
        refused: dict[str, int] = {}
        placed = []
        for one in found:
            attempt_id = self._attempt(one, who)
            if attempt_id is None:
                why = (
                    f"no attempt is named: send the runner's traceparent, or the attribute {ATTEMPT} with the id of an "
                    "attempt in this store"
                )
                refused[why] = refused.get(why, 0) + 1
            else:
                placed.append((attempt_id, one))
        around = {(attempt_id, one.span_id): one for attempt_id, one in placed}
        for attempt_id, one in placed:
            try:
                rewards += _rewards(attempt_id, one)
            except RewardError as error:
                refused[str(error)] = refused.get(str(error), 0) + 1
                continue
            spans.append(_span(attempt_id, one, self._path(attempt_id, one, around)))
        return spans, rewards, refused

    def _attempt(self, one: Heard, who: Caller) -> str | None:
        said = one.attributes.get(ATTEMPT) or one.resource.get(ATTEMPT)
        named = str(said).lower() if said else one.trace_id if self._is_known(one.trace_id) else who.attempt_id
        if who.attempt_id is not None and named != who.attempt_id:
            raise Refused(
                403,
                f"this key only writes attempt {who.attempt_id}: a span belongs to {named}; nothing was stored.",
                "Forbidden",
            )
        return named if named and self._is_known(named) else None

    def _is_known(self, attempt_id: str) -> bool:
        if attempt_id in self._known:
            return True
        try:
            self._store.attempt(attempt_id)
        except NotFound:
            return False
        _remember(self._known, attempt_id, True)
        return True

    def _path(self, attempt_id: str, one: Heard, around: Mapping[tuple[str, str], Heard]) -> str:
        """Agent path; the spans around it count, whether they came now or before."""
        above: list[Heard] = []
        seen: set[str] = set()
        place: Heard | None = one
        path = ""
        while place is not None and place.span_id not in seen:
            above.append(place)
            seen.add(place.span_id)
            if place.attributes.get(AGENT_KEY):
                break
            key = (attempt_id, place.parent_id or "")
            if key not in around:
                path = self._paths.get(key, "")
            place = around.get(key)
        for place in reversed(above):
            said = place.attributes.get(AGENT_KEY) or (place is above[-1] and place.resource.get(AGENT_KEY))
            path = str(said).strip("/") if said else _deeper(path, place)
        _remember(self._paths, (attempt_id, one.span_id), path)
        return path


def kind_of(attributes: Mapping[str, Any]) -> SpanKind:
    """What a span is, by what it says of itself."""
    operation = _OPERATIONS.get(str(attributes.get("gen_ai.operation.name")))
    if operation is not None:
        return operation
    said = next((str(attributes[name]).lower() for name in _OTHER_NAMES if name in attributes), "")
    if said in _KINDS:
        return _KINDS[said]
    return SpanKind.LLM if "gen_ai.request.model" in attributes and not said else SpanKind.OPERATION


def _deeper(path: str, one: Heard) -> str:
    """Where the inside of this span is, below `path`."""
    name = str(one.attributes.get("gen_ai.agent.name") or "").strip().replace("/", "_")
    if kind_of(one.attributes) is SpanKind.AGENT:
        return join(path, name or one.name.removeprefix("invoke_agent ").strip().replace("/", "_"))
    return join(path, name) if name and leaf(path) != name else path


def _span(attempt_id: str, one: Heard, path: str) -> Span:
    attributes = dict(one.attributes)
    if one.events:
        attributes["otel.events"] = [{"name": name, **told} for name, told in one.events]
    if one.scope:
        attributes["otel.scope.name"] = one.scope
    if "service.name" in one.resource:
        attributes["service.name"] = one.resource["service.name"]
    error = _error(one)
    parent = one.parent_id if one.parent_id != attempt_id[:16] else None  # what stands for the attempt itself
    return Span(
        id=one.span_id,
        attempt_id=attempt_id,
        kind=kind_of(one.attributes),
        name=one.name,
        parent_id=parent,
        path=path,
        start_ns=one.start_ns,
        end_ns=one.end_ns,
        status="open" if one.end_ns is None else "error" if one.failed else "ok",
        error=error,
        attributes=attributes,
    )


def _error(one: Heard) -> str | None:
    if not one.failed:
        return None
    for name, told in one.events:
        if name == "exception":
            parts = (told.get("exception.type"), told.get("exception.message"))
            return ": ".join(str(part) for part in parts if part) or one.message
    return one.message or str(one.attributes.get("error.type") or "error")


def _rewards(attempt_id: str, one: Heard) -> list[Reward]:
    if REWARD not in one.attributes:
        return []
    name = str(one.attributes.get("agl.reward.name") or "reward")
    target = str(one.attributes.get("agl.reward.target") or "rollout")
    value = finite(one.attributes[REWARD], f"reward {name!r} of span {one.span_id}")
    return [Reward(f"{attempt_id[:16]}{one.span_id}", attempt_id, value, name, target, "otel")]


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    while len(memory) > _KEPT:
        memory.popitem(last=False)
