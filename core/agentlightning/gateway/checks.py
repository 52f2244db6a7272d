"""What is wrong with a captured choice: checked at the door, so that nothing doubtful is ever taken for training data.

A choice with a defect is served like any other; the defect is the reason that the step's ledger will show.
"""

from __future__ import annotations

import math

from agentlightning.gateway.capture import Capture, Choice

GOOD_ENDINGS = frozenset({"stop", "length", "tool_calls", "function_call"})
"""Finish reasons of complete samples. `length` is one: the tokens were sampled all the same."""

IMPOSSIBLE = -9999.0
"""What vLLM reports for minus infinity: no sampled token can have it."""


def defect(capture: Capture, choice: Choice, sampled: int) -> str | None:
    """The first thing that makes this choice untrainable, or None. `sampled`: ids of all choices of the call."""
    if capture.error is not None:
        return "upstream_error"
    if capture.malformed:
        return "bad_response"
    if choice.ids is None or not capture.prompt_ids:
        return "no_token_ids"
    if not choice.ids:
        return "empty"
    return _numbers(capture, choice) or _lengths(capture, choice, sampled) or _ending(capture, choice)


def explain(capture: Capture, choice: Choice) -> str:
    """The numbers behind a defect, for the log."""
    return (
        f"{len(capture.prompt_ids or ())} prompt ids (usage says {capture.prompt_tokens}), "
        f"{len(choice.ids or ())} response ids (usage of all choices says {capture.completion_tokens}), "
        f"{len(choice.logprobs or ())} log-probabilities, finish reason {choice.finish_reason!r}"
        + (f", unreadable: {capture.malformed}" if capture.malformed else "")
        + (f", error: {capture.error}" if capture.error is not None else "")
    )


def _numbers(capture: Capture, choice: Choice) -> str | None:
    if any(min(ids) < 0 or max(ids) >= 2**31 for ids in (capture.prompt_ids, choice.ids) if ids):
        return "bad_token_ids"
    if choice.logprobs is None:
        return "no_logprobs"
    good = all(v is not None and math.isfinite(v) and IMPOSSIBLE < v <= 1e-3 for v in choice.logprobs)
    return None if good else "bad_logprobs"


def _lengths(capture: Capture, choice: Choice, sampled: int) -> str | None:
    agree = (
        len(choice.ids or ()) == len(choice.logprobs or ())
        and capture.prompt_tokens in (None, len(capture.prompt_ids or ()))
        and capture.completion_tokens in (None, sampled)
    )
    return None if agree else "length_mismatch"


def _ending(capture: Capture, choice: Choice) -> str | None:
    if choice.finish_reason is None:
        return "no_finish_reason"
    if choice.finish_reason not in GOOD_ENDINGS:
        return f"finish_{choice.finish_reason}"
    return "mixed_versions" if len(capture.versions) > 1 else None
