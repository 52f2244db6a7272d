"""Whatever a user's program holds, as data that JSON can say and a store can keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_MOST_ITEMS = 50
_MOST_TEXT = 4_000


def plain(value: object, depth: int = 8) -> Any:
    """`value` as JSON-safe data: what cannot be represented becomes its `repr`, cut to 2,000 characters.

    Never raises, whatever the user's program puts into its state: dates, bytes, sets, NaN, circular references.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > 0 and isinstance(value, Mapping):
        return {str(plain(str(k))): plain(v, depth - 1) for k, v in value.items()}
    if depth > 0 and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v, depth - 1) for v in value]
    if depth > 0 and isinstance(value, np.generic):
        return plain(value.item(), depth - 1)
    try:
        return repr(value)[:2000].encode("utf-8", "replace").decode()
    except Exception as error:  # noqa: BLE001  # a user's __repr__ may do anything
        return f"<{type(value).__name__}: repr failed: {type(error).__name__}>"


def brief(value: object, depth: int = 4, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    """A look at a value of the user's program, of bounded size and cost. `convert` sees each part of it first."""
    value = convert(value)
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}... ({len(value)} characters)"
    if depth > 0 and isinstance(value, Mapping):
        return {str(key): brief(value[key], depth - 1, convert) for key in list(value)[:_MOST_ITEMS]}
    if depth > 0 and isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        more = [f"... ({len(value)} items)"] if len(value) > _MOST_ITEMS else []
        return [brief(item, depth - 1, convert) for item in value[:_MOST_ITEMS]] + more
    return plain(value, 0)
