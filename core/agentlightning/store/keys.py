"""Bearer keys: the store's own opens everything; one derived from it lets a program write its own attempt and no more.

An attempt's key is `agl-<attempt id>-<HMAC-SHA256 of the id under the store's key>`: nobody has to keep it, and whoever
has it cannot make another. The gateway reads the attempt from its beginning (`gateway/identity.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import NamedTuple

from agentlightning.errors import Forbidden

_ATTEMPT = re.compile(r"agl-([0-9a-f]{32})-[0-9a-f]{32}")
_CURE = "give the server's key: open_store(url, key=...) or AGL_STORE_KEY"


class Caller(NamedTuple):
    """Who a key says is calling."""

    attempt_id: str | None
    """The only attempt that it may write; None: it may do everything."""


def attempt_key(store_key: str, attempt_id: str) -> str:
    """For programs that should write their own attempt, and nothing else."""
    proof = hmac.new(store_key.encode(), b"agl attempt " + attempt_id.encode(), hashlib.sha256).hexdigest()
    return f"agl-{attempt_id}-{proof[:32]}"


def caller(store_key: str, authorization: str) -> Caller:
    """Who sends this header. `store_key` empty: everyone may do everything. Raises Forbidden."""
    if not store_key:
        return Caller(None)
    scheme, _, given = authorization.partition(" ")
    given = given.strip()
    if scheme.lower() != "bearer" or not given:
        raise Forbidden(f"this store asks for a key: {_CURE}.")
    if _same(given, store_key):
        return Caller(None)
    named = _ATTEMPT.fullmatch(given)
    if named and _same(given, attempt_key(store_key, named[1])):
        return Caller(named[1])
    raise Forbidden(f"this store has another key: {_CURE}.")


def _same(given: str, right: str) -> bool:
    """Takes as long for a nearly right key as for a wrong one."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), right.encode("utf-8", "replace"))
