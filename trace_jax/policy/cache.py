"""The key/value cache of a decoding batch.

Axes: L layers, B rows of the batch, S cache positions, K key/value heads, h head width.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import PolicyConfig


@chex.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of every token seen so far, indexed by the token's position in its row.

    One array a layer, so that a layer attends to its buffer where it lies: a slice of a stacked array would be copied
    at every step, twice the traffic of reading it. Keys are stored with positions last and values with positions
    second to last, the order in which both matmuls of a decoding step run along contiguous memory (15 times faster on
    CPU than attention over [B, S, K, h]).

    A position that has not been written yet holds zeros, or what an earlier occupant of the row left there; attention
    never looks past the position of the query, so neither is visible.
    """

    k: tuple[Float[Array, "B K h S"], ...]
    v: tuple[Float[Array, "B K S h"], ...]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.k[0].shape[0]

    @property
    def length(self) -> int:
        """Number of positions a row can hold."""
        return self.k[0].shape[3]

    def take(self, rows: Int[Array, " n"]) -> KVCache:
        """The cache of some rows, in the order given; an index beyond the batch gives the last row."""
        return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), self)

    def put(self, rows: Int[Array, " n"], part: KVCache) -> KVCache:
        """Writes the rows of `part`, which may be shorter in time; an index beyond the batch writes nothing."""
        span = part.length
        return KVCache(
            k=tuple(k.at[rows, :, :, :span].set(p, mode="drop") for k, p in zip(self.k, part.k, strict=True)),
            v=tuple(v.at[rows, :, :span].set(p, mode="drop") for v, p in zip(self.v, part.v, strict=True)),
        )

    def first(self, length: int) -> KVCache:
        """The first `length` positions of every row."""
        return KVCache(k=tuple(k[..., :length] for k in self.k), v=tuple(v[:, :, :length] for v in self.v))

    def grow(self, length: int) -> KVCache:
        """The same rows with room for `length` positions, at least as many as now.

        A decoding step that attends to the whole length copies nothing, so a cache is best allocated at the prefix
        needed now and grown when the longest row fills it.
        """
        extra = length - self.length
        return KVCache(
            k=tuple(jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, extra))) for k in self.k),
            v=tuple(jnp.pad(v, ((0, 0), (0, 0), (0, extra), (0, 0))) for v in self.v),
        )


def new(cfg: PolicyConfig, batch: int, length: int, dtype: str = "float32") -> KVCache:
    """An empty cache for `batch` rows of at most `length` tokens."""
    keys = (batch, cfg.kv_heads, cfg.head_dim, length)
    values = (batch, cfg.kv_heads, length, cfg.head_dim)
    return KVCache(
        k=tuple(jnp.zeros(keys, dtype) for _ in range(cfg.layers)),
        v=tuple(jnp.zeros(values, dtype) for _ in range(cfg.layers)),
    )
