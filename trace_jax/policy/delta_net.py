"""The mixer of a gated delta net layer (arXiv 2412.06464), as in Qwen3.5: projections, a short causal convolution of
queries, keys and values, the gated delta rule (`policy.delta_rule`), a norm gated by another projection.

`mix` runs packed rows for training, `step` new tokens from a `DeltaState`. Both take the normalised input of the layer
and leave the output projection to the caller, who also says how to project: `linear(h, name)`.

Axes: B rows, T tokens, D model width, Hk key heads of width d, Hv value heads of width e, w width of the convolution,
C = 2 Hk d + Hv e its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trace_jax.config import PolicyConfig
from trace_jax.policy import delta_rule
from trace_jax.policy.delta_rule import Layout

Linear = Callable[[Array, str], Array]  # (h [*n, D], name of a parameter) -> [*n, its features]
CONVOLVED = ("query", "key", "value")


@chex.dataclass(frozen=True)
class DeltaState:
    """What a layer remembers of each row.

    Attributes:
        conv: inputs of the convolution at the last w - 1 tokens: queries, keys, values.
        rule: state of the delta rule, float32.
    """

    conv: Float[Array, "B w-1 C"]
    rule: Float[Array, "B Hv d e"]


def new_state(cfg: PolicyConfig, rows: int, dtype: str = "float32") -> DeltaState:
    """The state of rows before their first token.

    Args:
        dtype: of the inputs of the convolution; the compute type loses nothing.
    """
    channels = 2 * cfg.delta_key_heads * cfg.delta_key_dim + cfg.delta_value_heads * cfg.delta_value_dim
    return DeltaState(
        conv=jnp.zeros((rows, cfg.conv_width - 1, channels), dtype),
        rule=jnp.zeros((rows, cfg.delta_value_heads, cfg.delta_key_dim, cfg.delta_value_dim), jnp.float32),
    )


def mix(
    h: Float[Array, "*n D"], weights: Mapping[str, Array], cfg: PolicyConfig, layout: Layout, linear: Linear
) -> Float[Array, "B T Hv*e"]:
    """Mixes the tokens of packed rows.

    Args:
        h: normalised input, [B, T, D] or flat.
        weights: of this layer: conv_query, conv_key, conv_value, decay_rate, decay_bias, delta_norm.
        layout: with a reach of `cfg.conv_width - 1` (`delta_rule.layout`).
        linear: projects by delta_query, delta_key, delta_value, delta_gate, delta_beta, delta_decay.
    """
    rows = layout.lineage.shape

    def project(name):
        return linear(h, "delta_" + name).reshape(*rows, -1)

    q, k, v = (convolve(project(name), weights["conv_" + name], layout) for name in CONVOLVED)
    g, beta = gates(project("decay"), project("beta"), weights["decay_rate"], weights["decay_bias"])
    out, _ = delta_rule.chunked(*_heads(q, k, v, cfg), g, beta, layout)
    return _finish(out, project("gate"), weights, cfg)


def step(
    h: Float[Array, "*n D"],
    weights: Mapping[str, Array],
    cfg: PolicyConfig,
    state: DeltaState,
    valid: Bool[Array, "B T"],
    fresh: Bool[Array, " B"],
    linear: Linear,
) -> tuple[Float[Array, "B T Hv*e"], DeltaState]:
    """Mixes the next tokens of each row, one (decoding) or several (prefill), from its state.

    Args:
        h, weights, linear: as in `mix`.
        valid: False for tokens that are not there, behind those that are: they leave the state of their row as it is,
            bit for bit where the whole row is not there; their output means nothing.
        fresh: rows whose first token is the first of a sequence: what the state holds of them is ignored.
    """

    def project(name):
        return linear(h, "delta_" + name).reshape(*valid.shape, -1)

    inputs = [project(name) for name in CONVOLVED]
    parts = jnp.split(state.conv, [inputs[0].shape[-1], inputs[0].shape[-1] + inputs[1].shape[-1]], axis=-1)
    done = [
        convolve_next(x, weights["conv_" + name], part, valid, fresh)
        for x, name, part in zip(inputs, CONVOLVED, parts, strict=True)
    ]
    (q, k, v), conv = (x[0] for x in done), jnp.concatenate([x[1] for x in done], axis=-1)
    g, beta = gates(project("decay"), project("beta"), weights["decay_rate"], weights["decay_bias"])
    out, rule = advance(*_heads(q, k, v, cfg), g, beta, state.rule, valid, fresh)
    return _finish(out, project("gate"), weights, cfg), DeltaState(conv=conv, rule=rule)


def convolve(x: Float[Array, "B T c"], weight: Float[Array, "c w"], layout: Layout) -> Float[Array, "B T c"]:
    """Causal convolution of each channel by itself, then SiLU; sums in float32. The last weight is that of the token
    itself, what is not of its sequence counts as 0."""
    time, wide = x.shape[1], x.astype(jnp.float32)
    weight = weight.astype(jnp.float32)
    total = wide * weight[:, -1]
    for distance in range(1, weight.shape[1]):
        before = layout.before[distance - 1][..., None]
        if layout.parent is None:
            seen = jnp.where(before, jnp.pad(wide, ((0, 0), (distance, 0), (0, 0)))[:, :time], 0.0)
        else:
            seen = jnp.where(before >= 0, jnp.take_along_axis(wide, jnp.maximum(before, 0), axis=1), 0.0)
        total += seen * weight[:, -1 - distance]
    return jax.nn.silu(total).astype(x.dtype)


def convolve_next(
    x: Float[Array, "B T c"],
    weight: Float[Array, "c w"],
    last: Float[Array, "B w-1 c"],
    valid: Bool[Array, "B T"],
    fresh: Bool[Array, " B"],
) -> tuple[Float[Array, "B T c"], Float[Array, "B w-1 c"]]:
    """`convolve` of the next tokens, and the last inputs after them. See `step`."""
    reach, time = last.shape[1], x.shape[1]
    inputs = jnp.concatenate([jnp.where(fresh[:, None, None], 0, last), x.astype(last.dtype)], axis=1)
    count = jnp.sum(valid, axis=1)[:, None, None]
    kept = jnp.take_along_axis(inputs, count + jnp.arange(reach)[:, None], axis=1)
    wide, weight = inputs.astype(jnp.float32), weight.astype(jnp.float32)
    total = sum(wide[:, n : n + time] * weight[:, n] for n in range(reach + 1))
    return jax.nn.silu(total).astype(x.dtype), jnp.where(count > 0, kept, last)


def advance(
    q: Float[Array, "B T Hk d"],
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hv e"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv d e"],
    valid: Bool[Array, "B T"],
    fresh: Bool[Array, " B"],
) -> tuple[Float[Array, "B T Hv e"], Float[Array, "B Hv d e"]]:
    """The delta rule over the next tokens. See `step`."""
    old = jnp.where(fresh[:, None, None, None], 0.0, state)
    if q.shape[1] == 1:
        out, new = delta_rule.recurrent(q, k, v, g, beta, old)
    else:
        out, new = delta_rule.chunked(q, k, v, g, beta, delta_rule.layout(valid.astype(jnp.int32)), old)
    return out, jnp.where(valid[:, :1, None, None], new, state)


def gates(
    a: Float[Array, "*n Hv"], b: Float[Array, "*n Hv"], decay_rate: Float[Array, " Hv"], decay_bias: Float[Array, " Hv"]
) -> tuple[Float[Array, "*n Hv"], Float[Array, "*n Hv"]]:
    """Logarithm g of the decay and share beta of the update, from their projections; float32."""
    a, b, decay_rate, decay_bias = (x.astype(jnp.float32) for x in (a, b, decay_rate, decay_bias))
    return -jnp.exp(decay_rate) * jax.nn.softplus(a + decay_bias), jax.nn.sigmoid(b)


def gated_norm(
    x: Float[Array, "*n e"], z: Float[Array, "*n e"], weight: Float[Array, " e"], eps: float
) -> Float[Array, "*n e"]:
    """Root-mean-square normalisation of x, times weight, times silu(z); float32 inside, of the type of z."""
    x = x.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return (x * weight * jax.nn.silu(z.astype(jnp.float32))).astype(z.dtype)


def _heads(q, k, v, cfg):
    def split(x, heads):
        return x.reshape(*x.shape[:2], heads, -1)

    return split(q, cfg.delta_key_heads), split(k, cfg.delta_key_heads), split(v, cfg.delta_value_heads)


def _finish(out, z, weights, cfg):
    return gated_norm(out, z.reshape(out.shape), weights["delta_norm"], cfg.norm_eps).reshape(z.shape)
