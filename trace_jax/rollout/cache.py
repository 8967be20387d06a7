"""The key/value cache of the sampling engine, and decoding against it.

Every layer owns its arrays, whose time axis is exactly as long as the prefix that is attended: nothing is sliced out
before a matmul, which on CPU cost more than the attention itself (measured: 14.7 -> 1.9 ms a layer for 256 rows of
256 positions). Keys are stored time-last and values head-last, so that both matmuls read contiguous memory. When rows
outgrow the arrays, `grow` copies them to the next bucket.

Axis letters: B cache rows, R rows of the call, T tokens of the call, S cache positions, H query heads, K key/value
heads, h head width, D model width.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.policy import attention
from trace_jax.policy.transformer import Transformer, rms_norm


@chex.dataclass(frozen=True)
class LayerCache:
    """Rotated keys and values of each layer, addressed by a token's position in its row.

    What lies beyond a row's last token is left over from padding or an earlier row; a query never looks past its own
    position, so it is never seen.
    """

    k: tuple[Float[Array, "B K h S"], ...]
    v: tuple[Float[Array, "B K S h"], ...]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.k[0].shape[0]

    @property
    def length(self) -> int:
        """Positions a row can hold."""
        return self.k[0].shape[3]


def new(cfg: PolicyConfig, batch: int, length: int, dtype: str) -> LayerCache:
    """An empty cache of `batch` rows of `length` positions."""
    keys = (batch, cfg.kv_heads, cfg.head_dim, length)
    values = (batch, cfg.kv_heads, length, cfg.head_dim)
    return LayerCache(
        k=tuple(jnp.zeros(keys, dtype) for _ in range(cfg.layers)),
        v=tuple(jnp.zeros(values, dtype) for _ in range(cfg.layers)),
    )


def take(cache: LayerCache, rows: Int[Array, " R"]) -> LayerCache:
    """A cache of the given rows."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="clip"), cache)


def put(cache: LayerCache, rows: Int[Array, " R"], part: LayerCache) -> LayerCache:
    """Writes the rows of `part` back; an index beyond the cache writes nothing. `part` may be shorter in time."""
    span = part.length
    return LayerCache(
        k=tuple(c.at[rows, :, :, :span].set(p, mode="drop") for c, p in zip(cache.k, part.k, strict=True)),
        v=tuple(c.at[rows, :, :span].set(p, mode="drop") for c, p in zip(cache.v, part.v, strict=True)),
    )


def grow(cache: LayerCache, length: int) -> LayerCache:
    """The same rows with room for `length` positions."""
    extra = length - cache.length
    return LayerCache(
        k=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))) for x in cache.k),
        v=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))) for x in cache.v),
    )


def decode(
    model: Transformer,
    ids: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    valid: Bool[Array, "R T"],
    cache: LayerCache,
    rows: Int[Array, " R"] | None = None,
) -> tuple[Float[Array, "R T D"], LayerCache]:
    """Hidden states of the next tokens; their keys and values are written at `positions`.

    Args:
      model: the policy.
      ids: one token a row (decoding) or a chunk (prefill).
      positions: of each token in its row, contiguous in a chunk.
      valid: false for padding, which writes nothing and whose hidden state means nothing.
      cache: donate it to the jitted caller, then writes happen in place.
      rows: cache row of each row of the call; None when the call covers the whole cache in order.

    Returns:
      Hidden states after the final norm, and the cache.
    """
    cfg = model.cfg
    rope = attention.rope_table(positions, cfg.head_dim, cfg.rope_theta)
    target = (jnp.arange(ids.shape[0]) if rows is None else rows)[:, None]
    slots = jnp.where(valid, positions, cache.length)  # out of range: dropped
    weights = model._layer_weights()
    x = model._embed(ids)
    keys, values = [], []
    for layer in range(cfg.layers):  # unrolled: a scan would copy each layer's cache in and out
        layer_weights = {name: stacked[layer] for name, stacked in weights.items()}
        q, k, v = model._project(x, layer_weights, rope)
        k = cache.k[layer].at[target, :, :, slots].set(k.astype(cache.k[layer].dtype), mode="drop")
        v = cache.v[layer].at[target, :, slots].set(v.astype(cache.v[layer].dtype), mode="drop")
        keys.append(k)
        values.append(v)
        if rows is not None:
            k, v = k.at[rows].get(mode="clip"), v.at[rows].get(mode="clip")
        x = model._residual_attention(x, attend(q, k.astype(q.dtype), v.astype(q.dtype), positions), layer_weights)
        x = model._residual_mlp(x, layer_weights)
    return rms_norm(x, model.final_norm[...], cfg.norm_eps), LayerCache(k=tuple(keys), v=tuple(values))


def attend(
    q: Float[Array, "R T H h"],
    k: Float[Array, "R K h S"],
    v: Float[Array, "R K S h"],
    positions: Int[Array, "R T"],
) -> Float[Array, "R T H h"]:
    """Attention over the cache up to each query's own position; softmax in float32."""
    rows, time, heads, width = q.shape
    kv_heads, length = k.shape[1], k.shape[3]
    shared = heads // kv_heads  # query heads that read the same keys
    grouped = q.reshape(rows, time, kv_heads, shared, width).transpose(0, 2, 1, 3, 4)
    scores = jnp.einsum(
        "bkqh,bkhs->bkqs",
        grouped.reshape(rows, kv_heads, time * shared, width),
        k,
        preferred_element_type=jnp.float32,
    ).reshape(rows, kv_heads, time, shared, length)
    seen = jnp.arange(length) <= positions[:, None, :, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores * width**-0.5, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkqs,bksh->bkqh", weights.reshape(rows, kv_heads, time * shared, length), v)
    mixed = mixed.reshape(rows, kv_heads, time, shared, width).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(rows, time, heads, width)
