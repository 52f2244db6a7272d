"""What runs in a child process: one program, then the end of everything that it started. See `children.py`."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from agentlightning import plugins
from agentlightning.context import Scope, propagate_to, set_scope
from agentlightning.errors import RewardError, RolloutError
from agentlightning.execution import Call, Ended, attempted, awaited, cancel_tasks, tracking_factory
from agentlightning.finishing import rewards_of
from agentlightning.outcomes import Failure, failure_of
from agentlightning.recorder import Recorder
from agentlightning.schema import Outcome, Reward, Span, decoder, encode


class Happened(msgspec.Struct, tag=True):
    """What a program recorded."""

    spans: list[Span] = []
    rewards: list[Reward] = []


class Over(msgspec.Struct, tag=True):
    """How it ended: with what it returned, as named rewards, or with a failure."""

    rewards: dict[str, float] | None = None
    failure: Failure | None = None


decode_message: Callable[[bytes], Happened | Over] = decoder(Happened | Over)


@dataclass(frozen=True)
class Order:
    """What a child is asked to run."""

    program: bytes
    """A function without arguments, pickled."""
    name: str
    is_async: bool
    attempt_id: str
    gateway_url: str
    adapters: list[str]


class Told(SystemExit):
    """Raised in a program that is to end."""


class _Pipe:
    """The store of a child's recorder."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def add(self, spans: Sequence[Span] = (), completions: Sequence[Any] = (), rewards: Sequence[Reward] = ()) -> None:
        self._pipe.send_bytes(encode(Happened(list(spans), list(rewards))))


def run_child(pipe: Connection, order: Order) -> None:
    """The whole life of a child."""
    if os.name == "posix":
        os.setsid()
        signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_die_with_parent, args=(pipe,), daemon=True).start()
    recorder = Recorder(_Pipe(pipe), linger_s=0.0)
    over = _over(_run(order, recorder), order)
    if os.name == "posix":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on nothing is left to be told
    try:
        recorder.close()
    except Exception as trouble:  # noqa: BLE001  it becomes the outcome
        over = Over(failure=over.failure or failure_of(trouble))
    pipe.send_bytes(encode(over))
    _die()


_told = threading.Event()


def _end(number: int, frame: object) -> NoReturn:
    _told.set()
    raise Told("the program was told to end")


def _die_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        _die()


def _die() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _run(order: Order, recorder: Recorder) -> Ended:
    context = contextvars.copy_context()
    ended = attempted(functools.partial(_prepare, order, context, recorder))
    if ended.error is not None:
        return ended
    call = Call(ended.value, order.is_async, context, lambda ended: None)
    if not call.is_async:
        ended = attempted(functools.partial(context.run, call.function))
        if not inspect.isawaitable(ended.value):
            return ended
        call.function = functools.partial(_same, ended.value)
    return attempted(functools.partial(_in_loop, call))


def _prepare(order: Order, context: contextvars.Context, recorder: Recorder) -> Any:
    """The program, with everything around it as it is in its parent."""
    if order.gateway_url:
        propagate_to(order.gateway_url)
    try:
        program = pickle.loads(order.program)
    except Exception as error:
        raise RolloutError(
            f"{order.name} cannot be found in another process ({type(error).__name__}: {error}): put it, and the types of "
            "its tasks, into a module that can be imported, or leave out processes=True."
        ) from error
    for name in order.adapters:
        plugins.install(name)
    context.run(set_scope, Scope(order.attempt_id, recorder=recorder))
    return program


async def _same(awaitable: Any) -> Any:
    return await awaitable


def _in_loop(call: Call) -> Any:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(tracking_factory)
    asyncio.set_event_loop(loop)

    def cancel() -> None:
        _told.set()
        call.cancelled = True
        cancel_tasks(call)

    if os.name == "posix":
        loop.add_signal_handler(signal.SIGTERM, cancel)
    call.task = loop.create_task(_keep(call), context=call.context)
    loop.run_until_complete(call.task)
    ended: Ended = call.task.result()  # type: ignore[assignment]
    if ended.error is not None:
        raise ended.error
    return ended.value


async def _keep(call: Call) -> Any:
    return await awaited(call)


def _over(ended: Ended, order: Order) -> Over:
    if _told.is_set() and isinstance(ended.error, Told | asyncio.CancelledError):
        return Over(failure=Failure(Outcome.INFRA_ERROR, "Told", "the program's process was told to end (SIGTERM)."))
    if ended.error is not None:
        return Over(failure=failure_of(ended.error, order.gateway_url))
    try:
        rewards = rewards_of(ended.value, order.attempt_id, order.name)
    except RewardError as refused:
        return Over(failure=failure_of(refused))
    return Over(None if ended.value is None else {reward.name: reward.value for reward in rewards})
