"""The key/value cache of a decoding batch.

Axes: L layers, B rows of the batch, S cache positions, K key/value heads, h head width.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
from jaxtyping import Array, Float

from trace_jax.config import PolicyConfig


@chex.dataclass(frozen=True)
class KVCache:
    """Keys (already rotated) and values of every token seen so far, indexed by the token's position in its row.

    A position that has not been written yet holds zeros, or what an earlier occupant of the row left there; attention
    never looks past the position of the query, so neither is visible.
    """

    k: Float[Array, "L B S K h"]
    v: Float[Array, "L B S K h"]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.k.shape[1]

    @property
    def length(self) -> int:
        """Number of positions a row can hold."""
        return self.k.shape[2]


def new(cfg: PolicyConfig, batch: int, length: int, dtype: str = "float32") -> KVCache:
    """An empty cache for `batch` rows of at most `length` tokens."""
    shape = (cfg.layers, batch, length, cfg.kv_heads, cfg.head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
