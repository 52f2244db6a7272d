"""Tasks with names, and ids that are a function of what they name: the key to running the same command again.

A rollout's id is a hash of its run, step, task and number. A trainer that was killed asks for the same ids after its
restart; what had finished is read, what had not is run, and nothing is counted twice.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.plain import plain
from agentlightning.schema import Json


class Task(msgspec.Struct, frozen=True):
    """One row of a data set."""

    id: str
    """The row's own `id` or `task_id` if it has one, else a hash of it; with `#2`, `#3` ... where rows repeat."""
    value: Json


def digest(*parts: object, size: int = 16) -> str:
    """Hexadecimal hash of JSON-like data; equal data, equal hash, in every process."""
    encoded = msgspec.msgpack.encode(plain(list(parts), depth=64), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=size).hexdigest()


def tasks_of(rows: Iterable[Any], what: str) -> list[Task]:
    """Rows as tasks. Raises ConfigError when there are none, or one cannot be written as JSON."""
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        try:
            value = msgspec.to_builtins(row)
            msgspec.json.encode(value)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"row {number} of {what} cannot be stored ({error}): make tasks of JSON data.") from error
        own = next((value[k] for k in ("id", "task_id") if k in value), None) if isinstance(value, dict) else None
        name = str(own) if own is not None else digest(value, size=8)
        seen[name] = seen.get(name, 0) + 1
        tasks.append(Task(name if seen[name] == 1 else f"{name}#{seen[name]}", value))
    if not tasks:
        raise ConfigError(f"{what} holds no tasks: pass at least one.")
    return tasks


def draw(tasks: Sequence[Task], count: int, step: int, seed: int) -> list[Task]:
    """The tasks of a step (1, 2, ...): every task once in each pass over the data, each pass in an order of its own.

    A function of its arguments alone, so that a restart needs no saved position.
    """
    first = (step - 1) * count
    chosen: list[Task] = []
    while len(chosen) < count:
        epoch, offset = divmod(first + len(chosen), len(tasks))
        order = random.Random(f"{seed}/{epoch}").sample(range(len(tasks)), len(tasks))
        chosen.extend(tasks[i] for i in order[offset : offset + count - len(chosen)])
    return chosen
