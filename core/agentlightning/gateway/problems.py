"""What the gateway answers when it cannot serve: problem+json (RFC 9457) that names the cure.

The body also has OpenAI's `error` object, so that client libraries show the cure in the exception they raise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Scope = MutableMapping[str, Any]


class Problem(Exception):
    """Ends the handling of a request with this answer; never leaves the gateway."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        """One word for programs: `unknown_dialect`, `attempt_ended`, ..."""
        self.detail = detail
        """What is wrong and what cures it, for people."""

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.code == "context_length_exceeded" else "agentlightning"
        error = {"message": self.detail, "type": kind, "code": self.code}
        return msgspec.json.encode({"title": self.code, "status": self.status, "detail": self.detail, "error": error})

    def event(self) -> bytes:
        """The same as a server-sent event, for answers whose head is already out."""
        return b'data: {"error":%s}\n\n' % msgspec.json.encode(
            {"message": self.detail, "type": "agentlightning", "code": self.code}
        )

    async def answer(self, send: Send, body: bytes | None = None) -> None:
        """`body`: the same in a dialect's own shape."""
        kind = b"application/problem+json" if body is None else b"application/json"
        await respond(send, self.status, self.body() if body is None else body, [(b"content-type", kind)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(send)


async def respond(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """One whole answer; `headers` less the length."""
    head = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
