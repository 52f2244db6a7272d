"""Whatever a user's program holds, as data that JSON can say and a store can keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


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
