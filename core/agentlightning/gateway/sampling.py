"""From the client's request to the one that the engine gets: route, sampling overrides, seed, and the token fields."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.gateway.directory import Place, Target
from agentlightning.gateway.wire import dumps
from agentlightning.schema import Rollout

Json = dict[str, Any]

NOT_SAMPLING = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "response_format",
        "metadata",
        "user",
        "store",
    }
)
"""Keys of a request that are not parameters of the distribution."""

RESERVED = frozenset({"model", "messages", "prompt", "stream", "stream_options", "logprobs", "return_token_ids"})
"""What a rollout's sampling may not override."""

LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
"""Two names of one parameter: an override of either replaces both."""


class Keep(msgspec.Struct, frozen=True):
    """What the client asked for itself, and so gets to see."""

    logprobs: bool
    ids: bool
    usage: bool
    """The usage chunk of a stream; whole answers always have it."""

    @classmethod
    def of(cls, request: Json) -> Keep:
        options = request.get("stream_options")
        usage = not request.get("stream") or (isinstance(options, dict) and bool(options.get("include_usage")))
        return cls(bool(request.get("logprobs")), bool(request.get("return_token_ids")), usage)


class _Numbers(msgspec.Struct):
    """Repetitions of one question."""

    following: int = 0
    returned: list[int] = []

    def take(self) -> int:
        if self.returned:
            self.returned.sort()
            return self.returned.pop(0)
        self.following += 1
        return self.following - 1


class Seeds:
    """Seeds that depend on what is asked and never on when.

    Equal messages asked again in an attempt get the next number; a call that failed gives its number back, so that the
    client's retry samples what the first try would have.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._asked: OrderedDict[str, dict[bytes, _Numbers]] = OrderedDict()

    def take(self, place: Place, path: str, messages: Any) -> tuple[bytes, int]:
        """The question's digest and how often it was asked before."""
        digest = hashlib.blake2b(dumps([path, messages], ordered=True), digest_size=16).digest()
        asked = self._asked.setdefault(place.attempt.id, {})
        self._asked.move_to_end(place.attempt.id)
        while len(self._asked) > self._size:
            self._asked.popitem(last=False)
        return digest, asked.setdefault(digest, _Numbers()).take()

    def give_back(self, place: Place, ticket: tuple[bytes, int]) -> None:
        numbers = self._asked.get(place.attempt.id, {}).get(ticket[0])
        if numbers is not None:
            numbers.returned.append(ticket[1])


def seed_of(place: Place, ticket: tuple[bytes, int]) -> int:
    """31 bits from the rollout's seed, the attempt's number, the agent, the messages and the repetition."""
    digest, repetition = ticket
    material = msgspec.msgpack.encode([place.rollout.seed, place.attempt.number, digest, repetition])
    return int.from_bytes(hashlib.blake2b(material, digest_size=4).digest(), "big") >> 1


def overrides(rollout: Rollout, target: Target) -> Json | None:
    """The rollout's sampling where it applies, else None: calls of trained agents only. All others keep what the program
    asks for, in training and in evaluations alike.

    Raises ConfigError for keys that are not parameters of sampling.
    """
    if target.policy is None or not target.trained:
        return None
    wrong = sorted(RESERVED.intersection(rollout.sampling))
    if wrong:
        raise ConfigError(
            f"sampling of rollout {rollout.id} sets {', '.join(wrong)}, which the gateway itself needs: leave it out."
        )
    return rollout.sampling


def shape(request: Json, target: Target, changes: Json | None, seed: int | None, ids: bool) -> Json:
    """The engine's request. `changes`: sampling overrides. `seed`: see `seed_of`; an override of it is stronger, and
    where there are no overrides the client's own is too. `ids`: ask for token ids and log-probabilities."""
    asked = {key: value for key, value in request.items() if not (changes and key in LIMITS and LIMITS & set(changes))}
    asked["model"] = target.model
    if seed is not None and (changes is not None or asked.get("seed") is None):
        asked["seed"] = seed
    asked.update(changes or {})
    if ids:
        asked.update(target.ask)
        asked["return_token_ids"] = True
        if not asked.get("logprobs"):
            asked["logprobs"] = True if "messages" in asked else 1  # text completions want their number
        if asked.get("stream"):
            options = asked.get("stream_options")
            asked["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return asked


def sampling_of(asked: Json, target: Target) -> Json:
    """The parameters of the distribution in an engine's request."""
    return {key: value for key, value in asked.items() if key not in NOT_SAMPLING and key not in target.ask}
