"""The part of the vocabulary that says where models are served, to whom, and how much of them; `schema` has it all."""

from __future__ import annotations

from typing import Any

import msgspec

from agentlightning.errors import ConfigError


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which served model answers the calls of an agent. Routes are tried in order."""

    selector: str
    """Agent name, path or glob; `*` is the last resort."""
    model: str
    """The name to ask the engine for."""
    trained: bool
    """Whether this algorithm updates what answers: sampling overrides of training apply to such calls only."""
    base_url: str = ""
    """Of another server that answers this agent: a judge, a frozen teammate, a hosted API. Empty: the endpoint's own."""
    api_key: str = ""
    """Of that server."""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many tokens may be used; None: no limit of ours. Looked at before each call; what does not fit is refused with
    the API's own `context_length_exceeded`, and a program that ends from it has the outcome `truncated`.

    Raises ConfigError for a limit below 1.
    """

    prompt: int | None = None
    """Of the prompt of one call."""
    response: int | None = None
    """Sampled in one call, for each choice."""
    rollout: int | None = None
    """Sampled in one attempt, all its calls together. Calls at the same time share what is left; with `response` given,
    none has to wait for another."""
    window: int | None = None
    """Prompt and response of one call together, where that is to be less than the endpoint's `context`."""

    def __post_init__(self) -> None:
        wrong = [name for name in self.__struct_fields__ if (value := getattr(self, name)) is not None and value < 1]
        if wrong:
            told = ", ".join(f"{name}={getattr(self, name)}" for name in wrong)
            raise ConfigError(f"the budget has {told}: give at least 1 token, or None for no limit.")


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a policy is served. Its fields become the value of the `policy` resource."""

    base_url: str
    """OpenAI-compatible, ends in `/v1`. Answers carry `prompt_token_ids` at the top, and `token_ids` and
    `logprobs.content[].logprob` in each choice; in streams the same fields in their chunks."""
    api_key: str
    routes: tuple[Route, ...]
    context: int
    """Tokens that prompt and response may have together."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a turn, with which the last id of each sample is compared; empty: not known."""
    ask: dict[str, Any] = {}
    """What this server wants to be asked, besides `return_token_ids` and `logprobs`, before it sends all tokens: for
    SGLang `{"return_prompt_token_ids": True}`."""
    tokenize: str = ""
    """URL that counts the tokens of a request, as vLLM's `/tokenize` does; empty: prompts are only counted by the engine
    that gets them."""
    budget: Budget = Budget()
    replicas: tuple[str, ...] = ()
    """Base URLs of further servers with the same weights. Each rollout stays with one of all, for its prefix cache, as
    long as that one answers."""
