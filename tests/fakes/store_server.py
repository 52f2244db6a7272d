"""`agl store serve` as a process of its own, which may be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

REPO = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """Serves the store at `database`. The port stays the same when it is started again."""

    def __init__(self, database: str, *, key: str = "", port: int = 0) -> None:
        self.database, self.key, self.port = database, key, port or free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Returns when it serves. Raises RuntimeError with what it said when it does not."""
        path = os.pathsep.join([str(REPO / "core"), *filter(None, [os.environ.get("PYTHONPATH")])])
        run = [sys.executable, "-c", "from agentlightning.cli import main; main()", "store", "serve", self.database]
        self._process = subprocess.Popen(
            [*run, "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "AGL_STORE_KEY": self.key},
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if "is served at" not in said:
            raise RuntimeError(said + self.end()[1])
        return self

    def kill(self) -> None:
        """As a crash or the kernel would."""
        self.end(signal.SIGKILL)

    def end(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        process, self._process = self._process, None
        if process is None:
            return 0, ""
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.end()
