"""From the tables of an older release to those of this one: one function per version, run when a store is opened.

Adding one: raise `SCHEMA_VERSION`, and add a function that turns the version before into it. Each runs in the same
transaction as the new version number.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import Connection

from agentlightning.store.tables import meta, workers


def _retries_and_workers(connection: Connection) -> None:
    connection.execute(sa.text("ALTER TABLE agl_rollouts ADD COLUMN retry VARCHAR NOT NULL DEFAULT '{}'"))
    workers.create(connection)


UPGRADES: dict[int, Callable[[Connection], None]] = {1: _retries_and_workers}
"""By the version that each starts from."""


def upgraded(connection: Connection, version: int) -> int:
    """The version after all upgrades that apply to `version`."""
    while version in UPGRADES:
        UPGRADES[version](connection)
        version += 1
        connection.execute(sa.update(meta).where(meta.c.key == "schema_version").values(value=version))
    return version
