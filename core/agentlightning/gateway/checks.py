"""What is wrong with a captured choice: checked at the door, so that nothing doubtful is ever taken for training data.

A choice with a defect is served like any other; the defect is the reason that the step's ledger will show.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agentlightning.gateway.capture import Capture, Choice, Tokens

GOOD_ENDINGS = frozenset({"stop", "length", "tool_calls", "function_call"})
"""Finish reasons of complete samples. `length` is one: the tokens were sampled all the same."""

IMPOSSIBLE = -9999.0
"""What vLLM reports for minus infinity: no sampled token can have it."""


ROUNDING = 1e-3
"""How far above 0 an engine's arithmetic may put a log-probability."""


class Ends(NamedTuple):
    """How a sample may end, by the endpoint and the request."""

    ids: frozenset[int] = frozenset()
    """Those that end a turn; empty: not known."""
    otherwise: bool = False
    """Whether the request names stops of its own, or has the engine ignore the end of a turn."""

    @classmethod
    def of(cls, asked: dict[str, Any], stop_ids: frozenset[int]) -> Ends:
        return cls(stop_ids, any(asked.get(key) for key in ("stop", "stop_token_ids", "ignore_eos")))


ANY = Ends()
"""Of an endpoint that does not tell its ids."""


def defect(capture: Capture, choice: Choice, tokens: Tokens, sampled: int, ends: Ends = ANY) -> str | None:
    """The first thing that makes this choice untrainable, or None. `sampled`: ids of all choices of the call."""
    if capture.error is not None:
        return "upstream_error"
    if capture.malformed:
        return "bad_response"
    if choice.ids is None or not capture.prompt_ids:
        return "no_token_ids"
    if not choice.ids:
        return "empty"
    return _numbers(choice, tokens) or _lengths(capture, tokens, sampled) or _ending(capture, choice, ends)


def explain(capture: Capture, choice: Choice) -> str:
    """The numbers behind a defect, for the log."""
    return (
        f"{len(capture.prompt_ids or ())} prompt ids (usage says {capture.prompt_tokens}), "
        f"{len(choice.ids or ())} response ids (usage of all choices says {capture.completion_tokens}), "
        f"{len(choice.logprobs or ())} log-probabilities, finish reason {choice.finish_reason!r}, "
        f"last id {choice.ids[-1] if choice.ids else None}"
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


def _ending(capture: Capture, choice: Choice, ends: Ends) -> str | None:
    if choice.finish_reason is None:
        return "no_finish_reason"
    if choice.finish_reason not in GOOD_ENDINGS:
        return f"finish_{choice.finish_reason}"
    if ends.ids and not ends.otherwise and choice.ids:
        stopped = choice.finish_reason != "length"
        if stopped != (choice.ids[-1] in ends.ids):
            return "bad_ending"
    return "mixed_versions" if len(capture.versions) > 1 else None
