"""JSON as the world sends it: fast where it is clean, and never lost where it is not.

msgspec refuses lone surrogates (half an emoji, cut by somebody's tokenizer) and NaN; the standard library takes both.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


def loads(data: bytes) -> Any:
    """Raises ValueError for what is not JSON."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data.decode("utf-8", "surrogatepass"))


def dumps(value: Any, *, ordered: bool = False) -> bytes:
    """UTF-8; lone surrogates as escapes. `ordered`: keys sorted, so that equal values give equal bytes."""
    try:
        return msgspec.json.encode(value, order="deterministic" if ordered else None)
    except UnicodeEncodeError:
        return json.dumps(value, sort_keys=ordered).encode()
