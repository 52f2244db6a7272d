"""Record and replay of language-model calls: what was asked once is answered from a file, without a key or a network.

    with Replay("calls.jsonl", upstream="https://api.example.com/v1", api_key=key) as replay:
        client = openai.OpenAI(base_url=replay.base_url, api_key="unused")

A call is known by its path and its JSON, keys in any order. The same call asked again is another occurrence, with an answer
of its own, so that a program which samples a question four times gets four answers, and the same four in every replay.
Keys and other headers are never written. The file has one call a line, ordered by call, and can be committed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec

from agentlightning.errors import ConfigError, ReplayError
from agentlightning.files import write_text
from agentlightning.gateway.wire import dumps, loads

log = logging.getLogger(__name__)

MODES = ("record", "replay", "auto")
UNHEARD = ("user", "metadata")
"""Fields of a request that say nothing to the model."""


class Recorded(msgspec.Struct, omit_defaults=True):
    """One call and its answer: a line of the file."""

    key: str
    occurrence: int
    path: str
    """Below `/v1/`."""
    request: Any
    answer: Any
    """JSON, or the text of a stream."""
    stream: bool = False


class Recording:
    """The file. `record`: begins anew. `replay`: only what is in it. `auto`: what is in it, and the rest is added.

    Safe to use from several threads. Raises ConfigError for another mode, ReplayError for a file that is not there (in
    `replay`) or cannot be read.
    """

    def __init__(self, path: str | Path, mode: str = "auto") -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}: choose one of {', '.join(MODES)}.")
        self.path, self.mode = Path(path), mode
        self._lock = threading.Lock()
        self._asked: Counter[str] = Counter()
        self._known: dict[tuple[str, int], Recorded] = {}
        self._added = False
        if mode == "replay" and not self.path.is_file():
            raise ReplayError(f"there is no recording {self.path}: make it with mode='auto' and an upstream.")
        if mode != "record" and self.path.is_file():
            self._known = {(each.key, each.occurrence): each for each in _read(self.path)}

    def __len__(self) -> int:
        return len(self._known)

    def ask(self, path: str, request: Any) -> tuple[Recorded, bool]:
        """The next occurrence of this call, and whether it is known; where it is not, its answer is None and to be given to
        `add`."""
        heard = {k: v for k, v in request.items() if k not in UNHEARD} if isinstance(request, dict) else request
        key = hashlib.blake2b(dumps([path, heard], ordered=True), digest_size=16).hexdigest()
        with self._lock:
            occurrence = self._asked[key]
            self._asked[key] += 1
            known = self._known.get((key, occurrence))
        return known or Recorded(key, occurrence, path, request, None), known is not None

    def add(self, call: Recorded) -> None:
        """Writes the call down at once. Raises ReplayError in `replay`."""
        if self.mode == "replay":
            raise ReplayError(f"{self.path} is only replayed: use mode='auto' to add calls to it.")
        with self._lock:
            fresh = self.mode == "record" and not self._added
            self._known[call.key, call.occurrence], self._added = call, True
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w" if fresh else "a", encoding="utf-8") as file:
                file.write(_line(call))

    def close(self) -> None:
        """Puts the file in order, so that recording the same calls again changes nothing in it."""
        with self._lock:
            if self._added:
                calls = sorted(self._known.values(), key=lambda call: (call.key, call.occurrence))
                write_text(self.path, "".join(map(_line, calls)))


def _line(call: Recorded) -> str:
    return json.dumps(msgspec.to_builtins(call), sort_keys=True) + "\n"


def _read(path: Path) -> list[Recorded]:
    found: list[Recorded] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(line, type=Recorded))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            if number == len(lines) and not line.endswith("\n"):
                log.warning("%s ends in the middle of a call, which is asked again", path)
                path.write_text("".join(lines[:-1]), encoding="utf-8")
                break
            raise ReplayError(f"{path} line {number} is no recorded call ({error}): restore the file.") from error
    return found


class Replay:
    """A server that speaks for a model: from the recording where it can, from `upstream` (ends in `/v1`) where it must.

    What is not recorded and may not be asked is answered with status 404, which says so. Only good answers are recorded.
    """

    def __init__(
        self,
        path: str | Path,
        upstream: str | None = None,
        *,
        api_key: str = "",
        mode: str = "auto",
        timeout_s: float = 600.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if mode == "record" and upstream is None:
            raise ConfigError(
                "mode='record' needs an upstream: the base URL of the model, such as http://host:8000/v1."
            )
        self.recording = Recording(path, mode)
        self.stats: Counter[str] = Counter()
        """Calls that were `replayed`, `recorded`, `missing` or `failed`."""
        self._upstream, self._key, self._timeout_s = upstream, api_key, timeout_s
        self._address = (host, port)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="agl-replay", daemon=True)

    @property
    def base_url(self) -> str:
        """Ends in `/v1`."""
        return f"{self._url}/v1"

    def start(self) -> Self:
        """Serves from now on. Raises ReplayError when the address cannot be used."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        from agentlightning.serving import listen, url_of, uvicorn_server

        host, port = self._address
        self._socket = listen(host, port, "the replay", ReplayError)
        self._url = url_of(host, self._socket.getsockname()[1])
        self._server = uvicorn_server(
            Starlette(routes=[Route("/v1/{path:path}", self._serve, methods=["POST", "GET"])])
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the server and puts the recording in order; safe to call twice."""
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()
        self.recording.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        async def serve() -> None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            async with httpx.AsyncClient(timeout=self._timeout_s, headers=headers) as self._client:
                await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    async def _serve(self, request: Any) -> Any:
        body = await request.body()
        path = request.path_params["path"]
        try:
            asked = loads(body) if body else None
        except ValueError as error:
            return _said(400, {"error": {"message": f"the body is no JSON ({error}).", "type": "bad_request"}})
        call, known = self.recording.ask(path, asked)
        if known:
            self.stats["replayed"] += 1
            return _answered(call)
        if self._upstream is None or self.recording.mode == "replay":
            self.stats["missing"] += 1
            return _said(404, {"error": {"message": self._missing(call), "type": "not_recorded"}})
        return await self._forward(call, request.method, body)

    async def _forward(self, call: Recorded, method: str, body: bytes) -> Any:
        url = f"{(self._upstream or '').rstrip('/')}/{call.path}"
        try:
            answer = await self._client.request(
                method, url, content=body, headers={"content-type": "application/json", "accept-encoding": "identity"}
            )
        except httpx.HTTPError as error:
            self.stats["failed"] += 1
            return _said(502, {"error": {"message": f"{url}: {error!r}", "type": "upstream_unreachable"}})
        call.stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        try:
            call.answer = answer.text if call.stream else loads(answer.content)
        except ValueError:
            call.answer = None
        if answer.status_code != 200 or call.answer is None:
            from starlette.responses import Response

            self.stats["failed"] += 1
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
        self.recording.add(call)
        self.stats["recorded"] += 1
        return _answered(call)

    def _missing(self, call: Recorded) -> str:
        which = f"occurrence {call.occurrence + 1} of " if call.occurrence else ""
        return (
            f"{which}this call of {call.path} (key {call.key[:8]}) is not in {self.recording.path}, which has "
            f"{len(self.recording)} calls: record it with mode='auto' and an upstream."
        )


def _answered(call: Recorded) -> Any:
    from starlette.responses import Response

    if call.stream:
        return Response(call.answer, media_type="text/event-stream")
    return Response(dumps(call.answer), media_type="application/json")


def _said(status: int, body: dict[str, Any]) -> Any:
    from starlette.responses import Response

    return Response(dumps(body), status, media_type="application/json")
