"""Records to try a store with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from agentlightning.schema import (
    Attempt,
    Completion,
    Reward,
    Rollout,
    RolloutState,
    Span,
    SpanKind,
    floats,
    ids,
    new_id,
    new_span_id,
)
from agentlightning.store.base import Store

LONG = 1e6
"""Seconds of a lease that no test lives to see the end of."""

ME = f"{socket.gethostname()}:{os.getpid()}:me"
RIVAL = f"{socket.gethostname()}:{os.getpid()}:rival"


def rollout(rollout_id: str, **fields: Any) -> Rollout:
    given = {"run_id": "run", "task": {"question": "?"}, "task_id": "t1", "group_id": "g1"} | fields
    return Rollout(rollout_id, **given)


def completion(attempt_id: str | None, **fields: Any) -> Completion:
    given: dict[str, Any] = {
        "path": "team/writer",
        "span_id": None,
        "model": "m",
        "policy": "policy",
        "version": 3,
        "prompt_ids": ids([1, 2, 3]),
        "response_ids": ids([4, 2**31 - 1]),
        "logprobs": floats([-0.1, -1e-30]),
        "finish_reason": "stop",
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "response": {"choices": []},
    }
    return Completion(**({"id": new_id(), "attempt_id": attempt_id} | given | fields))


def span(attempt_id: str, **fields: Any) -> Span:
    return Span(**({"id": new_span_id(), "attempt_id": attempt_id, "kind": SpanKind.LLM, "name": "call"} | fields))


def reward(attempt_id: str, value: float = 1.0, **fields: Any) -> Reward:
    return Reward(**({"id": new_id(), "attempt_id": attempt_id, "value": value} | fields))


def begin(store: Store, rollout_id: str = "r1", lease_s: float = LONG, **fields: Any) -> Attempt:
    """The first attempt of a new rollout."""
    store.enqueue([rollout(rollout_id, **fields)])
    ((_, attempt),) = store.lease("worker", lease_s=lease_s)
    return attempt


def state_of(store: Store, rollout_id: str = "r1") -> RolloutState:
    return store.rollouts(ids=[rollout_id])[0].state


def dead_owner() -> str:
    """An owner on this host whose process has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return f"{socket.gethostname()}:{child.pid}:gone"
