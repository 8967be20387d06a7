"""Layers one after the other: a scan over what repeats, where layers differ by a pattern.

Axes: L layers; a stacked parameter has its layers on the leading axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.config_rules_policy import mixers
from trace_jax.policy.lora import Pair, Pairs


class Stack(NamedTuple):
    """What belongs to layers.

    Attributes:
        weights: stacked parameters, grouped by the layers that have them: "all" or a kind of mixer.
        pairs: stacked factors of adapters, by target.
        chosen: experts of every layer's tokens.
    """

    weights: dict[str, dict[str, Array]]
    pairs: Pairs | None
    chosen: Int[Array, "L n k"] | None


# what one layer gets: its weights, its factors of adapters, its tokens' experts
Given = tuple[dict[str, Array], dict[str, Pair], Any]


def each_layer(stack: Stack, cfg: PolicyConfig) -> Iterator[tuple[str, Given]]:
    """Kind of mixer and share of the stack of every layer, in order."""
    groups = _groups(stack)
    counts = dict.fromkeys(groups, 0)
    for index, kind in enumerate(mixers(cfg)):
        yield kind, _merge(_nth(groups["all"], index), _nth(groups[kind], counts[kind]))
        counts[kind] += 1


def over_layers(
    remat: Callable,
    layer: Callable[[Array, Given, str], tuple[Array, Any]],
    x: Float[Array, "n D"],
    stack: Stack,
    cfg: PolicyConfig,
    unroll: bool,
) -> tuple[Float[Array, "n D"], Any]:
    """Applies all layers: a scan over the repetitions of `cfg.mixers`, then the layers of a last, incomplete one.

    Args:
        remat: wraps a layer, so that it keeps less for the backward pass.
        layer: (x, its share of the stack, kind of mixer) -> (x, what it reports).

    Returns:
        x, and what the layers reported, stacked over all of them.
    """
    pattern = _period(cfg.mixers)
    times = cfg.layers // len(pattern)
    groups = _groups(stack)
    per = {group: len(pattern) if group == "all" else pattern.count(group) for group in groups}

    def apply(x, shares, kinds):
        """Some layers, given as many of every group as they need, in front."""
        counts, reports = dict.fromkeys(groups, 0), []
        for index, kind in enumerate(kinds):
            given = _merge(_nth(shares["all"], index), _nth(shares[kind], counts[kind]))
            x, report = remat(partial(layer, kind=kind))(x, given)
            counts[kind] += 1
            reports.append(report)
        return x, jax.tree.map(lambda *r: jnp.stack(r), *reports)

    def repeated(n, a):
        return a[: times * n].reshape(times, n, *a.shape[1:])

    reports = []
    if times:
        shares = {g: jax.tree.map(partial(repeated, per[g]), share) for g, share in groups.items()}
        x, found = jax.lax.scan(lambda x, shares: apply(x, shares, pattern), x, shares, unroll=unroll)
        reports.append(jax.tree.map(lambda r: r.reshape(-1, *r.shape[2:]), found))
    if rest := mixers(cfg)[times * len(pattern) :]:
        shares = {g: jax.tree.map(lambda a, n=per[g]: a[times * n :], share) for g, share in groups.items()}
        x, found = apply(x, shares, rest)
        reports.append(found)
    return x, jax.tree.map(lambda *r: jnp.concatenate(r), *reports)


def _nth(share: Given, index: int) -> Given:
    return jax.tree.map(lambda a: a[index], share)


def _period(pattern: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest pattern that gives the same layers."""
    lengths = (n for n in range(1, len(pattern) + 1) if len(pattern) % n == 0)
    return next(pattern[:n] for n in lengths if pattern[:n] * (len(pattern) // n) == pattern)


def _groups(stack: Stack) -> dict[str, tuple[dict[str, Array], dict[str, Pair], Any]]:
    """The stack, split by the layers that have it; factors of adapters go with their targets."""
    pairs = stack.pairs or {}
    return {
        group: (weights, {n: p for n, p in pairs.items() if n in weights}, stack.chosen if group == "all" else None)
        for group, weights in stack.weights.items()
        if weights
    }


def _merge(common: Given, own: Given) -> Given:
    return common[0] | own[0], common[1] | own[1], common[2]
