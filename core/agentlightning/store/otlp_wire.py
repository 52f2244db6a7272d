"""OTLP over HTTP, traces only, as protobuf or JSON: what any OpenTelemetry SDK sends, as plain records.

Source: the OpenTelemetry protocol, version 1 (`opentelemetry/proto/trace/v1/trace.proto`); in JSON, ids are hex and 64-bit
integers are strings. Unknown fields are ignored there, as the protocol asks.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from agentlightning.store.bodies import JSON
from agentlightning.store.requests import Refused

PROTOBUF = "application/x-protobuf"

_TRACE_ID, _SPAN_ID = re.compile(r"(?!0{32})[0-9a-f]{32}"), re.compile(r"(?!0{16})[0-9a-f]{16}")
_ERROR = 2


class Heard(msgspec.Struct):
    """One span as OpenTelemetry tells it."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_ns: int
    end_ns: int | None
    failed: bool
    message: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]
    scope: str


def heard(data: bytes, content_type: str) -> list[Heard]:
    """Every span of an export request. Raises Refused for a body that is not one: then none of it counts."""
    try:
        found = list(_of_json(data) if content_type == JSON else _of_protobuf(data))
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise Refused(
            400, f"this is no OTLP export of traces ({error}): mend the exporter; nothing was stored."
        ) from error
    for span in found:
        if not _TRACE_ID.fullmatch(span.trace_id) or not _SPAN_ID.fullmatch(span.span_id):
            raise Refused(
                400, f"span {span.name!r} has no valid trace id and span id: mend the exporter; nothing was stored."
            )
    return found


def receipt(content_type: str, rejected: int, why: str) -> bytes:
    """The answer to an export request of which `rejected` spans were not stored."""
    if content_type == JSON:
        partial = {"rejectedSpans": str(rejected), "errorMessage": why} if rejected else None
        return msgspec.json.encode({"partialSuccess": partial} if partial else {})
    answer = _service().ExportTraceServiceResponse()
    if rejected:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = why
    return bytes(answer.SerializeToString())


def _service() -> Any:
    try:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    except ImportError as error:
        raise Refused(
            415, "this server reads OTLP as JSON only: send JSON, or install 'lightning[otel]' on the server."
        ) from error
    return trace_service_pb2


def _of_protobuf(data: bytes) -> Iterator[Heard]:
    from google.protobuf.message import DecodeError

    service = _service()
    try:
        request = service.ExportTraceServiceRequest.FromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    for group in request.resource_spans:
        resource = _told(group.resource.attributes)
        for part in group.scope_spans:
            for span in part.spans:
                yield Heard(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex() or None,
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano or None,
                    span.status.code == _ERROR,
                    span.status.message,
                    _told(span.attributes),
                    [(event.name, _told(event.attributes)) for event in span.events],
                    resource,
                    part.scope.name,
                )


def _told(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    which = value.WhichOneof("value")
    if which is None:
        return None
    found = getattr(value, which)
    if which == "array_value":
        return [_value(item) for item in found.values]
    if which == "kvlist_value":
        return _told(found.values)
    return base64.b64encode(found).decode() if which == "bytes_value" else found


class _Value(msgspec.Struct, rename="camel"):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | str | None = None
    double_value: float | str | None = None
    bytes_value: str | None = None
    array_value: _Values | None = None
    kvlist_value: _Pairs | None = None

    def plain(self) -> Any:
        if self.array_value is not None:
            return [value.plain() for value in self.array_value.values]
        if self.kvlist_value is not None:
            return _plain(self.kvlist_value.values)
        if self.int_value is not None:
            return int(self.int_value)
        if self.double_value is not None:
            return float(self.double_value)
        return next((v for v in (self.string_value, self.bool_value, self.bytes_value) if v is not None), None)


class _Pair(msgspec.Struct):
    key: str
    value: _Value = msgspec.field(default_factory=_Value)


class _Values(msgspec.Struct):
    values: list[_Value] = []


class _Pairs(msgspec.Struct):
    values: list[_Pair] = []


class _Attributes(msgspec.Struct):
    attributes: list[_Pair] = []


class _Event(msgspec.Struct):
    name: str = ""
    attributes: list[_Pair] = []


class _Status(msgspec.Struct):
    code: int | str = 0
    message: str = ""


class _Span(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    name: str = ""
    parent_span_id: str = ""
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: list[_Pair] = []
    events: list[_Event] = []
    status: _Status = msgspec.field(default_factory=_Status)


class _Scope(msgspec.Struct):
    name: str = ""


class _ScopeSpans(msgspec.Struct, rename="camel"):
    scope: _Scope = msgspec.field(default_factory=_Scope)
    spans: list[_Span] = []


class _ResourceSpans(msgspec.Struct, rename="camel"):
    resource: _Attributes = msgspec.field(default_factory=_Attributes)
    scope_spans: list[_ScopeSpans] = []


class _Export(msgspec.Struct, rename="camel"):
    resource_spans: list[_ResourceSpans]


_export = msgspec.json.Decoder(_Export)


def _plain(pairs: list[_Pair]) -> dict[str, Any]:
    return {pair.key: pair.value.plain() for pair in pairs}


def _of_json(data: bytes) -> Iterator[Heard]:
    for group in _export.decode(data).resource_spans:
        resource = _plain(group.resource.attributes)
        for part in group.scope_spans:
            for span in part.spans:
                yield Heard(
                    span.trace_id.lower(),
                    span.span_id.lower(),
                    span.parent_span_id.lower() or None,
                    span.name,
                    int(span.start_time_unix_nano),
                    int(span.end_time_unix_nano) or None,
                    span.status.code in (_ERROR, "STATUS_CODE_ERROR"),
                    span.status.message,
                    _plain(span.attributes),
                    [(event.name, _plain(event.attributes)) for event in span.events],
                    resource,
                    part.scope.name,
                )
