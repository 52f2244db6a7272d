"""From an exception to an outcome: whose fault it was, and so whether trying again can help.

Client libraries are known by the names of their modules and types, so none of them is imported.

* errors of model SDKs, and HTTP errors of calls to the gateway: `model_error` when they may pass (429, 5xx, cut
  connections, timeouts), `truncated` when the context was full, else `agent_error` (a 400 or 401 fails each time);
* `RewardError`: `grader_error`. Our own store, gateway or policy: `infra_error`. All else: `agent_error`.

An error that was raised `from` another one, or while another one was handled, counts as that one if it says nothing by
itself: what a clean-up raises does not hide what went wrong. A group counts as one kind only if all members agree.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from agentlightning.errors import GatewayError, PolicyError, RewardError, StoreError
from agentlightning.schema import Outcome

MODEL_SDKS = frozenset({"openai", "anthropic", "litellm"})
HTTP_CLIENTS = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp"})
TRANSIENT = frozenset({408, 409, 425, 429})
"""Client errors that may pass; every 5xx may too."""
ERROR_CHARS = 4000
"""A kept traceback is at most this long: its start and its end."""

_CONTEXT_FULL = re.compile(
    r"context[_ ](length|window)|maximum context|context overflow|prompt is too long|too many tokens", re.IGNORECASE
)
_CONTEXT_TYPES = frozenset({"ContextWindowExceededError", "ContextOverflowError", "LengthFinishReasonError"})


@dataclass(frozen=True, slots=True)
class Failure:
    """What is kept of an error that a program raised."""

    outcome: Outcome
    kind: str
    """Of the error: the qualified name of its type."""
    text: str
    """Traceback."""


def failure_of(error: BaseException, gateway_url: str = "") -> Failure:
    return Failure(classify(error, gateway_url), type(error).__qualname__, describe(error))


def classify(error: BaseException, gateway_url: str = "") -> Outcome:
    """The outcome of an attempt whose program raised `error`, when we did not interrupt it ourselves."""
    if isinstance(error, BaseExceptionGroup):
        kinds = {classify(member, gateway_url) for member in error.exceptions}
        return kinds.pop() if len(kinds) == 1 else Outcome.AGENT_ERROR
    for link in _causes(error):
        outcome = _own(link) or _model(link, gateway_url)
        if outcome is not None:
            return outcome
    return Outcome.AGENT_ERROR


def describe(error: BaseException, limit: int = ERROR_CHARS) -> str:
    """The traceback of `error` without the runner's frames, cut in its middle to `limit` characters."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _ours(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames, limit=-12))
    except Exception as broken:  # noqa: BLE001  a user's __str__ or __notes__ may do anything
        text = f"{type(error).__name__} (its text cannot be shown: {type(broken).__name__})"
    text = text.strip().encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    head, tail = limit // 4, limit - limit // 4 - 5
    return f"{text[:head]}\n...\n{text[-tail:]}"


def _ours(module: str) -> bool:
    return module in ("agentlightning.children", "agentlightning.execution", "agentlightning.runner")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _own(error: BaseException) -> Outcome | None:
    if isinstance(error, RewardError):
        return Outcome.GRADER_ERROR
    if isinstance(error, (StoreError, GatewayError, PolicyError)):
        return Outcome.INFRA_ERROR
    return None


def _model(error: BaseException, gateway_url: str) -> Outcome | None:
    """None when `error` does not come from a model call."""
    origins = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    if type(error).__name__ in _CONTEXT_TYPES:
        return Outcome.TRUNCATED
    from_sdk = not origins.isdisjoint(MODEL_SDKS) and _is_api_error(error)
    from_gateway = not origins.isdisjoint(HTTP_CLIENTS) and bool(gateway_url) and _url(error).startswith(gateway_url)
    if not from_sdk and not from_gateway:
        return None
    status = _status(error)
    if status is None or status in TRANSIENT or status >= 500:
        return Outcome.MODEL_ERROR
    if status in (400, 413, 422) and _CONTEXT_FULL.search(_text(error)):
        return Outcome.TRUNCATED
    return Outcome.CANCELLED if status == 410 else Outcome.AGENT_ERROR


def _is_api_error(error: BaseException) -> bool:
    return any(kind.__name__ in ("APIError", "APIConnectionError") for kind in type(error).__mro__)


def _url(error: BaseException) -> str:
    request = _attribute(error, "request") or _attribute(error, "request_info")
    return str(_attribute(request, "url") or "")


def _status(error: BaseException) -> int | None:
    response = _attribute(error, "response")
    for holder, name in ((error, "status_code"), (error, "status"), (response, "status_code")):
        status = _attribute(holder, name)
        if isinstance(status, int):
            return status
    return None


def _text(error: BaseException) -> str:
    body = _attribute(error, "body") or _attribute(_attribute(error, "response"), "text")
    return f"{error} {body}"


def _attribute(holder: object, name: str) -> object:
    """None where the attribute is absent, or a property that refuses: no request was set, a stream was not read."""
    try:
        return getattr(holder, name, None)
    except Exception:  # noqa: BLE001  anybody's exception class may be here, with any property
        return None
