"""How the commands print: a table or tree for people, one JSON document for programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import typer

from agentlightning.plain import plain
from agentlightning.store import open_store

if TYPE_CHECKING:
    from rich.console import Console

    from agentlightning.store.base import Store

SHORT = 12
"""Digits of an id that a person sees; the commands take any beginning that is unique."""


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """The store at `url`, which must exist: looking makes nothing."""
    store = open_store(url, create=False)
    try:
        yield store
    finally:
        store.close()


def print_json(value: object) -> None:
    """Records with every field; token arrays as lists; NaN and infinities as text, since JSON has no such numbers."""
    data = plain(msgspec.to_builtins(value, enc_hook=_array, str_keys=True), 200)
    typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=2))  # bytes: UTF-8 whatever the terminal is


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return plain(value)


def console() -> Console:
    """Lines are never cut or wrapped where nobody looks at a terminal."""
    from rich.console import Console

    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(highlight=False)
    return Console(highlight=False, width=10_000)


def ago(nanoseconds: int) -> str:
    """Time since then, in its largest unit."""
    seconds = max(0.0, (time.time_ns() - nanoseconds) / 1e9)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def line(value: object, width: int = 80) -> str:
    """`value` on one line of at most `width` characters, safe to print anywhere."""
    text = " ".join(str(plain(str(value))).split())
    return text if len(text) <= width else text[: width - 1] + "…"
