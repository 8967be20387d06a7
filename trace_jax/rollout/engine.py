"""The sampling engine: a key/value cache kept across turns, chunked prefill, and a decoding loop on the device.

Rows are spread over lanes. A lane owns a cache and a thread: on CPU one XLA program of this size keeps about one core
busy, so two lanes use two cores. Every token is drawn with a key made from its row's seed and its position, so what a
row samples does not depend on the rows that share its batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int, UInt64

from trace_jax.config import ConfigError, RolloutConfig
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.lane import Lane, SampledTurn
from trace_jax.rollout.programs import SMALLEST_BATCH, Programs
from trace_jax.rollout.sampling import Sampling


class Generator(Protocol):
    """What `collect` needs of a sampler. Rows are numbered from 0 in the order of `begin`."""

    version: int

    def begin(self, prompts: Sequence[np.ndarray], seeds: UInt64[np.ndarray, " rows"], sampling: Sampling) -> None:
        """Forgets everything and starts one row per prompt."""
        ...

    def sample_turn(self, rows: Int[np.ndarray, " n"], limits: Int[np.ndarray, " n"]) -> list[SampledTurn]:
        """Samples each row until its stop token or `limits` tokens."""
        ...

    def extend(self, rows: Int[np.ndarray, " n"], ids: Sequence[np.ndarray]) -> None:
        """Appends ids that were not sampled."""
        ...


class Engine:
    """Samples turns of many rows with one policy. Implements `Generator`."""

    def __init__(self, model: Transformer, config: RolloutConfig, stop_id: int, *, lanes: int | None = None):
        """Reads the structure of `model` and its present parameters.

        Args:
          model: the policy; later parameters arrive through `set_params`.
          config: `slots`, `context`, `max_turn_tokens` and `cache_dtype` fix the shapes.
          stop_id: the token that ends a turn.
          lanes: independent batches that run at once; by default one per core on CPU (at most 4) and 1 elsewhere.

        Raises:
          ConfigError: the context is longer than the policy's positions.
        """
        if config.context > model.cfg.max_length:
            raise ConfigError(
                f"rollout.context {config.context} exceeds policy.max_length {model.cfg.max_length}; lower the first"
            )
        if lanes is None:
            lanes = min(4, os.cpu_count() or 1) if jax.default_backend() == "cpu" else 1
        lanes = max(1, min(lanes, config.slots // SMALLEST_BATCH))
        self._context = config.context
        structure, params = nnx.split(model)
        self.set_params(params, 0)
        self._programs = Programs(structure, stop_id, config.max_turn_tokens)
        self._slots = config.slots
        self._lanes = [Lane(self._programs, model.cfg, config, -(-config.slots // lanes)) for _ in range(lanes)]
        self._threads = ThreadPoolExecutor(lanes, thread_name_prefix="rollout-lane")

    def set_params(self, params: nnx.State, version: int) -> None:
        """Parameters for everything sampled from now on (`nnx.state(model, nnx.Param)`); `version` labels the turns.

        The arrays must stay alive: a learner that donates its state hands over the new parameters before the next turn.
        """
        self.params = params
        self.version = version

    @property
    def compiled(self) -> int:
        """Decoding and prefill programs compiled so far."""
        return self._programs.compiled

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of prefill and decoding since `begin`, averaged over lanes."""
        return {name: float(np.mean([lane.seconds[name] for lane in self._lanes])) for name in ("prefill", "decode")}

    def begin(self, prompts: Sequence[np.ndarray], seeds: UInt64[np.ndarray, " rows"], sampling: Sampling) -> None:
        """See `Generator.begin`. Equal prompts in a lane are prefilled once.

        Raises:
          ConfigError: an empty prompt, or one that leaves no room in the context.
          ValueError: more rows than `slots`.
        """
        if len(prompts) > self._slots:
            raise ValueError(f"{len(prompts)} rows, but the engine has {self._slots} slots")
        for row, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self._context:
                raise ConfigError(
                    f"prompt {row} has {len(prompt)} tokens, rollout.context is {self._context}: raise the context"
                )
        self._sampling = sampling
        # Contiguous blocks, so that the rows of one prompt group land in one lane.
        blocks = np.array_split(np.arange(len(prompts)), len(self._lanes))
        self._lane_of = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])
        for lane, block in zip(self._lanes, blocks, strict=True):
            lane.begin(
                {int(r): np.asarray(prompts[r], np.int32) for r in block}, {int(r): int(seeds[r]) for r in block}
            )

    def sample_turn(self, rows: Int[np.ndarray, " n"], limits: Int[np.ndarray, " n"]) -> list[SampledTurn]:
        """See `Generator.sample_turn`. Limits are cut to `max_turn_tokens` and to the room left in the context."""
        rows, limits = np.asarray(rows), np.asarray(limits)

        def run(lane: Lane, mine: np.ndarray) -> list[SampledTurn]:
            return lane.sample(self.params, self._sampling, rows[mine], limits[mine]) if len(mine) else []

        shares = [np.flatnonzero(self._lane_of[rows] == index) for index in range(len(self._lanes))]
        turns: dict[int, SampledTurn] = {}
        for mine, sampled in zip(shares, self._in_lanes(run, shares), strict=True):
            turns.update(zip(mine.tolist(), sampled, strict=True))
        return [turns[i] for i in range(len(rows))]

    def extend(self, rows: Int[np.ndarray, " n"], ids: Sequence[np.ndarray]) -> None:
        """See `Generator.extend`. The ids enter the cache when the row is sampled next."""
        for row, new in zip(rows, ids, strict=True):
            self._lanes[self._lane_of[row]].extend(int(row), np.asarray(new, np.int32))

    def _in_lanes(self, run: Callable[[Lane, np.ndarray], list[SampledTurn]], shares: list[np.ndarray]):
        if len(self._lanes) == 1:
            return [run(self._lanes[0], shares[0])]
        return list(self._threads.map(run, self._lanes, shares))
