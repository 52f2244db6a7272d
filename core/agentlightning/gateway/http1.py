"""Reads HTTP/1.1 answers with llhttp (`httptools`): a status, headers, and a body by length, in chunks, or up to the end.

The parser is the library's; what is added is the state that a connection asks for.
"""

from __future__ import annotations

import httptools

from agentlightning.errors import GatewayError


class Broken(GatewayError):
    """The peer does not speak HTTP/1.1, or went away in the middle of an answer."""


class Reader:
    """One answer after another: `feed` what arrives, look at `status` and `complete`, `take` the body, then `reset`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
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

    def feed(self, data: bytes) -> None:
        """Raises Broken."""
        if self.complete:
            self.reusable = self.reusable and not data
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.reusable = False
            if not self.complete:
                raise Broken(
                    f"the engine does not speak HTTP/1.1 ({error}; it sent {data[:60]!r}): check the base URL."
                ) from error

    def end(self) -> None:
        """The peer has closed. Raises Broken unless that is how this answer ends."""
        self.reusable = False
        framed = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.status and not framed:
            self.complete = True
        if not self.complete:
            raise Broken("the engine closed the connection before its answer was complete: see the engine's log.")

    def take(self) -> bytes:
        """What has come of the body since the last `take`."""
        body = b"".join(self._body)
        self._body.clear()
        return body

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.complete:  # an answer that nobody asked for follows at once: this peer has lost count
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.complete:
            return
        key = name.lower()
        self.headers[key] = self.headers[key] + b", " + value if key in self.headers else value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # those below announce another head
            self.headers.clear()
        elif not self.complete:
            self.status = status

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self.status and not self.complete:
            self.complete, self.reusable = True, self._parser.should_keep_alive()
