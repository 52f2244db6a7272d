"""Rows of tokens to micro-batches, with what rows share computed once.

The rollouts of a group begin with the same prompt. Its keys and values are computed in one pass, one row for each
different prompt, and all rows of the group continue from them: the gradient is the same, the tokens are fewer. The shared
part ends one token before the first trained one, so that it needs no loss of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentlightning.errors import PolicyError

from .base import Row
from .torch_cache import PlainCache
from .torch_model import Network

WORTH_SHARING = 16
"""Tokens of a prompt from which on it is worth a pass of its own."""


@dataclass
class Micro:
    """Rows of one selector that go through the model together."""

    numbers: list[int]
    """Which rows these are."""
    selector: str
    ids: Tensor
    """[rows, tokens] after the shared part, padded with 0 at the right."""
    prefix: Tensor | None
    """[groups, tokens], padded with 0 at the right."""
    group: Tensor
    """[rows], the row of `prefix` that comes before."""
    start: Tensor
    """[rows], tokens that come before `ids`."""
    row: Tensor
    """[trained], which row a trained token is in."""
    place: Tensor
    """[trained], its column in `ids`; the hidden state before it predicts it."""
    old: Tensor
    advantages: Tensor
    weights: Tensor
    temperatures: Tensor

    def hidden(self, network: Network) -> Tensor:
        """Hidden states that predict the trained tokens, [trained, width]."""
        ids = self.ids[:, :-1]
        if self.prefix is None:
            return network.hidden(ids)[self.row, self.place - 1]
        cache = _SharedPrefix(self.group)
        network.hidden(self.prefix, cache=cache)
        cache.recording = False
        columns = torch.arange(self.prefix.shape[1], device=ids.device)
        before = (columns < self.start[:, None])[:, None].expand(-1, ids.shape[1], -1)
        causal = (
            torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril().expand(len(ids), -1, -1)
        )
        positions = self.start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        mask = torch.cat([before, causal], -1)[:, None]
        return network.hidden(ids, positions, mask, cache)[self.row, self.place - 1]


class _SharedPrefix(PlainCache):
    """Keeps the keys and values of the first pass, with their gradients, and puts them before those of the second."""

    def __init__(self, group: Tensor) -> None:
        super().__init__()
        self.recording = True
        self._group = group
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.recording:
            self._kept.append((key_states, value_states))
            return key_states, value_states
        keys, values = (kept.index_select(0, self._group) for kept in self._kept[layer_idx])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


def check(row: Row, number: int, vocabulary: int, context: int) -> None:
    """Raises PolicyError naming what is wrong with a row, before anything is computed from it."""
    lengths = {len(a) for a in (row.ids, row.logprobs, row.advantages, row.weights)}
    if len(lengths) != 1:
        raise PolicyError(f"row {number}: ids, logprobs, advantages and weights have lengths {sorted(lengths)}.")
    if len(row.ids) > context:
        raise PolicyError(f"row {number} has {len(row.ids)} tokens; the context is {context}.")
    if len(row.ids) and not (row.ids.min() >= 0 and row.ids.max() < vocabulary):
        raise PolicyError(f"row {number} holds a token id outside the vocabulary of {vocabulary}.")
    for name in ("logprobs", "advantages", "weights"):
        if not np.isfinite(getattr(row, name)).all():
            raise PolicyError(f"row {number}: {name} holds NaN or an infinity; exclude such calls before.")


def micros(rows: Sequence[Row], budget: int, device: torch.device) -> Iterator[Micro]:
    """Micro-batches of about `budget` tokens, rows of like length together. Tokens at position 0 are never trained.

    The longest come first: if memory fails, it fails at once.
    """
    for selector in dict.fromkeys(row.selector for row in rows):
        trained = [n for n, row in enumerate(rows) if row.selector == selector and np.any(row.weights[1:])]
        for groups in _packed(_groups(rows, trained), rows, budget):
            yield _micro(selector, rows, groups, device)


@dataclass
class _Group:
    """Rows with one prompt; `shared` of its tokens are computed once."""

    numbers: list[int]
    shared: int


def _groups(rows: Sequence[Row], numbers: list[int]) -> list[_Group]:
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for number in numbers:
        row = rows[number]
        by_prompt[row.ids[: _prompt(row)].tobytes()].append(number)
    groups = []
    for same in by_prompt.values():
        shared = _prompt(rows[same[0]])
        if len(same) > 1 and shared >= WORTH_SHARING:
            groups.append(_Group(same, shared))
        else:
            groups += [_Group([number], 0) for number in same]
    return groups


def _prompt(row: Row) -> int:
    """Tokens that come before the one that predicts the first trained token."""
    return int(np.flatnonzero(row.weights[1:])[0])


def _packed(groups: list[_Group], rows: Sequence[Row], budget: int) -> Iterator[list[_Group]]:
    """Groups, some of them cut in pieces, that fill a micro-batch each. Groups without a shared part stay among themselves."""

    def tail(group: _Group) -> int:
        return max(len(rows[n].ids) for n in group.numbers) - group.shared

    for sharing in (True, False):
        queue = sorted((g for g in groups if bool(g.shared) == sharing), key=lambda g: (-g.shared, -tail(g)))
        taken: list[_Group] = []
        while queue:
            group = queue.pop(0)
            prefix = max(g.shared for g in [*taken, group])
            width = max(map(tail, [*taken, group]))
            count = sum(len(g.numbers) for g in taken)
            room = (budget - prefix * (len(taken) + 1)) // width - count
            if room < len(group.numbers) and taken:
                yield taken
                taken = []
                queue.insert(0, group)
            else:
                now, later = group.numbers[: max(1, room)], group.numbers[max(1, room) :]
                taken.append(_Group(now, group.shared))
                if later:
                    queue.insert(0, _Group(later, group.shared))
        if taken:
            yield taken


def _micro(selector: str, rows: Sequence[Row], groups: list[_Group], device: torch.device) -> Micro:
    numbers = [n for group in groups for n in group.numbers]
    starts = [group.shared for group in groups for _ in group.numbers]
    tails = list(zip((rows[n] for n in numbers), starts, strict=True))
    weights = _table([row.weights[start:] for row, start in tails], np.float32)
    weights[:, 0] = 0
    row, place = np.nonzero(weights)
    temperatures = np.array([rows[n].temperature or 1.0 for n in numbers], np.float32)

    def at_trained(name: str) -> Tensor:
        return put(_table([getattr(r, name)[start:] for r, start in tails], np.float32)[row, place])

    def put(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    prompts = [rows[group.numbers[0]].ids[: group.shared] for group in groups]
    return Micro(
        numbers=numbers,
        selector=selector,
        ids=put(_table([r.ids[start:] for r, start in tails], np.int64)),
        prefix=put(_table(prompts, np.int64)) if groups[0].shared else None,
        group=put(np.repeat(np.arange(len(groups)), [len(group.numbers) for group in groups])),
        start=put(np.array(starts, np.int64)),
        row=put(row),
        place=put(place),
        old=at_trained("logprobs"),
        advantages=at_trained("advantages"),
        weights=put(weights[row, place]),
        temperatures=put(temperatures[row]),
    )


def _table(arrays: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """Arrays as the rows of one, padded with 0."""
    table = np.zeros((len(arrays), max(map(len, arrays))), dtype)
    for number, array in enumerate(arrays):
        table[number, : len(array)] = array
    return table
