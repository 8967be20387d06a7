"""A lane of the sampling engine: its slots, and the thread that serves them on the lane's own device or devices.

The thread alternates between prefill and decoding. It takes the group with the most rows that could be sampled, feeds
what those rows have pending, decodes a few tokens, hands over the turns that ended, and looks for new orders. Rows that
wait for a tool keep their slot and their cache; a slow one holds up nobody. On a CPU, where idle places cost as much as
busy ones, a group of which most rows are at their tools is left until more of them are back, as long as they keep
coming.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trace_jax.config import RolloutConfig
from trace_jax.policy.cache import default_block
from trace_jax.policy.mixture import Lock
from trace_jax.rollout.calls import Calls, Weights
from trace_jax.rollout.generator import Deliver, SampledTurn
from trace_jax.rollout.placement import Place
from trace_jax.rollout.programs import Chunk, State, fit, length_buckets, next_chunk
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.slots import DECODING, FEEDING, IDLE, Group, Row, Slots

# Prefill calls between two decoding calls: few while rows are in the middle of a turn, which a long prompt must not
# hold up, more when none is, so that rows that start together are decoded together.
FEED_CALLS, MOST_FEED_CALLS = 4, 64
QUIT_SHARE = 8  # a decoding call ends when one row in so many has stopped: their places idle, their tools wait
PACE_SHARE = 0.2  # weight of the last decoding call in the running mean of their duration
MOST_PATIENCE = 1.0  # seconds


@dataclass
class LaneStats:
    """Counts since the engine was made.

    Attributes:
      decode_steps: decoding steps, each over one group. slot_steps: times the slots of the group.
      sampled_tokens: tokens drawn for rows.
      prefill_tokens: tokens fed by prefill. shared_tokens: tokens that a common prefix saved it.
      refilled_tokens: tokens fed anew because parameters had changed (part of `prefill_tokens`).
      prefill_seconds, decode_seconds: in those calls.
      stale_turns: turns that used keys and values of older parameters.
    """

    decode_steps: int = 0
    slot_steps: int = 0
    sampled_tokens: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    refilled_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stale_turns: int = 0


class Lane:
    """Rows that share a device, and the thread that samples them. Orders come from one other thread at a time."""

    def __init__(
        self,
        calls: Calls,
        config: RolloutConfig,
        slots: Slots,
        place: Place,
        shapes: Sequence[Chunk],
        reuse: bool,
    ):
        self.stats = LaneStats()
        self.place = place
        self.calls, self._config = calls, config
        self._slots, self._shapes, self._reuse = slots, shapes, reuse
        # On a CPU the places of rows that wait cost as much as busy ones, and their tools need the same cores; on an
        # accelerator they cost next to nothing, and waiting only wastes it.
        self._patient = place.device.platform == "cpu"
        self._pace = 0.0  # running mean of the seconds of a decoding call
        self._heard = 0.0  # when the last order was done
        self._lengths = length_buckets(config.context, default_block())
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def weights(self) -> Weights | None:
        """Parameters on the lane's devices, and their version."""
        return self.calls.weights

    # Orders, from the collecting thread

    def begin(self, sampling: Sampling, deliver: Deliver) -> None:
        """Forgets all rows and starts the thread."""
        self.end()
        self._deliver = deliver
        self._rows: dict[int, Row] = {}
        self._slots.forget()
        self.calls.begin(sampling)
        self._orders = queue.SimpleQueue()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._serve, name="rollout-lane", daemon=True)
        self._thread.start()

    def order(self, work: Callable[[], None]) -> None:
        """Has the lane's thread do something between two device calls."""
        self._orders.put(work)

    def end(self) -> None:
        """Stops the thread; returns when its device call is over."""
        if self._thread is not None:
            self._stopping.set()
            self._orders.put(None)
            self._thread.join()
            self._thread = None
            self.calls.end()

    def free(self) -> None:
        """Gives up the memory of its devices, after the end."""
        self._slots.forget()
        self.calls.free()

    # What orders do, in the lane's thread

    def start(self, name: int, prompt: np.ndarray, seed: int, limit: int, adapter: int) -> None:
        """Places a new row."""
        words = (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
        row, kept = self._slots.put(name, words, prompt, 0, self.weights[1], self._reuse, adapter)
        self.stats.shared_tokens += kept
        self._rows[name] = row
        self._ask(row, limit)

    def resume(self, name: int, ids: np.ndarray, limit: int) -> None:
        """Appends ids to a row and has its next turn sampled."""
        row = self._rows.get(name)
        if row is None:  # released while the order was on its way
            return
        self._slots.extend(row, ids)
        if not self._reuse:
            self._slots.fed[row.slot] = 0
        self._ask(row, limit)

    def release(self, name: int) -> None:
        """Frees a row's slot."""
        row = self._rows.pop(name, None)
        if row is None:
            return
        self._slots.remove(row)
        # The next row may need this very slot: those that wait to copy from it do so now.
        for group in self._slots.groups:
            waiting = [r for r in self._slots.members(group) if r.source is not None and r.source[0] == row.slot]
            if waiting:
                self._copy(group, waiting)

    def _ask(self, row: Row, limit: int) -> None:
        row.limit = min(limit, self._config.context - int(self._slots.length[row.slot]))
        row.state, row.version, row.stale, row.drawn = FEEDING, None, False, []
        if row.limit <= 0:
            self._finish(row, False)

    # The loop

    def _serve(self) -> None:
        try:
            waiting_since = None
            while not self._stopping.is_set():
                self._take_orders(None if self._fullest() is None else 0.0)
                group = self._fullest()
                if group is None or self._stopping.is_set():
                    continue
                now = time.perf_counter()
                waiting_since = now if waiting_since is None else waiting_since
                if self._worth_waiting(group):
                    patience = min(self._heard + self._pace, waiting_since + MOST_PATIENCE) - now
                    if patience > 0:
                        self._take_orders(patience)
                        continue
                waiting_since = None
                for other in self._slots.groups:
                    other.passed_over = 0 if other is group else other.passed_over + 1
                self._feed(group)
                self._decode(group)
        except BaseException as error:  # the collecting thread raises it
            self._deliver(error)

    def _take_orders(self, patience: float | None) -> None:
        """Does what was ordered; waits so many seconds for a first order, or for ever (None)."""
        try:
            order = self._orders.get(timeout=patience) if patience != 0.0 else self._orders.get_nowait()
            while order is not None:
                order()
                self._heard = time.perf_counter()
                order = self._orders.get_nowait()
        except queue.Empty:
            return

    def _fullest(self) -> Group | None:
        """The group with the most rows to sample; one that was passed over for long comes first in the end."""
        best, most = None, 0.0
        for group in self._slots.groups:
            ready = sum(row.state != IDLE for row in self._slots.members(group))
            score = ready + group.passed_over * self._slots.size / 8
            if ready and score > most:
                best, most = group, score
        return best

    def _worth_waiting(self, group: Group) -> bool:
        """Whether most of the group's rows are at their tools. As long as orders keep coming, at least one in the time
        of a decoding call, more of them are worth waiting for."""
        rows = self._slots.members(group)
        return self._patient and 2 * sum(row.state == IDLE for row in rows) > len(rows)

    def _room(self, group: Group, wanted: int) -> None:
        """Allocates a group's cache, or lengthens it."""
        self.calls.room(group.index, self._slots.size, fit(self._lengths, min(wanted, self._lengths[-1])))

    def _feed(self, group: Group) -> None:
        """Feeds what the group's rows have pending, in a bounded number of calls if some could be decoded meanwhile."""
        start, slots, calls = time.perf_counter(), self._slots, 0
        most = FEED_CALLS if any(row.state == DECODING for row in slots.members(group)) else MOST_FEED_CALLS
        while feeding := [row for row in slots.members(group) if row.state == FEEDING]:
            self._copy(group, [row for row in feeding if row.source is not None])
            open_rows = [row for row in feeding if row.source is None]
            for row in open_rows:
                self._refresh(row)
                if slots.left(row) == 0:
                    row.state = DECODING
            pending = [row for row in open_rows if row.state == FEEDING]
            if not pending:
                if any(row.source is not None for row in feeding):
                    self._feed_sources(feeding)
                    continue
                break
            if calls >= most:
                break
            self._prefill(group, pending)
            calls += 1
        if calls:
            self.calls.wait(group.index)
        self.stats.prefill_seconds += time.perf_counter() - start

    def _refresh(self, row: Row) -> None:
        """Before a turn: drops what older parameters put into the row's cache, unless it is to be kept."""
        if self._stale(row, self.weights[1]):
            self.stats.refilled_tokens += int(self._slots.fed[row.slot])
            self._slots.fed[row.slot] = 0

    def _stale(self, row: Row, version: int) -> bool:
        """Whether the row's cache holds what parameters older than `version` put there, and is not to be kept."""
        slots = self._slots
        return self._config.stale_cache == "refill" and slots.fed[row.slot] > 0 and slots.oldest[row.slot] < version

    def _feed_sources(self, waiting: Sequence[Row]) -> None:
        """Rows wait for a prefix that a row of another group is to be fed first."""
        for row in waiting:
            if row.source is None:
                continue
            group = self._slots.group_of(row.source[0])[0]
            rows = [r for r in self._slots.members(group) if r.state == FEEDING and r.source is None]
            if rows := [r for r in rows if self._slots.left(r) > 0]:
                self._prefill(group, rows)
                return
            row.source = None  # nobody there is about to be fed

    def _prefill(self, group: Group, pending: Sequence[Row]) -> None:
        """One call: the next chunk of some of the rows, those with the same chunk as the first."""
        slots = self._slots
        shape = next_chunk(self._shapes, slots.left(pending[0]))
        rows = [row for row in pending if next_chunk(self._shapes, slots.left(row)) == shape][: shape.rows]
        # No longer than these tokens need: attention covers the whole length, and most of a prompt is fed early.
        self._room(group, max(int(slots.fed[row.slot]) + min(shape.width, slots.left(row)) for row in rows))
        ids = np.zeros((shape.rows, shape.width), np.int32)
        starts, counts = np.zeros(shape.rows, np.int32), np.zeros(shape.rows, np.int32)
        at, adapter = np.full(shape.rows, slots.size, np.int32), _zeros(shape.rows)
        weights = self.weights
        version = weights[1]
        for i, row in enumerate(rows):
            starts[i], counts[i] = slots.fed[row.slot], min(shape.width, slots.left(row))
            ids[i, : counts[i]] = slots.ids[row.slot, starts[i] : starts[i] + counts[i]]
            at[i], adapter[i] = row.slot % slots.size, row.adapter
        lock = self._lock(shape.rows, range(len(rows)), rows)
        experts, locked = self.calls.prefill(weights, group.index, ids, starts, counts, at, adapter, lock)
        for i, (row, count) in enumerate(zip(rows, counts, strict=False)):
            if locked is not None and starts[i] < row.prompt <= starts[i] + count:  # fed anew: it was locked anew
                row.locked = np.asarray(locked[:, i])
            if experts is not None:
                slots.record(row, np.asarray(experts)[:, i, :count])
            if slots.fed[row.slot] == 0:
                slots.oldest[row.slot] = version
            slots.fed[row.slot] += count
            slots.oldest[row.slot] = min(slots.oldest[row.slot], version)
        self.stats.prefill_tokens += int(counts.sum())

    def _lock(self, count: int, at: Iterable[int], rows: Sequence[Row]) -> Lock | None:
        """What a call over `count` places is told of the mixtures of the rows in some of them; None without a gate."""
        if self._slots.gate is None:
            return None
        layers, ways = self._slots.gate
        lock = Lock(_zeros(count), np.zeros((layers, count, ways), np.float32))
        for i, row in zip(at, rows, strict=True):
            lock.prompt[i], lock.weights[:, i] = row.prompt, row.locked
        return lock

    def _copy(self, group: Group, waiting: Sequence[Row]) -> None:
        """Copies prefixes that have become available to the rows that wait for them."""
        slots, ready = self._slots, {}
        for row in waiting:
            state = slots.source_ready(row)
            if state:
                ready.setdefault(row.source[0] // slots.size, []).append(row)
            elif state is None:
                row.source = None
        width = self._shapes[-1].rows
        for index, rows in ready.items():
            self._room(group, max(row.source[1] for row in rows))
            for part in (rows[i : i + width] for i in range(0, len(rows), width)):
                sources, targets = np.zeros(width, np.int32), np.full(width, slots.size, np.int32)
                sources[: len(part)] = [row.source[0] % slots.size for row in part]
                targets[: len(part)] = [row.slot % slots.size for row in part]
                self.calls.copy(group.index, index, sources, targets)
            for row in rows:
                if slots.experts is not None:
                    slots.experts[row.slot, : row.source[1]] = slots.experts[row.source[0], : row.source[1]]
                slots.fed[row.slot] = row.source[1]
                slots.oldest[row.slot] = slots.oldest[row.source[0]]
                self.stats.shared_tokens += row.source[1]
                row.source = None

    def _decode(self, group: Group) -> None:
        """A few tokens of every row of the group that is ready."""
        slots, start = self._slots, time.perf_counter()
        weights = self.weights
        version = weights[1]
        for row in slots.members(group):
            # Parameters may have come since the row was fed; a turn that has not begun is fed anew.
            if row.state == DECODING and not row.drawn and self._stale(row, version):
                row.state = FEEDING
        rows = [row for row in slots.members(group) if row.state == DECODING]
        if not rows:
            return
        ahead = min(max(row.limit for row in rows), self._config.decode_steps)
        self._room(group, max(int(slots.fed[row.slot]) for row in rows) + ahead)
        at = [row.slot % slots.size for row in rows]
        fed = slots.fed[[row.slot for row in rows]]
        fields = {name: _zeros(slots.size) for name in ("token", "position", "left", "adapter")}
        state = State(**fields, lock=self._lock(slots.size, at, rows))
        state.token[at] = [slots.ids[row.slot, n] for row, n in zip(rows, fed, strict=True)]
        state.position[at], state.left[at] = fed, [row.limit for row in rows]
        state.adapter[at] = [row.adapter for row in rows]
        seeds = np.zeros((slots.size, 2), np.uint32)
        seeds[at] = [row.seed for row in rows]
        going = len(rows) - max(1, len(rows) // QUIT_SHARE)
        ids, logprobs, kept, experts, counts, stopped, steps, locked = self.calls.decode(
            weights, group.index, state, seeds, going
        )
        ended = []
        for row, i in zip(rows, at, strict=True):
            n = int(counts[i])
            if n == 0:
                continue
            row.drawn.append((ids[i, :n], logprobs[i, :n], None if kept is None else kept[i, :n]))
            row.stale |= bool(slots.oldest[row.slot] < version)
            row.version = version if row.version is None else min(row.version, version)
            row.limit -= n
            if experts is not None:
                slots.record(row, experts[:, i, :n])
            if locked is not None:
                row.locked = locked[:, i]
            slots.extend(row, ids[i, :n])
            slots.fed[row.slot] += n
            slots.oldest[row.slot] = min(slots.oldest[row.slot], version)
            if stopped[i] or row.limit <= 0:
                ended.append((row, bool(stopped[i])))
        self.stats.decode_steps += int(steps)
        self.stats.slot_steps += int(steps) * slots.size
        self.stats.sampled_tokens += int(counts.sum())
        seconds = time.perf_counter() - start
        self.stats.decode_seconds += seconds
        self._pace += PACE_SHARE * (seconds - self._pace)
        for row, stop in ended:
            self._finish(row, stop)

    def _finish(self, row: Row, stopped: bool) -> None:
        """Hands over a turn; the row waits for its next order."""
        row.state = IDLE
        self.stats.stale_turns += row.stale
        ids, logprobs, kept = zip(*row.drawn, strict=True) if row.drawn else ((_zeros(0),), (_zeros(0),), (None,))
        turn = SampledTurn(
            row=row.name,
            ids=np.concatenate(ids),
            logprobs=np.concatenate(logprobs).astype(np.float32),
            stopped=stopped,
            version=self.weights[1] if row.version is None else row.version,
            stale=row.stale,
            kept=None if kept[0] is None else np.concatenate(kept),
            experts=None
            if self._slots.experts is None
            else self._slots.experts[row.slot, : self._slots.fed[row.slot]].copy(),
            gate=None if row.locked is None else row.locked.copy(),
        )
        row.drawn = []
        self._deliver(turn)


def _zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.int32)
