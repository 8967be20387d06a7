"""The jitted programs of the sampling engine, and the buckets that bound how many of them are compiled.

A row's numbers must not depend on who is sampled beside it, to the last bit: otherwise a run whose tools take a little
longer would train on other trajectories. Matrix products of another number of rows round differently, so every kind of
call has one shape, whatever it carries: decoding always covers a whole group of slots, and prefill takes a fixed number
of rows for each chunk width. Only the cache length varies; positions beyond a row's own add exact zeros.

* decoding: one program a length bucket, a `while_loop` on the device over several tokens;
* prefill: (chunk widths) x (length buckets) programs;
* copies of a common prefix between rows, and growth of a cache: trivial programs, not counted.

Axis letters: B slots of a group, W decoding steps of a call, R rows of a prefill call, T chunk width, k `top_k`, M
adapters and the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from trace_jax.policy import cache as kv_cache
from trace_jax.policy import lora, mixture
from trace_jax.policy.cache import KVCache
from trace_jax.policy.delta_net import DeltaState
from trace_jax.rollout.sampling import Knobs, Sampling, draw, token_keys

SMALLEST_LENGTH = 128


@dataclass(frozen=True)
class Chunk:
    """Shape of a prefill call: `rows` rows of `width` tokens."""

    width: int
    rows: int


# Descending widths. A row's next chunk follows from what it has left to feed and from nothing else. On a CPU work is
# proportional to the positions computed, so calls are small; an accelerator wants thousands of positions a call.
CPU_CHUNKS = (Chunk(128, 4), Chunk(32, 4), Chunk(16, 8))
ACCELERATOR_CHUNKS = (Chunk(512, 8), Chunk(64, 32))


def chunks() -> tuple[Chunk, ...]:
    """Prefill shapes of the default backend."""
    return CPU_CHUNKS if jax.default_backend() == "cpu" else ACCELERATOR_CHUNKS


def next_chunk(shapes: Sequence[Chunk], left: int) -> Chunk:
    """The chunk that the next of `left` pending tokens go into: the narrowest that holds them all and is at least half
    full, else the widest that they fill."""
    holding = [shape for shape in shapes if left <= shape.width <= 2 * left]
    return holding[-1] if holding else next((shape for shape in shapes if shape.width <= left), shapes[-1])


def length_buckets(longest: int, block: int) -> list[int]:
    """Cache lengths, ascending multiples of `block`: 128, 192, 256, 384, 512, 768, ..., the last just holding
    `longest`."""
    last = -(-longest // block) * block
    sizes, size = [], SMALLEST_LENGTH
    while size < last:
        sizes.append(-(-size // block) * block)
        size += size // 2 if size & (size - 1) == 0 else size // 3
    return sorted({*sizes, last})


def fit(sizes: Sequence[int], wanted: int) -> int:
    """The first bucket that holds `wanted`."""
    return next(size for size in sizes if size >= wanted)


@chex.dataclass(frozen=True)
class State:
    """Decoding state of a group: the token to feed, its position, how many tokens may still be drawn (0: idle), and
    the adapter of the row (-1: none; without adapters it says nothing), or what it knows of its mixture of them."""

    token: Int[Array, " B"]
    position: Int[Array, " B"]
    left: Int[Array, " B"]
    adapter: Int[Array, " B"]
    lock: mixture.Lock | None = None


class Programs:
    """The jitted functions that all lanes share. Arguments decide where a call runs: parameters and cache of a lane lie
    on its own devices."""

    def __init__(self, structure: nnx.GraphDef, stop_id: int, steps: int, routes: bool = False):
        """
        Args:
          structure: of the policy.
          stop_id: the token that ends a turn.
          steps: most tokens a decoding call draws for a row.
          routes: report the experts of every token.
        """
        self._structure = structure
        self._routes = routes
        self._stop = stop_id
        self._steps = steps
        self._decode = jax.jit(
            self._decode_loop, static_argnames=("greedy", "top_k", "truncate", "heads"), donate_argnums=(1,)
        )
        self.prefill = jax.jit(self._prefill_chunk, static_argnames=("heads",), donate_argnums=(1,))
        self.copy_within = jax.jit(_copy_within, donate_argnums=(0,))
        self.copy_across = jax.jit(_copy_across, donate_argnums=(0,))
        self.grow = jax.jit(KVCache.grow, static_argnums=(1,))

    @property
    def compiled(self) -> int:
        """Decoding and prefill programs compiled so far (the copies of cache rows are trivial)."""
        return self._decode._cache_size() + self.prefill._cache_size()

    def decode(
        self, params, cache: KVCache, state: State, seeds: UInt32[np.ndarray, "B 2"], going: int, sampling: Sampling,
        heads: NamedSharding | None,
    ):  # fmt: skip
        """Samples until all rows are done, the cache is full, `steps` are made, or at most `going` rows go on; donates
        the cache.

        Returns:
          cache, ids [B W], logprobs [B W], kept [B W k] or None, experts of the tokens fed [L B W e] or None, drawn
          [B], stopped [B], steps made, weights locked (`mixture.Lock`) or None.
        """
        return self._decode(
            params, cache, state, seeds, np.int32(going), sampling.knobs, heads=heads, **sampling.static
        )

    def lowered(
        self, params, cache: KVCache, state: State, seeds: UInt32[Array, "B 2"], sampling: Sampling,
        heads: NamedSharding | None,
    ) -> jax.stages.Lowered:  # fmt: skip
        """`decode` for devices that need not be there: shapes will do."""
        return self._decode.lower(
            params, cache, state, seeds, np.int32(0), sampling.knobs, heads=heads, **sampling.static
        )

    def _prefill_chunk(
        self,
        params,
        cache: KVCache,
        ids: Int[Array, "R T"],
        starts: Int[Array, " R"],
        counts: Int[Array, " R"],
        slots: Int[Array, " R"],
        adapter: Int[Array, " R"],
        lock: mixture.Lock | None = None,
        *,
        heads: NamedSharding | None,
    ) -> tuple[KVCache, Int[Array, "L R T e"] | None, Float[Array, "L R M"] | None]:
        offsets = jnp.arange(ids.shape[1])[None]
        base, adapters = lora.parts(params, adapter, lock)
        model = nnx.merge(self._structure, base)
        valid = offsets < counts[:, None]
        done = model.decode(ids, starts[:, None] + offsets, valid, cache, rows=slots, adapters=adapters)
        experts = done.experts if self._routes else None
        return _constrained(done.cache, heads), *_readable((experts, done.locked), heads)

    def _decode_loop(
        self,
        params,
        cache: KVCache,
        state: State,
        seeds: UInt32[Array, "B 2"],
        going: Int[Array, ""],
        knobs: Knobs,
        *,
        greedy: bool,
        top_k: int,
        truncate: bool,
        heads: NamedSharding | None,
    ):
        base, adapters = lora.parts(params, state.adapter, state.lock)
        model = nnx.merge(self._structure, base)
        shape = (cache.batch, self._steps)
        pick = partial(draw, greedy=greedy, top_k=top_k, truncate=truncate)

        def proceed(carry):
            step, _, state, *_ = carry
            active = state.left > 0
            room = jnp.max(jnp.where(active, state.position, 0)) < cache.length
            return (jnp.sum(active) > going) & room & (step < self._steps)

        def body(carry):
            step, cache, state, ids, logprobs, kept, experts, stopped = carry
            active = state.left > 0
            used = adapters if state.lock is None else adapters._replace(lock=state.lock)
            hidden, cache, routes, locked = model.decode(
                state.token[:, None], state.position[:, None], active[:, None], cache, adapters=used
            )
            position = state.position + 1
            token, logprob, could = pick(token_keys(seeds, position), model.logits(hidden[:, 0]), knobs)
            ids = jax.lax.dynamic_update_slice(ids, token[:, None], (0, step))
            logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, step))
            if could is not None:
                kept = jax.lax.dynamic_update_slice(kept, could[:, None], (0, step, 0))
            if experts is not None:
                experts = jax.lax.dynamic_update_slice(experts, routes.astype(experts.dtype), (0, 0, step, 0))
            stop = active & (token == self._stop)
            state = State(
                adapter=state.adapter,
                token=jnp.where(active, token, state.token),
                position=jnp.where(active, position, state.position),
                left=jnp.where(stop, 0, state.left - active),
                lock=None if state.lock is None else state.lock._replace(weights=locked),
            )
            return step + 1, _constrained(cache, heads), state, ids, logprobs, kept, experts, stopped | stop

        kept = jnp.full((*shape, top_k), -1, jnp.int32) if top_k and not greedy else None
        policy = model.cfg
        experts = jnp.full((policy.layers, *shape, policy.experts_per_token), -1, jnp.int16) if self._routes else None
        begin = (
            jnp.zeros((), jnp.int32), cache, state, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), kept,
            experts, jnp.zeros(shape[0], bool),
        )  # fmt: skip
        steps, cache, end, ids, logprobs, kept, experts, stopped = jax.lax.while_loop(proceed, body, begin)
        drawn, locked = end.position - state.position, None if end.lock is None else end.lock.weights
        return cache, *_readable((ids, logprobs, kept, experts, drawn, stopped, steps, locked), heads)


def new_cache(policy, batch: int, length: int, dtype: str, heads: NamedSharding | None, device) -> KVCache:
    """An empty cache on a device, or with its heads split over the devices of a mesh, each of which makes its part."""
    if heads is None:
        return jax.device_put(kv_cache.new(policy, batch, length, dtype), device)
    return _empty(policy, batch, length, dtype, heads)()


@lru_cache(maxsize=64)
def _empty(policy, batch: int, length: int, dtype: str, heads: NamedSharding) -> Callable[[], KVCache]:
    make = partial(kv_cache.new, policy, batch, length, dtype)
    return jax.jit(make, out_shardings=_shardings(jax.eval_shape(make), heads))


def cache_like(
    policy, batch: int, length: int, dtype: str, heads: NamedSharding | None, whole: NamedSharding, block: int
) -> KVCache:
    """Shapes of `new_cache`, with blocks of so many positions; `whole`: where arrays lie that are not split."""
    cache = jax.eval_shape(lambda: kv_cache.new(policy, batch, length, dtype, block))
    where = jax.tree.map(lambda _: whole, cache) if heads is None else _shardings(cache, heads)
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), cache, where)


def _constrained(cache: KVCache, heads: NamedSharding | None) -> KVCache:
    return cache if heads is None else jax.lax.with_sharding_constraint(cache, _shardings(cache, heads))


def _readable(found, heads: NamedSharding | None):
    """What a call found, whole on every device of a lane that lies in several processes: the one that leads reads it.
    Elsewhere it lies as the compiler likes."""
    if heads is None or not heads.mesh.is_multi_process:
        return found
    return jax.lax.with_sharding_constraint(found, NamedSharding(heads.mesh, PartitionSpec()))


def _shardings(cache: KVCache, heads: NamedSharding) -> KVCache:
    """Keys, values and the states of delta layers are split by heads; what their convolutions look back on is small
    and whole everywhere."""
    whole = NamedSharding(heads.mesh, PartitionSpec())
    delta = tuple(DeltaState(conv=whole, rule=heads) for _ in cache.delta)
    return KVCache(k=(heads,) * len(cache.k), v=(heads,) * len(cache.v), delta=delta)


def _copy_within(cache: KVCache, sources: Int[Array, " R"], targets: Int[Array, " R"]) -> KVCache:
    return cache.put(targets, cache.take(sources))


def _copy_across(target: KVCache, source: KVCache, sources: Int[Array, " R"], targets: Int[Array, " R"]) -> KVCache:
    return target.put(targets, source.take(sources).first(min(source.length, target.length)))
