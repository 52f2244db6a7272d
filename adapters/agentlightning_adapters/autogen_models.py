"""Model calls of AutoGen, as its model clients make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.context import Scope, current, surrounding
from agentlightning.listening import Ear, guarded
from agentlightning.schema import Span, SpanKind, leaf

_SETTINGS = ("temperature", "top_p", "max_tokens", "seed")


class Call:
    """A model call that has begun."""

    lasting = False

    def __init__(self, span: Span, scope: Scope, manager: Ear | None) -> None:
        self._span = span
        self._manager = manager
        self._said: dict[str, Any] = {}
        self.scope = scope.inside(span)

    @guarded
    def hear(self, answer: Any) -> None:
        """The result, the last of a stream. One that was not asked for its usage counts nothing."""
        usage = getattr(answer, "usage", None)
        if usage is None:
            return
        self._said["gen_ai.response.finish_reasons"] = [answer.finish_reason]
        if usage.prompt_tokens or usage.completion_tokens:
            self._said["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            self._said["gen_ai.usage.output_tokens"] = usage.completion_tokens
        if answer.cached:
            self._said["autogen.cached"] = True

    @guarded
    def end(self, error: BaseException | None = None) -> None:
        if isinstance(error, GeneratorExit):
            if not self._said:
                self._said["agl.stopped_early"] = True
            error = None
        if self.scope.recorder is not None:
            self.scope.recorder.end(self._span, error=error, attributes=self._said)
        if self._manager is not None:
            self._manager.end(error)


def begin_call(client: Any, given: Mapping[str, Any], manager: Callable[[], Ear] | None) -> Call | None:
    """None for a client that asks another one, such as a cache: that is one call."""
    scope = surrounding()
    if scope is None or scope.recorder is None or current() is not scope:
        return None
    led = manager() if manager is not None else None
    if led is not None:
        scope = led.scope
    asked = {**(getattr(client, "_create_args", None) or {}), **(given.get("extra_create_args") or {})}
    name = str(asked.get("model") or type(client).__name__)
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": name,
        "gen_ai.provider.name": "openai" if type(client).__module__.startswith("autogen_ext.models.openai") else None,
        "gen_ai.agent.name": leaf(scope.path) or None,
    }
    told |= {f"gen_ai.request.{key}": asked.get(key) for key in _SETTINGS}
    said = {key: value for key, value in told.items() if value is not None}
    assert scope.recorder is not None  # that of the scope around
    return Call(scope.recorder.start(SpanKind.LLM, name, attributes=said, scope=scope), scope, led)
