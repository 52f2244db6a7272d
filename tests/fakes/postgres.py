"""A real PostgreSQL server in a temporary folder, reached through a socket there; no port, no password, no leftovers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self
from urllib.parse import quote

USERS = ("postgres", "nobody")
"""Who may run the server where we are root, which PostgreSQL refuses to be."""


def binaries() -> Path | None:
    """The folder of `initdb` and `postgres`: the newest in Debian's place, or what the path holds."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class PostgresServer:
    """`durable=False` leaves out the waits for the disk that tests need not pay for."""

    def __init__(self, durable: bool = False) -> None:
        folder = binaries()
        assert folder is not None, "ask `binaries()` first"
        self._bin, self._durable = folder, durable
        self.folder = Path(tempfile.mkdtemp(prefix="agl-pg-"))
        self._as_user: list[str] = []
        if os.geteuid() == 0:
            user = next(name for name in USERS if _exists(name))
            shutil.chown(self.folder, user)
            self._as_user = ["setpriv", f"--reuid={user}", "--clear-groups", "--"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        data = self.folder / "data"
        if not data.exists():
            make = [self._bin / "initdb", "-D", data, "-U", "agl", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
            subprocess.run([*self._as_user, *map(str, make)], check=True, capture_output=True, cwd=self.folder)
        waits = [] if self._durable else ["-c", "fsync=off", "-c", "synchronous_commit=off"]
        run = [self._bin / "postgres", "-D", data, "-k", self.folder, "-c", "listen_addresses=", *waits]
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen([*self._as_user, *map(str, run)], stdout=log, stderr=log, cwd=self.folder)
        log.close()
        ask = [self._bin / "pg_isready", "-h", self.folder, "-U", "agl", "-d", "postgres", "-q"]
        give_up_at = time.monotonic() + 60
        while subprocess.run(list(map(str, ask)), check=False).returncode:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < give_up_at, "PostgreSQL did not start within a minute"
            time.sleep(0.05)
        return self

    def url(self, schema: str = "") -> str:
        """Of the one database; with `schema`, only of that part of it."""
        inside = f"&options={quote(f'-c search_path={schema}')}" if schema else ""
        return f"postgresql://agl@/postgres?host={quote(str(self.folder))}{inside}"

    def sql(self, statement: str) -> str:
        """Runs a statement as an administrator would."""
        run = ["psql", "-h", str(self.folder), "-U", "agl", "-d", "postgres", "-qAtc", statement]
        run[0] = str(self._bin / "psql")
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: at once and in order. SIGQUIT: as if it crashed."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _exists(user: str) -> bool:
    import pwd

    try:
        return bool(pwd.getpwnam(user))
    except KeyError:
        return False
