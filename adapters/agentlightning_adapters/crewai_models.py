"""Model calls of CrewAI, heard where CrewAI itself makes them: `call` and `acall` of every `BaseLLM`.

Its native providers, LiteLLM and the user's own models are all subclasses. The span is open and its scope in force while
the model is at work, whatever it sends its request with. What came back is told by CrewAI's own event, which is emitted
inside the call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from crewai.llms.base_llm import BaseLLM

from agentlightning.context import Scope, current, reset_scope, set_scope, surrounding
from agentlightning.listening import Ear, Patches, attend, guarded, hear_subclasses
from agentlightning.schema import Span, SpanKind, leaf

_SETTINGS = ("temperature", "top_p", "seed", "max_tokens")
Begin = Callable[[Any, tuple[Any, ...], dict[str, Any]], Ear | None]


class Call:
    """A model call that is under way."""

    lasting = False

    def __init__(self, span: Span, around: Scope) -> None:
        self.span = span
        self.scope = around.inside(span)
        self.told: dict[str, Any] = {}
        opened(around)[span.id] = self

    def hear(self, answer: Any) -> None:
        """An answer is a text or a list of tool calls: it says nothing about the call."""

    @guarded
    def end(self, error: BaseException | None = None) -> None:
        opened(self.scope).pop(self.span.id, None)
        if self.scope.recorder is not None:
            self.scope.recorder.end(self.span, error=error, attributes=self.told)


def opened(scope: Scope) -> dict[str, Any]:
    """What is open in the attempt, by the id of our span: model calls, and what is around them."""
    return scope.memory.kept.setdefault((__name__, "open"), {})  # type: ignore[no-any-return]


@guarded
def _begin(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """None outside attempts, and for a model that asks another one: that is one call."""
    scope = surrounding()
    if scope is None or scope.recorder is None or current() is not scope:
        return None
    name = str(model.model)
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": name,
        "gen_ai.provider.name": getattr(model, "provider", None),
        "gen_ai.agent.name": leaf(scope.path) or None,
    }
    for key in _SETTINGS:
        told[f"gen_ai.request.{key}"] = getattr(model, key, None)
    given = {key: value for key, value in told.items() if value is not None}
    return Call(scope.recorder.start(SpanKind.LLM, name, attributes=given, scope=scope), scope)


def note_answer(event: Any) -> None:
    """CrewAI says what came back; which of this it knows depends on its release and on the provider."""
    scope = current()
    call = opened(scope).get(scope.span_id) if scope is not None else None
    if not isinstance(call, Call):
        return
    usage = getattr(event, "usage", None) or {}
    reason = getattr(event, "finish_reason", None)
    told = {
        "gen_ai.response.id": getattr(event, "response_id", None),
        "gen_ai.response.finish_reasons": [reason] if reason else None,
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
    }
    call.told |= {key: value for key, value in told.items() if value is not None}


def heard(patches: Patches, begin: Begin, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is heard by the ear that `begin` gives; one that only makes a coroutine, until that has run."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ear = begin(self, args, kwargs) if patches.active else None
        if ear is None:
            return original(self, *args, **kwargs)
        token = set_scope(ear.scope, lasting=ear.lasting)
        try:
            answer = original(self, *args, **kwargs)
        except BaseException as error:
            ear.end(error)
            raise
        finally:
            reset_scope(token)
        if inspect.iscoroutine(answer):
            return attend(lambda: answer, ear)
        ear.hear(answer)
        ear.end()
        return answer

    return method


def heard_async(
    patches: Patches, begin: Begin, original: Callable[..., Coroutine[Any, Any, Any]]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The same of an async method."""

    @functools.wraps(original)
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        ear = begin(self, args, kwargs) if patches.active else None
        return await attend(lambda: original(self, *args, **kwargs), ear)

    return method


def hear_models(patches: Patches) -> None:
    """Hears the calls of every model class, also of those that are made later."""
    methods = {
        "call": functools.partial(heard, patches, _begin),
        "acall": functools.partial(heard_async, patches, _begin),
    }
    hear_subclasses(patches, BaseLLM, methods)
