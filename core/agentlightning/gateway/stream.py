"""Server-sent events: captured and cleaned one by one, forwarded as they arrive.

The last part, from the chunk that ends the last choice on, is held until the answer is complete and its record is on the
way to the store: a program that has read its answer can rely on the record.
"""

from __future__ import annotations

from agentlightning.gateway.capture import Capture, take
from agentlightning.gateway.dialects import Speech, engine_problem
from agentlightning.gateway.sampling import Keep
from agentlightning.gateway.wire import loads

DONE = b"[DONE]"


class StreamCapture:
    """Feed it bytes as they come; it returns bytes for the client."""

    def __init__(self, keep: Keep, n: int, speech: Speech | None = None) -> None:
        """`speech`: the dialect that the client gets; None: chat completions."""
        self.capture = Capture()
        self._keep, self._n, self._speech = keep, n, speech
        self._rest = b""
        self._held: list[bytes] = []

    @property
    def finished(self) -> bool:
        """Whether every choice has ended; what follows is `usage` and the closing mark."""
        return self.capture.finished(self._n)

    def feed(self, data: bytes) -> bytes:
        """Cuts may be anywhere, also within a character."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        out: list[bytes] = []
        for event in events:
            shown = self._event(event)
            if shown:
                (self._held if self.finished else out).append(shown)
        return b"".join(out)

    def tail(self) -> bytes:
        """What was held. Empty lines that a server forgot at its end are added."""
        if self._rest.strip():
            self._held.append(self._event(self._rest))
            self._rest = b""
        if self._speech is not None:
            error = self.capture.error
            self._held.append(self._speech.end() if error is None else self._speech.fail(engine_problem(500, error)))
        held, self._held = b"".join(self._held), []
        return held

    def _event(self, event: bytes) -> bytes:
        lines = event.split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if not data or data == DONE:
            return b"" if data and self._speech else event + b"\n\n"
        try:
            shown = take(self.capture, data, self._keep)
        except ValueError as error:
            self.capture.malformed = self.capture.malformed or f"a chunk that is no JSON object: {error}"
            return b"" if self._speech else event + b"\n\n"
        if shown is None:
            return b""
        if self._speech is not None:
            return self._translated(shown)
        if shown is data:
            return event + b"\n\n"
        others = b"".join(line + b"\n" for line in lines if not line.startswith(b"data:"))
        return others + b"data: " + shown + b"\n\n"

    def _translated(self, shown: bytes) -> bytes:
        assert self._speech is not None
        try:
            return b"" if self.capture.error is not None else self._speech.chunk(loads(shown))
        except (AttributeError, KeyError, TypeError) as error:
            self.capture.malformed = self.capture.malformed or f"a chunk of a shape nobody defined: {error!r}"
            return b""
