"""`agl runs`: the runs of a store, and the rollouts of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agentlightning.cli.output import SHORT, ago, console, line, opened, print_json

if TYPE_CHECKING:
    from agentlightning.schema import Episode, Run, Step
    from agentlightning.store.base import Store

NEWEST = 50
"""Rollouts of a run that a person is shown; `--json` gives all."""


def print_runs(url: str, as_json: bool) -> None:
    with opened(url) as store:
        found = [(run, store.steps(run.id)) for run in store.runs()]
    if as_json:
        print_json([_described(run, steps) for run, steps in found])
    elif not found:
        console().print(f"No runs in {url} yet: a Trainer with this store begins one.", markup=False)
    else:
        _print_table(found)


def print_run(store: Store, run: Run, as_json: bool) -> None:
    """One run with its rollouts."""
    steps, rollouts = store.steps(run.id), store.rollouts(run.id)
    if as_json:
        print_json(_described(run, steps) | {"rollouts": rollouts, "all_steps": steps})
        return
    _print_table([(run, steps)])
    if len(rollouts) > NEWEST:
        console().print(f"the newest {NEWEST} of {len(rollouts)} rollouts (--json gives all):")
    _print_rollouts(store.episodes([rollout.id for rollout in rollouts[-NEWEST:]]))


def _described(run: Run, steps: list[Step]) -> dict[str, Any]:
    described: dict[str, Any] = msgspec.to_builtins(run)
    return described | {"steps": len(steps), "metrics": steps[-1].metrics if steps else {}}


def _print_table(found: list[tuple[Run, list[Step]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "name", "state", "steps", "last step", "begun", "held by", box=None, pad_edge=False)
    for run, steps in found:
        metrics = steps[-1].metrics if steps else {}
        last = "  ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[:4])
        cells = (run.id[:SHORT], run.name, run.state, str(len(steps)), last, ago(run.created_ns), run.owner)
        table.add_row(*(Text(line(cell)) for cell in cells))
    console().print(table)


def _print_rollouts(episodes: list[Episode]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("rollout", "step", "mode", "state", "outcome", "tries", "calls", "rewards", "task", box=None)
    for episode in episodes:
        rollout = episode.rollout
        rewards = "  ".join(f"{one.name} {one.value:.4g}" for one in episode.rewards if one.target == "rollout")
        counts = (str(rollout.attempts), str(len(episode.completions)))
        cells = (
            rollout.id[:SHORT],
            str(rollout.step),
            rollout.mode,
            rollout.state.value,
            rollout.outcome or "",
            *counts,
        )
        table.add_row(*(Text(line(cell)) for cell in (*cells, rewards)), Text(line(rollout.task, 60)))
    console().print(table)
