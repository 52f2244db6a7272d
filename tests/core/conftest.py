"""Trainers and store servers that are closed at the end of the test that made them."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentlightning.store.server import StoreServer
from agentlightning.store.sql import SqlStore
from tests.core.store_server_world import KEY
from tests.core.trainer_world import Trainers


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    with Trainers(tmp_path) as made:
        yield made


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{tmp_path / 'agl.db'}")
    yield store
    store.close()


@pytest.fixture
def server(behind: SqlStore) -> Iterator[StoreServer]:
    with StoreServer(behind, key=KEY, most_bytes=100_000) as server:
        yield server


@pytest.fixture
def http(server: StoreServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        yield client
