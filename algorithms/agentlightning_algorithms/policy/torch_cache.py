"""Keys and values of many sequences, one slot each, in one rectangle per layer: [slots, heads, length, dim].

The model calls `update` once per layer. Rows of a batch may sit at different lengths, so new keys are scattered to each
row's own position and the model gets back the columns that any row needs; the caller's mask hides the rest. What lies
beyond a slot's length is never read, so that padding may be written there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

_ROUND = 64


class PlainCache(Cache):
    """What transformers asks of a cache to build its own mask. It does so only where all rows start at 0."""

    def __init__(self) -> None:
        self.layers: list[Any] = []  # transformers looks here for sliding-window layers; there are none

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class SlotCache(PlainCache):
    """See the module. `begin` says where the next forward pass reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = 0
        self.length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._contiguous: slice | None = None
        self._uniform: slice | None = None
        self._live: Tensor | None = None
        self._rows = self._positions = torch.zeros(0, dtype=torch.long)
        self._width = 0

    @property
    def slot_bytes(self) -> int:
        """Memory of one slot at today's length; 0 before the first forward pass."""
        pairs = zip(self._keys, self._values, strict=True)
        return sum(k[0].numel() * k.element_size() + v[0].numel() * v.element_size() for k, v in pairs)

    def token_bytes(self) -> float:
        return self.slot_bytes / max(1, self.length)

    def reserve(self, slots: int, length: int) -> None:
        """Grows to hold `slots` slots of `length` tokens; contents stay."""
        if length > self.length:
            length = max(length, min(2 * self.length, self.length + 1024))
        if slots > self.slots:
            slots = max(slots, min(2 * self.slots, self.slots + 16))
        slots, length = max(slots, self.slots), max(self.length, -(-length // _ROUND) * _ROUND)
        if (slots, length) == (self.slots, self.length):
            return
        self.slots, self.length = slots, length
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._grown(old)

    def shrink(self, slots: int) -> None:
        """Gives up the slots from `slots` on."""
        if slots < self.slots:
            self.slots = slots
            for tensors in (self._keys, self._values):
                tensors[:] = [old[:slots].clone() for old in tensors]

    def _grown(self, old: Tensor) -> Tensor:
        # Zeros, not empty: a masked column is multiplied by 0, and 0 * NaN is NaN.
        new = old.new_zeros(self.slots, old.shape[1], self.length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def begin(
        self, rows: list[int], starts: list[int], tokens: int, device: torch.device, live: list[int] | None = None
    ) -> Tensor:
        """The next forward pass puts `tokens` tokens into each slot of `rows`, from `starts` on.

        `live` are the rows of the batch that are written; None: all. Returns the positions, [rows, tokens].
        """
        first, count = rows[0], len(rows)
        ascending = count == 1 or rows == list(range(first, first + count))
        self._contiguous = slice(first, first + count) if ascending else None
        even = ascending and starts.count(starts[0]) == count
        self._uniform = slice(starts[0], starts[0] + tokens) if even and live is None else None
        self._live = torch.tensor(live, device=device) if live is not None else None
        self._rows = torch.tensor(rows, device=device)[:, None]
        self._positions = torch.tensor(starts, device=device)[:, None] + torch.arange(tokens, device=device)
        self._width = max(starts) + tokens
        self.reserve(max(rows) + 1, self._width)
        return self._positions

    @property
    def width(self) -> int:
        """Columns that the running forward pass sees."""
        return self._width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == len(self._keys):
            for tensors, states in ((self._keys, key_states), (self._values, value_states)):
                tensors.append(states.new_zeros(self.slots, states.shape[1], self.length, states.shape[3]))
        return self._put(self._keys[layer_idx], key_states), self._put(self._values[layer_idx], value_states)

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        if self._uniform is not None:
            store[self._contiguous, :, self._uniform] = states
        elif self._live is not None:
            live = self._live
            store[self._rows[live], :, self._positions[live]] = states[live].transpose(1, 2)
        else:
            store[self._rows, :, self._positions] = states.transpose(1, 2)
        if self._contiguous is not None:
            return store[self._contiguous, :, : self._width]
        return store[:, :, : self._width].index_select(0, self._rows[:, 0])

    def copy(self, source: int, target: int, length: int) -> None:
        """Makes the first `length` tokens of slot `target` those of `source`."""
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                tensor[target, :, :length] = tensor[source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchanges the first `length` tokens of two slots."""
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                tensor[[one, other], :, :length] = tensor[[other, one], :, :length]
