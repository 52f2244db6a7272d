"""The `torch` back end: engine and learner share one set of weights, in a process of their own.

The trainer's process holds only this handle: it imports no torch, so the user's program never waits for a tensor. The
child serves on 127.0.0.1 and ends with its parent, however that ends.
"""

from __future__ import annotations

import collections
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from agentlightning.errors import PolicyError
from agentlightning.schema import Endpoint, Floats, decode, encode

from .base import PolicySettings, Row, Update
from .torch_options import find_model, parse_options
from .torch_worker import HOST, Start, Started

LAST_WORDS = 30
"""Lines of the child's stderr that an error quotes."""


class TorchPolicy:
    """See `policy/base.py` for what the methods promise. Wrong settings raise ConfigError here, before any process."""

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings
        self.options = parse_options(settings)
        find_model(settings.model)
        self.version = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None
        self._words: collections.deque[str] = collections.deque(maxlen=LAST_WORDS)
        self._listener: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None when it does not run."""
        return self._child.pid if self._child else None

    def start(self) -> Endpoint:
        if self._child is not None:
            raise PolicyError("this policy is running already: call close() first.")
        api_key, control_key = secrets.token_hex(16), secrets.token_hex(16)
        child = self._child = self._spawn()
        try:
            started = self._hand_over(child, Start(self.settings, api_key, control_key))
            if started.error:
                raise PolicyError(started.error)
        except BaseException:
            self.close()
            raise
        root = f"http://{HOST}:{started.port}"
        # No time limit: an update takes as long as it takes. A dead child closes the connection.
        self._client = httpx.Client(base_url=f"{root}/control/", headers={"x-agl-key": control_key}, timeout=None)
        return Endpoint(
            f"{root}/v1",
            api_key,
            started.routes,
            started.context,
            stop_ids=started.stop_ids,
            tokenize=f"{root}/tokenize",
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # OpenMP threads that wait by spinning take the core from the program they wait for: five times slower where the
        # cores are shared with gateway and agents.
        quiet |= {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000")}
        child = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.torch_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **quiet},
            start_new_session=True,  # Ctrl-C is the trainer's to handle: it closes us when it is done
        )
        self._words.clear()
        self._listener = threading.Thread(target=self._listen, args=(child,), name="policy-stderr", daemon=True)
        self._listener.start()
        return child

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        for line in child.stderr:
            self._words.append(line.decode("utf-8", "replace").rstrip())

    def _hand_over(self, child: subprocess.Popen[bytes], start: Start) -> Started:
        """Sends the settings and waits for the answer, the child's death or the time limit."""
        assert child.stdin is not None and child.stdout is not None
        answer: list[bytes] = []
        reader = threading.Thread(target=lambda: answer.append(child.stdout.readline()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        try:
            child.stdin.write(msgspec.json.encode(start) + b"\n")
            child.stdin.flush()
        except BrokenPipeError as error:
            raise self._died("before it was told what to load") from error
        reader.join(self.options.start_timeout)
        if reader.is_alive():
            raise PolicyError(
                f"the model was not loaded after {self.options.start_timeout:g} s: raise the option start_timeout, or "
                "use a smaller model."
            )
        if not answer or not answer[0]:
            raise self._died("while it started")
        return msgspec.json.decode(answer[0], type=Started)

    def _died(self, when: str) -> PolicyError:
        """The error for a child that is gone, with its last words."""
        code = None
        if self._child is not None:
            try:
                code = self._child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._child.kill()
        if self._listener is not None:
            self._listener.join(timeout=5)
        words = "\n  ".join(self._words) or "(nothing)"
        return PolicyError(
            f"the policy's process ended {when} (exit code {code}). Its last words:\n  {words}\n"
            "-9 is a kill, mostly for lack of memory: use a smaller model, max_batch or micro_tokens."
        )

    def update(self, update: Update) -> dict[str, float]:
        self.version, metrics = self._command("update", update, tuple[int, dict[str, float]])
        return dict(metrics)

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        return list(self._command("logprobs", list(rows), list[Floats]))

    def save(self, folder: Path) -> None:
        self._command("save", str(Path(folder).absolute()), None)

    def load(self, folder: Path) -> None:
        self.version = self._command("load", str(Path(folder).absolute()), int)

    def counts(self) -> dict[str, int]:
        """Tokens since the start: `prompt`, of them `reused`, `computed` by the model, `generated`."""
        return dict(self._command("counts", None, dict[str, int]))

    def _command(self, verb: str, body: Any, kind: Any) -> Any:
        if self._client is None:
            raise PolicyError("this policy is not running: call start() first.")
        try:
            response = self._client.post(verb, content=encode(body))
        except httpx.HTTPError as error:
            raise self._died(f"during {verb}") from error
        if response.status_code == 409:
            raise PolicyError(response.text)
        if response.status_code != 200:
            raise PolicyError(f"the policy's process answered {response.status_code} to {verb}: {response.text[:500]}")
        return decode(response.content, kind)

    def close(self) -> None:
        client, self._client = self._client, None
        child, self._child = self._child, None
        if client is not None:
            client.close()
        if child is None:
            return
        if child.stdin is not None:
            try:
                child.stdin.close()
            except BrokenPipeError:
                pass
        _wait(child)
        if self._listener is not None:
            self._listener.join(timeout=5)
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


def _wait(child: subprocess.Popen[bytes]) -> None:
    """The child ends by itself when stdin closes; if it cannot, it is ended."""
    try:
        child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
