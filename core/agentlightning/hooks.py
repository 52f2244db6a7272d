"""The hook specifications: all that a plug-in can say. Ours use these and nothing else.

Adapters implement `agl_callback` or `agl_install`. Observers implement the rest; they are called guarded, so that a
logger cannot kill a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

from agentlightning.schema import Attempt, Outcome, Resource, Reward, Rollout, Span

if TYPE_CHECKING:
    from agentlightning.recorder import Recorder

PROJECT = "agentlightning"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def agl_callback(recorder: Recorder) -> Any:
    """The object that the user hands to the framework."""


@hookspec(firstresult=True)
def agl_install(recorder: Recorder) -> Callable[[], None]:  # type: ignore[empty-body]
    """Listen globally; returns the undo, which leaves the framework as it was."""


@hookspec(firstresult=True)
def agl_reward_from_span(span: Span) -> Reward | None:
    """An automatic intermediate reward for what happened in a span, or None."""


@hookspec
def agl_rollout_started(rollout: Rollout, attempt: Attempt) -> None:
    """An attempt begins."""


@hookspec
def agl_rollout_finished(rollout: Rollout, attempt: Attempt, outcome: Outcome) -> None:
    """An attempt has ended."""


@hookspec
def agl_resource_published(resource: Resource) -> None:
    """New prompts or weights are current."""


@hookspec
def agl_step_finished(step: int, metrics: dict[str, float], ledger: dict[str, Any]) -> None:
    """A training step is complete and durable."""
