"""Programs of no framework: each call of an OpenAI client is a span, below the `agl.agent` block around it.

All calls of the SDK, chat or Responses, plain, parsed or streamed, pass `request` of the sync or the async client: that
is where we listen, retries included. Nothing is needed for attribution itself, which the request's headers carry anyway;
the span adds model, usage, finish reasons and errors. A call that another adapter has opened already stays one call.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from openai import AsyncStream, Stream
from openai._base_client import AsyncAPIClient, SyncAPIClient

from agentlightning.context import Scope, current, reset_scope, set_scope, surrounding
from agentlightning.hooks import hookimpl
from agentlightning.listening import Installation, Patches, guarded
from agentlightning.schema import Span, SpanKind, leaf

OPERATIONS = {"/chat/completions": "chat", "/responses": "chat", "/completions": "text_completion"}
"""The endpoints that are model calls, and what OpenTelemetry calls them."""
_SETTINGS = ("temperature", "top_p", "seed", "max_tokens")


class Call:
    """A model call that is under way."""

    __slots__ = ("scope", "span", "token", "told")

    def __init__(self, scope: Scope, span: Span) -> None:
        self.scope, self.span = scope, span
        self.told: dict[str, Any] = {}
        self.token = set_scope(scope.inside(span), lasting=False)

    @guarded
    def sent(self) -> None:
        """The request is answered: what the program does now is not inside the call."""
        reset_scope(self.token)

    @guarded
    def heard(self, answer: object) -> None:
        """Notes what an answer, or a piece of a streamed one, says."""
        self.told |= _response(answer)

    @guarded
    def end(self, error: BaseException | None = None, early: bool = False) -> None:
        reset_scope(self.token)
        if self.scope.recorder is not None:
            told = {**self.told, "agl.stopped_early": True} if early else self.told
            self.scope.recorder.end(self.span, error=error, attributes=told)


@guarded
def _begin(options: Any) -> Call | None:
    """The call that these options of a request make; None where there is nothing to record, or another does."""
    operation = OPERATIONS.get(options.url) if options.method.lower() == "post" else None
    scope = surrounding() if operation else None
    if operation is None or scope is None or scope.recorder is None or current() is not scope:
        return None
    asked = options.json_data if isinstance(options.json_data, Mapping) else {}
    model = str(asked.get("model", "model"))
    told: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
    told |= {f"gen_ai.request.{key}": asked[key] for key in _SETTINGS if isinstance(asked.get(key), (int, float))}
    if scope.path:
        told["gen_ai.agent.name"] = leaf(scope.path)
    span = scope.recorder.start(SpanKind.LLM, model, path=scope.path, attributes=told, scope=scope)
    return Call(scope, span)


def _response(answer: Any) -> dict[str, Any]:
    """GenAI attributes of an answer: a chat completion, a chunk of one, a response, or an event that bears one."""
    answer = getattr(answer, "response", None) or answer
    usage = getattr(answer, "usage", None)
    reasons = [choice.finish_reason for choice in getattr(answer, "choices", None) or () if choice.finish_reason]
    told = {
        "gen_ai.response.id": getattr(answer, "id", None),
        "gen_ai.response.model": getattr(answer, "model", None),
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.usage.input_tokens": getattr(usage, "prompt_tokens", getattr(usage, "input_tokens", None)),
        "gen_ai.usage.output_tokens": getattr(usage, "completion_tokens", getattr(usage, "output_tokens", None)),
    }
    return {key: value for key, value in told.items() if value is not None}


class _Pieces:
    """The pieces of a streamed answer on their way to the program. The call ends with them, or when they are dropped."""

    def __init__(self, inner: Any, call: Call) -> None:
        self._inner, self._call = inner, call

    def stop(self) -> None:
        self._call.end(early=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __del__(self) -> None:
        self._call.end(early=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            piece = next(self._inner)
        except StopIteration:
            self._call.end()
            raise
        except BaseException as error:
            self._call.end(error)
            raise
        self._call.heard(piece)
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            piece = await anext(self._inner)
        except StopAsyncIteration:
            self._call.end()
            raise
        except BaseException as error:
            self._call.end(error)
            raise
        self._call.heard(piece)
        return piece


def _answered(call: Call, answer: Any) -> None:
    """The SDK has an answer for the program: whole, in pieces, or as it came (`with_raw_response`)."""
    call.sent()
    if isinstance(answer, (Stream, AsyncStream)):
        answer._iterator = _Pieces(answer._iterator, call)
        return
    call.heard(answer)
    call.end()


def _request(patches: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(options) if patches.active else None
        if call is None:
            return original(self, cast_to, options, **kwargs)
        try:
            answer = original(self, cast_to, options, **kwargs)
        except BaseException as error:
            call.end(error)
            raise
        _answered(call, answer)
        return answer

    return request


def _request_async(patches: Patches, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(original)
    async def request(self: Any, cast_to: Any, options: Any, **kwargs: Any) -> Any:
        call = _begin(options) if patches.active else None
        if call is None:
            return await original(self, cast_to, options, **kwargs)
        try:
            answer = await original(self, cast_to, options, **kwargs)
        except BaseException as error:
            call.end(error)
            raise
        _answered(call, answer)
        return answer

    return request


def _close(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def close(self: Any) -> None:
        _stop(self)
        original(self)

    return close


def _close_async(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(original)
    async def close(self: Any) -> None:
        _stop(self)
        await original(self)

    return close


def _stop(stream: Any) -> None:
    if isinstance(pieces := stream.__dict__.get("_iterator"), _Pieces):
        pieces.stop()


def listen(patches: Patches) -> None:
    """Puts our ears into the SDK."""
    patches.replace(SyncAPIClient, "request", functools.partial(_request, patches))
    patches.replace(AsyncAPIClient, "request", functools.partial(_request_async, patches))
    patches.replace(Stream, "close", _close)
    patches.replace(AsyncStream, "close", _close_async)


_installation = Installation(listen)


@hookimpl
def agl_install() -> Callable[[], None]:
    """Listens to every OpenAI client of this process; returns the undo."""
    return _installation.add()
