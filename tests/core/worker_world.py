"""Processes that work together on one store: servers, workers, and programs for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from tests.core.runner_world import WAIT_S
from tests.core.trainer_world import post

REPO = Path(__file__).parents[2]
FOLDER = "WORKER_FOLDER"
"""Names the folder that programs of workers leave notes in."""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPO), str(REPO / "core"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


class Command:
    """`agl ...` in a process of its own; its lines are read as they come."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from agentlightning.cli import main; main()", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**env),
            cwd=REPO,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        while line := stream.readline():
            lines.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()

    def first_line(self) -> str:
        until(lambda: self.lines or self.process.poll() is not None)
        assert self.lines, "".join(self.errors)
        return self.lines[0]

    def end(self) -> int:
        """Waits for it, and for its last words."""
        code = self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def worker(program: str, store: str, *more: str, **env: str) -> Command:
    """A worker that has begun."""
    made = Command("worker", f"tests.core.worker_world:{program}", "--store", store, "--json", *more, **env)
    made.first_line()
    return made


def until(true: Any, seconds: float = WAIT_S) -> None:
    give_up_at = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up_at, "it never became true"
        time.sleep(0.01)


def note(name: str, text: str) -> None:
    with (Path(os.environ[FOLDER]) / name).open("a") as file:
        file.write(f"{text}\n")


# Programs.


def solve(task: Any, policy: Any) -> float:
    """As in `trainer_world`; their trainers run in the test's process."""
    post(policy.agent("writer").base_url, f"write {task['x']}")
    post(policy.agent("critic").base_url, f"judge {task['x']}")
    return float(task["x"]) / 4


def slow(task: Any) -> float:
    note("begun", str(task))
    while not (Path(os.environ[FOLDER]) / "go").exists():
        time.sleep(0.01)
    return 1.0


def quick(task: Any) -> float:
    return float(task)
