"""Low-rank adapters (LoRA, arXiv 2106.09685): a target W works as W + alpha / rank * A B, W itself is never changed.

Several adapters of one rank may be resident; each token of a batch has one of them, or none, or a mixture of all whose
weights a gate computes (`policy.mixture`). An adapter is a tree of arrays beside the parameters, so the base policy is
the same arrays with adapters left out: a reference costs nothing.

Axes: L layers that have the target, N adapters, a and b features, r rank, E experts, n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import ConfigError, LoraConfig, PolicyConfig
from trace_jax.policy import layers, mixture, parameters
from trace_jax.policy.placement import Placement


class Pair(NamedTuple):
    """The factors of one target: `a` [L, N, a, r] and `b` [L, N, r, b]; of experts [L, N, E, a, r] and
    [L, N, E, r, b]. Without L inside a layer."""

    a: Float[Array, "L N *E a r"]
    b: Float[Array, "L N *E r b"]


Pairs = dict[str, Pair]


class Adapters(NamedTuple):
    """Adapters in use.

    Attributes:
        pairs: by target.
        scale: alpha / rank of each adapter.
        chosen: which one each token has, or each row where a batch is decoded; -1: none. None: all have the only one.
        gate: of `mixture`, all layers; then all adapters are in use and `chosen` is None.
        lock: where the gate reads: of packed rows see `mixture.packed`, of decoded ones it is a `mixture.Lock`.
        shares: weight of each adapter for each token, in the layer that is being computed.
    """

    pairs: Pairs
    scale: Float[Array, " N"]
    chosen: Int[Array, ...] | None = None
    gate: Float[Array, "L D M"] | None = None
    lock: Int[Array, "B T"] | mixture.Lock | None = None
    shares: Float[Array, "n N"] | None = None


class Frozen(NamedTuple):
    """What adapters are trained on, or a gate over them. A policy is its parameters, or `(pairs, Frozen)`, or
    `(mixture.init(...), Frozen)` with the pairs among what is frozen; pairs or gate None: adapters off.

    Attributes:
        base: parameters of the base policy.
        scale: of `Adapters`.
        pairs: that a gate mixes; None: pairs are what is trained.
    """

    base: Any
    scale: Float[Array, " N"]
    pairs: Pairs | None = None


def parts(
    params: Any, chosen: Int[Array, ...] | None = None, lock: Int[Array, "B T"] | mixture.Lock | None = None
) -> tuple[Any, Adapters | None]:
    """Parameters of a policy, and its adapters in use.

    Args:
        params: as `Frozen` says.
        chosen, lock: see `Adapters`; a gate has no use for the first, and needs the second.

    Raises:
        ValueError: a gate, and no `lock`.
    """
    if not isinstance(params, tuple):
        return params, None
    trained, frozen = params
    if trained is None:
        return frozen.base, None
    if frozen.pairs is None:
        return frozen.base, Adapters(trained, frozen.scale, chosen)
    if lock is None:
        raise ValueError("a gate over adapters reads the prompt's last token, and where prompts end was not given")
    return frozen.base, Adapters(frozen.pairs, frozen.scale, gate=trained[mixture.GATE], lock=lock)


def init(policy: PolicyConfig, config: LoraConfig, key: Array, count: int = 1) -> Pairs:
    """Fresh adapters: A is drawn uniformly within 1/sqrt(a) as PEFT does, B is zero, so they change nothing yet."""
    pairs = {}
    for name, (a, b, _) in _shapes(policy, config, count).items():
        bound = a[-2] ** -0.5
        key, mine = jax.random.split(key)
        pairs[name] = Pair(jax.random.uniform(mine, a, minval=-bound, maxval=bound), jnp.zeros(b))
    return pairs


def axes(policy: PolicyConfig, config: LoraConfig) -> dict[str, Pair]:
    """Logical axes of every factor: the tree of `init` with a tuple of names at each leaf."""
    return {name: names for name, (_, _, names) in _shapes(policy, config, 1).items()}


def scale(config: LoraConfig, count: int = 1) -> Float[Array, " N"]:
    """`Adapters.scale` of adapters made by one configuration."""
    return jnp.full((count,), config.alpha / config.rank, jnp.float32)


def stacked(adapters: Sequence[Pairs]) -> Pairs:
    """Single adapters side by side.

    Raises:
        ConfigError: they differ in targets or rank.
    """
    shapes = [{name: (pair.a.shape, pair.b.shape) for name, pair in pairs.items()} for pairs in adapters]
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "adapters of different targets or ranks cannot be resident together: train them with one `lora`"
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *adapters)


def add(
    y: Float[Array, "n b"],
    x: Float[Array, "n a"],
    pair: Pair,
    adapters: Adapters,
    names: tuple[str, str],
    placement: Placement,
) -> Float[Array, "n b"]:
    """`y` with the low-rank products of the tokens' adapters added, or of all in their mixture.

    Args:
        pair: of one layer.
        names: logical axes of the target.
    """
    count, features, rank = pair.a.shape
    a = pair.a.transpose(1, 0, 2).reshape(features, count * rank)
    inner = layers.linear(x, a, (names[0], "rank"), placement).reshape(-1, count, rank)
    inner = inner * adapters.scale.astype(x.dtype)[:, None]
    if adapters.shares is not None:
        inner = inner * adapters.shares[..., None].astype(x.dtype)
    elif adapters.chosen is not None:
        mine = adapters.chosen.reshape(-1, 1) == jnp.arange(count)
        inner = jnp.where(mine[..., None], inner, 0.0)
    b = pair.b.reshape(count * rank, -1)
    return y + layers.linear(inner.reshape(-1, count * rank), b, ("rank", names[1]), placement)


def merged(
    params: Mapping[str, Any], pairs: Pairs, factor: float, index: int = 0, exact: bool = False
) -> dict[str, Any]:
    """Weights with one adapter put into them.

    Args:
        params: arrays by name, targets stacked over layers.
        factor: alpha / rank.
        exact: targets become float32; otherwise they are rounded to the type that they have.
    """
    return {
        name: value
        if name not in pairs
        else _merge(value, pairs[name].a[:, index], pairs[name].b[:, index], factor, exact)
        for name, value in params.items()
    }


def _merge(weight, a, b, factor, exact):
    product = factor * jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    whole = weight.astype(jnp.float32) + product
    return whole if exact else whole.astype(weight.dtype)


def _shapes(policy: PolicyConfig, config: LoraConfig, count: int) -> dict[str, tuple[tuple, tuple, Pair]]:
    declared, found = parameters.declare(policy, 1), {}
    for name in config.targets:
        (layer_count, *middle, a, b), (layer_axis, *middle_axes, axis_a, axis_b), _ = declared[name]
        shape_a = (layer_count, count, *middle, a, config.rank)
        shape_b = (layer_count, count, *middle, config.rank, b)
        start = (layer_axis, "", *middle_axes)
        found[name] = (shape_a, shape_b, Pair((*start, axis_a, "rank"), (*start, "rank", axis_b)))
    return found
