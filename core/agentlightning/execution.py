"""Where programs run: async ones as tasks of one event loop, sync ones in reusable threads, all in this process.

A task can be cancelled. A thread cannot be killed: it is *written off*, which gives its place to a fresh one and leaves
it to end when it will. Whoever began a program hears of its end exactly once through `done`, written off or not; to
ignore what comes too late is the caller's business. `children.py` has an executor of child processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from agentlightning.outcomes import Failure

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""Seconds that tasks which a program has spawned and not awaited may still take, as part of its attempt."""

_spawned: contextvars.ContextVar[set[asyncio.Task[Any]] | None] = contextvars.ContextVar("agl_spawned", default=None)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: with a value or with an error."""

    value: Any = None
    error: BaseException | None = None
    failure: Failure | None = None
    """Instead of an error that cannot leave its process."""


@dataclass(eq=False, slots=True)
class Call:
    """One run of a program."""

    function: Callable[[], Any]
    is_async: bool
    context: contextvars.Context
    done: Callable[[Ended], None]
    gateway_url: str = ""
    task: asyncio.Task[None] | None = None
    thread: Worker | None = None
    spawned: set[asyncio.Task[Any]] = field(default_factory=set)
    cancelled: bool = False
    late: bool = False
    ended: bool = False


class Executor(Protocol):
    """What the runner asks of the place where programs run. Every method may be called from any thread."""

    @property
    def late(self) -> int:
        """Programs that were written off and still run."""

    def start(self) -> None: ...

    def begin(self, call: Call) -> None:
        """Runs `call` soon; never blocks."""

    def cancel(self, call: Call) -> None:
        """Asks the program to end; it may not listen."""

    def write_off(self, call: Call) -> str:
        """Stops waiting for it: its place is free again. Says what became of it."""

    def close(self) -> None:
        """Ends all that can be ended."""


class InProcess:
    """The executor of this module."""

    def __init__(self, concurrency: int) -> None:
        self._threads = Threads()
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(tracking_factory)
        # The default pool has cores + 4 threads: too few for `concurrency` async programs that use `to_thread`.
        self._pool = ThreadPoolExecutor(max(8, concurrency), thread_name_prefix="agl-to-thread")
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self._serve, name="agl-loop", daemon=True)
        self._lock = threading.Lock()
        self._late = 0
        self._closing = False

    @property
    def late(self) -> int:
        return self._late

    def start(self) -> None:
        self._thread.start()

    def begin(self, call: Call) -> None:
        if call.is_async:
            self._soon(functools.partial(self._create, call))
        else:
            call.thread = self._threads.run(functools.partial(self._in_thread, call))

    def cancel(self, call: Call) -> None:
        call.cancelled = True
        self._soon(functools.partial(self._cancel, call))

    def write_off(self, call: Call) -> str:
        with self._lock:
            if not call.ended:
                call.late = True
                self._late += 1
        if call.late:
            if call.thread is not None:
                call.thread.written_off = True
            self.cancel(call)
        return "it blocks the event loop or ignores its cancellation" if call.is_async else "its thread runs on"

    def close(self) -> None:
        """Late threads are left behind: they are daemons."""
        self._closing = True
        self._threads.close()
        if self._thread.is_alive():
            self._soon(self._loop.stop)
            self._thread.join(timeout=5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    def _soon(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nothing is left that could be told
            log.debug("the event loop of the runner has closed", exc_info=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # raised in a task that a program spawned
                log.warning("a background task of a program raised %r; the run goes on", error)
        self._loop.run_until_complete(self._wind_up())

    async def _wind_up(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
        await self._loop.shutdown_asyncgens()

    def _create(self, call: Call) -> None:
        call.context.run(_spawned.set, None)  # the program's own task is not one that it spawned
        call.task = self._loop.create_task(self._in_task(call), context=call.context)
        # A task that is cancelled before its first step never enters its body, so it cannot say itself that it ended.
        call.task.add_done_callback(lambda _: self._ended(call, Ended(error=asyncio.CancelledError())))
        if call.cancelled:
            call.task.cancel()

    def _cancel(self, call: Call) -> None:
        cancel_tasks(call)

    def _in_thread(self, call: Call) -> None:
        ended = attempted(functools.partial(call.context.run, call.function))
        if inspect.isawaitable(ended.value):
            # A plain function that hands back a coroutine, such as a lambda or a partial around an async one.
            call.function, call.thread = functools.partial(_same, ended.value), None
            self._soon(functools.partial(self._create, call))
            return
        self._ended(call, ended)

    async def _in_task(self, call: Call) -> None:
        self._ended(call, await awaited(call))

    def _ended(self, call: Call, ended: Ended) -> None:
        with self._lock:
            if call.ended:
                return
            call.ended = True
            self._late -= call.late
        call.done(ended)


async def awaited(call: Call) -> Ended:
    """Runs an async program as the current task of a loop that has `tracking_factory`, and what it spawned to its end."""
    _spawned.set(call.spawned)
    try:
        ended = Ended(value=await call.function())
    except BaseException as error:  # noqa: BLE001  SystemExit in a program ends the program, not the run
        ended = Ended(error=error)
    if not call.cancelled:
        await _linger(call)
    for task in call.spawned if call.cancelled else ():
        task.cancel()
    return ended


def cancel_tasks(call: Call) -> None:
    """The program's task and those that it spawned; in the loop's thread."""
    for task in (call.task, *call.spawned):
        if task is not None:
            task.cancel()


async def _linger(call: Call) -> None:
    """Calls of spawned tasks belong to the attempt. Those that outlast this may be a shared client's: they live on."""
    if call.spawned:
        try:
            await asyncio.wait(set(call.spawned), timeout=LINGER_S)
        except asyncio.CancelledError:
            call.cancelled = True


def attempted(function: Callable[[], Any]) -> Ended:
    """How a plain function ended."""
    try:
        return Ended(value=function())
    except BaseException as error:  # noqa: BLE001  SystemExit in a program ends the program, not the run
        return Ended(error=error)


async def _same(awaitable: Any) -> Any:
    return await awaitable


def tracking_factory(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], /, **options: Any
) -> asyncio.Task[Any]:
    """A plain task, remembered by the program that spawned it."""
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    context = options.get("context")
    spawned = _spawned.get() if context is None else context.get(_spawned)
    if spawned is not None:
        spawned.add(task)
        task.add_done_callback(spawned.discard)
    return task


class Worker(threading.Thread):
    """A daemon that runs what it is handed, until it is written off or told to end."""

    def __init__(self, home: Threads) -> None:
        super().__init__(name="agl-program", daemon=True)
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.written_off = False
        self._home = home

    def run(self) -> None:
        while (work := self.inbox.get()) is not None:
            work()
            del work  # or the last program's values would live until the next one
            if self.written_off or not self._home.take_back(self):
                return


class Threads:
    """As many threads as run at once; the last one used is used again first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._closed = False

    def run(self, work: Callable[[], None]) -> Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = Worker(self)
            worker.start()
        worker.inbox.put(work)
        return worker

    def take_back(self, worker: Worker) -> bool:
        """False: the pool is closed and the thread is to end."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
            return not self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.inbox.put(None)
