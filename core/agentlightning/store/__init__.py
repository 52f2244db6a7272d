"""Where everything that happened is kept. `open_store(url)` gives a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentlightning.store.base import Store

__all__ = ["open_store"]


def open_store(url: str, *, create: bool = True) -> Store:
    """The store at `url`: `sqlite:///path/to/file.db`, or `sqlite://` for one in memory that ends with the process.

    A missing file is made unless `create` is False. Raises StoreError for a URL, file or schema version that it cannot
    use, with the cure.
    """
    from agentlightning.store.sql import SqlStore  # SQLAlchemy takes a while to import

    return SqlStore(url, create=create)
