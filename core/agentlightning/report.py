"""What a run shows to people while it goes: moving bars on a terminal, one plain line per step anywhere else.

What remains afterwards, tables and curves, is in `results.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentlightning.evaluation import Evaluation, evaluation_of
from agentlightning.results import comparison, duration, number, reward_interval, spread, write_results
from agentlightning.schema import Episode, Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["Display", "Meter", "evaluation_line", "step_line", "write_results"]

log = logging.getLogger(__name__)


class Meter:
    """Where a batch of rollouts stands. `clock` gives seconds."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._clock, self._began = total, clock, clock()
        self.done = self.missing = 0
        self._rewards: list[float] = []
        self._calls: list[int] = []

    def add(self, evaluation: Evaluation) -> None:
        """Counts rollouts that have ended."""
        self._rewards += evaluation.values
        self._calls += evaluation.calls
        self.missing += evaluation.missing
        self.done += evaluation.missing + len(evaluation.values)

    @property
    def reward(self) -> float | None:
        """Mean over the rollouts that have one."""
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    @property
    def calls(self) -> float | None:
        """Model calls per task."""
        return sum(self._calls) / len(self._calls) if self._calls else None

    @property
    def rate(self) -> float:
        """Rollouts per second."""
        return self.done / max(self._clock() - self._began, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds until the rest is done at this rate; None before the first one is."""
        return (self.total - self.done) / self.rate if self.done else None

    def __str__(self) -> str:
        parts = [f"reward {number(self.reward)}", f"calls/task {number(self.calls, 2)}", f"{self.rate:.1f} rollouts/s"]
        if self.missing:
            parts.append(f"{self.missing} without reward")
        return " · ".join(parts)


class Display:
    """Shows a run while it goes. A terminal that has gone away is not the end of the run.

    `console`: standard error unless given. `clock` gives seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console  # rich takes 50 ms to import

        self.console = console or Console(stderr=True)
        self._clock = clock
        self._meter = Meter(0, clock)
        self._title = ""
        self._step_began: float | None = None
        self._step_seconds: list[float] = []
        self._progress: Progress | None = _progress(self.console) if self.console.is_terminal else None
        self._bar: Any = None
        self._run_bar: Any = None

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    # What the loop tells.

    def sampling(self, title: str, total: int) -> None:
        """A batch of `total` rollouts begins."""
        self._title, self._meter = title, Meter(total, self._clock)
        if self._step_began is None:
            self._step_began = self._clock()
        if self._progress is not None:
            if self._bar is not None:
                self._progress.remove_task(self._bar)
            self._bar = self._progress.add_task(title, total=total, figures="", left="")

    def finished(self, episodes: Sequence[Episode]) -> None:
        """These rollouts of the batch have ended."""
        self._meter.add(evaluation_of(self._title, episodes))
        if self._progress is not None and self._bar is not None:
            left = duration(self._meter.left_s)
            self._progress.update(self._bar, completed=self._meter.done, figures=str(self._meter), left=left)

    def step(self, step: Step, total: int) -> None:
        """A training step is complete."""
        now = self._clock()
        self._step_seconds.append(now - (now if self._step_began is None else self._step_began))
        self._step_began = None
        left = self.left_s(step.number, total)
        self._print(step_line(step, total, self._step_seconds[-1], left))
        if self._progress is not None:
            if self._run_bar is None:
                self._run_bar = self._progress.add_task("steps", total=total, figures="", left="")
            self._progress.update(self._run_bar, completed=step.number, left=duration(left))

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is complete; the time it took is not a step's."""
        self._step_began = None
        self._print(evaluation_line(evaluation))

    def end(self, before: Mapping[str, Evaluation], after: Mapping[str, Evaluation], folder: Path) -> None:
        """The run is complete."""
        if self._progress is not None:
            self._progress.stop()
        if before and after:
            self._print(comparison(before, after))
        self._print(f"tables and curves: {folder}")

    def left_s(self, number: int, total: int) -> float | None:
        """Seconds until the last step, at the mean pace of the steps so far."""
        if not self._step_seconds:
            return None
        return sum(self._step_seconds) / len(self._step_seconds) * (total - number)

    def _print(self, line: str | Table) -> None:
        try:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError as error:
            log.warning("the terminal takes no more (%s): %s", error, line)


def step_line(step: Step, total: int, seconds: float, left_s: float | None) -> str:
    """One step on one line: reward, calls, what was trained, time."""
    metrics, ledger = step.metrics, step.ledger
    parts = [
        f"step {step.number}/{total}",
        f"reward {number(metrics.get('reward'))}",
        f"calls/task {number(metrics.get('calls_per_task'), 2)}",
    ]
    if isinstance(ledger.get("trained"), int):
        parts.append(f"trained {ledger['trained']} of {ledger.get('seen', '?')} calls")
    if metrics.get("failed"):
        parts.append(f"{metrics['failed']:.0f} of {metrics.get('rollouts', math.nan):.0f} rollouts without reward")
    if seconds > 0 and metrics.get("rollouts"):
        parts.append(f"{metrics['rollouts'] / seconds:.1f} rollouts/s")
    parts.append(f"{duration(seconds)}, {duration(left_s)} left")
    return " · ".join(parts)


def evaluation_line(evaluation: Evaluation) -> str:
    """One evaluation on one line."""
    parts = [f"{evaluation.name}: reward {spread(reward_interval(evaluation))}"]
    parts.append(f"calls/task {number(evaluation.mean_calls, 2)}")
    if evaluation.missing:
        parts.append(f"{evaluation.missing} rollouts without reward")
    return " · ".join(parts)


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TextColumn("{task.fields[left]} left", markup=False),
    )
    return Progress(*columns, console=console)
