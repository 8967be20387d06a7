"""The key/value cache of a decoding batch.

Axes: B rows of the batch, K key/value heads, n blocks of p positions each, h head width.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, mixers
from trace_jax.policy import delta_net
from trace_jax.policy.delta_net import DeltaState


@chex.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of every token seen so far, indexed by the token's position in its row.

    One array a layer, so that a layer attends to its buffer where it lies: a slice of a stacked array would be copied
    at every step, twice the traffic of reading it. Inside a block keys are stored with positions last and values with
    positions second to last, the order in which both matmuls of a decoding step run along contiguous memory (15 times
    faster on CPU than attention over [B, S, K, h]). Blocks have one length whatever the length of the cache, so that
    the numbers of a row do not depend on it (see `attention.cache_attention`).

    A position that has not been written yet holds zeros, or what an earlier occupant of the row left there; attention
    never looks past the position of the query, so neither is visible.
    """

    k: tuple[Float[Array, "B K n h p"], ...]
    v: tuple[Float[Array, "B K n p h"], ...]
    delta: tuple[DeltaState, ...] = ()  # of recurrent layers: after the last token that a row was fed, and no other

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.k[0].shape[0]

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.k[0].shape[4]

    @property
    def length(self) -> int:
        """Number of positions a row can hold."""
        return self.k[0].shape[2] * self.block

    def take(self, rows: Int[Array, " r"]) -> KVCache:
        """The cache of some rows, in the order given; an index beyond the batch gives the last row."""
        return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), self)  # rows are in front everywhere

    def put(self, rows: Int[Array, " r"], part: KVCache) -> KVCache:
        """Writes the rows of `part`, which may be shorter in time; an index beyond the batch writes nothing."""
        blocks = part.k[0].shape[2]
        return self._with(
            lambda x, p: x.at[rows, :, :blocks].set(p, mode="drop"),
            lambda x, p: x.at[rows].set(p, mode="drop"),
            part,
        )

    def first(self, length: int) -> KVCache:
        """The blocks of every row that hold its first `length` positions; states of recurrent layers stay."""
        blocks = -(-length // self.block)
        return self._with(lambda x: x[:, :, :blocks])

    def grow(self, length: int) -> KVCache:
        """The same rows with room for at least `length` positions, as many as now or more.

        A decoding step that attends to the whole length copies nothing, so a cache is best allocated at the prefix
        needed now and grown when the longest row fills it.
        """
        extra = -(-length // self.block) - self.k[0].shape[2]
        return self._with(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0), (0, 0))))

    def _with(self, keyed: Callable, recurrent: Callable = lambda x: x, *others: KVCache) -> KVCache:
        """Functions applied to keys and values, and to states of recurrent layers."""
        changed = {
            name: jax.tree.map(recurrent if name == "delta" else keyed, getattr(self, name), *(o[name] for o in others))
            for name in ("k", "v", "delta")
        }
        return KVCache(**changed)


def default_block() -> int:
    """Positions of a block on the default backend: accelerators tile memory in 128, a CPU wastes less with 64."""
    return 64 if jax.default_backend() == "cpu" else 128


def new(cfg: PolicyConfig, batch: int, length: int, dtype: str = "float32", block: int | None = None) -> KVCache:
    """An empty cache for `batch` rows of at least `length` tokens; states of recurrent layers are float32 whatever
    `dtype`: errors of rounding would add up in them."""
    block = block or default_block()
    blocks = -(-length // block)
    keys = (batch, cfg.kv_heads, blocks, cfg.head_dim, block)
    values = (batch, cfg.kv_heads, blocks, block, cfg.head_dim)
    kinds = mixers(cfg)
    return KVCache(
        k=tuple(jnp.zeros(keys, dtype) for _ in range(kinds.count(ATTENTION))),
        v=tuple(jnp.zeros(values, dtype) for _ in range(kinds.count(ATTENTION))),
        delta=tuple(delta_net.new_state(cfg, batch, cfg.dtype) for _ in range(kinds.count(DELTA))),
    )
