"""Records to rows and back: the one place that knows how a field is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import sqlalchemy as sa

from agentlightning.errors import StoreError
from agentlightning.plain import plain
from agentlightning.schema import (
    Attempt,
    Completion,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Span,
    SpanKind,
    Step,
    encode,
)
from agentlightning.store import tables as t
from agentlightning.store.records import Worker, title

T = TypeVar("T")


def pack(value: dict[str, Any], what: str, lenient: bool = False) -> bytes:
    """`value` as a body. A text with lone surrogates, which MessagePack cannot hold, becomes JSON with escapes.

    Raises StoreError for a value that is not data; where `lenient`, that value is kept as its `repr` instead.
    """
    try:
        return encode(value)
    except (UnicodeEncodeError, TypeError, NotImplementedError, OverflowError, RecursionError) as error:
        reason = error
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        if lenient:
            return json.dumps(plain(value, 32)).encode()
    raise StoreError(
        f"{what} cannot be stored: {reason}. Use plain data: dicts, lists, strings, numbers, true, false, none."
    ) from reason


def unpack(body: bytes) -> dict[str, Any]:
    """The inverse of `pack`: no MessagePack map begins with a brace."""
    value: dict[str, Any] = json.loads(body) if body[:1] == b"{" else msgspec.msgpack.decode(body)
    return value


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str):
        value = value.value if isinstance(value, Enum) else value
        value = value if value.isascii() else value.encode("utf-8", "replace").decode()
        return value.replace("\0", "\ufffd") if "\0" in value else value  # PostgreSQL keeps no NUL in a text
    return value


def _ints(blob: bytes) -> Any:
    return np.frombuffer(blob, dtype="<i4")


def _reals(blob: bytes) -> Any:
    return np.frombuffer(blob, dtype="<f4")


class Codec(Generic[T]):
    """Records of one kind to rows of one table and back."""

    def __init__(
        self,
        kind: Callable[..., T],
        table: sa.Table,
        read: Mapping[str, Callable[[Any], Any]] | None = None,
        arrays: Mapping[str, str] | None = None,
        lenient: bool = False,
    ) -> None:
        names = [field.name for field in msgspec.structs.fields(kind)]  # type: ignore[arg-type]
        self.names = [name for name in names if name in table.c]
        self.rest = [name for name in names if name not in table.c]
        self.columns = [table.c[name] for name in [*self.names, *(["body"] if self.rest else [])]]
        self._kind, self._lenient, self._arrays = kind, lenient, arrays or {}
        self._read = [(name, convert) for name, convert in (read or {}).items()]

    def row(self, record: T, **overrides: Any) -> dict[str, Any]:
        """Column values of `record`; `overrides` win."""
        row = {name: _cell(getattr(record, name)) for name in self.names}
        for name, dtype in self._arrays.items():
            row[name] = np.ascontiguousarray(row[name], dtype=dtype).tobytes()
        if self.rest:
            body = {name: getattr(record, name) for name in self.rest}
            row["body"] = pack(body, title(record), self._lenient)
        row.update(overrides)
        return row

    def record(self, row: Any) -> T:
        """The record in the row of a query that begins with `columns`."""
        fields = dict(zip(self.names, row, strict=False))
        for name, convert in self._read:
            if fields[name] is not None:
                fields[name] = convert(fields[name])
        if self.rest:
            fields.update(unpack(row[len(self.names)]))
        return self._kind(**fields)


RUN = Codec(Run, t.runs)
STEP = Codec(Step, t.steps)
RESOURCE = Codec(Resource, t.resources)
ROLLOUT = Codec(Rollout, t.rollouts, {"state": RolloutState, "outcome": Outcome, "retry": json.loads})
ATTEMPT = Codec(Attempt, t.attempts, {"outcome": Outcome})
SPAN = Codec(Span, t.spans, {"kind": SpanKind}, lenient=True)
COMPLETION = Codec(
    Completion,
    t.completions,
    {"prompt_ids": _ints, "response_ids": _ints, "logprobs": _reals},
    {"prompt_ids": "<i4", "response_ids": "<i4", "logprobs": "<f4"},
    lenient=True,
)
REWARD = Codec(Reward, t.rewards)
WORKER = Codec(Worker, t.workers)
