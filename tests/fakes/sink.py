"""The smallest thing a recorder can write to; it can refuse, fail, and be slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from agentlightning.schema import Reward, Span


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        """Latest form of each, in order of first arrival."""
        self.rewards: list[Reward] = []
        self.batches: list[int] = []
        self.refuse: Callable[[Sequence[Any]], Exception | None] = lambda records: None
        """Given a batch, the error to raise, or None to take it."""
        self.open = threading.Event()
        self.open.set()

    def add(self, spans: Sequence[Span] = (), completions: Sequence[Any] = (), rewards: Sequence[Reward] = ()) -> None:
        self.open.wait()
        if error := self.refuse([*spans, *rewards]):
            raise error
        self.batches.append(len(spans) + len(rewards))
        for span in spans:
            known = [i for i, old in enumerate(self.spans) if old.id == span.id]
            if known:
                self.spans[known[0]] = span
            else:
                self.spans.append(span)
        self.rewards += rewards
