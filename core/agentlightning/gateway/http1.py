"""Reads HTTP/1.1 answers (RFC 9112): a status, headers, and a body by length, in chunks, or up to the end.

Only what a client needs, because it is on the path of every model call; the tests hold it against h11.
"""

from __future__ import annotations

from agentlightning.errors import GatewayError

MAX_HEAD = 64 * 1024
"""Bytes that the head of an answer, or the line of a chunk, may have."""

_BODYLESS = frozenset({204, 304})


class Broken(GatewayError):
    """The peer does not speak HTTP/1.1, or went away in the middle of an answer."""


class Reader:
    """One answer after another: `feed` what arrives, look at `status` and `complete`, `take` the body, then `reset`."""

    def __init__(self) -> None:
        self._rest = b""
        self.reset()

    def reset(self) -> None:
        """Ready for the next answer."""
        self.status = 0
        """0 until the head is complete."""
        self.headers: dict[bytes, bytes] = {}
        """Names in lower case; repeated ones joined by commas."""
        self.complete = False
        self.reusable = False
        """Whether the peer will take another request after this answer."""
        self._body: list[bytes] = []
        self._left = 0
        """Bytes to come: of the body, or of this chunk and its line end."""
        self._step = self._head

    def feed(self, data: bytes) -> None:
        """Raises Broken."""
        self._rest = self._rest + data if self._rest else data
        while self._rest and not self.complete and self._step():
            pass
        if self.complete and self._rest:
            self.reusable = False  # bytes that nobody asked for: this peer has lost count

    def end(self) -> None:
        """The peer has closed. Raises Broken unless that is how this answer ends."""
        self.reusable = False
        if self._step == self._until_end:
            self.complete = True
        if not self.complete:
            raise Broken("the engine closed the connection before its answer was complete: see the engine's log.")

    def take(self) -> bytes:
        """What has come of the body since the last `take`."""
        body = b"".join(self._body)
        self._body.clear()
        return body

    def _line(self, end: bytes) -> bytes | None:
        """The bytes up to `end`; None when it has not come yet."""
        line, found, rest = self._rest.partition(end)
        if not found:
            if len(line) > MAX_HEAD:
                raise Broken(
                    f"the engine sent more than {MAX_HEAD} bytes without ending a line: it speaks no HTTP/1.1."
                )
            return None
        self._rest = rest
        return line

    def _head(self) -> bool:
        head = self._line(b"\r\n\r\n")
        if head is None:
            return False
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise Broken(f"the engine does not speak HTTP/1.1 (it began with {first[:60]!r}): check the base URL.")
        status = int(rest[:3])
        if status >= 200:  # those below announce another head
            self.status, self.headers = status, _fields(lines)
            self._frame(version != b"HTTP/1.0")
        return True

    def _frame(self, modern: bool) -> None:
        """How long the body is."""
        headers = self.headers
        self.reusable = modern and b"close" not in headers.get(b"connection", b"").lower()
        length = headers.get(b"content-length")
        if self.status in _BODYLESS:
            self.complete = True
        elif headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._step = self._chunk_line
        elif length is None:
            self.reusable, self._step = False, self._until_end
        elif not length.isdigit():
            raise Broken(f"the engine sent the length {length[:60]!r}: it speaks no HTTP/1.1.")
        else:
            self._left, self._step = int(length), self._by_length
            self.complete = not self._left

    def _by_length(self) -> bool:
        data = self._rest[: self._left]
        self._rest = self._rest[len(data) :]
        self._body.append(data)
        self._left -= len(data)
        self.complete = not self._left
        return True

    def _until_end(self) -> bool:
        self._body.append(self._rest)
        self._rest = b""
        return True

    def _chunk_line(self) -> bool:
        line = self._line(b"\r\n")
        if line is None:
            return False
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError as error:
            raise Broken(f"the engine sent the chunk size {line[:60]!r}: it speaks no HTTP/1.1.") from error
        self._left, self._step = size + 2, self._chunk if size else self._trailer
        return True

    def _chunk(self) -> bool:
        rest = self._rest
        if self._left > 2:
            data = rest[: self._left - 2]
            self._body.append(data)
            self._rest = rest[len(data) :]
            self._left -= len(data)
            return True
        if len(rest) < 2:
            return False
        if rest[:2] != b"\r\n":
            raise Broken("the engine sent a chunk of another size than it said: it speaks no HTTP/1.1.")
        self._rest, self._step = rest[2:], self._chunk_line
        return True

    def _trailer(self) -> bool:
        line = self._line(b"\r\n")
        self.complete = line == b""
        return line is not None


def _fields(lines: list[bytes]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        key, value = name.strip().lower(), value.strip()
        fields[key] = fields[key] + b", " + value if key in fields else value
    return fields
