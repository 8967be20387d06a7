"""The matrices of a sampler as 8-bit integers: half the memory of bfloat16, a quarter of float32.

Each column of a matrix W [a, b] is stored as round(W / s) with s = max|W| / 127 over its a inputs (symmetric, one scale
for each output): the error of an entry is at most s / 2. Only what is large is stored so, the projections of layers and
experts; embeddings, the output matrix, routers, gains and kernels stay in the type that they are used in. The learner
never sees these numbers. What the sampler draws from differs from what is trained by them, so the ratio of the two is
to be looked at (`sampler/log_ratio` of a step) and corrected (`grpo.old_policy: learner`, `grpo.correction`).

Axes: L layers, E experts, a and b features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int8

from trace_jax.policy.lora import Frozen
from trace_jax.policy.parameters import cast_in_use

LARGE = (
    *("query", "key", "value", "output", "query_gate", "gate", "up", "down"),
    *("delta_query", "delta_key", "delta_value", "delta_gate", "delta_output"),
    *("expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down"),
)
_EXPERTS = ("expert_gate", "expert_up", "expert_down")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A stacked matrix. It stands for an array where that is cast before its use, as every matrix of a policy is.

    Attributes:
        entries: rounded.
        scale: of each column.
    """

    entries: Int8[Array, "L *E a b"]
    scale: Float[Array, "L *E 1 b"]

    def astype(self, dtype: Any) -> Array:
        """The matrix itself."""
        return (self.entries.astype(jnp.float32) * self.scale).astype(dtype)

    def __getitem__(self, index: Any) -> Quantised:
        if index is not Ellipsis:
            raise TypeError("only the whole of it: layers are taken by `jax.tree.map`")
        return self


def quantise(weight: Float[Array, "L *E a b"]) -> Quantised:
    """Rounds a matrix to 8 bits."""
    wide = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127.0, 1.0)
    return Quantised(jnp.round(wide / scale).astype(jnp.int8), scale)


def in_use(params: Any, dtype: str, weights: str, layout: Any = None) -> Any:
    """Parameters as a sampler holds them.

    Args:
        params: of a policy, or what adapters work on (`lora.Frozen`); adapters themselves stay as they are but for the
            compute type. Shapes will do.
        dtype: the compute type.
        weights: `rollout.weights`.
        layout: sharding of every parameter as it comes; it is rounded where it lies, before anything is gathered.
    """
    if isinstance(params, Frozen):
        return params._replace(base=in_use(params.base, dtype, weights, layout and layout.base))
    cast = cast_in_use(params, dtype)
    if weights != "int8" or _adapters(params):
        return cast
    # from the parameters, not from what was cast: rounding once is better than twice
    return jax.tree_util.tree_map_with_path(
        lambda path, array, used, *where: _rounded(array, *where) if _name(path) in LARGE else used,
        params,
        cast,
        *(() if layout is None else (layout,)),
    )


def layout_in_use(layout: Any, weights: str) -> Any:
    """Sharding of `in_use` from that of the parameters."""
    if isinstance(layout, Frozen):
        return layout._replace(base=layout_in_use(layout.base, weights))
    if layout is None or weights != "int8" or _adapters(layout):
        return layout
    return jax.tree_util.tree_map_with_path(
        lambda path, s: _split(s, 4 if _name(path) in _EXPERTS else 3) if _name(path) in LARGE else s, layout
    )


def _rounded(array: Any, where: NamedSharding | None = None) -> Quantised:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(quantise, array)
    found = quantise(array)
    if where is None:
        return found
    return jax.tree.map(jax.lax.with_sharding_constraint, found, _split(where, array.ndim))


def _split(where: NamedSharding, axes: int) -> Quantised:
    """Sharding of a matrix with `axes` axes as it is stored: a scale has all inputs of its column."""
    spec = (*where.spec, *[None] * (axes - len(where.spec)))
    return Quantised(where, NamedSharding(where.mesh, PartitionSpec(*spec[:-2], None, spec[-1])))


def _name(path: tuple[Any, ...]) -> str:
    return str(getattr(path[0], "key", getattr(path[0], "name", path[0])))


def _adapters(params: Any) -> bool:
    """Whether these are the pairs of adapters, which are named as their targets are."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return any(getattr(key, "name", None) in ("a", "b") for path, _ in leaves for key in path[1:])
