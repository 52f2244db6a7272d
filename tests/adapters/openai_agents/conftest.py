"""The SDK without its exporter: no trace leaves this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

with contextlib.suppress(ImportError):
    import agents


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracing as it is on in a user's program, with nobody who listens."""
    agents.set_trace_processors([])
    agents.set_tracing_disabled(False)
    yield
    agents.set_trace_processors([])
    agents.set_tracing_disabled(False)
