"""What every test may use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.schema import new_id
from tests.fakes.postgres import PostgresServer, binaries


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets beside the checkout; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("AGL_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder}; set AGL_SHARED_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A real server of our own; skips where PostgreSQL or its driver is not installed."""
    if binaries() is None:
        pytest.skip("no PostgreSQL here: install Debian's package postgresql, or put initdb on the PATH")
    pytest.importorskip("psycopg", reason="no PostgreSQL driver here: pip install '.[postgres]'")
    server = PostgresServer()
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty place of its own for each test."""
    schema = f"t{new_id()}"
    postgres_server.sql(f"CREATE SCHEMA {schema}")
    yield postgres_server.url(schema)
    postgres_server.sql(f"DROP SCHEMA {schema} CASCADE")
