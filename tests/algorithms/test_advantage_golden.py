"""Every estimator, preset and aggregation against its table, to a millionth; the tables against the formulas."""

import json
from typing import Any

import numpy as np
import pytest

from agentlightning.schema import Completion, Group, Trajectory, Transition, floats, ids
from agentlightning_algorithms.advantage import ESTIMATORS, advantages, overlong_penalty
from agentlightning_algorithms.presets import PRESETS
from agentlightning_algorithms.rows import AGGREGATIONS, rows_of
from tests.golden import cases, name
from tests.golden.formulas import TABLES


@pytest.mark.parametrize("case", cases("advantages"), ids=name)
def test_advantages(case: dict[str, Any]) -> None:
    how = PRESETS[case["preset"]].advantage if "preset" in case else ESTIMATORS[case["estimator"]]
    found = advantages(case["returns"], how, case.get("lengths", ()))
    for values, expected in zip(found, case["expected"], strict=True):
        assert values.dtype == np.float64
        assert values == pytest.approx(expected, abs=1e-6)


def test_the_table_has_all_of_them() -> None:
    named = {case.get("preset") or case["estimator"] for case in cases("advantages")}
    assert named == set(ESTIMATORS) | set(PRESETS)
    assert {case["aggregation"] for case in cases("aggregation")} == set(AGGREGATIONS)
    assert sum(len(cases(table)) for table in TABLES) >= 100


@pytest.mark.parametrize("table", list(TABLES))
def test_the_tables_are_what_the_formulas_say(table: str) -> None:
    assert cases(table) == [json.loads(json.dumps(case)) for case in TABLES[table]()]


@pytest.mark.parametrize(
    ("preset", "winner", "loser"),
    [
        ("verl", 1.5, -0.5),
        ("skyrl", 1.5, -0.5),
        ("slime", 1.5, -0.5),
        ("openrlhf", 1.5, -0.5),
        ("trl", 1.4997, -0.4999),
        ("rllm", 1.7320, -0.5773),
        ("art", 1.7320, -0.5773),
        ("nemo_rl", 1.0, -0.5773),
        ("prime_rl", 0.75, -0.25),
        ("tinker", 0.75, -0.25),
        ("dr_grpo", 0.75, -0.25),
    ],
)
def test_what_grpo_means_elsewhere(preset: str, winner: float, loser: float) -> None:
    """One success among four, in ten projects: from 0.75 to 1.73."""
    found = advantages([[1, 0, 0, 0]], PRESETS[preset].advantage)[0]
    assert found == pytest.approx([winner, loser, loser, loser], abs=1e-4)


@pytest.mark.parametrize("case", cases("aggregation"), ids=name)
def test_aggregation(case: dict[str, Any]) -> None:
    trajectories = [
        Trajectory(f"r{i}", f"a{i}", "w", 0.0, [_call(n, i * 100 + k) for k, n in enumerate(answers)])
        for i, answers in enumerate(case["answers"])
    ]
    rows = rows_of(
        [Group(("g", "w"), trajectories)], case["aggregation"], 100 if case["aggregation"] == "constant" else 0
    )
    firsts = {trajectory.transitions[0].completion.prompt_ids[0]: i for i, trajectory in enumerate(trajectories)}
    own = [row for row in rows if firsts.get(row.ids[0] // 100 * 100) == case["rollout"]]
    found = [float(row.weights[row.weights > 0][0]) for row in own]
    assert found == pytest.approx(case["expected"], rel=1e-6)
    assert [int((row.weights > 0).sum()) for row in own] == case["answers"][case["rollout"]]


def _call(tokens: int, prompt: int) -> Transition:
    done = Completion(
        "c", "a", "w", None, "m", "p", 0, ids([prompt]), ids([7] * tokens), floats([-1.0] * tokens), "stop", {}, {}
    )
    return Transition(done, "w", 0.0, 1.0)


@pytest.mark.parametrize("case", cases("overlong"), ids=name)
def test_overlong_answers_are_punished_softly(case: dict[str, Any]) -> None:
    assert overlong_penalty(*case["overlong"]) == pytest.approx(case["expected"])
