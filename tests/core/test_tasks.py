"""Tasks: names that stay, draws that need no saved position."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning.tasks import Task, digest, draw, tasks_of


def test_a_task_is_named_by_its_own_id_else_by_what_it_says():
    tasks = tasks_of([{"id": 7, "q": "a"}, {"task_id": "t", "q": "b"}, {"q": "c"}, {"q": "c"}, "text"], "train")
    assert [task.id for task in tasks[:2]] == ["7", "t"]
    assert tasks[3].id == f"{tasks[2].id}#2"
    assert len({task.id for task in tasks}) == 5


def test_no_tasks_and_odd_tasks_are_refused():
    with pytest.raises(ConfigError, match="holds no tasks"):
        tasks_of([], "train")
    with pytest.raises(ConfigError, match="row 1 of val cannot be stored"):
        tasks_of([1, object()], "val")


def test_a_digest_is_the_same_in_every_process():
    code = "from agentlightning.tasks import digest; print(digest({'b': 1, 'a': [1.5, None]}, 'x'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == digest({"a": [1.5, None], "b": 1}, "x")


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 3))
def test_each_pass_over_the_data_draws_each_task_once(size, count, seed):
    tasks = [Task(str(i), i) for i in range(size)]
    drawn = [task.id for step in range(1, size + 1) for task in draw(tasks, count, step, seed)]
    assert Counter(drawn) == {str(i): count for i in range(size)}
    for start in range(0, len(drawn), size):
        assert len(set(drawn[start : start + size])) == size


def test_draws_depend_on_the_seed():
    tasks = [Task(str(i), i) for i in range(50)]
    assert draw(tasks, 50, 1, 0) != draw(tasks, 50, 1, 1)
