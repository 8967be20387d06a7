"""Every parameter of the decoder, declared once: shape, logical axes, initialiser.

Axes: L layers, D width, H query heads, K key/value heads, h head width, F feed-forward width, E experts, V vocabulary;
of gated delta layers Hk key heads of width dk, Hv value heads of width dv, w tokens under the convolution.
Parameters of a kind of block are stacked over the layers that have it, in the order of the layers. Matrices are
[in, out]; head axes are stored flattened (H*h), which makes every projection one two-dimensional matmul.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import ATTENTION, DELTA, mixers

Initialiser = Callable[[nnx.Rngs, tuple[int, ...]], Array]


class Declared(NamedTuple):
    """A parameter; `axes` are its logical axes, one name for each axis of `shape` ("" for none)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    make: Initialiser


def names(cfg: PolicyConfig) -> dict[str, tuple[str, ...]]:
    """Parameters that are stacked over layers, by the layers that have them: "all" or a kind of mixer."""
    declared, kinds = declare(cfg, 1), mixers(cfg)
    attention = _attention(cfg, 1)
    delta = _delta(cfg, 1) if DELTA in kinds else {}
    stacked = [name for name, (_, axes, _) in declared.items() if axes[0] == "layers"]
    groups = {"all": tuple(name for name in stacked if name not in attention and name not in delta)}
    return groups | {kind: tuple(found) for kind, found in ((ATTENTION, attention), (DELTA, delta)) if kind in kinds}


def declare(cfg: PolicyConfig, vocab_size: int) -> dict[str, Declared]:
    """All parameters. Weights are drawn with standard deviation 1/sqrt(fan in), residual outputs scaled down by
    sqrt(2L). The order decides which numbers a seed draws."""
    width, kinds = cfg.width, mixers(cfg)
    found = {"embedding": Declared((vocab_size, width), ("vocab", "embed"), _normal(width**-0.5))}
    found["attention_norm"] = _gain(cfg, (cfg.layers, width), ("layers", "embed"))
    found |= _attention(cfg, kinds.count(ATTENTION)) if ATTENTION in kinds else {}
    found |= _delta(cfg, kinds.count(DELTA)) if DELTA in kinds else {}
    found["mlp_norm"] = _gain(cfg, (cfg.layers, width), ("layers", "embed"))
    found |= _experts(cfg) if cfg.experts else _dense(cfg)
    found["final_norm"] = _gain(cfg, (width,), ("embed",))
    if not cfg.tie_embeddings:
        found["head"] = Declared((width, vocab_size), ("embed", "vocab"), _normal(width**-0.5))
    return found


# Parameters that a layer uses as they are stored; all others are cast to the compute type first.
_WIDE = ("norm", "conv_", "decay_", "shared_share", "adapter_gate")


def cast_in_use(params: Any, dtype: str) -> Any:
    """Parameters (or the pairs of adapters, by target) with every matrix in the compute type.

    Each use of a matrix casts it, so a policy that only samples gives the same numbers, to the last bit, with half the
    memory and half the reading.
    """

    def cast(path, array):
        name = str(getattr(path[0], "key", getattr(path[0], "name", path[0])))
        wide = any(part in name for part in _WIDE[:1]) or name.startswith(_WIDE[1:])
        return array if wide else array.astype(dtype)

    def like(path, array):
        if isinstance(array, jax.ShapeDtypeStruct):
            new = jax.eval_shape(lambda a: cast(path, a), array)
            return jax.ShapeDtypeStruct(array.shape, new.dtype, sharding=array.sharding)
        return cast(path, array)

    return jax.tree_util.tree_map_with_path(like, params)


def _attention(cfg: PolicyConfig, count: int) -> dict[str, Declared]:
    heads, kv_heads = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    found = {
        "query": _matrix(count, cfg.width, heads, "embed", "heads"),
        "key": _matrix(count, cfg.width, kv_heads, "embed", "kv_heads"),
        "value": _matrix(count, cfg.width, kv_heads, "embed", "kv_heads"),
        "output": _matrix(count, heads, cfg.width, "heads", "embed", _residual(cfg)),
    }
    if cfg.attention_gate:
        found["query_gate"] = _matrix(count, cfg.width, heads, "embed", "heads")
    if cfg.qk_norm:
        for name in ("query_norm", "key_norm"):
            found[name] = _gain(cfg, (count, cfg.head_dim), ("layers", "head_dim"))
    return found


