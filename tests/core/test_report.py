"""What people see while a run goes and after it."""

from __future__ import annotations

import builtins
import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentlightning.evaluation import Evaluation
from agentlightning.intervals import Interval, interval
from agentlightning.report import Display, Meter, evaluation_line, step_line
from agentlightning.results import (
    compared,
    comparison,
    duration,
    learning_curve,
    number,
    spread,
    write_csv,
    write_results,
)
from agentlightning.schema import Attempt, Episode, Outcome, Reward, Rollout, Step


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def evaluation(name: str, values: list[float], calls: list[int], missing: int = 0) -> Evaluation:
    return Evaluation(name, {str(i): [value] for i, value in enumerate(values)}, missing, calls, [10] * len(calls))


def episode(value: float | None) -> Episode:
    attempt = Attempt("a" * 32, "r", 1, "w", outcome=Outcome.OK)
    rewards = [] if value is None else [Reward("x", attempt.id, value)]
    return Episode(Rollout("r", "run", {}, "t", "g"), attempt, [], [], rewards)


def step(i: int, **metrics: float) -> Step:
    return Step("run", i, metrics, {"seen": 20, "trained": 12}, None)


BEFORE = {"greedy": evaluation("before-greedy", [0, 1, 0, 0], [3, 3, 2, 3]), "only": evaluation("x", [1], [1])}
AFTER = {"greedy": evaluation("after-greedy", [1, 1, 1, 0], [1, 2, 1, 1], missing=1)}


class TestMeter:
    def test_figures(self) -> None:
        clock = Clock()
        meter = Meter(10, clock)
        assert (meter.reward, meter.calls, meter.left_s) == (None, None, None)
        clock.now = 2.0
        meter.add(evaluation("x", [0.0, 1.0, 1.0], [1, 2, 3], missing=1))
        assert (meter.done, meter.reward, meter.calls) == (4, 2 / 3, 2.0)
        assert (meter.rate, meter.left_s) == (2.0, 3.0)
        assert str(meter) == "reward 0.667 · calls/task 2.00 · 2.0 rollouts/s · 1 without reward"

    def test_what_is_missing_is_not_0(self) -> None:
        meter = Meter(2, Clock())
        meter.add(evaluation("x", [], [], missing=2))
        assert str(meter).startswith("reward – · calls/task –") and meter.done == 2


class TestDisplay:
    def shown(self, terminal: bool) -> str:
        """A short run."""
        out, clock = io.StringIO(), Clock()
        console = Console(file=out, force_terminal=terminal, width=160, color_system=None)
        with Display(console, clock) as display:
            display.sampling("before-greedy", 4)
            clock.now = 100.0
            display.finished([episode(1.0), episode(None)])
            display.evaluated(BEFORE["greedy"])
            for i in (1, 2):
                display.sampling(f"step {i}/4", 2)
                clock.now += 1.0
                display.finished([episode(0.5), episode(0.5)])
                clock.now += 9.0
                display.step(step(i, reward=0.5, calls_per_task=2.0, rollouts=2.0, failed=0.0), 4)
            display.end(BEFORE, AFTER, Path("runs/x"))
        return out.getvalue()

    def test_elsewhere_each_step_is_one_plain_line(self) -> None:
        lines = self.shown(terminal=False).splitlines()
        assert lines[0] == "before-greedy: reward 0.250 [0.046, 0.699] · calls/task 2.75"
        assert lines[1] == (
            "step 1/4 · reward 0.500 · calls/task 2.00 · trained 12 of 20 calls · 0.2 rollouts/s · 10 s, 30 s left"
        )
        assert lines[2].startswith("step 2/4") and lines[2].endswith("10 s, 20 s left")
        assert "tables and curves: runs/x" in lines[-1]
        assert not any("\x1b" in line for line in lines)

    def test_on_a_terminal_bars_move_too(self) -> None:
        text = self.shown(terminal=True)
        assert "━" in text and "2/2" in text and "steps" in text
        assert "reward 0.500 · calls/task 0.00 · 2.0 rollouts/s" in text

    def test_names_are_not_markup(self) -> None:
        out = io.StringIO()
        display = Display(Console(file=out, width=100, color_system=None), Clock())
        display.evaluated(evaluation("[bold]mine[/nonsense]", [0.5, 0.6], [1, 1]))
        assert "[bold]mine[/nonsense]: reward 0.550" in out.getvalue()

    def test_a_terminal_that_has_gone_is_not_the_end(self, caplog: pytest.LogCaptureFixture) -> None:
        class Gone(io.StringIO):
            def write(self, text: str) -> int:
                raise OSError("input/output error")

        display = Display(Console(file=Gone(), width=100), Clock())
        display.evaluated(AFTER["greedy"])
        assert "input/output error" in caplog.text and "after-greedy" in caplog.text


