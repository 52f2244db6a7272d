"""The process of the `torch` back end: loads, serves, learns, and ends when its parent does.

Started by `torch.py` as `python -m agentlightning_algorithms.policy.torch_worker`. The first line of stdin holds the
settings; one line on stdout answers when it serves, or says why it cannot. Closing stdin ends it.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.errors import AgentLightningError
from agentlightning.schema import Route, decode, encode

from .base import PolicySettings, Row, Update
from .chat import Chat
from .torch_options import TorchOptions, find_model, parse_options

HOST = "127.0.0.1"


class Start(msgspec.Struct, frozen=True):
    """What the parent sends."""

    settings: PolicySettings
    api_key: str
    control_key: str


class Started(msgspec.Struct, frozen=True):
    """What the child answers; `error` alone where it cannot start."""

    port: int = 0
    context: int = 0
    routes: tuple[Route, ...] = ()
    stop_ids: tuple[int, ...] = ()
    error: str = ""


def main() -> None:
    """Runs until the parent closes stdin or dies."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answer
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        Worker(start).run(answers)
    except AgentLightningError as error:
        _tell(answers, Started(error=str(error)))
        sys.exit(1)


def _tell(answers: Any, started: Started) -> None:
    answers.write(msgspec.json.encode(started).decode() + "\n")
    answers.flush()


def _end_with_parent(parent: int) -> None:
    """Ends the process when stdin closes or the parent is gone, even by kill -9.

    Both are watched: a process that the parent forked may hold the other end of stdin open.
    """
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.5)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    os._exit(0)


class Worker:
    """Puts model, engine and server together."""

    def __init__(self, start: Start) -> None:
        import torch
        from transformers.utils import logging as transformers_logging

        from .torch_engine import Engine
        from .torch_weights import Weights

        transformers_logging.disable_progress_bar()
        self.start = start
        options: TorchOptions = parse_options(start.settings)
        torch.set_num_threads(options.learning_threads())
        self.weights = Weights(start.settings, options, find_model(start.settings.model))
        self.chat = Chat(self.weights.tokenizer)
        self.loop = asyncio.new_event_loop()
        self.engine = Engine(self.weights.served(), lambda: self.weights.version, options.max_batch, self._notify)

    def run(self, answers: Any) -> None:
        """Serves until the process ends."""
        import uvicorn

        listener = socket.create_server((HOST, 0))
        config = uvicorn.Config(
            self._server().app(), log_level="error", access_log=False, lifespan="off", timeout_keep_alive=75
        )
        self.engine.start()
        self.engine.call(self.weights.serve)
        weights, port = self.weights, listener.getsockname()[1]
        stop_ids = tuple(sorted(_eos(weights.network.model, weights.tokenizer)))
        started = Started(port, weights.network.context, weights.routes(), stop_ids)
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(_tell, answers, started)
        self.loop.run_until_complete(uvicorn.Server(config).serve(sockets=[listener]))

    def _server(self) -> Any:
        from .server import Server

        weights = self.weights
        return Server(
            self.engine,
            self.chat,
            context=weights.network.context,
            eos=_eos(weights.network.model, weights.tokenizer),
            seed=self.start.settings.seed,
            api_key=self.start.api_key,
            control_key=self.start.control_key,
            control={
                "update": self._update,
                "logprobs": self._logprobs,
                "save": self._save,
                "load": self._load,
                "counts": self._counts,
            },
        )

    def _notify(self, jobs: Sequence[Any]) -> None:
        self.loop.call_soon_threadsafe(_wake, jobs)

    # ---- control verbs: bytes in, bytes out, on the engine's thread

    def _update(self, body: bytes) -> Any:
        def run() -> bytes:
            metrics = self.weights.update(decode(body, Update))
            return encode((self.weights.version, metrics))

        return self.engine.call(run, exclusive=True)

    def _logprobs(self, body: bytes) -> Any:
        return self.engine.call(lambda: encode(self.weights.logprobs(decode(body, list[Row]))))

    def _save(self, body: bytes) -> Any:
        from .torch_checkpoint import save

        def run() -> bytes:
            save(self.weights, Path(decode(body, str)))
            return encode(None)

        return self.engine.call(run)

    def _load(self, body: bytes) -> Any:
        from .torch_checkpoint import load

        def run() -> bytes:
            load(self.weights, Path(decode(body, str)))
            return encode(self.weights.version)

        return self.engine.call(run, exclusive=True)

    def _counts(self, body: bytes) -> Any:
        """Tokens served since the start, over all lanes."""

        def run() -> bytes:
            names = ("prompt", "reused", "computed", "generated")
            return encode({n: sum(getattr(lane.counts, n) for lane in self.engine.lanes) for n in names})

        return self.engine.call(run)


def _wake(jobs: Sequence[Any]) -> None:
    for job in jobs:
        job.wake()


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end an answer: the model's and the tokenizer's."""
    found = getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
    ids = [found] if isinstance(found, int) else list(found or ())
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


if __name__ == "__main__":
    main()
