"""What a program says about itself: rewards, notes, objects, errors, and operations worth seeing in the trace.

Outside an attempt nothing is recorded, so the same program runs in production unchanged; what it says is checked all
the same, so that a mistake shows before training does.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from agentlightning.context import Scope, Token, current, reset_scope, set_scope
from agentlightning.errors import ConfigError
from agentlightning.schema import Span, SpanKind, finite

F = TypeVar("F", bound=Callable[..., Any])


def emit_reward(
    value: float | Mapping[str, float],
    *,
    name: str = "reward",
    target: str = "rollout",
) -> None:
    """Gives a reward, final or intermediate.

    `value`: a finite number, or several by name (`{"correct": 1.0, "style": 0.3}`; `name` is then not used).
    `target`: `rollout`; `agent:<path>`; `call`, the latest model call of the agent that is running here, else the
    latest one around it; or `call:<id>` of a completion or span.

    Raises RewardError for a value that is not a finite number, and ConfigError for a target that does not exist.
    """
    items = dict(value) if isinstance(value, Mapping) else {name: value}
    checked = {str(key): finite(number, f"reward {key!r}") for key, number in items.items()}
    _check_target(target)
    scope = current()
    if scope is None or scope.recorder is None:
        return
    place = _latest_call(scope) if target == "call" else target
    for key, number in checked.items():
        scope.recorder.reward(number, name=key, target=place)


def _check_target(target: str) -> None:
    known = target in ("rollout", "call") or any(
        target.startswith(kind) and target != kind for kind in ("agent:", "call:")
    )
    if not known:
        raise ConfigError(f"reward target {target!r} is unknown: use rollout, agent:<path>, call or call:<id>.")


def _latest_call(scope: Scope) -> str:
    call = scope.memory.latest_call(scope.span_id)
    if call is None:
        raise ConfigError(
            "target='call', but no adapter has seen a model call in this attempt: hand agl.callback(...) to the "
            "framework, emit after the call, or name it with target='call:<id>'."
        )
    return f"call:{call}"


def emit_annotation(values: Mapping[str, Any]) -> None:
    """Notes facts about what is happening: any keys and values. Raises ConfigError for what is no mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"an annotation is a mapping of names to values, not {type(values).__name__}.")
    _emit(SpanKind.ANNOTATION, "annotation", values)


def emit_message(text: str, *, attributes: Mapping[str, Any] | None = None) -> None:
    """Writes a line into the trace. Raises ConfigError for what is no text."""
    if not isinstance(text, str):
        raise ConfigError(f"a message is text, not {type(text).__name__}: use emit_object for other values.")
    _emit(SpanKind.MESSAGE, "message", {**(attributes or {}), "message": text})


def emit_object(value: object, *, name: str = "object") -> None:
    """Keeps a value as JSON-safe data; what JSON cannot hold becomes its `repr`, cut to 2,000 characters."""
    _emit(SpanKind.OBJECT, name, {"object": value})


def emit_exception(error: BaseException) -> None:
    """Records an exception that the program handles itself. Raises ConfigError for what is no exception."""
    if not isinstance(error, BaseException):
        raise ConfigError(f"{type(error).__name__} is no exception: emit_message and emit_object take other values.")
    attributes = {
        "exception.type": type(error).__qualname__,
        "exception.message": _text(error),
        "exception.stacktrace": "".join(traceback.format_tb(error.__traceback__))[-8000:],
    }
    _emit(SpanKind.EXCEPTION, type(error).__name__, attributes, error)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  a user's __str__ may do anything
        return f"<str() failed: {type(broken).__name__}>"


def _emit(kind: SpanKind, name: str, attributes: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
    scope = current()
    if scope is not None and scope.recorder is not None:
        scope.recorder.event(kind, name, attributes=attributes, error=error)


class Operation:
    """One step of the program in the trace; what `operation` returns. `output` may be set inside the block."""

    def __init__(self, name: str, inputs: Any = None) -> None:
        self.name = name
        self.input = inputs
        self.output: Any = None
        self._open: tuple[Span, Token] | None = None

    def __enter__(self) -> Self:
        if self._open is not None:
            raise ConfigError(f"operation {self.name!r} is open already: make a new operation(...) for each block.")
        scope = current()
        if scope is not None and scope.recorder is not None:
            given = {} if self.input is None else {"input": self.input}
            span = scope.recorder.start(SpanKind.OPERATION, self.name, attributes=given)
            self._open = span, set_scope(scope.inside(span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is None:
            return
        (span, token), self._open = self._open, None
        reset_scope(token)
        if token.scope.recorder is not None:
            given = {} if self.output is None else {"output": self.output}
            token.scope.recorder.end(span, error=error, attributes=given)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """The function, recorded each time it runs."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{self.name} is a generator: use `with operation({self.name!r}):` inside it instead.")
        wrap = _awaited if inspect.iscoroutinefunction(function) else _called
        return cast(F, functools.wraps(function)(wrap(self.name, function)))


def operation(name: str | Callable[..., Any], *, input: Any = None) -> Any:
    """`@operation`, `@operation("name")`, `with operation("name") as op: ... op.output = x`, and `async with` too.

    Records a span with the arguments and the result (an error, if it raises), around sync and async functions alike.
    Raises ConfigError for generator functions, whose span would have no clear end.
    """
    if isinstance(name, str):
        return Operation(name, input)
    if not callable(name):
        raise ConfigError(f"operation takes a name or a function, not {type(name).__name__}.")
    return Operation(getattr(name, "__name__", type(name).__name__))(name)


def _called(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return function(*args, **kwargs)
        with Operation(name, _arguments(function, args, kwargs)) as step:
            step.output = function(*args, **kwargs)
            return step.output

    return called


def _awaited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return await function(*args, **kwargs)
        with Operation(name, _arguments(function, args, kwargs)) as step:
            step.output = await function(*args, **kwargs)
            return step.output

    return awaited


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; a call that does not fit is left to fail by itself."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {"args": args, "kwargs": kwargs}
    return {name: value for name, value in bound.items() if name not in ("self", "cls")}
