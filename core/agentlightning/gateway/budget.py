"""Limits of tokens, enforced before a call: nobody samples what does not fit.

A prompt is counted only where its bytes do not prove already that it fits, since a token is at least one byte: so most
calls cost nothing. Where an endpoint cannot count, its engine decides, and a prompt that was too long for the budget is
marked afterwards.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import Any

import msgspec

from agentlightning.gateway.call import Call
from agentlightning.gateway.problems import Problem
from agentlightning.gateway.upstream import Cut, Unreachable, Upstream
from agentlightning.gateway.wire import dumps, loads

FULL = "context_length_exceeded"
"""OpenAI's code for a prompt that does not fit; what does not fit in a budget of ours has it too."""

TEMPLATE_BYTES = 2048
"""What a chat template may add by itself: instructions for tools, a default system prompt."""
MESSAGE_BYTES = 64
"""What it may add to each message."""
REMEMBERED = 65536
"""Attempts whose use is remembered."""

_FULL_WORDS = re.compile(
    rb"maximum context length|context_length_exceeded|context length|context window|prompt is too long"
)


class _Use(msgspec.Struct):
    """What an attempt has sampled, and what its open calls may yet sample."""

    sampled: int = 0
    promised: int = 0


class Budgets:
    """The use of all attempts. Runs on the gateway's loop."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self._changed = asyncio.Event()
        self._uncounted: set[str] = set()
        """Endpoints that turned out not to count."""

    async def admit(self, call: Call) -> None:
        """Fits the call into its limits, or raises Problem. Waits where other calls of the attempt hold what is left."""
        asked, budget = _asked_limit(call.asked), call.target.budget
        limit = min((n for n in (asked, budget.response) if n is not None), default=None)
        limit = await self._fit(call, limit)
        if budget.rollout is not None and call.attempt_id is not None:
            limit = await self._share(call, budget.rollout, limit)
        if limit is not None:
            names = [name for name in ("max_completion_tokens", "max_tokens") if call.asked.get(name) is not None]
            call.asked.update(dict.fromkeys(names or ["max_tokens"], limit))

    def settle(self, call: Call, sampled: int) -> None:
        """Gives back what an admitted call did not use."""
        if call.promised and call.attempt_id is not None:
            use = self._use(call.attempt_id)
            use.promised -= call.promised
            use.sampled += sampled
            call.promised = 0
            self._changed.set()
            self._changed = asyncio.Event()

    async def _fit(self, call: Call, limit: int | None) -> int | None:
        """The limit that the prompt leaves."""
        target, budget = call.target, call.target.budget
        window = min(target.context, budget.window or target.context)
        longest = min(window - 1, budget.prompt or window)
        most = _most_tokens(call)
        if most <= longest and most + (limit or 1) <= window:
            return limit
        count = await self._count(call)
        if count is None:
            return limit
        if count > longest:
            raise _too_long(count, longest, window)
        return limit if limit is None or count + limit <= window else window - count

    async def _share(self, call: Call, total: int, limit: int | None) -> int:
        """What is left for this call of what its attempt may sample; promised to it until it is settled."""
        assert call.attempt_id is not None
        while True:
            use = self._use(call.attempt_id)
            left = (total - use.sampled - use.promised) // call.n
            if left > 0:
                granted = left if limit is None else min(left, limit)
                call.promised = granted * call.n
                use.promised += call.promised
                return granted
            if not use.promised:
                raise Problem(
                    400,
                    FULL,
                    f"This rollout's budget of {total} tokens is spent: its maximum context length for all calls is reached. "
                    "Answer shorter, call the model less often, or raise `rollout` in the budget.",
                )
            await self._changed.wait()

    def _use(self, attempt_id: str) -> _Use:
        use = self._uses.setdefault(attempt_id, _Use())
        self._uses.move_to_end(attempt_id)
        while len(self._uses) > REMEMBERED:
            self._uses.popitem(last=False)
        return use

    async def _count(self, call: Call) -> int | None:
        """Tokens of the prompt; None where the endpoint does not count, or cannot now."""
        url = call.target.tokenize
        if not url or url in self._uncounted:
            return None
        keys = ("model", "messages", "prompt", "tools", "chat_template_kwargs")
        body = {key: call.asked[key] for key in keys if call.asked.get(key) is not None}
        if call.asked.get("tool_choice") == "none":
            body.pop("tools", None)
        try:
            async with await self._upstream.post(url, call.headers(), dumps(body)) as answer:
                told = loads(await answer.read()) if answer.status == 200 else None
        except (Unreachable, Cut, ValueError):
            return None  # the call itself will tell what is wrong with the engine
        count = told.get("count") if isinstance(told, dict) else None
        if not isinstance(count, int):
            self._uncounted.add(url)
            return None
        return count


def _asked_limit(asked: dict[str, Any]) -> int | None:
    """The client's own limit. Raises Problem for one that is none."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = asked.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise Problem(400, "bad_request", f"{name} is {value!r}: ask for at least 1 token, or leave it out.")
        return value
    return None


def _most_tokens(call: Call) -> int:
    """Tokens that the prompt cannot exceed. A message with an image may be any number."""
    messages = call.asked.get("messages")
    if messages is None:
        return call.size
    if any(isinstance(message, dict) and not isinstance(message.get("content"), str | None) for message in messages):
        return 1 << 60
    return call.size + TEMPLATE_BYTES + MESSAGE_BYTES * len(messages)


def _too_long(count: int, longest: int, window: int) -> Problem:
    return Problem(
        400,
        FULL,
        f"This model's maximum context length is {window} tokens, of which the messages may have {longest}. However, your "
        f"messages resulted in {count} tokens. Please reduce the length of the messages.",
    )


def is_full(status: int, body: bytes) -> bool:
    """Whether an engine says, in whatever words, that the prompt is too long for it."""
    return status in (400, 413, 422) and _FULL_WORDS.search(body) is not None
