"""One file of records, written at its end and read from its start: frames of a length, a checksum and a record.

Its process holds a lock on it, so that others see whether that one still lives. A frame that was cut by a kill is no record.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from agentlightning.errors import StoreError
from agentlightning.schema import Completion, Reward, Span, new_id
from agentlightning.store.bodies import JSON, MSGPACK, Body, tamed, written

try:
    import fcntl
except ImportError:  # Windows: files of processes that are gone stay where they are
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".spool"
_HEAD = struct.Struct("<IIBB")
_KINDS: tuple[type[Any], ...] = (Span, Completion, Reward)
_BODIES = tuple(map(Body, _KINDS))
_FORMS = (MSGPACK, JSON)


class SpoolFile:
    """Not thread-safe. `path` is locked while it is open."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._sizes: list[int] = [size for _, size in self._frames(0)]
        """Of each frame that is not yet dropped."""
        self._start, self.size = 0, sum(self._sizes)
        """Where the first frame begins, and how many bytes the frames have."""

    @classmethod
    def create(cls, folder: Path, prefix: str) -> Self:
        """A new one. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{prefix}-{os.getpid()}-{new_id()[:8]}{SUFFIX}"
        made = open_locked(path, os.O_CREAT | os.O_EXCL)
        if made is None:
            raise OSError(errno.EACCES, "cannot lock a new file", str(path))
        return cls(path, made)

    def __len__(self) -> int:
        return len(self._sizes)

    def append(self, records: Sequence[Any], room: int) -> None:
        """All or none. Raises OSError when they have more than `room` bytes or the disk is full."""
        frames = [_frame(record) for record in records]
        size = sum(map(len, frames))
        if size > room:
            raise OSError(errno.ENOSPC, f"{size} more bytes are over the limit of the spool")
        end = self._start + self.size
        try:
            self._file.seek(end)
            self._file.write(b"".join(frames))
            self._file.flush()
        except OSError:
            self._file.truncate(end)
            raise
        self._sizes += map(len, frames)
        self.size += size

    def first(self, count: int) -> list[Any]:
        """The oldest records, up to `count`."""
        return [record for record, _ in self._frames(self._start, min(count, len(self._sizes)))]

    def drop(self, count: int) -> None:
        """Forgets the oldest records."""
        gone = sum(self._sizes[:count])
        del self._sizes[:count]
        self._start, self.size = self._start + gone, self.size - gone

    def close(self) -> None:
        """Leaves the file to whoever opens it next."""
        self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _frames(self, start: int, count: int | None = None) -> Iterator[tuple[Any, int]]:
        self._file.seek(start)
        found = 0
        while count is None or found < count:
            head = self._file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return
            length, checksum, kind, form = _HEAD.unpack(head)
            body = self._file.read(length)
            if len(body) < length or zlib.crc32(body) != checksum:
                return
            found += 1
            yield _BODIES[kind].read(body, _FORMS[form]), _HEAD.size + length


def orphans(folder: Path, prefix: str) -> list[SpoolFile]:
    """Files that processes which are gone have left, oldest first; ours as long as they are open."""
    found = []
    if fcntl is None or not folder.is_dir():
        return []
    for path in sorted(folder.glob(f"{prefix}-*{SUFFIX}"), key=_age):
        file = open_locked(path)
        if file is None:
            continue
        orphan = SpoolFile(path, file)
        if len(orphan):
            found.append(orphan)
        else:
            orphan.remove()
    return found


def open_locked(path: Path, flags: int = 0) -> BinaryIO | None:
    """None when another process holds it, or has removed it."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | flags, 0o600), "r+b")
    except FileNotFoundError:
        return None
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        file.close()
        return None
    file.close()
    return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _frame(record: Any) -> bytes:
    """Raises StoreError for a reward that is no data; of spans and completions what can be said is kept."""
    try:
        body, form = written(record)
    except StoreError:
        if isinstance(record, Reward):
            raise
        body, form = written(tamed(record))
    return _HEAD.pack(len(body), zlib.crc32(body), _KINDS.index(type(record)), _FORMS.index(form)) + body
