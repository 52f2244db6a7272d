"""Model calls of OpenAI Agents, heard where the SDK itself makes them: `Model.get_response` and `stream_response`.

Every model that the SDK can use is a subclass of `Model`: its own for chat completions and Responses, those of its
extensions, and the user's. Each has the two methods replaced by ones that open a span, set the scope while the model is
at work, and tell what came back; so does a class that is made later.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from agentlightning.context import Scope, current, surrounding
from agentlightning.listening import Patches, attend, guarded, hear_subclasses, relay
from agentlightning.schema import Span, SpanKind, leaf

_NO_ID = "__fake_id__"
"""What the SDK calls answers that have no id."""


def hear_models(patches: Patches, base: Any) -> None:
    """Hears the calls of every subclass of `base`, now and later."""
    whole, streamed = functools.partial(_whole, patches), functools.partial(_streamed, patches)
    hear_subclasses(patches, base, {"get_response": whole, "stream_response": streamed})


class Call:
    """A model call that has begun."""

    lasting = False

    def __init__(self, span: Span, scope: Scope) -> None:
        self._span = span
        self._recorder = scope.recorder
        self._said: dict[str, Any] = {}
        self.scope = scope.inside(span)
        """In force while the model is at work."""

    @guarded
    def note(self, usage: Any, response_id: object, model: object = None) -> None:
        """What came back. A stream that was not asked for its usage counts nothing."""
        found = {
            "gen_ai.response.id": response_id if response_id != _NO_ID else None,
            "gen_ai.response.model": model,
        }
        if usage is not None and usage.total_tokens:
            found["gen_ai.usage.input_tokens"] = usage.input_tokens
            found["gen_ai.usage.output_tokens"] = usage.output_tokens
        self._said |= {key: value for key, value in found.items() if value is not None}

    @guarded
    def hear(self, event: Any) -> None:
        """A response, or a step of a stream: the last one carries the whole response."""
        if not hasattr(event, "type"):
            self.note(getattr(event, "usage", None), getattr(event, "response_id", None))
        elif event.type in ("response.completed", "response.incomplete", "response.failed"):
            self._said["openai_agents.response.status"] = event.type.removeprefix("response.")
            self.note(event.response.usage, event.response.id, event.response.model)

    @guarded
    def end(self, error: BaseException | None = None) -> None:
        if isinstance(error, GeneratorExit):
            if "openai_agents.response.status" not in self._said:  # else all has been said
                self._said["agl.stopped_early"] = True
            error = None
        if self._recorder is not None:
            self._recorder.end(self._span, error=error, attributes=self._said)


@guarded
def _begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """None outside attempts, and for a model that asks another one: that is one call."""
    scope = surrounding()
    if scope is None or scope.recorder is None or current() is not scope:
        return None
    settings = kwargs.get("model_settings", args[2] if len(args) > 2 else None)
    name = str(getattr(model, "model", None) or type(model).__name__)
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": name,
        "gen_ai.provider.name": "openai" if type(model).__module__.startswith("agents.models.openai_") else None,
        "gen_ai.agent.name": leaf(scope.path) or None,
    }
    for key in ("temperature", "top_p", "max_tokens"):
        told[f"gen_ai.request.{key}"] = getattr(settings, key, None)
    given = {key: value for key, value in told.items() if value is not None}
    return Call(scope.recorder.start(SpanKind.LLM, name, attributes=given, scope=scope), scope)


def _whole(patches: Patches, original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(original)
    async def get_response(model: Any, *args: Any, **kwargs: Any) -> Any:
        call = _begin(model, args, kwargs) if patches.active else None
        return await attend(lambda: original(model, *args, **kwargs), call)

    return get_response


def _streamed(patches: Patches, original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(original)
    def stream_response(model: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        events = original(model, *args, **kwargs)
        return relay(events, lambda: _begin(model, args, kwargs)) if patches.active else events

    return stream_response
