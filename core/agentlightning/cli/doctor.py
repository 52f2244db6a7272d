"""`agl doctor`: one rollout of a program, and what keeps it from being trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from agentlightning.cli.output import console, print_json
from agentlightning.errors import ConfigError
from agentlightning.loop import Loop, Serving
from agentlightning.rehearsal import Fixed, Rehearsal, rehearse

STYLES = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "fault": ("fault", "red")}


@dataclass(frozen=True)
class Answering:
    """Who answers the model calls: a server, a model that is served here, or a stand-in."""

    endpoint: str
    model: str
    api_key: str
    reply: str

    @property
    def name(self) -> str:
        return self.endpoint or self.model or f"a stand-in that says {self.reply!r}"

    def serving(self, agents: list[str]) -> Callable[[Loop], Serving]:
        """For `rehearse`. Raises ConfigError and PluginError when it is called."""
        if self.endpoint:
            return lambda loop: loop.serve(Fixed(self.endpoint, self.model or "default", self.api_key))
        if self.model:
            return lambda loop: _algorithm(self.model, agents).serve(loop)
        from agentlightning.standin import StandIn

        return lambda loop: loop.serve(StandIn(self.reply))


def _algorithm(model: str, agents: list[str]) -> Any:
    from agentlightning import plugins

    return plugins.algorithm("grpo", model=model, agents=agents)


def task_of(text: str) -> Any:
    """`text` as a task: JSON, or `@file` with JSON or JSON lines. Raises ConfigError."""
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text("utf-8")
            first = text.strip().partition("\n")[0]
            return json.loads(first if _is_json(first) else text)
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f'--task is no JSON ({error}): write --task \'{{"question": "..."}}\' or --task @FILE.'
        ) from error


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def rehearsed(program: str, task: str, agents: list[str], answering: Answering, timeout: float) -> Rehearsal:
    return rehearse(program, task_of(task), answering.serving(agents), selectors=agents, timeout_s=timeout)


def print_findings(program: str, task: str, agents: str, answering: Answering, timeout: float, as_json: bool) -> None:
    selectors = [name.strip() for name in agents.split(",") if name.strip()]
    if not selectors:
        raise ConfigError("--agents names none: give names, paths or globs, such as --agents writer,team/*.")
    found = rehearsed(program, task, selectors, answering, timeout)
    if as_json:
        print_json({"program": program, "answered_by": answering.name, "findings": found.findings})
    else:
        _print_table(found, answering)
    if found.faults:
        raise typer.Exit(1)


def _print_table(found: Rehearsal, answering: Answering) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in found.findings:
        word, style = STYLES[finding.level]
        text = Text(finding.what.strip())
        if finding.cure:
            text.append(f"\n{finding.cure}", style="bold")
        table.add_row(Text(word, style=style), Text(finding.code), text)
    console().print(table)
    faults = len(found.faults)
    verdict = "nothing keeps this program from being trained" if not faults else f"{faults} to mend"
    console().print(f"{verdict}; answered by {answering.name}", markup=False)
