"""Where everything that happened is kept. `open_store(url)` gives a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentlightning.store.base import Store

__all__ = ["open_store"]


def open_store(url: str, *, create: bool = True, key: str | None = None) -> Store:
    """The store at `url`: `sqlite:///path/to/file.db`, `sqlite://` for one in memory that ends with the process,
    `postgresql://user@host/database`, or `http://host:port` of a store's server (`agl store serve`).

    A missing file is made unless `create` is False. `key`: of a server; without it, that of `AGL_STORE_KEY`. Raises
    StoreError for a URL, file or schema version that it cannot use, with the cure.
    """
    if url.startswith(("http://", "https://")):
        from agentlightning.store.client import http_store

        return http_store(url, key)
    from agentlightning.store.sql import SqlStore  # SQLAlchemy takes a while to import

    return SqlStore(url, create=create)
