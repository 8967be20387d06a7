"""Building blocks of the training pass with gradients written by hand: each keeps its inputs and little else.

Automatic differentiation keeps every intermediate array of an elementwise chain; on CPU these cost as much as the
matmuls. Weights come as stored (float32) and are cast and placed inside, so that nothing gathered outlives its use.

Axes: n tokens, a and b features.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.policy.placement import Placement


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def linear(x: Float[Array, "n a"], weight: Float[Array, "a b"], axes: tuple[str, str], placement: Placement):
    """`x @ weight` in the type of x, `[n, b]`; the weight's gradient is accumulated in float32.

    Args:
        axes: logical axes of the weight.
    """
    return placement.used(jnp.dot(x, _cast(weight, x.dtype, axes, placement)), ("rows", axes[1]))


def _linear_forward(x, weight, axes, placement):
    return linear(x, weight, axes, placement), (x, weight)


def _linear_backward(axes, placement, saved, d_y):
    x, weight = saved
    d_y = placement.used(d_y, ("rows", axes[1]))
    d_x = jax.lax.dot_general(d_y, _cast(weight, x.dtype, axes, placement), (((1,), (1,)), ((), ())))
    d_weight = jax.lax.dot_general(x, d_y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return placement.used(d_x, ("rows", axes[0])), placement.stored(d_weight, axes).astype(weight.dtype)


linear.defvjp(_linear_forward, _linear_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(table: Float[Array, "a b"], ids: Int[Array, " n"], dtype: str, placement: Placement):
    """Rows of a table with logical axes (vocab, embed) in some type, `[n, b]`; its gradient in float32."""
    return _cast(table, dtype, ("vocab", "embed"), placement)[ids]


def _lookup_forward(table, ids, dtype, placement):
    return lookup(table, ids, dtype, placement), (ids, table)


def _lookup_backward(dtype, placement, saved, d_y):
    ids, table = saved
    d_y = placement.used(d_y.astype(jnp.float32), ("replica", "split"))  # every device has its columns of the table
    d_table = jnp.zeros(table.shape, jnp.float32).at[ids].add(d_y)
    return placement.stored(d_table, ("vocab", "embed")).astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def normalise(x: Float[Array, "*n a"], gain: Float[Array, " a"], eps: float) -> Float[Array, "*n a"]:
    """Root-mean-square normalisation (arXiv 1910.07467), statistics in float32."""
    return _normalise_forward(x, gain, eps)[0]


def _normalise_forward(x, gain, eps):
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * gain).astype(x.dtype), (x, gain, scale)


def _normalise_backward(eps, saved, d_y):
    x, gain, scale = saved
    unit = x.astype(jnp.float32) * scale
    d_y = d_y.astype(jnp.float32)
    d_unit = d_y * gain
    d_x = scale * (d_unit - unit * jnp.mean(d_unit * unit, axis=-1, keepdims=True))
    return d_x.astype(x.dtype), jnp.sum(d_y * unit, axis=range(x.ndim - 1))


normalise.defvjp(_normalise_forward, _normalise_backward)


@jax.custom_vjp
def gated(gate: Float[Array, "n b"], up: Float[Array, "n b"]) -> Float[Array, "n b"]:
    """`silu(gate) * up` (SwiGLU, arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


def _gated_backward(saved, d_y):
    gate, up = saved
    share = jax.nn.sigmoid(gate)
    return d_y * up * share * (1.0 + gate * (1.0 - share)), d_y * gate * share


gated.defvjp(lambda gate, up: (gated(gate, up), (gate, up)), _gated_backward)


def _cast(weight, dtype, axes, placement):
    return placement.used(weight.astype(dtype), axes)


def in_use(weight: Array, axes: tuple[str, ...], placement: Placement) -> Array:
    """A small parameter (a gain) as used, its gradient as stored."""

    @jax.custom_vjp
    def use(weight):
        return placement.used(weight, axes)

    use.defvjp(lambda weight: (use(weight), None), lambda _, d: (placement.stored(d, axes),))
    return use(weight)