def _delta(cfg: PolicyConfig, count: int) -> dict[str, Declared]:
    key, value = cfg.delta_key_heads * cfg.delta_key_dim, cfg.delta_value_heads * cfg.delta_value_dim
    heads, width, taps = cfg.delta_value_heads, cfg.width, cfg.conv_width
    kernel = _normal(taps**-0.5)
    return {
        "delta_query": _matrix(count, width, key, "embed", "kv_heads"),
        "delta_key": _matrix(count, width, key, "embed", "kv_heads"),
        "delta_value": _matrix(count, width, value, "embed", "heads"),
        "delta_gate": _matrix(count, width, value, "embed", "heads"),
        "delta_beta": _matrix(count, width, heads, "embed", "heads"),
        "delta_decay": _matrix(count, width, heads, "embed", "heads"),
        "conv_query": Declared((count, key, taps), ("layers", "kv_heads", ""), kernel),
        "conv_key": Declared((count, key, taps), ("layers", "kv_heads", ""), kernel),
        "conv_value": Declared((count, value, taps), ("layers", "heads", ""), kernel),
        "decay_rate": Declared((count, heads), ("layers", "heads"), _log_uniform),
        "decay_bias": Declared((count, heads), ("layers", "heads"), _ones),
        "delta_norm": Declared((count, cfg.delta_value_dim), ("layers", "head_dim"), _ones),
        "delta_output": _matrix(count, value, width, "heads", "embed", _residual(cfg)),
    }


def _dense(cfg: PolicyConfig) -> dict[str, Declared]:
    layers, width, mlp = cfg.layers, cfg.width, cfg.mlp_width
    return {
        "gate": _matrix(layers, width, mlp, "embed", "mlp"),
        "up": _matrix(layers, width, mlp, "embed", "mlp"),
        "down": _matrix(layers, mlp, width, "mlp", "embed", _residual(cfg)),
    }


def _experts(cfg: PolicyConfig) -> dict[str, Declared]:
    layers, width, shared = cfg.layers, cfg.width, cfg.shared_expert_width
    into = ((layers, cfg.experts, width, cfg.expert_width), ("layers", "experts", "embed", "mlp"))
    out = ((layers, cfg.experts, cfg.expert_width, width), ("layers", "experts", "mlp", "embed"))
    found = {
        "router": _matrix(layers, width, cfg.experts, "embed", ""),
        "expert_gate": Declared(*into, _normal(width**-0.5)),
        "expert_up": Declared(*into, _normal(width**-0.5)),
        "expert_down": Declared(*out, _normal(_residual(cfg) * cfg.expert_width**-0.5)),
    }
    if shared:
        found |= {
            "shared_gate": _matrix(layers, width, shared, "embed", "mlp"),
            "shared_up": _matrix(layers, width, shared, "embed", "mlp"),
            "shared_down": _matrix(layers, shared, width, "mlp", "embed", _residual(cfg)),
            "shared_share": Declared((layers, width), ("layers", "embed"), _normal(width**-0.5)),
        }
    return found


def _residual(cfg: PolicyConfig) -> float:
    return (2 * cfg.layers) ** -0.5


def _matrix(count: int, inputs: int, outputs: int, axis_in: str, axis_out: str, scale: float = 1.0) -> Declared:
    return Declared((count, inputs, outputs), ("layers", axis_in, axis_out), _normal(scale * inputs**-0.5))


def _gain(cfg: PolicyConfig, shape: tuple[int, ...], axes: tuple[str, ...]) -> Declared:
    return Declared(shape, axes, _zeros if cfg.norm_offset else _ones)


def _normal(scale: float) -> Initialiser:
    return lambda rngs, shape: scale * jax.random.normal(rngs.params(), shape)


def _ones(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    return jnp.ones(shape)


def _zeros(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    return jnp.zeros(shape)


def _log_uniform(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
    """Decay rates between 1 and 16 a token, before the step width that the layer's input gives."""
    return jnp.log(jax.random.uniform(rngs.params(), shape, minval=1.0, maxval=16.0))