class TestLines:
    def test_a_step_with_failures_and_without_figures(self) -> None:
        line = step_line(Step("run", 3, {"rollouts": 8.0, "failed": 8.0}, {}, None), 5, 0.0, None)
        assert line == "step 3/5 · reward – · calls/task – · 8 of 8 rollouts without reward · 0 s, ? left"

    def test_an_evaluation_with_failures(self) -> None:
        assert evaluation_line(AFTER["greedy"]).endswith("calls/task 1.25 · 1 rollouts without reward")
        assert evaluation_line(evaluation("none", [], [], missing=3)) == (
            "none: reward – · calls/task – · 3 rollouts without reward"
        )

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(None, "?"), (math.inf, "?"), (0.4, "0 s"), (59.6, "1:00"), (185, "3:05"), (7800, "2:10:00"), (-1, "0 s")],
    )
    def test_durations(self, seconds: float | None, text: str) -> None:
        assert duration(seconds) == text

    def test_numbers(self) -> None:
        assert (number(None), number(math.nan), number(0.0)) == ("–", "–", "0.000")
        assert spread(Interval(0.5, -math.inf, math.inf, 1)) == "0.500"


class TestTables:
    def test_before_and_after(self) -> None:
        out = io.StringIO()
        Console(file=out, width=160, color_system=None).print(comparison(BEFORE, AFTER))
        text = out.getvalue()
        assert "greedy reward" in text and "greedy calls/task" in text and "only" not in text
        assert spread(interval([0, 1, 0, 0])) in text and spread(interval([1, 1, 1, 0])) in text

    def test_the_change_is_taken_task_by_task(self) -> None:
        reward, calls = compared(BEFORE, AFTER)
        assert reward["change"].mean == 0.5 and reward["change"].n == 4
        assert calls["change"].mean == -1.5 and calls["change"].high < 0


class TestFiles:
    def read(self, path: Path) -> list[dict[str, str]]:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def test_all_of_them(self, tmp_path: Path) -> None:
        steps = [step(1, reward=0.25, calls_per_task=2.5), step(2, reward=0.5, calls_per_task=2.0, loss=math.nan)]
        written = write_results(tmp_path / "new" / "folder", steps, BEFORE, AFTER)
        assert [path.name for path in written] == [
            "learning_curve.csv",
            "learning_curve.png",
            "evaluations.csv",
            "tasks.csv",
        ]
        curve, picture, evaluations, tasks = written
        assert self.read(curve) == [
            {"step": "1", "reward": "0.25", "calls_per_task": "2.5", "loss": ""},
            {"step": "2", "reward": "0.5", "calls_per_task": "2.0", "loss": ""},
        ]
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert [row["what"] for row in self.read(evaluations)] == ["greedy reward", "greedy calls/task"]
        assert float(self.read(evaluations)[0]["before"]) == 0.25
        rows = self.read(tasks)
        assert rows[0] == {"evaluation": "greedy", "task": "0", "before": "0.0", "after": "1.0"}
        assert rows[-1] == {"evaluation": "only", "task": "0", "before": "1.0", "after": ""}
        assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == sorted(p.name for p in written)

    def test_writing_again_replaces(self, tmp_path: Path) -> None:
        write_results(tmp_path, [step(1, reward=0.1)], {}, {})
        written = write_results(tmp_path, [step(1, reward=0.1), step(2, reward=0.2)], {}, {})
        assert [path.name for path in written] == ["learning_curve.csv", "learning_curve.png"]
        assert len(self.read(written[0])) == 2

    def test_a_run_without_steps_has_no_curve(self, tmp_path: Path) -> None:
        assert write_results(tmp_path, [], {}, {}) == []

    def test_steps_without_a_reward_leave_a_gap(self, tmp_path: Path) -> None:
        curve, picture = learning_curve([{"step": 1, "reward": None}, {"step": 2, "reward": 1.0}], tmp_path)
        assert self.read(curve)[0] == {"step": "1", "reward": ""} and picture.exists()

    def test_without_matplotlib_there_are_the_numbers_and_a_word(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        real = builtins.__import__

        def refuse(name: str, *args: Any, **options: Any) -> Any:
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *args, **options)

        monkeypatch.setattr(builtins, "__import__", refuse)
        assert [p.name for p in learning_curve([{"step": 1, "reward": 1.0}], tmp_path)] == ["learning_curve.csv"]
        assert "pip install matplotlib" in caplog.text

    def test_columns_that_come_later(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", [{"a": 1}, {"a": 2, "b, c": math.inf}, {"b, c": "ü"}])
        assert self.read(path) == [{"a": "1", "b, c": ""}, {"a": "2", "b, c": ""}, {"a": "", "b, c": "ü"}]
