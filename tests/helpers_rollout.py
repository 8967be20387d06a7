"""Drives the sampling engine without a collector: every row takes its turns with made-up observations between."""

from __future__ import annotations

import queue
import random
from dataclasses import dataclass, field

import numpy as np

from trace_jax.config import PolicyConfig, RolloutConfig
from trace_jax.rollout.sampling import Sampling

VOCABULARY, STOP = 48, 3
POLICY = PolicyConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64, max_length=256)
CONFIG = RolloutConfig(max_turn_tokens=24, context=192, slots=48, decode_steps=8)


@dataclass
class Life:
    """What happened to a row: its ids, (position, log-probability) of every sampled one, and its turns."""

    ids: list[int]
    sampled: list[tuple[int, float]] = field(default_factory=list)
    turns: list = field(default_factory=list)


def prompts_of(n, rng=None, same=4):
    """n prompts of 3 to 27 tokens, each `same` times in a row."""
    rng = rng or np.random.default_rng(0)
    distinct = [rng.integers(4, VOCABULARY, rng.integers(3, 28)) for _ in range(-(-n // same))]
    return [prompt for prompt in distinct for _ in range(same)][:n]


def observation(seed, turn, salt=0):
    """A function of the row's seed, so that a row lives the same life in any company."""
    return np.random.default_rng([salt, int(seed), turn]).integers(4, VOCABULARY, 1 + int(seed) % 23)


def live(engine, prompts, seeds, turns=3, *, sampling=None, limit=24, window=None, disorder=None, salt=0, on_turn=None):
    """Runs `turns` turns of every row.

    Args:
      window: rows in flight at once, the engine's slots by default.
      disorder: seed of an arbitrary order in which rows are resumed; they go on at once without it.
      on_turn: called with every delivered turn.
    """
    lives = [Life(list(map(int, prompt))) for prompt in prompts]
    waiting, ended, next_row = [], 0, 0
    arrived: queue.SimpleQueue = queue.SimpleQueue()
    chance = random.Random(disorder)
    engine.begin(sampling or Sampling(1.0), arrived.put)
    in_flight = 0
    try:
        while ended < len(prompts):
            while next_row < len(prompts) and in_flight < min(window or engine.slots, engine.slots):
                engine.start(next_row, prompts[next_row], int(seeds[next_row]), limit)
                next_row, in_flight = next_row + 1, in_flight + 1
            # In disorder some rows wait as if for slow tools while others are sampled.
            if waiting and (disorder is None or len(waiting) == in_flight or chance.random() < 0.3):
                row = waiting.pop(chance.randrange(len(waiting)) if disorder is not None else 0)
                new = observation(seeds[row], len(lives[row].turns), salt)
                lives[row].ids += new.tolist()
                engine.resume(row, new, limit)
                continue
            turn = arrived.get(timeout=120)
            if isinstance(turn, BaseException):
                raise turn
            life = lives[turn.row]
            life.sampled += list(zip(range(len(life.ids), 9999), turn.logprobs.tolist(), strict=False))
            life.ids += turn.ids.tolist()
            life.turns.append(turn)
            if on_turn:
                on_turn(turn)
            if len(life.turns) == turns or len(life.ids) + 30 > CONFIG.context:
                engine.release(turn.row)
                ended, in_flight = ended + 1, in_flight - 1
            else:
                waiting.append(turn.row)
    finally:
        engine.end()
    return lives
