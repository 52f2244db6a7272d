"""Wires store, gateway, runner and algorithm together, and stays out of the way: `Trainer(...).fit(program, train=...)`."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agentlightning import plugins
from agentlightning.context import propagate_to
from agentlightning.errors import ConfigError, NothingToTrain, PolicyError, RunInUse, StoreError, UnknownAgent
from agentlightning.evaluation import Evaluation, evaluation_of
from agentlightning.gateway import Gateway
from agentlightning.gateways import Workers, gateway_resource, reachable
from agentlightning.loop import Loop
from agentlightning.plain import plain
from agentlightning.program import Program, program_of
from agentlightning.recorder import Recorder
from agentlightning.report import Display, write_results
from agentlightning.runner import Runner
from agentlightning.schema import Budget, Run, Step, new_id
from agentlightning.spool import Spooled
from agentlightning.store import open_store
from agentlightning.store.base import LEASE_S
from agentlightning.tasks import digest, tasks_of


class Algorithm(Protocol):
    """Anything with `run(loop)`. With `serve(loop)` too, `Trainer.evaluate` can use its policy without training it."""

    def run(self, loop: Loop) -> None: ...


class Result(msgspec.Struct):
    """What a `fit` brought."""

    run_id: str
    folder: Path
    """Where tables, curves and checkpoints are."""
    steps: list[Step]
    before: dict[str, Evaluation]
    """On `val`: `greedy` and `sampled` of a policy that is trained, else `val`; empty without `val`."""
    after: dict[str, Evaluation]
    details: Any = None
    """What the algorithm has to show besides: of prompt optimisation the winner, its diff and a table per example."""

    @property
    def trained_agents(self) -> list[str]:
        """Entries of `agents=` whose calls were chosen at least once."""
        return sorted({name for step in self.steps for name in step.ledger.get("chosen", {})})

    @property
    def checkpoint(self) -> Path | None:
        """The policy after the last step."""
        last = self.steps[-1].checkpoint if self.steps else None
        return Path(last) if last else None

    def save(self, folder: str | Path) -> Path:
        """Copies the trained policy to `folder`, which must not exist or be empty. Raises ConfigError, PolicyError."""
        target = Path(folder)
        if self.checkpoint is None or not self.checkpoint.is_dir():
            raise PolicyError("this run has no checkpoint: it trained no policy, or its folder was removed.")
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target} is not empty: choose another folder, so that nothing is overwritten.")
        return Path(shutil.copytree(self.checkpoint, target, dirs_exist_ok=True))


class Trainer:
    """Trains the agents of a program that it never changes.

    `store`: URL; everything is kept there, and an interrupted `fit` with the same settings goes on from its last finished
    step. `name`: of the run; `seed`: of tasks and sampling. `concurrency`: rollouts at a time in this process; 0 leaves them
    all to workers (`agl worker`). `timeout_s`: of one rollout, all its attempts taken separately. `budget`: of tokens, for
    calls of the policy. `address`: `host:port` of the gateway, port 0 for a free one; `advertise`: its URL as workers on
    other machines reach it. `processes`: each rollout runs in a process of its own, which is killed at its deadline.
    `plugins`: objects with hooks of `agentlightning.hooks`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        store: str = "sqlite:///agl.db",
        name: str = "fit",
        seed: int = 0,
        concurrency: int = 32,
        timeout_s: float | None = 600.0,
        max_attempts: int = 2,
        budget: Budget | None = None,
        address: str = "127.0.0.1:0",
        advertise: str = "",
        processes: bool = False,
        folder: str | Path | None = None,
        plugins: Iterable[object] = (),
    ) -> None:
        if not callable(getattr(algorithm, "run", None)):
            raise ConfigError(
                f"{algorithm!r} is no algorithm: use agl.algorithm('grpo', ...) or an object with run(loop)."
            )
        if concurrency < 0 or max_attempts < 1:
            raise ConfigError(
                f"concurrency={concurrency}, max_attempts={max_attempts}: the least that works is 0 and 1."
            )
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"address={address!r}: write host:port, such as 127.0.0.1:0.")
        self.algorithm, self.name, self.seed = algorithm, name, seed
        self.concurrency, self.timeout_s, self.max_attempts = concurrency, timeout_s, max_attempts
        self.budget, self.processes = budget, processes
        self._observers = _manager(plugins)
        self.store = open_store(store)
        self.folder = Path(folder) if folder else _folder_beside(store)
        self._sink = Spooled(self.store)
        self._gateway = Gateway(self.store, host=host, port=int(port), sink=self._sink)
        self._started, self._advertise = False, advertise

    @property
    def base_url(self) -> str:
        """For model clients that are built once, outside the rollout: the trace context says whose call it is."""
        if not self._started:
            self._gateway.start()
            self._started = True
        return f"{self._gateway.url}/v1"

    def fit(self, program: Callable[..., Any], train: Iterable[Any], val: Iterable[Any] | None = None) -> Result:
        """Trains on `train`; with `val`, also measures before and after. Blocks until done.

        Raises ConfigError and RolloutError for what cannot run, UnknownAgent and NothingToTrain when nothing would be
        learned, RunInUse when another process holds the same run.
        """
        checked, tasks = program_of(program), tasks_of(train, "train")
        held_out = tasks_of(val, "val") if val is not None else []
        config = self._config(checked, fit=digest([t.id for t in tasks]), val=digest([t.id for t in held_out]))
        with self._run(config) as run, self._session(run, checked) as session:
            loop = Loop(self.store, run, session.folder, train=tasks, val=held_out, **session.options(self, checked))
            session.close_policy_of(loop)
            self.algorithm.run(loop)
            result = Result(run.id, session.folder, loop.history, loop.before, loop.after, loop.details)
            write_results(result.folder, result.steps, result.before, result.after)
            session.display.end(result.before, result.after, result.folder)
        return result

    def evaluate(
        self,
        program: Callable[..., Any],
        tasks: Iterable[Any],
        *,
        n: int = 1,
        sampling: Mapping[str, Any] | None = None,
        name: str = "evaluate",
    ) -> Evaluation:
        """Runs each task `n` times on the algorithm's untrained policy. Raises what `fit` raises for what cannot run."""
        serve = getattr(self.algorithm, "serve", None)
        if serve is None:
            raise ConfigError(f"{type(self.algorithm).__name__} has no serve(loop): it cannot be evaluated by itself.")
        checked, rows = program_of(program), tasks_of(tasks, "tasks")
        config = self._config(checked, evaluate=digest([t.id for t in rows]), once=new_id())
        with self._run(config) as run, self._session(run, checked) as session:
            loop = Loop(self.store, run, session.folder, train=rows, **session.options(self, checked))
            session.close_policy_of(loop)
            serve(loop)
            return evaluation_of(name, loop.sample(rows, n, sampling=sampling, mode=name))

    def close(self) -> None:
        """Frees the gateway's port and the store; safe to call twice."""
        self._gateway.close()
        self._sink.close()
        self.store.close()

    def _config(self, program: Program, **more: str) -> dict[str, object]:
        described: dict[str, Any] = {}
        if dataclasses.is_dataclass(self.algorithm) and not isinstance(self.algorithm, type):
            described = {f.name: getattr(self.algorithm, f.name) for f in dataclasses.fields(self.algorithm)}
        return {
            "algorithm": type(self.algorithm).__name__,
            "knobs": plain({key: _stable(value) for key, value in described.items()}),
            "program": program.name,
            "seed": self.seed,
            **more,
        }

    @contextmanager
    def _run(self, config: dict[str, object]) -> Iterator[Run]:
        """Holds the run. A run that can never learn is `failed`; all else that stops it leaves it to be resumed."""
        owner = f"{socket.gethostname()}:{os.getpid()}:{new_id()[:8]}"
        run = self.store.begin_run(self.name, config, owner)
        try:
            with _Hold(self, run, owner):
                yield run
        except RunInUse:  # it is another's now
            raise
        except BaseException as error:
            hopeless = isinstance(error, (NothingToTrain, UnknownAgent, ConfigError))
            state = "failed" if hopeless else "paused"
            try:
                self.store.end_run(run.id, state, owner)
            except StoreError as trouble:
                error.add_note(f"Also, the run could not be marked as {state}: {trouble}")
            raise
        self.store.end_run(run.id, "finished", owner)

    @contextmanager
    def _session(self, run: Run, program: Program) -> Iterator[_Session]:
        """Gateway, recorder and runner, up for one run."""
        root = self.base_url.removesuffix("/v1")
        with ExitStack() as stack:
            session = _Session(stack, self.folder / run.id[:12])
            stack.callback(propagate_to(root))
            recorder = Recorder(self._sink)
            stack.callback(recorder.close)
            place = gateway_resource(self._advertise or reachable(root), self._gateway.secret)
            self.store.publish(run.id, [place], moved=True)
            stack.enter_context(session.display)
            if not self.concurrency:
                workers = Workers(self.store, run.id, program.name)
                session.begin, session.alive = workers.look, workers.look
                yield session
                return
            runner = Runner(
                self.store,
                program,
                gateway_url=root,
                recorder=recorder,
                run_id=run.id,
                concurrency=self.concurrency,
                worker=run.owner,
                barrier=self._gateway.flush,
                on_cancel=self._gateway.cancel,
                hooks=self._observers,
                processes=self.processes,
            )
            stack.callback(runner.stop, drain=False)  # one that never begins holds a loop too
            session.begin, session.alive = functools.partial(_begin, stack, runner), runner.check
            yield session


