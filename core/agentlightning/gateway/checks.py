"""What is wrong with a captured choice: checked at the door, so that nothing doubtful is ever taken for training data.

A choice with a defect is served like any other; the defect is the reason that the step's ledger will show.
"""

from __future__ import annotations

from agentlightning.gateway.capture import Capture, Choice, Tokens

GOOD_ENDINGS = frozenset({"stop", "length", "tool_calls", "function_call"})
"""Finish reasons of complete samples. `length` is one: the tokens were sampled all the same."""

IMPOSSIBLE = -9999.0
"""What vLLM reports for minus infinity: no sampled token can have it."""


ROUNDING = 1e-3
"""How far above 0 an engine's arithmetic may put a log-probability."""


def defect(capture: Capture, choice: Choice, tokens: Tokens, sampled: int) -> str | None:
    """The first thing that makes this choice untrainable, or None. `sampled`: ids of all choices of the call."""
    if capture.error is not None:
        return "upstream_error"
    if capture.malformed:
        return "bad_response"
    if choice.ids is None or not capture.prompt_ids:
        return "no_token_ids"
    if not choice.ids:
        return "empty"
    return _numbers(choice, tokens) or _lengths(capture, tokens, sampled) or _ending(capture, choice)


def explain(capture: Capture, choice: Choice) -> str:
    """The numbers behind a defect, for the log."""
    return (
        f"{len(capture.prompt_ids or ())} prompt ids (usage says {capture.prompt_tokens}), "
        f"{len(choice.ids or ())} response ids (usage of all choices says {capture.completion_tokens}), "
        f"{len(choice.logprobs or ())} log-probabilities, finish reason {choice.finish_reason!r}"
        + (f", unreadable: {capture.malformed}" if capture.malformed else "")
        + (f", error: {capture.error}" if capture.error is not None else "")
    )


def _numbers(choice: Choice, tokens: Tokens) -> str | None:
    if min(tokens.prompt_ids.min(), tokens.response_ids.min()) < 0:
        return "bad_token_ids"
    if choice.logprobs is None:
        return "no_logprobs"
    within = (tokens.logprobs > IMPOSSIBLE) & (tokens.logprobs <= ROUNDING)  # NaN is neither
    return None if within.all() else "bad_logprobs"


def _lengths(capture: Capture, tokens: Tokens, sampled: int) -> str | None:
    agree = (
        len(tokens.response_ids) == len(tokens.logprobs)
        and capture.prompt_tokens in (None, len(tokens.prompt_ids))
        and capture.completion_tokens in (None, sampled)
    )
    return None if agree else "length_mismatch"


def _ending(capture: Capture, choice: Choice) -> str | None:
    if choice.finish_reason is None:
        return "no_finish_reason"
    if choice.finish_reason not in GOOD_ENDINGS:
        return f"finish_{choice.finish_reason}"
    return "mixed_versions" if len(capture.versions) > 1 else None
