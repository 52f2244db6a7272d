"""Trainers that are closed at the end of the test that made them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.trainer_world import Trainers


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    with Trainers(tmp_path) as made:
        yield made
