"""Where servers put the sampled ids and their log-probabilities: one table, read top down, the first that is there counts.

The first place is the one that `capture` reads as bytes, without a look at this table. All others are looked for only in
answers that lack it and hold one of `MARKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Path = tuple[str | int, ...]
Logprobs = list[float | None]


class Place(NamedTuple):
    """Somewhere in an answer or chunk, or in one of its choices."""

    server: str
    path: Path
    ids: Callable[[Any], list[int] | None]
    """The ids in what stands there, or None when it is something else."""
    logprobs: Callable[[Any], Logprobs | None] | None = None
    """The log-probabilities, where they stand beside the ids and nowhere else."""


def plain(value: Any) -> list[int] | None:
    """`[5, 7]`"""
    return value if isinstance(value, list) and all(type(item) is int for item in value) else None


def paired(value: Any) -> list[int] | None:
    """`[[-0.1, 5, "a"], ...]`, SGLang's log-probability, id and text"""
    return plain([item[1] for item in value]) if _rows(value) else None


def paired_logprobs(value: Any) -> Logprobs:
    return [item[0] for item in value]


def listed(value: Any) -> list[int] | None:
    """`[{"id": 5, "logprob": -0.1}, ...]`"""
    return plain([item.get("id") for item in value]) if _objects(value) else None


def listed_logprobs(value: Any) -> Logprobs:
    return [item.get("logprob") for item in value]


def named(value: Any) -> list[int] | None:
    """`["token_id:5", ...]`, or entries with such a `token`"""
    tokens = [item.get("token") for item in value] if _objects(value) else value
    if not isinstance(tokens, list) or not tokens:
        return None
    numbers = [str(token).removeprefix("token_id:") for token in tokens if str(token).startswith("token_id:")]
    return (
        [int(number) for number in numbers] if len(numbers) == len(tokens) and all(map(str.isdigit, numbers)) else None
    )


def _rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, list) and len(item) > 1 for item in value)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


PROMPT: tuple[Place, ...] = (
    Place("vLLM, lightning", ("prompt_token_ids",), plain),
    Place("SGLang, vLLM /completions", ("choices", 0, "prompt_token_ids"), plain),
    Place("LiteLLM", ("provider_specific_fields", "prompt_token_ids"), plain),
    Place("LiteLLM", ("choices", 0, "provider_specific_fields", "prompt_token_ids"), plain),
    Place("LiteLLM", ("choices", 0, "message", "provider_specific_fields", "prompt_token_ids"), plain),
    Place("LiteLLM", ("choices", 0, "delta", "provider_specific_fields", "prompt_token_ids"), plain),
    Place("SGLang", ("choices", 0, "meta_info", "input_token_logprobs"), paired),
    Place("TGI", ("choices", 0, "details", "prefill"), listed),
    Place("TGI", ("details", "prefill"), listed),
)
"""From the top of an answer."""

RESPONSE: tuple[Place, ...] = (
    Place("vLLM, SGLang, lightning", ("token_ids",), plain),
    Place("SGLang until 0.5.5", ("response_token_ids",), plain),
    Place("LiteLLM", ("provider_specific_fields", "token_ids"), plain),
    Place("LiteLLM", ("message", "provider_specific_fields", "token_ids"), plain),
    Place("LiteLLM", ("delta", "provider_specific_fields", "token_ids"), plain),
    Place("LMDeploy", ("message", "gen_tokens"), plain),
    Place("LMDeploy", ("delta", "gen_tokens"), plain),
    Place("LMDeploy /completions", ("gen_tokens",), plain),
    Place("SGLang", ("meta_info", "output_token_logprobs"), paired, paired_logprobs),
    Place("llama.cpp", ("logprobs", "content"), listed),
    Place("vLLM, return_tokens_as_token_ids", ("logprobs", "content"), named),
    Place("vLLM /completions, return_tokens_as_token_ids", ("logprobs", "tokens"), named),
    Place("TGI", ("details", "tokens"), listed, listed_logprobs),
)
"""From a choice."""

MARKS = (b"token_ids", b"gen_tokens", b"token_logprobs", b"token_id:", b'"prefill"', b'"id":')
"""An answer without any of these has no ids in another place."""


def find(value: Any, places: Sequence[Place]) -> tuple[list[int], Logprobs | None] | None:
    """The ids, and the log-probabilities where they stand beside them; None when there are none."""
    for place in places:
        there = value
        for key in place.path:
            there = _step(there, key)
        ids = place.ids(there) if there is not None else None
        if ids is not None:
            return ids, place.logprobs(there) if place.logprobs else None
    return None


def _step(value: Any, key: str | int) -> Any:
    if isinstance(key, str):
        return value.get(key) if isinstance(value, dict) else None
    return value[key] if isinstance(value, list) and len(value) > key else None
