"""The world of word problems, the logs of a mediocre team, and the calculator."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("autogen_agentchat", reason="the autogen extra is not installed")

from examples.calculator import logs, problems
from examples.calculator.problems import KINDS, load, make_world, value
from examples.calculator.team import CRITIC, calculator

SMALL = {"warm": 300, "train": 100, "heldout": 50}


@pytest.fixture(scope="module")
def small():
    return make_world(7, **SMALL)


def test_no_two_problems_of_a_world_are_the_same(small):
    tasks = [problem.task for problem in small.warm] + small.train + small.validation + small.heldout
    assert len(tasks) == 500
    for field in ("id", "question"):
        assert len({task[field] for task in tasks}) == 500


def test_equal_seeds_make_equal_worlds_and_logs(small):
    assert make_world(7, **SMALL) == small
    assert make_world(8, **SMALL).heldout != small.heldout
    assert logs.make_logs(small, 50, 3) == logs.make_logs(small, 50, 3)


def test_every_answer_is_that_of_the_right_expression_and_no_careless_one_is_right(small):
    for problem in small.warm:
        assert value(problem.right) == problem.task["answer"] > 0
        assert problem.careless is None or value(problem.careless) != problem.task["answer"]


def test_every_kind_is_there_and_most_problems_invite_a_careless_reading(small):
    kinds = Counter(problem.task["kind"] for problem in small.warm)
    assert set(kinds) == set(KINDS)
    assert 0.6 < sum(problem.careless is not None for problem in small.warm) / 300 < 0.9


def test_the_solver_of_the_logs_is_careless_more_often_than_not(small):
    right = {problem.task["question"]: problem for problem in small.warm}
    first = [d for d in logs.make_logs(small, 2000, 0) if d.answer.startswith("<tool_call>") and len(d.messages) == 2]
    asked = [(right[d.messages[1]["content"]], json.loads(d.answer[11:-12])["arguments"]["expression"]) for d in first]
    careless = [given == problem.careless for problem, given in asked if problem.careless]
    assert 0.5 < sum(careless) / len(careless) < 0.7
    others = [given == problem.right for problem, given in asked if not problem.careless]
    assert sum(others) / len(others) > 0.9


def test_the_critic_of_the_logs_is_mostly_right(small):
    right = {problem.task["question"]: calculator(problem.right) for problem in small.warm}
    judged = [d for d in logs.make_logs(small, 1000, 0) if d.messages[0]["content"] == CRITIC]
    just = [(right[d.messages[1]["content"]] == d.messages[2]["content"]) == (d.answer == "APPROVE") for d in judged]
    assert 0.9 < sum(just) / len(just) < 1


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("12 + 3 * 4", "12 + 3 * 4 = 24"),
        (" (1 + 2) / 4 ", "(1 + 2) / 4 = 0.75"),
        ("-3 * 2", "-3 * 2 = -6"),
        ("10 / 5", "10 / 5 = 2"),
        ("1 / 3", "1 / 3 = 0.3333"),
    ],
)
def test_the_calculator(expression, said):
    assert calculator(expression) == said


@pytest.mark.parametrize(
    "expression", ["", "1 +", "__import__('os')", "2 ** 9", "a + 1", "1 / 0", "1 and 2", "1" * 201]
)
def test_what_the_calculator_does_not_do(expression):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(expression)


def test_problems_in_the_form_of_gsm8k(shared_data):
    folder = shared_data / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"no GSM8K data at {folder}")
    train, held = load(folder, 5, seed=1)
    assert len(held) == 5 and len(train) > 100
    assert all(isinstance(task["answer"], float) and task["question"] for task in train + held)
    assert not {task["id"] for task in train} & {task["id"] for task in held}


def test_a_folder_without_the_files_is_refused_with_the_cure(tmp_path):
    with pytest.raises(SystemExit, match="has no train.jsonl"):
        load(tmp_path, 5, seed=0)


def test_a_world_has_problems_enough():
    assert len({p.task["question"] for p in problems.make_world(1).warm}) == 4000
