"""A lane of the sampling engine: rows that are sampled as one batch, and their cache.

A row's tokens are split into those that the cache holds ("fed") and those it does not ("pending"). A turn's last
sampled token is never fed by the loop that drew it, so a row always has something pending: prefill feeds all of it
but the last token, and that one starts the next decoding loop. "Slot" is a row of the cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from trace_jax.config import PolicyConfig, RolloutConfig
from trace_jax.policy import cache as kv_cache
from trace_jax.policy.cache import KVCache
from trace_jax.rollout.programs import CHUNKS, PREFILL_ROWS, Programs, State, batch_buckets, fit, length_buckets
from trace_jax.rollout.sampling import Sampling

HEADROOM = 16  # positions left free when a cache is sized for decoding


@dataclass(frozen=True)
class SampledTurn:
    """One assistant turn: ids as sampled (stop token included), their log-probabilities, whether the stop token
    came."""

    ids: Int[np.ndarray, " W"]
    logprobs: Float[np.ndarray, " W"]
    stopped: bool


@dataclass
class _Row:
    seed: tuple[int, int]  # 64 bits as two words, high first
    pending: np.ndarray
    fed: int = 0
    slot: int = 0


class Lane:
    """Rows, their cache, and the bookkeeping between jitted programs."""

    def __init__(self, programs: Programs, policy: PolicyConfig, config: RolloutConfig, slots: int):
        self._programs = programs
        self._policy = policy
        self._config = config
        self._lengths = length_buckets(config.context)
        self._sizes = batch_buckets(slots)
        self.begin({}, {})

    def begin(self, prompts: dict[int, np.ndarray], seeds: dict[int, int]) -> None:
        """Starts over with the given rows."""
        self._rows = {
            row: _Row(seed=(seeds[row] >> 32, seeds[row] & 0xFFFFFFFF), pending=prompt, slot=slot)
            for slot, (row, prompt) in enumerate(prompts.items())
        }
        self._cache: KVCache | None = None
        self.seconds = {"prefill": 0.0, "decode": 0.0}

    def extend(self, row: int, ids: np.ndarray) -> None:
        """Appends ids that were not sampled."""
        self._rows[row].pending = np.concatenate([self._rows[row].pending, ids])

    def sample(self, params: nnx.State, sampling: Sampling, names: np.ndarray, limits: np.ndarray) -> list[SampledTurn]:
        """One turn of each named row."""
        start = time.perf_counter()
        rows = [self._rows[int(name)] for name in names]
        first = self._cache is None
        self._make_room(rows)
        self._feed_prompts(params, rows) if first else self._feed(params, rows)
        jax.block_until_ready(self._cache)
        middle = time.perf_counter()
        turns = self._decode(params, sampling, rows, limits)
        self.seconds["prefill"] += middle - start
        self.seconds["decode"] += time.perf_counter() - middle
        return turns

    def _make_room(self, rows: list[_Row]) -> None:
        """Allocates the cache, or lengthens it to what the rows need."""
        wanted = max(row.fed + len(row.pending) for row in rows) + HEADROOM
        length = fit(self._lengths, min(wanted, self._lengths[-1]))
        if self._cache is None:
            batch = fit(self._sizes, len(self._rows))
            self._cache = kv_cache.new(self._policy, batch, length, self._config.cache_dtype)
        elif length > self._cache.length:
            self._cache = self._programs.grow(self._cache, length)

    def _feed_prompts(self, params: nnx.State, rows: list[_Row]) -> None:
        """Feeds each distinct prompt once and copies it to the other rows that have it."""
        groups: dict[bytes, list[_Row]] = {}
        for row in rows:
            groups.setdefault(row.pending.tobytes(), []).append(row)
        self._feed(params, [group[0] for group in groups.values()])
        pairs = [(group[0], copy) for group in groups.values() for copy in group[1:]]
        for part in _batches(pairs, PREFILL_ROWS):
            sources = _padded([source.slot for source, _ in part], PREFILL_ROWS, 0)
            targets = _padded([copy.slot for _, copy in part], PREFILL_ROWS, self._cache.batch)
            self._cache = self._programs.put(self._cache, targets, self._programs.take(self._cache, sources))
            for source, copy in part:
                copy.fed, copy.pending = source.fed, source.pending

    def _feed(self, params: nnx.State, rows: list[_Row]) -> None:
        """Feeds everything pending but the last token. Rows with similar amounts share a call."""
        todo = sorted((row for row in rows if len(row.pending) > 1), key=lambda row: len(row.pending))
        for part in _batches(todo, PREFILL_ROWS):
            slots = _padded([row.slot for row in part], PREFILL_ROWS, self._cache.batch)
            while remaining := max(len(row.pending) - 1 for row in part):
                needed = -(-remaining // CHUNKS[-1]) * CHUNKS[-1]
                chunk = next(width for width in CHUNKS if width <= needed)
                ids = np.zeros((PREFILL_ROWS, chunk), np.int32)
                counts = np.zeros(PREFILL_ROWS, np.int32)
                for i, row in enumerate(part):
                    counts[i] = min(chunk, len(row.pending) - 1)
                    ids[i, : counts[i]] = row.pending[: counts[i]]
                starts = _padded([row.fed for row in part], PREFILL_ROWS, 0)
                self._cache = self._programs.prefill(params, self._cache, ids, starts, counts, slots)
                for row, count in zip(part, counts, strict=False):
                    row.fed += int(count)
                    row.pending = row.pending[count:]

    def _decode(self, params: nnx.State, sampling: Sampling, rows: list[_Row], limits: np.ndarray) -> list[SampledTurn]:
        """Runs the decoding loop; when the rows left fit a smaller batch, goes on with a copy of just those.

        So rows that have stopped, in this turn or for good, hold up nobody.
        """
        room = [self._config.context - row.fed - len(row.pending) for row in rows]
        left = np.minimum(np.minimum(limits, self._config.max_turn_tokens), room).astype(np.int32)
        stopped = np.zeros(len(rows), bool)
        turns: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in rows]
        slots = np.array([row.slot for row in rows])  # in the batch that is decoding
        copies: list[tuple[np.ndarray, KVCache]] = []  # (slots in the lane's cache, copy), each inside the former
        while len(active := np.flatnonzero(~stopped & (left > 0))):
            work = copies[-1][1] if copies else self._cache
            size = fit(self._sizes, len(active))
            if size < work.batch:
                home = [rows[i].slot for i in active]
                work = self._programs.take(work, _padded(slots[active], size, 0))
                copies.append((_padded(home, size, self._cache.batch), work))
                slots[active] = np.arange(len(active))
            longest = max(rows[i].fed for i in active) + 1
            if longest > work.length:
                work = self._programs.grow(work, fit(self._lengths, longest))
            at = slots[active]
            state = State(
                token=_spread(work.batch, at, [rows[i].pending[-1] for i in active]),
                position=_spread(work.batch, at, [rows[i].fed for i in active]),
                left=_spread(work.batch, at, left[active]),
            )
            seeds = np.zeros((work.batch, 2), np.uint32)
            seeds[at] = [rows[i].seed for i in active]
            work, *results = self._programs.decode(params, work, state, seeds, self._next_size(work.batch), sampling)
            ids, logprobs, counts, done = (np.asarray(x) for x in results)
            for i, slot in zip(active, at, strict=True):
                count = counts[slot]
                turns[i].append((ids[slot, :count], logprobs[slot, :count]))
                stopped[i] = done[slot]
                left[i] -= count
                rows[i].fed += int(count)
                rows[i].pending = ids[slot, count - 1 : count]
            if copies:
                copies[-1] = (copies[-1][0], work)
            else:
                self._cache = work
        self._write_back(copies)
        return [_joined(turn, bool(stop)) for turn, stop in zip(turns, stopped, strict=True)]

    def _next_size(self, batch: int) -> int:
        """The batch that decoding moves to once enough rows have stopped; 0 in the smallest, which runs to the end."""
        return max((size for size in self._sizes if size < batch), default=0)

    def _write_back(self, copies: Sequence[tuple[np.ndarray, KVCache]]) -> None:
        for slots, part in copies:
            if part.length > self._cache.length:
                self._cache = self._programs.grow(self._cache, part.length)
            self._cache = self._programs.put(self._cache, slots, part)


def _joined(pieces: list[tuple[np.ndarray, np.ndarray]], stopped: bool) -> SampledTurn:
    ids = [np.zeros(0, np.int32), *(ids for ids, _ in pieces)]
    logprobs = [np.zeros(0, np.float32), *(logprobs for _, logprobs in pieces)]
    return SampledTurn(np.concatenate(ids), np.concatenate(logprobs), stopped)


def _batches(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _padded(values: Sequence[int] | np.ndarray, size: int, fill: int) -> np.ndarray:
    result = np.full(size, fill, np.int32)
    result[: len(values)] = values
    return result


def _spread(size: int, slots: np.ndarray, values: Sequence[int] | np.ndarray) -> np.ndarray:
    result = np.zeros(size, np.int32)
    result[slots] = values
    return result
