"""A stand-in for a language model: says the same to everybody, with ids and log-probabilities, on a loopback port.

For rehearsals: whether calls arrive, who makes them and what they earn can be seen without any model. Each byte is a token.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from agentlightning.schema import Endpoint, Route

END = 256
"""The id that ends a turn."""
CONTEXT = 1 << 20


class StandIn:
    """A policy, to the loop; it never learns."""

    version = 1

    def __init__(self, reply: str = "ok") -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.reply = reply
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def start(self) -> Endpoint:
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return Endpoint(url, "stand-in", (Route("*", "stand-in", True),), CONTEXT, stop_ids=(END,))

    def save(self, folder: Path) -> None:
        """There is nothing to save."""

    def load(self, folder: Path) -> None:
        """Nor to load."""

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    reply: str


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Chat completions; whatever else is asked gets the same."""
        request = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
        answer = _answer(request, self.server.reply)
        if request.get("stream"):
            chunks = [*_chunks(answer), {**_head(answer), "choices": [], "usage": answer["usage"]}]
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self._send("text/event-stream", "".join([*events, "data: [DONE]\n\n"]))
        else:
            self._send("application/json", json.dumps(answer))

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: the doctor says what matters."""


def _answer(request: dict[str, Any], reply: str) -> dict[str, Any]:
    prompt = list(json.dumps(request.get("messages") or request.get("prompt"), ensure_ascii=False).encode())
    ids = [*reply.encode(), END]
    logprobs: list[dict[str, Any]] = [
        {"token": chr(i) if i < END else "", "logprob": -1.0, "bytes": None, "top_logprobs": []} for i in ids
    ]
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": reply},
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"content": logprobs},
        }
        for index in range(request.get("n") or 1)
    ]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids) * len(choices)}
    usage["total_tokens"] = sum(usage.values())
    head = {"id": "stand-in", "object": "chat.completion", "created": 0, "model": str(request.get("model"))}
    return {**head, "prompt_token_ids": prompt, "choices": choices, "usage": usage}


def _head(answer: dict[str, Any]) -> dict[str, Any]:
    kept = {key: answer[key] for key in ("id", "created", "model")}
    return {**kept, "object": "chat.completion.chunk"}


def _chunks(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each choice; the first has the ids of the prompt."""
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        delta = {key: value for key, value in choice.items() if key != "message"} | {"delta": choice["message"]}
        first = {"prompt_token_ids": answer["prompt_token_ids"]} if not chunks else {}
        chunks.append({**_head(answer), **first, "choices": [delta]})
    return chunks
