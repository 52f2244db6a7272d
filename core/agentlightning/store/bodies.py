"""What travels between a store's server and its clients: MessagePack, or JSON where that is asked for or needed.

MessagePack carries token arrays as raw bytes. JSON carries them as base64 of the same bytes (lists are read too); it also
holds what MessagePack cannot: half a surrogate pair, integers of more than 64 bits.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np

from agentlightning.errors import StoreError
from agentlightning.plain import plain
from agentlightning.schema import Floats, Ids, decoder, encode

MSGPACK, JSON = "application/msgpack", "application/json"

_DTYPES = {str(Ids): "<i4", str(Floats): "<f4"}


class Body:
    """Reads values of one type."""

    def __init__(self, kind: Any) -> None:
        self._kind, self._decode = kind, decoder(kind)

    def read(self, data: bytes, content_type: str) -> Any:
        """Raises ValueError for what is no such value, with the place where it is wrong."""
        if content_type == MSGPACK:
            try:
                return self._decode(data)
            except (msgspec.DecodeError, NotImplementedError, TypeError, ValueError, RecursionError) as error:
                raise ValueError(str(error)) from error
        try:
            value = json.loads(data.decode("utf-8", "surrogatepass"))
            return msgspec.convert(value, self._kind, dec_hook=_array)
        except (msgspec.ValidationError, NotImplementedError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from error


def written(value: Any, what: str = "this value") -> tuple[bytes, str]:
    """`value` as a body, and the content type of that: MessagePack where it can be. Raises StoreError for what is no data."""
    try:
        return encode(value), MSGPACK
    except (UnicodeEncodeError, TypeError, NotImplementedError, OverflowError, RecursionError) as error:
        reason = error
    try:
        return json.dumps(_builtins(value)).encode(), JSON
    except (TypeError, ValueError, NotImplementedError, RecursionError):
        raise StoreError(
            f"{what} cannot be stored: {reason}. Use plain data: dicts, lists, strings, numbers, true, false, none."
        ) from reason


def as_json(value: Any) -> bytes:
    """For programs of any language: NaN and infinities as text, since JSON has no such numbers."""
    return json.dumps(_finite(_builtins(value))).encode()


def tamed(record: Any) -> Any:
    """A span or completion whose free-form fields are data, whatever the user's program put there."""
    free = {
        name: plain(value, 32) for name in record.__struct_fields__ if isinstance(value := getattr(record, name), dict)
    }
    return msgspec.structs.replace(record, **free)


def _builtins(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=_text, str_keys=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return plain(value) if isinstance(value, float) else value


def _text(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return base64.b64encode(value.astype("<i4" if value.dtype.kind == "i" else "<f4").tobytes()).decode()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be stored")


def _array(kind: Any, value: Any) -> Any:
    dtype = _DTYPES.get(str(kind))
    if dtype is not None and isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype=dtype)
    if dtype is not None and isinstance(value, list) and all(type(item) in (int, float) for item in value):
        return np.array(value, dtype=dtype)
    raise NotImplementedError(f"expected an array as base64 or a list of numbers, got {type(value).__name__}")
