"""Which of several servers with the same weights a rollout is sent to.

Each rollout stays with one, whose prefix cache then knows its history: the one whose name, hashed together with the
rollout's, is highest (rendezvous hashing, Thaler and Ravishankar 1998), so that rollouts spread evenly and only those of a
server that leaves move. One that does not answer is avoided for a while.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from agentlightning.gateway.directory import Target

AVOID_S = 10.0
"""Seconds that a server that did not answer is tried last."""


class Replicas:
    """`clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent: dict[str, float] = {}
        """Base URL -> until when it is avoided."""

    def order(self, target: Target, rollout_id: str) -> list[str]:
        """Base URLs to try, one after the other."""
        if not target.replicas:
            return [target.base_url]
        now = self._clock()
        bases = {target.base_url, *target.replicas}
        return sorted(bases, key=lambda base: (self._silent.get(base, now) > now, _distance(base, rollout_id)))

    def silent(self, base_url: str) -> None:
        self._silent[base_url] = self._clock() + AVOID_S

    def answered(self, base_url: str) -> None:
        self._silent.pop(base_url, None)


def _distance(base_url: str, rollout_id: str) -> bytes:
    return hashlib.blake2b(f"{base_url} {rollout_id}".encode(), digest_size=8).digest()
