"""One rollout of a program, with everything around it as in training, and what it shows.

The store is a folder that is thrown away. Nothing is refused: whatever goes wrong becomes a finding.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.context import propagate_to
from agentlightning.doctor import CODES, Finding, examine
from agentlightning.errors import AgentLightningError, ConfigError, PluginError, RolloutError
from agentlightning.gateway import Gateway
from agentlightning.loop import Loop, Serving
from agentlightning.outcomes import describe
from agentlightning.program import Program, program_of
from agentlightning.recorder import Recorder
from agentlightning.runner import Runner
from agentlightning.schema import Budget, Completion, Endpoint, Episode, Outcome, Route, new_id
from agentlightning.store import open_store
from agentlightning.tasks import tasks_of
from agentlightning.trajectory import USABLE, collect


class Rehearsal(msgspec.Struct):
    """What one rollout showed."""

    findings: list[Finding]
    episode: Episode | None = None
    """None where none could be run."""

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    @property
    def calls(self) -> list[Completion]:
        return self.episode.completions if self.episode else []


class Fixed:
    """A server of somebody else's as a policy; it never learns."""

    version = 1

    def __init__(self, base_url: str, model: str, api_key: str = "none", context: int = 1 << 30) -> None:
        self._endpoint = Endpoint(base_url.rstrip("/"), api_key, (Route("*", model, True),), context)

    def start(self) -> Endpoint:
        return self._endpoint

    def save(self, folder: Path) -> None:
        """Its weights are not ours."""

    def load(self, folder: Path) -> None:
        """Nor to be changed."""

    def close(self) -> None:
        """It goes on."""


def find_program(where: str) -> Program:
    """`MODULE:FUNCTION` or `FILE.py:FUNCTION`, seen from the working directory. Raises PluginError when it is not there,
    RolloutError when it cannot be run."""
    name, _, attribute = where.rpartition(":")
    if not name or not attribute:
        raise PluginError(f"{where!r} names no program: write MODULE:FUNCTION, such as my_agents.sql:solve.")
    try:
        module = _file(Path(name)) if name.endswith(".py") else _module(name)
        for part in attribute.split("."):
            module = getattr(module, part)
    except AttributeError as error:
        raise PluginError(f"{name} has no {attribute!r} ({error}): correct the name after the colon.") from error
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{name} cannot be imported. Run `python -c 'import {name}'` here until it works:\n{describe(error)}"
        ) from error
    if not callable(module):
        raise RolloutError(
            f"{where} is a {type(module).__name__}, not a function: name the function that runs one task."
        )
    return program_of(module)


def _module(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def rehearse(
    program: str | Callable[..., Any] | Program,
    task: Any,
    serve: Callable[[Loop], Serving],
    *,
    selectors: Sequence[str] = ("*",),
    timeout_s: float | None = 120.0,
    budget: Budget | None = None,
) -> Rehearsal:
    """Runs `program` once. `serve` starts what answers and hands it to `loop.serve`."""
    try:
        checked = find_program(program) if isinstance(program, str) else program_of(program)
    except AgentLightningError as error:
        code = "AGL-D01" if isinstance(error, PluginError) else "AGL-D02"
        return Rehearsal([Finding(code, "fault", str(error))])
    findings = [_fine("AGL-D01"), _fine("AGL-D02")]
    with tempfile.TemporaryDirectory(prefix="agl-doctor-") as folder, ExitStack() as stack:
        try:
            episode, strays = _run(stack, Path(folder), checked, task, serve, timeout_s, budget)
        except ConfigError as error:
            return Rehearsal([findings[0], Finding("AGL-D02", "fault", str(error))])
        except AgentLightningError as error:
            return Rehearsal([*findings, Finding("AGL-D03", "fault", str(error))])
        return Rehearsal([*findings, *_ended(episode), *_walked(episode, strays, selectors)], episode)


def _run(
    stack: ExitStack,
    folder: Path,
    program: Program,
    task: Any,
    serve: Callable[[Loop], Serving],
    timeout_s: float | None,
    budget: Budget | None,
) -> tuple[Episode, int]:
    """The rollout, and how many calls named no attempt."""
    store = open_store(f"sqlite:///{folder}/doctor.db")
    stack.callback(store.close)
    run = store.begin_run("doctor", {}, f"doctor:{os.getpid()}:{new_id()[:8]}")
    gateway = Gateway(store).start()
    stack.callback(gateway.close)
    stack.callback(propagate_to(gateway.url))
    recorder = Recorder(store)
    stack.callback(recorder.close)
    runner = Runner(
        store,
        program,
        gateway_url=gateway.url,
        recorder=recorder,
        run_id=run.id,
        concurrency=1,
        barrier=gateway.flush,
        on_cancel=gateway.cancel,
    )
    stack.callback(runner.stop, drain=False)
    tasks = tasks_of([task], "task")
    loop = Loop(
        store,
        run,
        folder,
        train=tasks,
        timeout_s=timeout_s,
        max_attempts=1,
        budget=budget,
        check=program.check,
        begin=runner.start,
        alive=runner.check,
    )
    policy = serve(loop)
    stack.callback(policy.close)
    episode = loop.rehearse(tasks[0])
    gateway.flush()
    return episode, gateway.stats.get("unattributed", 0)


def _ended(episode: Episode) -> list[Finding]:
    """How the program ended."""
    outcome, error = episode.rollout.outcome, (episode.attempt.error if episode.attempt else None) or ""
    codes = {Outcome.TIMEOUT: "AGL-D05", Outcome.GRADER_ERROR: "AGL-D06", Outcome.TRUNCATED: "AGL-D25"}
    cures = {
        Outcome.TIMEOUT: "Raise the time limit, or make the program faster.",
        Outcome.GRADER_ERROR: "Return or emit finite numbers, or None when there is no reward.",
        Outcome.TRUNCATED: "Shorten what agents are told, raise the budget, or use a model with a longer context.",
        Outcome.MODEL_ERROR: "A model call failed: see the checks of the calls below.",
        Outcome.INFRA_ERROR: "See the log: store, gateway or policy failed.",
    }
    if outcome is Outcome.OK:
        return [_fine(code) for code in ("AGL-D04", "AGL-D05", "AGL-D06")]
    name = outcome.value if outcome else "unknown"
    told = f"the program ended as {name}.\n{error}".strip()
    level = "warning" if outcome in USABLE else "fault"
    cure = cures.get(outcome, "Mend the program; run it by itself on this task.") if outcome else ""
    return [Finding(codes.get(outcome, "AGL-D04") if outcome else "AGL-D04", level, told, cure)]  # type: ignore[arg-type]


def _walked(episode: Episode, strays: int, selectors: Sequence[str]) -> list[Finding]:
    """What the way of its calls shows; the end of the program is told already."""
    ledger = collect([episode], selectors).ledger
    ledger.seen += strays
    ledger.drop("unattributed", strays)
    for reason in [reason for reason in ledger.dropped if reason.startswith("outcome_")]:
        del ledger.dropped[reason]
    found = examine(ledger, ledger.agents, selectors)
    if episode.rollout.outcome in USABLE:
        return found
    return [finding for finding in found if finding.level != "ok" or finding.code < "AGL-D30"]


def _fine(code: str) -> Finding:
    return Finding(code, "ok", f"{CODES[code]}.")
