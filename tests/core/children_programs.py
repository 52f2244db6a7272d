"""Programs for child processes: they must lie in a module that another process can import."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
from tests.core.trainer_world import post


def plain(task: Any) -> float:
    agl.emit_annotation({"pid": os.getpid()})
    return float(task)


async def in_a_loop(task: Any, attempt: Any) -> dict[str, float]:
    with agl.agent("writer"):
        await asyncio.sleep(0)
        agl.emit_reward(0.5, name="on_the_way")
    return {"number": attempt.number, "task": task}


def nothing(task: Any) -> None:
    agl.emit_reward(1.0)


def raises(task: Any) -> None:
    raise ValueError("the real one")


def refused(task: Any) -> Any:
    return [1.0]


def calls(task: Any, policy: Any) -> float:
    return float(len(post(policy.agent("writer").base_url, "hello")))


def calls_forever(task: Any, policy: Any) -> None:
    while True:
        post(policy.base_url, "hello")


def cleans_up_badly(task: Any) -> None:
    try:
        raise ValueError("the real one")
    finally:
        raise RuntimeError("the clean-up")


def starts_others(task: str) -> None:
    """A tree of processes, each deaf to SIGTERM; their ids are in the file that the task names."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    shell = subprocess.Popen(["/bin/sh", "-c", f'"{sys.executable}" -c "{deaf}" & echo $! >> {task}; wait'])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    agl.emit_reward(0.25, name="partial")
    with Path(task).open("a") as file:
        file.write(f"{os.getpid()}\n{shell.pid}\n")
    time.sleep(600)


def leaves_others(task: str) -> float:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(task).write_text(f"{other.pid}\n")
    return 1.0


def tidies(task: str) -> None:
    try:
        time.sleep(600)
    finally:
        Path(task).write_text("tidied")


async def tidies_in_a_loop(task: str) -> None:
    try:
        await asyncio.sleep(600)
    finally:
        Path(task).write_text("tidied")


def crashes(task: Any, attempt: Any) -> float:
    if attempt.number == 1:
        ctypes.string_at(0)
    return 1.0


def leaves_abruptly(task: Any) -> None:
    os._exit(3)


def sleeps(task: str) -> None:
    Path(task).write_text(str(os.getpid()))
    time.sleep(600)
