"""The store's contract on each store that we have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.store import open_store
from agentlightning.store.base import Store
from agentlightning.store.server import StoreServer
from tests.conformance.store import StoreSuite


class TestSqliteFile(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = open_store(f"sqlite:///{tmp_path / 'agl.db'}")
        yield store
        store.close()


class TestSqliteMemory(StoreSuite):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        store = open_store("sqlite://")
        yield store
        store.close()


class TestPostgres(StoreSuite):
    @pytest.fixture
    def store(self, postgres_url: str) -> Iterator[Store]:
        store = open_store(postgres_url)
        yield store
        store.close()


class TestHttp(StoreSuite):
    """A server in front of a file, and a client that may do everything."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        behind = open_store(f"sqlite:///{tmp_path / 'agl.db'}")
        with StoreServer(behind, key="secret") as server:
            store = open_store(server.url, key="secret")
            yield store
            store.close()
        behind.close()


class TestHttpPostgres(StoreSuite):
    @pytest.fixture
    def store(self, postgres_url: str) -> Iterator[Store]:
        behind = open_store(postgres_url)
        with StoreServer(behind) as server:
            store = open_store(server.url)
            yield store
            store.close()
        behind.close()
