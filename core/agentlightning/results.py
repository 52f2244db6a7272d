"""What remains of a run for people: the before/after table and the learning curve, as CSV and PNG beside the store.

The same numbers are in the store. Nothing that is missing is shown or written as 0.
"""

from __future__ import annotations

import csv
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.evaluation import Evaluation
from agentlightning.intervals import Interval, interval, paired, per_task, t_interval, unpaired
from agentlightning.schema import Step

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger(__name__)

CURVE, EVALUATIONS, TASKS = "learning_curve", "evaluations.csv", "tasks.csv"
"""Names of the files that `write_results` makes; the curve is a `.csv` and a `.png`."""


def write_results(
    folder: Path, steps: Sequence[Step], before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]
) -> list[Path]:
    """Writes learning curve and tables into `folder`; returns the files. Writing again replaces them."""
    folder.mkdir(parents=True, exist_ok=True)
    written = learning_curve([{"step": step.number, **step.metrics} for step in steps], folder)
    rows = []
    for row in compared(before, after):
        flat = {"what": row["what"], "tasks": row["tasks"]}
        for key in ("before", "after", "change"):
            flat |= {key: row[key].mean, f"{key}_low": row[key].low, f"{key}_high": row[key].high}
        rows.append(flat)
    if rows:
        written.append(write_csv(folder / EVALUATIONS, rows))
    tasks = task_rows(before, after)
    if tasks:
        written.append(write_csv(folder / TASKS, tasks))
    return written


def task_rows(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """Each task's mean reward before and after: an average may hide what got worse."""
    rows = []
    for name in {**before, **after}:
        old, new = (per_task(side[name].rewards) if name in side else {} for side in (before, after))
        rows += [
            {"evaluation": name, "task": t, "before": old.get(t), "after": new.get(t)} for t in sorted({**old, **new})
        ]
    return rows


def learning_curve(rows: Sequence[Mapping[str, float | None]], folder: Path) -> list[Path]:
    """`learning_curve.csv` with every column of `rows` (each has a `step`), and a picture of reward and calls.

    Without matplotlib there is no picture, and a warning says what to install.
    """
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_csv(folder / f"{CURVE}.csv", rows)]
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        log.warning("no picture of the learning curve: run `pip install matplotlib`; its numbers are in %s", written[0])
        return written
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    shown = [(name, label) for name, label in (("reward", "mean reward"), ("calls_per_task", "model calls per task"))]
    for axes, (name, label) in zip(figure.subplots(len(shown), 1, sharex=True), shown, strict=True):
        points = [(row["step"], row[name]) for row in rows if _is_number(row.get(name))]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    picture = folder / f"{CURVE}.png"
    temporary = picture.with_name(f".{picture.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, picture)
    return [*written, picture]


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows under the union of their columns, in order of appearance; what is missing or not finite stays empty."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: "" if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()})
    os.replace(temporary, path)
    return path


def reward_interval(evaluation: Evaluation) -> Interval:
    """Of the mean reward, over tasks."""
    return interval(per_task(evaluation.rewards).values())


def comparison(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> Table:
    """The before/after table, with 95 % intervals; the change is taken task by task."""
    from rich.table import Table

    table = Table("", "before", "after", "change", "tasks", title="before and after training (95 % intervals)")
    for row in compared(before, after):
        table.add_row(row["what"], *(spread(row[key]) for key in ("before", "after", "change")), str(row["tasks"]))
    return table


def compared(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """The rows of the table: for each evaluation in both its reward and its calls per task, as `Interval`s."""
    rows = []
    for name in before:
        if name not in after:
            continue
        old, new = before[name], after[name]
        rows.append(
            {
                "what": f"{name} reward",
                "before": reward_interval(old),
                "after": reward_interval(new),
                "change": paired(per_task(old.rewards), per_task(new.rewards)),
                "tasks": len(new.rewards),
            }
        )
        calls = [list(map(float, evaluation.calls)) for evaluation in (old, new)]
        rows.append(
            {
                "what": f"{name} calls/task",
                "before": t_interval(calls[0]),
                "after": t_interval(calls[1]),
                "change": unpaired(*calls),
                "tasks": len(new.rewards),
            }
        )
    return rows


def number(value: float | None, digits: int = 3) -> str:
    """`–` for what is not there, which is not 0."""
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def spread(found: Interval) -> str:
    """`0.850 [0.812, 0.883]`; without brackets where nothing is known of the spread."""
    if not math.isfinite(found.low) or not math.isfinite(found.high):
        return number(found.mean)
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def duration(seconds: float | None) -> str:
    """`45 s`, `3:05`, `2:10:00`."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
