"""Fixtures of the adapter tests; a framework that is not installed skips its tests, not the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.adapters.world import World
    from tests.fakes.engine import Script


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """`world(reply)` gives a running world."""
    pytest.importorskip("langgraph", reason="the langgraph extra is not installed")
    from tests.adapters.world import World

    with ExitStack() as stack:

        def make(reply: Script | str | None = None) -> World:
            return stack.enter_context(World(tmp_path, reply))

        yield make
