"""Who holds a run. An owner is `host:pid:nonce`, so that a process can see whether a rival on its host still lives."""

from __future__ import annotations

import os
import socket
import sys

from agentlightning.errors import RunInUse
from agentlightning.schema import Run


def refuse_rival(run: Run, owner: str, now: float) -> None:
    """Raises RunInUse while another owner's hold on `run` is alive."""
    if run.owner and run.owner != owner and run.lease_until > now and not gone(run.owner):
        raise RunInUse(
            f"run {run.name!r} ({run.id}) is held by {run.owner} for another {run.lease_until - now:.0f} s: "
            "end that process or wait until its hold runs out, or give this run another name."
        )


def gone(owner: str) -> bool:
    """Whether the owner's process is known to be dead. False where nobody can tell: its lease decides then."""
    host, _, rest = owner.rpartition(":")[0].rpartition(":")
    if host != socket.gethostname() or not rest.isdigit() or sys.platform == "win32":  # there, signal 0 would kill
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
