"""One world for all tests of the example: making it takes seconds."""

from __future__ import annotations

import pytest

from examples.sql_agent.world import World, make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), 7, warm=400, train=300, heldout=100)
