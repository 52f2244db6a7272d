"""The sequences of one set of weights: which slot each has, what of it is computed already, and the forward passes.

A slot keeps its keys and values after its request is done. The next turn of the conversation finds them as the longest
common prefix of ids and computes only what is new; a group of equal prompts is read once and copied. Requests join and
leave between any two steps. A sequence with one uncomputed token is decoding, one with more is still being read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .torch_cache import SlotCache
from .torch_job import Job
from .torch_model import Network
from .torch_options import TorchOptions
from .torch_sampling import Draw, sample

WORTH_WAITING = 16
"""Tokens of a shared prefix for which a request waits until another one has read them."""
WORTH_COPYING = 4


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the cache."""

    index: int
    ids: list[int] = field(default_factory=list)
    done: int = 0
    """How many of `ids` have their keys and values in the cache."""
    adapter: str | None = None
    job: Job | None = None
    used: int = 0

    @property
    def pending(self) -> int:
        return len(self.ids) - self.done


@dataclass(slots=True)
class Counts:
    """Tokens since the start, for people and tests."""

    prompt: int = 0
    reused: int = 0
    computed: int = 0
    generated: int = 0


class Lane:
    """See the module."""

    def __init__(self, network: Network, options: TorchOptions) -> None:
        self.network, self.options = network, options
        self.cache = SlotCache()
        self.slots: list[Slot] = []
        self.counts = Counts()
        self._tick = 0

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.job is not None]

    # ---- joining

    def admit(self, job: Job, adapter: str | None) -> bool:
        """Gives the job a slot; False: not now."""
        if job.awaits is not None and self._still_worth(job.awaits):
            return False
        job.awaits = None
        donor, ready, pending = self._search(job, adapter)
        if pending is not None:
            job.awaits = pending
            return False
        slot = self._place(donor, ready, len(job.prompt))
        if slot is None:
            return False
        if slot is not donor:
            if donor is None or ready < WORTH_COPYING:
                ready = 0
            else:
                self.cache.copy(donor.index, slot.index, ready)
        self._tick += 1
        slot.ids, slot.done, slot.adapter, slot.job, slot.used = list(job.prompt), ready, adapter, job, self._tick
        job.reused = ready
        self.counts.prompt += len(job.prompt)
        self.counts.reused += ready
        return True

    def _still_worth(self, awaits: tuple[Job, int]) -> bool:
        other, needed = awaits
        return any(slot.job is other and slot.done < needed for slot in self.slots)

    def _search(self, job: Job, adapter: str | None) -> tuple[Slot | None, int, tuple[Job, int] | None]:
        """The slot with the longest computed prefix, its length, and a job that is about to compute a longer one."""
        donor, ready, coming, source = None, 0, 0, None
        limit = len(job.prompt) - 1
        for slot in self.slots:
            if slot.adapter != adapter or not slot.ids:
                continue
            length = common_prefix(slot.ids, job.prompt, limit)
            computed = min(length, slot.done)
            if computed > ready:
                donor, ready = slot, computed
            if length > coming and slot.job is not None and slot.pending > 1:
                coming, source = length, slot.job
        if source is not None and coming - ready >= WORTH_WAITING:
            return donor, ready, (source, coming)
        return donor, ready, None

    def _place(self, donor: Slot | None, ready: int, length: int) -> Slot | None:
        """Where the job goes: on the end of the same conversation, else an empty slot, else the one unused longest."""
        if donor is not None and donor.job is None and donor.done - ready <= WORTH_WAITING:
            return donor
        for slot in self.slots:
            if not slot.ids and slot.job is None:
                return slot
        if self._affordable(length + 1) > len(self.slots):
            self.slots.append(Slot(len(self.slots)))
            self.cache.reserve(len(self.slots), length + 1)
            return self.slots[-1]
        idle = [slot for slot in self.slots if slot.job is None]
        others = [slot for slot in idle if slot is not donor] or idle
        return min(others, key=lambda slot: slot.used) if others else None

    def _affordable(self, length: int) -> int:
        """How many slots of that length the memory allows: at least one, at most twice the largest batch."""
        size = self.network.token_bytes * max(length, self.cache.length)
        return max(1, min(2 * self.options.max_batch, int(self.options.cache_mb * 2**20 / size)))

    def _fit(self, length: int) -> None:
        """Before slots grow longer, idle ones make room."""
        if length <= self.cache.length:
            return
        keep = max(len(self.active), self._affordable(length))
        if keep < len(self.slots):
            self._compact()
            del self.slots[keep:]
            self.cache.shrink(keep)

    def _compact(self) -> None:
        """Moves the slots that work to the front, so that a batch is one block of memory without a copy."""
        active = self.active
        free = [slot for slot in self.slots[: len(active)] if slot.job is None]
        for slot in active:
            if slot.index >= len(active):
                other = free.pop()
                self.cache.swap(slot.index, other.index, max(slot.done, other.done))
                slot.index, other.index = other.index, slot.index
        self.slots.sort(key=lambda slot: slot.index)

    # ---- leaving

    def sweep(self) -> list[Job]:
        """Frees the slots of cancelled jobs."""
        gone = []
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                slot.job.finish = "cancelled"
                gone.append(slot.job)
                self._release(slot)
        return gone

    def _release(self, slot: Slot) -> None:
        self._tick += 1
        slot.job, slot.used = None, self._tick
        del slot.ids[slot.done :]

    def forget(self, adapters: set[str | None] | None = None) -> None:
        """Drops what was computed with weights that are no longer current; None: all of it."""
        for slot in self.slots:
            if slot.job is None and (adapters is None or slot.adapter in adapters):
                slot.ids, slot.done = [], 0

    def fail(self, reason: str) -> list[Job]:
        """Ends all jobs with an error and starts from an empty cache."""
        jobs = [slot.job for slot in self.active if slot.job is not None]
        for job in jobs:
            job.finish, job.error = "error", reason
        self.slots, self.cache = [], SlotCache()
        return jobs

    # ---- working

    def step(self) -> list[Job]:
        """One chunk of prompts, then one token for every sequence that is read. Returns jobs with new tokens."""
        return self._read() + self._decode()

    def _read(self) -> list[Job]:
        waiting = [slot for slot in self.slots if slot.job is not None and slot.pending > 1]
        if not waiting:
            return []
        slots, tokens = self._chunk(min(waiting, key=lambda slot: slot.used), waiting)
        self._fit(max(slot.done for slot in slots) + tokens)
        slots.sort(key=lambda slot: slot.index)
        counts = [min(tokens, slot.pending) for slot in slots]
        batch = [
            slot.ids[slot.done : slot.done + count] + [0] * (tokens - count)
            for slot, count in zip(slots, counts, strict=True)
        ]
        hidden = self._forward(slots, batch)
        for slot, count in zip(slots, counts, strict=True):
            slot.done += count
        self.counts.computed += sum(counts)
        ready = [row for row, slot in enumerate(slots) if slot.pending == 0]
        return self._sample([slots[r] for r in ready], hidden[ready, [counts[r] - 1 for r in ready]]) if ready else []

    def _chunk(self, first: Slot, waiting: list[Slot]) -> tuple[list[Slot], int]:
        """The oldest sequence, and others of like length that fit beside it without much padding."""
        budget = self.options.chunk
        tokens = min(first.pending, budget)
        like = [slot for slot in waiting if slot is not first and tokens // 2 <= slot.pending <= tokens]
        return [first, *like[: max(0, budget // tokens - 1)]], tokens

    def _decode(self) -> list[Job]:
        ready = [slot for slot in self.slots if slot.job is not None and slot.pending == 1]
        if not ready:
            return []
        self._fit(max(slot.done for slot in ready) + 1)
        first, last = ready[0].index, ready[-1].index
        if last - first >= 1.25 * len(ready) + 1 and last >= len(self.active):
            self._compact()
            ready.sort(key=lambda slot: slot.index)
            first, last = ready[0].index, ready[-1].index
        block = self.slots[first : last + 1]
        live = [slot.index - first for slot in ready] if len(ready) < len(block) else None
        batch = [[slot.ids[slot.done]] if slot.pending == 1 else [0] for slot in block]
        hidden = self._forward(block, batch, live)[:, 0]
        if live is not None:
            hidden = hidden[live]
        for slot in ready:
            slot.done += 1
        self.counts.computed += len(ready)
        return self._sample(ready, hidden)

    def _forward(self, slots: list[Slot], batch: list[list[int]], live: list[int] | None = None) -> Tensor:
        """Hidden states of `batch`, the next tokens of `slots`. Rows that are not `live` only fill the block."""
        device, tokens = self.network.device, len(batch[0])
        starts = [slot.done if live is None or slot.pending == 1 else 0 for slot in slots]
        positions = self.cache.begin([slot.index for slot in slots], starts, tokens, device, live)
        mask = None
        if tokens == 1 or any(starts):
            columns = torch.arange(self.cache.width, device=device)
            mask = (columns <= positions[:, :, None])[:, None]
        busy = next(slot.adapter for slot in slots if slot.job is not None)
        adapters = [slot.adapter if slot.job is not None else busy for slot in slots]
        with self.network.each(adapters):
            return self.network.hidden(torch.tensor(batch, device=device), positions, mask, self.cache)

    def _sample(self, slots: list[Slot], hidden: Tensor) -> list[Job]:
        jobs = [slot.job for slot in slots if slot.job is not None]
        draw = Draw(
            [job.temperature for job in jobs],
            [job.top_p for job in jobs],
            [job.top_k for job in jobs],
            [job.uniforms[len(job.out)] for job in jobs],
        )
        tokens, logps = sample(self.network.logits(hidden), draw)
        self.counts.generated += len(jobs)
        changed = []
        for slot, job, token, logp in zip(slots, jobs, tokens, logps, strict=True):
            slot.ids.append(token)
            if job.take(token, logp):
                self._release(slot)
                changed.append(job)
            elif job.streaming:
                changed.append(job)
        return changed


def common_prefix(one: list[int], other: list[int], limit: int) -> int:
    """How many leading ids two lists share, at most `limit`."""
    high = min(len(one), len(other), limit)
    if high <= 0 or one[0] != other[0]:
        return 0
    if one[:high] == other[:high]:
        return high
    low = 1
    while high - low > 1:  # one[:low] is shared, one[:high] is not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