class _Session:
    """What is up during one run, and ends with it."""

    begin: Callable[[], object]
    """Starts whoever runs rollouts."""
    alive: Callable[[], object]
    """Raises when nobody can run them any more."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.display, self._stack = folder, Display(), stack

    def options(self, trainer: Trainer, program: Program) -> dict[str, Any]:
        return {
            "seed": trainer.seed,
            "timeout_s": trainer.timeout_s,
            "max_attempts": trainer.max_attempts,
            "budget": trainer.budget,
            "observers": trainer._observers,
            "watcher": self.display,
            "strays": lambda: trainer._gateway.stats.get("unattributed", 0),
            "check": program.check,
            "begin": self.begin,
            "alive": self.alive,
        }

    def close_policy_of(self, loop: Loop) -> None:
        self._stack.callback(loop.close)


def _begin(stack: ExitStack, runner: Runner) -> None:
    """Starts the runner; it is the first to stop."""
    stack.callback(runner.stop, drain=False)
    runner.start()


class _Hold:
    """Keeps the run ours while we work on it."""

    def __init__(self, trainer: Trainer, run: Run, owner: str) -> None:
        self._store, self._run_id, self._owner = trainer.store, run.id, owner
        self._over = threading.Event()
        self._taken: RunInUse | None = None
        self._thread = threading.Thread(target=self._renew, name="agl-run-hold", daemon=True)

    def _renew(self) -> None:
        while not self._over.wait(LEASE_S / 3):
            try:
                self._store.renew_run(self._run_id, self._owner)
            except RunInUse as error:
                self._taken = error
                return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._taken is not None:
            raise self._taken


def _folder_beside(store: str) -> Path:
    """`runs/` beside a database in a file, else in the working directory."""
    path = store.partition(":///")[2]
    return (Path(path).parent if store.startswith("sqlite") and path else Path()) / "runs"


def _stable(value: object) -> object:
    """Functions and classes by name: their `repr` changes from process to process."""
    return getattr(value, "__qualname__", None) or value


def _manager(observers: Iterable[object]) -> Any:
    return plugins.manager(*observers)
