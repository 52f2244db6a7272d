"""Who is calling: the attempt and the agent, each from the strongest evidence in the request.

Attempt: the URL, then the bearer key `agl-<attempt id>`, then the trace id of `traceparent`. Agent: the URL, then
`baggage`, then the default name. Weaker evidence never overrides stronger, also where the stronger is out of date: a
call must not slip into another rollout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from agentlightning.context import AGENT_KEY, parse_baggage, parse_traceparent
from agentlightning.schema import DEFAULT_AGENT

_KEY = re.compile(r"(?:bearer\s+)?agl-([0-9a-f]{32})(?:-[0-9a-f]{32})?\s*", re.IGNORECASE)
"""Also what a store server takes for an attempt's key (`store/keys.py`): one key for both."""


_SAID = frozenset({b"authorization", b"x-api-key", b"traceparent", b"baggage"})
"""`x-api-key` is where Anthropic's clients put the key."""


class Caller(msgspec.Struct, frozen=True):
    """What a request says about its origin."""

    attempt_id: str | None
    path: str
    """Agent path."""
    span_id: str | None
    """The open span that the call was made from; None when the trace belongs to another attempt or names no span."""
    source: str
    """What named the attempt: `url`, `key`, `trace`, or `nothing`."""


def identify(params: Mapping[str, str], headers: Iterable[tuple[bytes, bytes]]) -> Caller:
    """`params`: `attempt` and `agent` of the URL, decoded, where it has them. `headers`: lower-case names."""
    said = {name: value for name, value in headers if name in _SAID}
    key = _KEY.fullmatch((said.get(b"x-api-key") or said.get(b"authorization", b"")).decode("latin-1"))
    trace = parse_traceparent(said.get(b"traceparent", b"").decode("latin-1"))
    attempt_id, source = _attempt(params.get("attempt"), key.group(1) if key else None, trace)
    own = trace is not None and trace[0] == attempt_id and trace[1] != trace[0][:16]
    path = params.get("agent", "").strip("/") or _baggage_agent(said.get(b"baggage")) or DEFAULT_AGENT
    return Caller(attempt_id, path, trace[1] if own and trace else None, source)


def _attempt(url: str | None, key: str | None, trace: tuple[str, str] | None) -> tuple[str | None, str]:
    if url:
        return url, "url"
    if key:
        return key, "key"
    return (trace[0], "trace") if trace else (None, "nothing")


def _baggage_agent(header: bytes | None) -> str:
    return parse_baggage(header.decode("latin-1")).get(AGENT_KEY, "").strip("/") if header else ""
