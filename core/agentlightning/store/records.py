"""Records that only the store and those who look into it hand to each other; the vocabulary itself is `schema.py`."""

from __future__ import annotations

import msgspec

from agentlightning.schema import Completion, Reward, Span


class Worker(msgspec.Struct, forbid_unknown_fields=True):
    """Who runs rollouts. It tells the store now and then, so that people see who is there."""

    id: str
    """`host:pid:nonce`."""
    run_id: str | None = None
    """The only run whose rollouts it takes; None: of any."""
    program: str = ""
    concurrency: int = 1
    running: int = 0
    """Attempts in its hands when it last told."""
    state: str = "running"
    """`running`, `draining` (takes nothing new) or `ended`."""
    started_ns: int = 0
    seen_ns: int = 0
    """When it last told; set by the store."""


class News(msgspec.Struct, forbid_unknown_fields=True):
    """What was added to a store since some sequence number."""

    cursor: int
    """Ask for what comes after this next."""
    spans: list[Span] = []
    completions: list[Completion] = []
    rewards: list[Reward] = []


def title(record: object) -> str:
    """What an error calls it."""
    name = getattr(record, "id", None) or getattr(record, "name", None) or getattr(record, "number", "")
    return f"{type(record).__name__} {name}"
