"""Bookkeeping of a lane's slots, on the host: which row lies where, what its cache holds, what can be shared.

A row's ids are split into those that the cache holds ("fed") and those it does not. The last token of a row is never
fed by the loop that drew it, so a row that is to be sampled always has something left: prefill feeds all of it but the
last token, and that one starts the next decoding loop. A slot keeps the ids of the row it held until another takes it,
so that a common prefix can still be copied from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

IDLE, FEEDING, DECODING = range(3)  # waits for its tool; has ids to feed; is being sampled


@dataclass
class Row:
    """A trajectory in the engine."""

    name: int
    seed: tuple[int, int]  # 64 bits as two words, high first
    slot: int
    prompt: int  # tokens of the prompt
    state: int = FEEDING
    limit: int = 0  # tokens that the turn may still get
    source: tuple[int, int] | None = None  # slot, and tokens to copy from it once they are there
    version: int | None = None  # oldest that drew a token of the turn
    stale: bool = False  # a token of the turn attended to keys of older parameters
    adapter: int = 0  # whose keys and values its cache holds
    locked: np.ndarray | None = None  # of a gate over adapters: the row's weights in each layer, [L M]
    drawn: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]] = field(default_factory=list)  # ids, logprobs, kept


@dataclass
class Group:
    """Slots that are decoded as one batch."""

    index: int
    passed_over: int = 0  # decoding calls that other groups got since this one had its last


class Slots:
    """The slots of a lane. Slot s is row s % size of group s // size."""

    def __init__(
        self,
        count: int,
        size: int,
        context: int,
        widest: int,
        recurrent: bool = False,
        experts: tuple[int, int] | None = None,
        gate: tuple[int, int] | None = None,
    ):
        """
        Args:
          count: slots. size: slots of a group.
          context: longest row.
          widest: widest prefill chunk: a prefix is shared in multiples of it, so that the rest is fed in the same
            pieces, and therefore rounded alike, as without sharing.
          recurrent: the policy has states of which only the newest exists: a prefix can be shared as long as its
            owner was fed nothing more.
          experts: layers, and experts of a token, whose record is kept.
          gate: layers, and adapters with the base, of a gate over them: only prompts are shared then, without their
            last token, from which on a row has its own mixture.
        """
        self.gate = gate
        self._recurrent = recurrent
        self.experts = None if experts is None else np.full((count, context + 1, *experts), -1, np.int16)
        self._adapter = np.full(count, -2, np.int64)
        self.size, self._widest = size, widest
        self.groups = [Group(g) for g in range(-(-count // size))]
        self.rows: list[Row | None] = [None] * count
        self.ids = np.zeros((count, context + 1), np.int32)
        self.length = np.zeros(count, np.int64)  # ids of the row
        self.fed = np.zeros(count, np.int64)
        self._prompt = np.zeros(count, np.int64)
        self.oldest = np.zeros(count, np.int64)  # policy version of the oldest keys and values in the cache
        self._taken = np.zeros(count, np.int64)  # order in which slots were last taken

    def forget(self) -> None:
        """Empties every slot; nothing that their caches hold is used again."""
        self.rows = [None] * len(self.rows)
        self.length[:] = self.fed[:] = self._prompt[:] = 0
        self._taken[:] = 0
        for group in self.groups:
            group.passed_over = 0

    def group_of(self, slot: int) -> tuple[Group, int]:
        """The group of a slot and the slot's row in it."""
        return self.groups[slot // self.size], slot % self.size

    def members(self, group: Group) -> list[Row]:
        """Rows of a group."""
        start = group.index * self.size
        return [row for row in self.rows[start : start + self.size] if row is not None]

    def put(
        self,
        name: int,
        seed: tuple[int, int],
        prompt: Int[np.ndarray, " n"],
        limit: int,
        version: int,
        share: bool,
        adapter: int = 0,
    ) -> tuple[Row, int]:
        """Places a new row in a free slot; with `share`, next to what its prompt has in common with another.

        Returns:
          The row, and how many of its tokens need no prefill because the slot it got holds them already. What lies in
          another slot is named in `Row.source`.
        """
        other, common = self._longest_match(prompt, version, adapter) if share else (None, 0)
        slot, kept = self._free(), 0
        if common and self.rows[other] is None:  # its old place, nothing to copy
            slot, kept = other, min(common, int(self.fed[other]))
        row = Row(name, seed, slot, len(prompt), limit=limit, adapter=adapter)
        if self.gate is not None:
            row.locked = np.zeros(self.gate, np.float32)
        if common and not kept:
            before = self.rows[other].source
            # A row that waits for a copy itself has nothing to copy from: both take it from the same place.
            row.source = (before[0], common) if before is not None and before[1] >= common else (other, common)
        self.rows[slot] = row
        self.ids[slot, : len(prompt)] = prompt
        self.length[slot] = self._prompt[slot] = len(prompt)
        self.fed[slot], self.oldest[slot], self._adapter[slot] = kept, version, adapter
        self._taken[slot] = self._taken.max() + 1
        return row, kept

    def remove(self, row: Row) -> None:
        """Frees a row's slot; its ids and cache stay to be shared."""
        self.rows[row.slot] = None

    def extend(self, row: Row, ids: Int[np.ndarray, " n"]) -> None:
        """Appends ids to a row."""
        end = int(self.length[row.slot]) + len(ids)
        self.ids[row.slot, self.length[row.slot] : end] = ids
        self.length[row.slot] = end

    def record(self, row: Row, experts: Int[np.ndarray, "L n e"]) -> None:
        """Keeps the experts of a row's next tokens, those that are being fed."""
        start = int(self.fed[row.slot])
        self.experts[row.slot, start : start + experts.shape[1]] = experts.transpose(1, 0, 2)

    def left(self, row: Row) -> int:
        """Tokens that prefill has to feed before the row can be sampled."""
        return int(self.length[row.slot] - self.fed[row.slot]) - 1

    def source_ready(self, row: Row) -> bool | None:
        """Whether what the row waits for can be copied; None when it will never come."""
        slot, common = row.source
        # Another row may have taken the slot; it will do if it begins alike and was fed in the same pieces.
        alike = self._prompt[slot] == row.prompt or common % self._widest == 0
        if self.gate is not None and common >= self._prompt[slot]:
            return None
        if not alike or self.oldest[slot] < self.oldest[row.slot]:
            return None
        if not np.array_equal(self.ids[slot, :common], self.ids[row.slot, :common]):
            return None
        if self._adapter[slot] != row.adapter or (self._recurrent and self.fed[slot] > common):
            return None
        if self.fed[slot] >= common:
            return True
        return False if self.rows[slot] is not None else None

    def _longest_match(self, prompt: np.ndarray, version: int, adapter: int) -> tuple[int | None, int]:
        """The slot whose ids begin most like the prompt, and how many tokens can be shared with it: all but the last
        of an equal prompt, or a multiple of the widest chunk."""
        n = len(prompt)
        usable = (self.oldest == version) & (self.length > 0) & (self._adapter == adapter)
        width = min(n, self.ids.shape[1])
        differs = self.ids[:, :width] != prompt[:width]
        same = np.where(differs.any(1), differs.argmax(1), width)
        same = np.where(usable, np.minimum(same, self.length), 0)
        if self.gate is not None:
            same = np.minimum(same, np.maximum(self._prompt - 1, 0))
        # What a freed slot was never fed will not come any more.
        free = np.array([row is None for row in self.rows])
        same = np.where(free, np.minimum(same, self.fed), same)
        equal = (self._prompt == n) & (same >= n - 1) & (n > 1)
        shared = np.where(equal, n - 1, np.minimum(same, n - 1) // self._widest * self._widest)
        if self._recurrent:
            shared = np.where(self.fed > shared, 0, shared)
        best = int(np.argmax(shared * 2 + free))  # of equals a free slot: nothing to copy
        return (best, int(shared[best])) if shared[best] > 0 else (None, 0)

    def _free(self) -> int:
        """A free slot that nobody waits to copy from, in the fullest group that has one, so that the rows left at the
        end lie together; of these the one whose ids are the oldest."""
        used = [sum(row is not None for row in self.rows[g * self.size : (g + 1) * self.size]) for g in self._indices()]
        wanted = {row.source[0] for row in self.rows if row is not None and row.source is not None}
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        return max(free, key=lambda s: (s not in wanted, used[s // self.size], -int(self._taken[s]), -s))

    def _indices(self) -> range:
        return range(len(self.groups))
