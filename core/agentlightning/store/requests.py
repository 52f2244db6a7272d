"""Reading a request and answering it: who calls, how large a body may be, and errors as problem+json (RFC 9457)."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentlightning import errors
from agentlightning.errors import AgentLightningError, Forbidden, StoreError, StoreUnavailable
from agentlightning.store.bodies import JSON

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Scope = MutableMapping[str, Any]

MOST_BYTES = 256 * 2**20
"""Of one body, unpacked."""

_STATUS: tuple[tuple[type[AgentLightningError], int], ...] = (
    (errors.NotFound, 404),
    (errors.Superseded, 409),
    (errors.RunInUse, 409),
    (Forbidden, 403),
    (StoreUnavailable, 503),
    (errors.RewardError, 422),
)


class Refused(Exception):
    """Ends the handling of a request with this answer; never leaves the server."""

    def __init__(self, status: int, detail: str, title: str = "StoreError") -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail


def refused(error: Exception) -> Refused:
    """What a client is told of `error`; its title is the class that the client raises."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, AgentLightningError):
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
        return Refused(status, str(error), type(error).__name__)
    return Refused(500, f"the store's server failed ({type(error).__name__}: {error}): see its log.")


def raised(status: int, body: bytes) -> AgentLightningError | None:
    """The error in an answer; None when it is none of ours."""
    try:
        said = json.loads(body)
        kind, detail = getattr(errors, said["title"], StoreError), str(said["detail"])
    except (ValueError, KeyError, TypeError):
        return None
    ours = isinstance(kind, type) and issubclass(kind, AgentLightningError)
    return kind(detail) if ours else StoreError(f"{status}: {detail}")


async def answer(send: Send, status: int, body: bytes, content_type: str, *more: tuple[bytes, bytes]) -> None:
    length = (b"content-length", b"%d" % len(body))
    head = [(b"content-type", content_type.encode()), length, *more]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def tell(send: Send, refusal: Refused) -> None:
    said = {"title": refusal.title, "status": refusal.status, "detail": refusal.detail}
    more = ((b"www-authenticate", b"Bearer"),) if refusal.status == 401 else ()
    await answer(send, refusal.status, json.dumps(said).encode(), "application/problem+json", *more)


async def whole_body(receive: Receive, headers: dict[bytes, bytes], most: int) -> bytes:
    """Raises Refused for one that is too large, before it is read where its length is told."""
    told = headers.get(b"content-length", b"")
    if told.isdigit() and int(told) > most:
        raise _too_large(most)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the request ended before its body was complete: send it again.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise _too_large(most)
        if not message.get("more_body"):
            return unpacked(b"".join(parts), headers.get(b"content-encoding", b"identity").strip().lower(), most)


def unpacked(data: bytes, encoding: bytes, most: int) -> bytes:
    """The body as it was before it was compressed; never more than `most` bytes of it are made."""
    if encoding in (b"identity", b""):
        return data
    if encoding not in (b"gzip", b"deflate"):
        raise Refused(415, f"bodies in {encoding.decode('latin-1')!r} are not read: send gzip, deflate or neither.")
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        plain = inflater.decompress(data, most + 1)
    except zlib.error as error:
        raise Refused(400, f"the body is no {encoding.decode()} ({error}): send it again.") from error
    if len(plain) > most:
        raise _too_large(most)
    if not inflater.eof:
        raise Refused(400, f"the body ends in the middle of its {encoding.decode()} data: send it again.")
    return plain


def type_of(headers: dict[bytes, bytes], known: tuple[str, ...]) -> str:
    """The content type of a body. Asking for one also keeps web pages from writing here: they cannot send these types."""
    said = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if said not in known:
        raise Refused(415, f"the content type is {said or 'missing'!r}: send {' or '.join(known)}.")
    return said


def wants_json(headers: dict[bytes, bytes], sent: str) -> bool:
    accepted = headers.get(b"accept", b"").decode("latin-1")
    return JSON in accepted or (sent == JSON and "msgpack" not in accepted)


async def gone(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)


def _too_large(most: int) -> Refused:
    return Refused(413, f"the body has more than {most:,} bytes: send fewer records at once.")
