"""The store's methods as calls over HTTP: `POST /store/<method>` with the arguments by name, answered with the result.

Everything is read off the contract in `base.py`, so that server and client cannot differ from it or from each other.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import msgspec

from agentlightning.store.base import Store
from agentlightning.store.bodies import Body

STORE_HEADER = "x-agl-store"
"""Names the store that is meant; a server with another one refuses."""
FIRST_CALL = "hello"
"""The one call that is no method: what a client asks first. It answers with a `Hello`."""

READS = frozenset(
    {"runs", "steps", "resource", "workers", "rollouts", "attempts", "attempt", "backlog", "episodes", "trace", "find"}
    | {"unattributed"}
)
WAITS = frozenset({"wait", "wait_for_work", "follow"})


class Hello(msgspec.Struct):
    """What a server says about itself."""

    store: str
    """The store's identity."""
    schema_version: int
    longest_wait_s: float
    """For how long it lets a call wait; ask again after that."""


class Call:
    """One method: its arguments as a record, and readers for both directions."""

    def __init__(self, name: str, method: Any) -> None:
        hints = get_type_hints(method)
        result = hints.pop("return")
        given = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
        fields = [
            (p.name, hints[p.name]) if p.default is p.empty else (p.name, hints[p.name], p.default) for p in given
        ]
        self.name = name
        self.names = [p.name for p in given]
        self.arguments = Body(msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True))
        self.result = Body(result)
        self.waits = name in WAITS
        self.writes = name not in READS | WAITS


CALLS: dict[str, Call] = {
    name: Call(name, method)
    for name, method in vars(Store).items()
    if inspect.isfunction(method) and not name.startswith("_") and name != "close"
}
