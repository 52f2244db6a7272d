"""The executor of child processes: each program has one of its own, which is killed with all that it started.

The child runs the program as its main thread and sends what it records, and at last how it ended, through a pipe; the
parent hands that to its own recorder, so the store has one writer and the child needs no key. A child leads a process group
of its own and ends that group when it is done, when it is told to, and when its parent is gone.

Programs travel by name, as `pickle` does it: whatever is sent must be importable in another process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from agentlightning import plugins
from agentlightning.child import Order, Over, decode_message, run_child
from agentlightning.context import current
from agentlightning.errors import RolloutError
from agentlightning.execution import Call, Ended, Threads
from agentlightning.outcomes import Failure
from agentlightning.recorder import Recorder
from agentlightning.schema import Outcome

log = logging.getLogger(__name__)

LINUX = "forkserver"
"""How children are made on Linux: copies of a process that has imported the program once. Elsewhere: `spawn`."""


def check_sendable(function: Callable[..., Any], name: str) -> None:
    """Raises RolloutError for a program that no other process can find by its name."""
    try:
        pickle.dumps(function)
    except Exception as error:
        module = getattr(function, "__module__", "?")
        raise RolloutError(
            f"the program {name} of {module} cannot be sent to a process of its own ({type(error).__name__}: {error}): "
            "define it with `def` at the top level of a module, or leave out processes=True."
        ) from error


@dataclass(eq=False)
class _Child:
    process: Any = None
    told: bool = False
    killed: bool = False


class Children:
    """Runs each program in a process of its own. `program` is imported ahead of time where children are copies."""

    late = 0
    """A killed process does not run on."""

    def __init__(self, program: Callable[..., Any], name: str, recorder: Recorder, method: str | None = None) -> None:
        check_sendable(program, name)
        method = method or (LINUX if sys.platform == "linux" else "spawn")
        self._context = multiprocessing.get_context(method)
        self._preload = sorted({"agentlightning.child", getattr(program, "__module__", "") or "__main__"})
        self._name, self._recorder = name, recorder
        self._threads = Threads()
        self._lock = threading.Lock()
        self._children: dict[Call, _Child] = {}

    def start(self) -> None:
        if self._context.get_start_method() == LINUX:
            self._context.set_forkserver_preload(self._preload)

    def begin(self, call: Call) -> None:
        with self._lock:
            self._children[call] = _Child()
        self._threads.run(functools.partial(self._attend, call))

    def cancel(self, call: Call) -> None:
        """SIGTERM for all its processes: async programs are cancelled, in others SystemExit is raised."""
        self._end(call, "told")

    def write_off(self, call: Call) -> str:
        self._end(call, "killed")
        return "its processes were killed"

    def close(self) -> None:
        with self._lock:
            running = list(self._children)
        for call in running:
            self.write_off(call)
        self._threads.close()

    def _end(self, call: Call, how: str) -> None:
        with self._lock:
            child = self._children.get(call)
            if child is None:
                return
            setattr(child, how, True)
            if child.process is not None:
                _signal(child.process, how)

    def _attend(self, call: Call) -> None:
        """The life of one child, in a thread of ours."""
        try:
            ended = self._live(call)
        except Exception as error:  # noqa: BLE001  whatever happens to the child is how its program ended
            ended = Ended(error=error)
        with self._lock:
            del self._children[call]
        call.done(ended)

    def _live(self, call: Call) -> Ended:
        here, there = self._context.Pipe()
        with here:
            process = self._start(call, there)
            try:
                over = self._listen(here, process)
            finally:
                _signal(process, "killed")
                process.join()
        code = process.exitcode
        process.close()
        if over is None:
            return _died(code)
        return Ended(value=over.rewards, failure=over.failure)

    def _start(self, call: Call, there: Connection) -> Any:
        with there:
            order = self._order(call)
            process = self._context.Process(target=run_child, args=(there, order), name="agl-rollout")  # type: ignore[attr-defined]
            with self._lock:
                child = self._children[call]
                if child.told or child.killed:
                    raise asyncio.CancelledError
                process.start()
                child.process = process
        return process

    def _order(self, call: Call) -> Order:
        scope = call.context.run(current)
        assert scope is not None
        try:
            program = pickle.dumps(call.function)
        except Exception as error:
            raise RolloutError(
                f"the task or a resource of {self._name} cannot be sent to a process of its own "
                f"({type(error).__name__}: {error}): make it plain data, or leave out processes=True."
            ) from error
        return Order(program, self._name, call.is_async, scope.attempt_id, call.gateway_url, plugins.listening())

    def _listen(self, here: Connection, process: Any) -> Over | None:
        """None when the child died without a word."""
        while True:
            if here not in wait([here, process.sentinel]):
                return None
            try:
                message = decode_message(here.recv_bytes())
            except (EOFError, OSError):
                return None
            if isinstance(message, Over):
                return message
            for span in message.spans:
                self._recorder.pass_on(span)
            for reward in message.rewards:
                self._recorder.pass_on(reward)


def _signal(process: Any, how: str) -> None:
    """To the whole group of the child; to the child alone while it has none yet."""
    if os.name != "posix":
        process.kill()
        return
    number = signal.SIGKILL if how == "killed" else signal.SIGTERM
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        if process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _died(code: int | None) -> Ended:
    if code is not None and code < 0:
        text = (
            f"the program's process was ended by {signal.Signals(-code).name}: it ran out of memory, crashed, or was "
            "killed from outside."
        )
        return Ended(failure=Failure(Outcome.INFRA_ERROR, "ChildDied", text))
    text = (
        f"the program's process ended with exit code {code} before the program did: it called os._exit, or its module "
        "cannot be imported in another process; see its standard error."
    )
    return Ended(failure=Failure(Outcome.AGENT_ERROR, "ChildDied", text))
