"""What a benchmark prints is read by people and, in its last line, by machines."""

from __future__ import annotations

import json
import math

import pytest

from tests.benchmarks._bench import report, table


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    report("walk", {"ms": 1.5, "ratio": 2}, [("what", "ms"), ("here to there", 1.5)])
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"benchmark": "walk", "metrics": {"ms": 1.5, "ratio": 2}}
    assert shown == ["what           ms", "-------------  ----", "here to there  1.50"]


def test_what_was_not_measured_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="walk measured no finite ms"):
        report("walk", {"ms": math.nan}, [("what",)])
    assert capsys.readouterr().out == ""


def test_a_ragged_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        table([("a", "b"), ("c",)])
