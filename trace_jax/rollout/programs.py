"""The jitted programs of the sampling engine, and the buckets that bound how many of them are compiled.

* decoding: (batch buckets) x (length buckets) programs, each a `while_loop` on the device that runs until every active
  row has stopped or reached its limit, or until so many have that the rest fits a smaller batch;
* prefill: (chunk widths) x (length buckets) programs of a fixed number of rows.

Axis letters: B rows of a batch, W tokens of one turn, R rows of a prefill call, T chunk width, S cache positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from trace_jax.policy.cache import KVCache
from trace_jax.rollout.sampling import Sampling, draw, token_keys

CHUNKS = (32, 16)  # widths of a prefill call
PREFILL_ROWS = 32
SMALLEST_BATCH = 16
SMALLEST_LENGTH = 128


def length_buckets(longest: int) -> list[int]:
    """Cache lengths, ascending: 128, 192, 256, 384, 512, 768, ..., the last one just holding `longest`."""
    last = -(-longest // 64) * 64
    sizes, size = [], SMALLEST_LENGTH
    while size < last:
        sizes.append(size)
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return [*sizes, last]


def batch_buckets(rows: int) -> list[int]:
    """Batch sizes, ascending: the power of two that holds `rows`, its half, and quarters of that.

    Every size is compiled for every length, so they are few; a batch that is at most half full is worth a copy.
    """
    sizes = [1 << max(rows - 1, 0).bit_length()]
    while sizes[0] > SMALLEST_BATCH:
        sizes.insert(0, max(sizes[0] // (2 if len(sizes) == 1 else 4), SMALLEST_BATCH))
    return sizes


def fit(sizes: Sequence[int], wanted: int) -> int:
    """The first bucket that holds `wanted`."""
    return next(size for size in sizes if size >= wanted)


@chex.dataclass(frozen=True)
class State:
    """Decoding state of a batch: the token to feed, its position, and how many tokens may still be drawn (0: idle)."""

    token: Int[Array, " B"]
    position: Int[Array, " B"]
    left: Int[Array, " B"]


class Programs:
    """The jitted functions that all lanes share."""

    def __init__(self, structure: nnx.GraphDef, stop_id: int, turn_tokens: int):
        self._structure = structure
        self._stop = stop_id
        self._width = turn_tokens
        self._decode = jax.jit(self._decode_loop, static_argnames=("greedy", "top_k"), donate_argnums=(1,))
        self.prefill = jax.jit(self._prefill_chunk, donate_argnums=(1,))
        self.take = jax.jit(KVCache.take)
        self.put = jax.jit(KVCache.put, donate_argnums=(0,))
        self.grow = jax.jit(KVCache.grow, static_argnums=(1,))

    @property
    def compiled(self) -> int:
        """Decoding and prefill programs compiled so far (the copies between batches are trivial)."""
        return self._decode._cache_size() + self.prefill._cache_size()

    def decode(self, params, cache, state: State, seeds, smaller: int, sampling: Sampling):
        """Samples until all rows are done, the cache is full, or at most `smaller` rows go on; donates the cache.

        Returns:
          cache, ids [B W], logprobs [B W], counts [B], stopped [B].
        """
        temperature = np.float32(1.0 if sampling.greedy else sampling.temperature)
        return self._decode(
            params, cache, state, seeds, np.int32(smaller), temperature, greedy=sampling.greedy, top_k=sampling.top_k
        )

    def _prefill_chunk(
        self,
        params,
        cache: KVCache,
        ids: Int[Array, "R T"],
        starts: Int[Array, " R"],
        counts: Int[Array, " R"],
        slots: Int[Array, " R"],
    ) -> KVCache:
        offsets = jnp.arange(ids.shape[1])[None]
        model = nnx.merge(self._structure, params)
        return model.decode(ids, starts[:, None] + offsets, offsets < counts[:, None], cache, rows=slots)[1]

    def _decode_loop(
        self,
        params,
        cache: KVCache,
        state: State,
        seeds: UInt32[Array, "B 2"],
        smaller: Int[Array, ""],
        temperature: Float[Array, ""],
        *,
        greedy: bool,
        top_k: int,
    ):
        model = nnx.merge(self._structure, params)
        shape = (cache.batch, self._width)

        def running(state: State) -> Bool[Array, " B"]:
            return state.left > 0

        def proceed(carry):
            step, _, state, *_ = carry
            active = running(state)
            room = jnp.max(jnp.where(active, state.position, 0)) < cache.length
            return (jnp.sum(active) > smaller) & room & (step < self._width)

        def body(carry):
            step, cache, state, ids, logprobs, stopped = carry
            active = running(state)
            hidden, cache = model.decode(state.token[:, None], state.position[:, None], active[:, None], cache)
            position = state.position + 1
            keys = token_keys(seeds, position)
            token, logprob = draw(keys, model.logits(hidden[:, 0]), temperature, greedy=greedy, top_k=top_k)
            ids = jax.lax.dynamic_update_slice(ids, token[:, None], (0, step))
            logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, step))
            stop = active & (token == self._stop)
            state = State(
                token=jnp.where(active, token, state.token),
                position=jnp.where(active, position, state.position),
                left=jnp.where(stop, 0, state.left - active),
            )
            return step + 1, cache, state, ids, logprobs, stopped | stop

        carry = (0, cache, state, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape[0], bool))
        _, cache, end, ids, logprobs, stopped = jax.lax.while_loop(proceed, body, carry)
        return cache, ids, logprobs, end.position - state.position, stopped
