"""Rotary positions and attention: packed training rows, and decoding over a prefix of the cache.

Axes: B rows, T query tokens, S keys, H query heads, K key/value heads (H is a multiple of K), h head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def rope_table(
    positions: Int[Array, "B T"], head_dim: int, theta: float
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of the rotary angles (RoFormer, arXiv 2104.09864), float32; half = head_dim / 2."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "B T n h"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T n h"]:
    """Rotates the pairs (i, i + h/2) of every head, the pairing of Llama and Qwen checkpoints."""
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def packed_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """True where a query may see a key: same segment and not later in the row."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return (same & jnp.tril(jnp.ones((length, length), bool)))[:, None]


def packed_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    mask: Bool[Array, "B 1 T T"],
) -> Float[Array, "B T H h"]:
    """Softmax attention scaled by 1/sqrt(h), softmax in float32."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def cache_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B S K h"],
    v: Float[Array, "B S K h"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T H h"]:
    """Attention of new tokens over a prefix of their row's cache; a query sees the cache up to its own position."""
    visible = jnp.arange(k.shape[1])[None, None, None, :] <= positions[:, None, :, None]
    return jax.nn.dot_product_attention(q, k.astype(q.dtype), v.astype(q.dtype), mask=visible)
