"""`agl agents`: who makes model calls in a program."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import typer

from agentlightning.cli.doctor import Answering, rehearsed
from agentlightning.cli.output import console, line, print_json
from agentlightning.rehearsal import Rehearsal
from agentlightning.schema import Completion, SpanKind, leaf


def print_agents(program: str, task: str, answering: Answering, timeout: float, as_json: bool) -> None:
    found = rehearsed(program, task, ["*"], answering, timeout)
    rows = described(found)
    if as_json:
        print_json({"program": program, "answered_by": answering.name, "agents": rows, "faults": found.faults})
    else:
        _print_table(rows, found)
    if not rows:
        raise typer.Exit(1)


def described(found: Rehearsal) -> list[dict[str, Any]]:
    """One entry for each agent, in the order in which they first spoke."""
    calls: defaultdict[str, list[Completion]] = defaultdict(list)
    for call in found.calls:
        calls[call.path].append(call)
    spans = found.episode.spans if found.episode else []
    return [
        {
            "path": path,
            "name": leaf(path),
            "calls": len(made),
            "prompt_tokens": sum(len(call.prompt_ids) for call in made),
            "response_tokens": sum(len(call.response_ids) for call in made),
            "tools": sorted({s.name for s in spans if s.kind == SpanKind.TOOL and s.path == path}),
        }
        for path, made in calls.items()
    ]


def _print_table(rows: list[dict[str, Any]], found: Rehearsal) -> None:
    from rich.table import Table
    from rich.text import Text

    for finding in found.faults:
        console().print(Text(f"{finding.code}: {finding.what} {finding.cure}".strip(), style="red"))
    if not rows:
        return
    table = Table("agent", "path", "calls", "tokens read", "sampled", "tools", box=None, pad_edge=False)
    for row in rows:
        counts = (str(row["calls"]), str(row["prompt_tokens"]), str(row["response_tokens"]))
        table.add_row(*(Text(line(cell)) for cell in (row["name"], row["path"], *counts, " ".join(row["tools"]))))
    console().print(table)
