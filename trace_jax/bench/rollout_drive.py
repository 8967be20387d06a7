"""Turns of many rows at once without a collector, and what the machine did meanwhile.

Turns have their full length, with a stop token that is never drawn: figures must not depend on what an untrained policy
happens to say.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trace_jax.rollout.engine import Engine, EngineStats
from trace_jax.rollout.sampling import Sampling


@dataclass(frozen=True)
class Shape:
    """Tokens of a row: a prompt, then turns with an observation between two of them."""

    prompt: int
    turn: int
    turns: int = 1
    observation: int = 0

    @property
    def length(self) -> int:
        """All of them."""
        return self.prompt + self.turns * self.turn + (self.turns - 1) * self.observation

    def fed(self, rows: int, prompts: int) -> int:
        """Tokens that prefill feeds when every distinct prompt is fed once and the cache is kept across turns.

        The last token before a turn is not among them, it starts the decoding loop; the last token of a turn is, it is
        fed with the observation.
        """
        return prompts * (self.prompt - 1) + rows * (self.turns - 1) * self.observation

    def shared(self, rows: int, prompts: int) -> int:
        """Tokens that a prompt's other rows do not feed."""
        return (rows - prompts) * (self.prompt - 1)


def drive(engine: Engine, shape: Shape, prompts: Sequence[np.ndarray], seed: int) -> None:
    """Every row through all its turns, as many rows as prompts, all in flight at once.

    Args:
      engine: with a stop token outside the vocabulary, and a slot for every row.
      seed: of the sampled tokens and of the observations.
    """
    rng = np.random.default_rng(seed)
    observations = rng.integers(0, int(max(map(np.max, prompts))) + 1, (len(prompts), shape.observation), np.int32)
    arrived: queue.SimpleQueue = queue.SimpleQueue()
    turns = [shape.turns] * len(prompts)
    left = len(prompts)
    engine.begin(Sampling(), arrived.put)
    try:
        for row, prompt in enumerate(prompts):
            engine.start(row, prompt, row_seed(seed, row), shape.turn)
        while left:
            turn = arrived.get()
            if isinstance(turn, BaseException):
                raise turn
            if len(turn.ids) != shape.turn:
                raise RuntimeError(f"a turn has {len(turn.ids)} tokens instead of {shape.turn}")
            turns[turn.row] -= 1
            if turns[turn.row]:
                engine.resume(turn.row, observations[turn.row], shape.turn)
            else:
                engine.release(turn.row)
                left -= 1
    finally:
        engine.end()


def row_seed(seed: int, row: int) -> int:
    """64 bits, the seed high."""
    return seed << 32 | row


def spent(engine: Engine, work: Callable[[], object]) -> tuple[float, EngineStats]:
    """Wall-clock seconds of some work, and what the engine counted in it."""
    before, start = engine.stats, time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, engine.stats
    fields = [field.name for field in dataclasses.fields(after)]
    return seconds, EngineStats(**{name: getattr(after, name) - getattr(before, name) for name in fields})


class Others:
    """Share of the cores that other processes take, beginning now. On a shared machine it says what a comparison is
    worth: programs that spin on all cores suffer more from company than others."""

    def __init__(self, pid: int | None = None):
        """
        Args:
          pid: another process that counts as ours.
        """
        self._pid = pid
        self._start = self._now()

    def share(self) -> float | None:
        """0 on a quiet machine, 1 when others had all the cores; None where the system does not tell."""
        if self._start is None or (now := self._now()) is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))

    def _now(self) -> tuple[float, float, float] | None:
        """Wall clock, seconds of all cores that were busy (or lent to other guests), seconds of our processes."""
        try:
            tick = os.sysconf("SC_CLK_TCK")
            user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
            own = sum(os.times()[:2])
            if self._pid is not None:
                stat = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
                own += sum(map(int, stat[11:13])) / tick
            return time.perf_counter(), (user + nice + system + irq + soft + steal) / tick, own
        except (OSError, ValueError):
            return None
