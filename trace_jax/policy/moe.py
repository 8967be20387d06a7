"""Mixture-of-experts feed-forward (arXiv 2401.06066, 2505.09388): router, dropless experts, shared expert, adapters.

Every token is worked on by the k experts its router scores highest, no token is dropped, and a token's result does not
depend on the tokens beside it: copies of the tokens are sorted by expert, each expert multiplies its own, and the k
results of a token are summed in float32 in the order of its routes.

On a mesh the `expert` axis splits the experts and the tokens are the same on all its devices: each computes the copies
that belong to its experts and the results are summed. Weights come as stored and are cast and placed inside, their
gradients are made in float32 (as in `policy.layers`).

A device works on so many tokens at a time (`TOKENS`): the copies of a row of 32,768 tokens would take k D times as many
numbers, a gigabyte in 16 bits for Qwen3.5-35B-A3B, several times over.

Axes: n tokens, D model width, E experts, F expert width, k experts of a token, m = n k copies, N adapters, r rank,
G groups of copies (one for each expert, or for each expert and adapter).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import PolicyConfig
from trace_jax.policy import layers
from trace_jax.policy.grouped import matmul, outer
from trace_jax.policy.lora import Adapters, Pair
from trace_jax.policy.placement import ANYWHERE, Placement

TOKENS = 8192  # whose copies exist at a time; enough that an expert of 256 is read for a hundred copies or more
GATE, UP, DOWN = NAMES = ("expert_gate", "expert_up", "expert_down")
AXES = {GATE: ("experts", "embed", "mlp"), UP: ("experts", "embed", "mlp"), DOWN: ("experts", "mlp", "embed")}


class Routes(NamedTuple):
    """Which experts work on each token.

    Attributes:
        experts: distinct, the highest score first.
        weights: of their results in the token's sum, float32.
    """

    experts: Int[Array, "n k"]
    weights: Float[Array, "n k"]


def route(logits: Float[Array, "n E"], k: int, renormalise: bool, chosen: Int[Array, "n k"] | None = None) -> Routes:
    """The k experts with the highest scores; of equal ones the lower numbers.

    Args:
        logits: scores of the router; the softmax over all experts is taken in float32.
        renormalise: the weights of a token's experts sum to 1 (`norm_topk_prob`); otherwise they are the
            probabilities.
        chosen: experts to take instead, e.g. those the sampler took (router replay). Weights and gradients are those
            of the present scores. A row with a negative entry was not recorded and is routed by its scores.
    """
    logits = logits.astype(jnp.float32)
    experts = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1].astype(jnp.int32)
    if chosen is not None:
        experts = jnp.where(jnp.all(chosen >= 0, axis=-1, keepdims=True), chosen.astype(jnp.int32), experts)
    # the softmax over the chosen is the renormalised one; experts replayed long after may have no probability left
    over = jax.nn.log_softmax(logits, axis=-1) if not renormalise else logits
    scores = jnp.take_along_axis(over, experts, axis=-1)
    return Routes(experts, jax.nn.softmax(scores, axis=-1) if renormalise else jnp.exp(scores))


def experts(
    x: Float[Array, "n D"],
    routes: Routes,
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    placement: Placement = ANYWHERE,
    adapters: Adapters | None = None,
) -> Float[Array, "n D"]:
    """Weighted sum over the experts of each token of `(silu(x @ gate) * (x @ up)) @ down`, in the type of x.

    Args:
        gate, up, down: as stored, experts split over the `expert` axis of a mesh.
        placement: of arrays on a mesh; rows split as "rows".
        adapters: of one layer, one for each token; the pairs of the targets `NAMES` are used. Their scale is no
            parameter: it has no gradient.
    """
    pairs, scale, adapter = {}, jnp.ones(1), None
    if adapters is not None:
        pairs = {name: pair for name, pair in adapters.pairs.items() if name in NAMES}
        scale, adapter = adapters.scale, adapters.chosen
    adapter = jnp.zeros(len(x), jnp.int32) if adapter is None else adapter.reshape(-1)
    matrices = {GATE: gate, UP: up, DOWN: down}
    return _experts(x, routes.weights, matrices, pairs, routes.experts, adapter, scale, placement)


def feed_forward(
    h: Float[Array, "n D"],
    weights: Mapping[str, Array],
    cfg: PolicyConfig,
    linear: Callable[[Array, str], Array],
    placement: Placement = ANYWHERE,
    chosen: Int[Array, "n k"] | None = None,
    adapters: Adapters | None = None,
) -> tuple[Float[Array, "n D"], Routes]:
    """The whole block of a layer (Qwen3-MoE; with a shared expert Qwen3.5-MoE), and the routes it took.

    Args:
        h: normalised input.
        weights: of one layer: expert_gate, expert_up, expert_down, and shared_share [D] with a shared expert.
        linear: (array, name) -> array times that matrix: router [D, E], shared_gate, shared_up, shared_down.
        chosen: see `route`.
        adapters: of the experts; those of the shared expert are in `linear`.
    """
    routes = route(linear(h, "router"), cfg.experts_per_token, cfg.norm_topk_prob, chosen)
    y = experts(h, routes, *(weights[name] for name in NAMES), placement, adapters)
    if cfg.shared_expert_width:
        shared = linear(layers.gated(linear(h, "shared_gate"), linear(h, "shared_up")), "shared_down")
        vector = layers.in_use(weights["shared_share"], ("embed",), placement).astype(jnp.float32)
        share = jax.nn.sigmoid(jnp.sum(h.astype(jnp.float32) * vector, axis=-1, keepdims=True))
        y = y + (share * shared.astype(jnp.float32)).astype(y.dtype)
    return y, routes


def load(routes: Routes, wanted: Bool[Array, " n"], count: int) -> dict[str, Float[Array, " E"]]:
    """Sums to add up over micro-batches: how many of the wanted tokens each of `count` experts works on."""
    ones = jnp.broadcast_to(jnp.where(wanted, 1.0, 0.0)[:, None], routes.experts.shape)
    return {"experts": jnp.zeros(count, jnp.float32).at[routes.experts].add(ones)}


def load_figures(counts: Float[np.ndarray, "*layers E"]) -> dict[str, float]:
    """How evenly tokens use the experts, from summed counts of one layer or of several; nothing without a token.

    Returns:
        experts/max_share: share of all copies that the busiest expert of any layer works on. Even: 1 / E; it bounds
            what the slowest device of an `expert` axis does. Above a few times 1 / E the router is collapsing.
        experts/idle: fraction of the experts without a token, over all layers. Over a whole optimizer step it should
            stay at 0; idle experts get no gradient.
        experts/entropy: of the shares, over log E, mean of the layers. 1 is even, 0 is one expert for everything; a
            steady fall over training is collapse.
    """
    counts = np.asarray(counts, np.float64)
    counts = counts.reshape(-1, counts.shape[-1])
    counts = counts[counts.sum(axis=1) > 0]
    if not counts.size:
        return {}
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(shares * np.log(np.where(shares > 0, shares, 1.0)), axis=1)
    even = np.log(counts.shape[1]) or 1.0  # one expert: its entropy is 0 anyway
    return {
        "experts/max_share": float(shares.max()),
        "experts/idle": float(np.mean(counts == 0)),
        "experts/entropy": float(np.mean(entropy) / even),
    }


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _experts(x, weights, matrices, pairs, chosen, adapter, scale, placement):
    return _forward(x, weights, matrices, pairs, chosen, adapter, scale, placement)[0]


def _forward(x, weights, matrices, pairs, chosen, adapter, scale, placement):
    def work(part, x, weights, chosen, adapter, scale, matrices, pairs):
        def some(x, weights, chosen, adapter):
            plan = _plan(part, chosen, weights, adapter, scale, matrices, pairs)
            copies = x[plan.token]
            gate, up = (_project(copies, matrices[name], pairs.get(name), plan) for name in (GATE, UP))
            out = _project(layers.gated(gate, up), matrices[DOWN], pairs.get(DOWN), plan)
            return _gathered(plan, out, weight=plan.weight), gate, up

        return _in_parts(some, (x, weights, chosen, adapter))

    taken, axes = _arguments(x, weights, matrices, pairs, chosen, adapter, scale, placement)
    out_axes = (("rows", ""), ("copies", "mlp"), ("copies", "mlp"))
    y, gate, up = placement.over_experts(work, taken, axes, out_axes)
    gate, up = checkpoint_name(gate, "matmul"), checkpoint_name(up, "matmul")
    return y.astype(x.dtype), (x, weights, matrices, pairs, chosen, adapter, scale, gate, up)


def _backward(placement, saved, d_y):
    x, weights, matrices, pairs, chosen, adapter, scale, gate, up = saved

    def work(part, x, weights, chosen, adapter, scale, matrices, pairs, gate, up, d_y):
        def some(x, weights, chosen, adapter, gate, up, d_y, sums):
            plan = _plan(part, chosen, weights, adapter, scale, matrices, pairs)
            d_out = jnp.where(plan.mine[:, None], d_y[plan.token], 0)
            hidden, gated_back = jax.vjp(layers.gated, gate, up)
            hidden = hidden.astype(jnp.float32)
            # the gradient of what comes out of `down` is weight * d_out: the weight is moved to the other factor, so
            # that d_hidden serves the gradient of the weight too
            weighted = (hidden * plan.weight[:, None]).astype(x.dtype)
            d_hidden, down = _project_back(weighted, d_out, matrices[DOWN], pairs.get(DOWN), plan, sums[DOWN])
            d_weight = jnp.sum(hidden * d_hidden.astype(jnp.float32), axis=-1)
            d_hidden = (d_hidden.astype(jnp.float32) * plan.weight[:, None]).astype(x.dtype)
            d_gate, d_up = gated_back(d_hidden)
            copies = x[plan.token]
            d_x, gates = _project_back(copies, d_gate, matrices[GATE], pairs.get(GATE), plan, sums[GATE])
            d_x_up, ups = _project_back(copies, d_up, matrices[UP], pairs.get(UP), plan, sums[UP])
            return (_gathered(plan, d_x, d_x_up), d_weight[plan.place]), {GATE: gates, UP: ups, DOWN: down}

        sums = {n: (_zeros(matrices[n]), jax.tree.map(_zeros, pairs.get(n))) for n in NAMES}
        (d_x, d_weights), sums = _in_parts(some, (x, weights, chosen, adapter, gate, up, d_y), sums)
        return d_x, d_weights, {n: sums[n][0] for n in matrices}, {n: sums[n][1] for n in pairs}

    taken, axes = _arguments(x, weights, matrices, pairs, chosen, adapter, scale, placement)
    taken, axes = (*taken, gate, up, d_y), (*axes, ("copies", "mlp"), ("copies", "mlp"), ("rows", ""))
    out_axes = (("rows", ""), ("rows", ""), dict(AXES), _pair_axes(pairs))
    d_x, d_weights, *d_stored = placement.over_experts(work, taken, axes, out_axes)
    d_matrices, d_pairs = jax.tree.map(lambda d, w: d.astype(w.dtype), tuple(d_stored), (matrices, pairs))
    return d_x.astype(x.dtype), d_weights, d_matrices, d_pairs, None, None, None


_experts.defvjp(_forward, _backward)


def _arguments(x, weights, matrices, pairs, chosen, adapter, scale, placement):
    """What a device is given to work with, and its logical axes; stored weights as they are used."""

    def use(array, names):
        return placement.used(array.astype(x.dtype), names)

    pair_axes = _pair_axes(pairs)
    matrices = {name: use(matrix, AXES[name]) for name, matrix in matrices.items()}
    pairs = {name: Pair(*map(use, pair, pair_axes[name])) for name, pair in pairs.items()}
    axes = (("rows", ""), ("rows", ""), ("rows", ""), ("rows",), ("",), dict(AXES), pair_axes)
    return (x, weights, chosen, adapter, scale, matrices, pairs), axes


def _in_parts(function, arrays, sums=None):
    """A function of the tokens of a device, of equally many of them at a time.

    Args:
        function: (*arrays) -> arrays of the same kind; with sums (*arrays, sums) -> (arrays, sums).
        arrays: tokens, or copies of them, on the leading axis; equally many copies of each.
        sums: over the tokens so far.
    """
    parts = _parts(len(arrays[0]))
    if parts == 1:
        return function(*arrays) if sums is None else function(*arrays, sums)
    split = tuple(a.reshape(parts, -1, *a.shape[1:]) for a in arrays)

    def turn(sums, taken):
        return (None, function(*taken)) if sums is None else function(*taken, sums)[::-1]

    sums, out = jax.lax.scan(turn, sums, split)
    out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)
    return out if sums is None else (out, sums)


def _parts(tokens: int) -> int:
    """The fewest equal parts of at most `TOKENS` tokens; 1 where only far smaller ones would be equal."""
    fewest = -(-tokens // TOKENS)
    return next((parts for parts in range(fewest, 2 * fewest) if tokens % parts == 0), 1)


def _pair_axes(pairs):
    return {name: Pair(("", *AXES[name][:2], "rank"), ("", "experts", "rank", AXES[name][2])) for name in pairs}


class _Plan(NamedTuple):
    """Copies of the tokens in the order of the experts of one device, other devices' copies last.

    Attributes:
        token: of each copy.
        place: of a token's copies.
        mine: whether the copy belongs to an expert of this device.
        weight: of the copy, 0 where it is not.
        sizes: copies of each expert.
        fine: copies of each expert and adapter; tokens without one are counted to the first.
        scale: of the adapter of the copy's token, 0 where it has none.
        most: tokens, which no expert has more copies than.
    """

    token: Int[Array, " m"]
    place: Int[Array, "n k"]
    mine: Bool[Array, " m"]
    weight: Float[Array, " m"]
    sizes: Int[Array, " E"]
    fine: Int[Array, " G"]
    scale: Float[Array, " m"]
    most: int


def _plan(part, chosen, weights, adapter, scale, matrices, pairs) -> _Plan:
    count = matrices[GATE].shape[0]  # of experts of this device
    resident = len(scale)
    n, k = chosen.shape
    own = chosen - part * count
    group = own * resident + jnp.maximum(adapter, 0)[:, None]
    group = jnp.where((own >= 0) & (own < count), group, count * resident).reshape(-1)
    order = jnp.argsort(group, stable=True)
    fine = jnp.zeros(count * resident, jnp.int32).at[group].add(1, mode="drop")
    mine = jnp.arange(n * k) < jnp.sum(fine)
    place = jnp.zeros(n * k, jnp.int32).at[order].set(jnp.arange(n * k, dtype=jnp.int32), unique_indices=True)
    token = order // k
    return _Plan(
        token=token,
        place=place.reshape(n, k),
        mine=mine,
        weight=jnp.where(mine, weights.reshape(-1)[order], 0.0),
        sizes=jnp.sum(fine.reshape(count, resident), axis=1),
        fine=fine,
        scale=jnp.where(adapter >= 0, scale[jnp.maximum(adapter, 0)], 0.0)[token],
        most=n,
    )


def _gathered(plan, *copies, weight=None):
    """Sums of the copies of each token, times their weights, slot by slot in that order; float32. They are widened once
    they are gathered: an array of all copies in float32 would be the largest of a layer."""
    total = 0.0
    for slot in range(plan.place.shape[1]):
        at = plan.place[:, slot]
        found = sum(array[at].astype(jnp.float32) for array in copies)
        total = total + (found if weight is None else found * weight[at][:, None])
    return total


def _project(x, weight, pair, plan):
    """Every copy times the matrix of its expert and the low-rank change of its token's adapter."""
    y = matmul(x, weight, plan.sizes, plan.most)
    if pair is None:
        return y
    a, b = map(_by_expert, pair)
    change = matmul(matmul(x, a, plan.fine, plan.most), b, plan.fine, plan.most)
    return y + _scaled(change, plan)


def _project_back(x, d_y, weight, pair, plan, sums):
    """Gradient of x, and sums with those of the matrices and of the pair added, float32; copies of other devices have
    d_y = 0."""
    d_x = matmul(d_y, weight, plan.sizes, plan.most, transposed=True)
    d_weight, d_pair = sums
    d_weight = outer(x, d_y, plan.sizes, d_weight)
    if pair is None:
        return d_x, (d_weight, None)
    a, b = map(_by_expert, pair)
    d_y = _scaled(d_y, plan)
    d_inner = matmul(d_y, b, plan.fine, plan.most, transposed=True)
    d_b = outer(matmul(x, a, plan.fine, plan.most), d_y, plan.fine)
    d_a = outer(x, d_inner, plan.fine)
    d_x = d_x + matmul(d_inner, a, plan.fine, plan.most, transposed=True)
    resident = pair.a.shape[0]
    found = Pair(*(jnp.swapaxes(d.reshape(-1, resident, *d.shape[1:]), 0, 1) for d in (d_a, d_b)))
    return d_x, (d_weight, jax.tree.map(jnp.add, d_pair, found))


def _zeros(array):
    return jnp.zeros(array.shape, jnp.float32)


def _scaled(change, plan):
    """What the adapter of each copy's token adds."""
    scale = plan.scale[:, None].astype(change.dtype)
    return jnp.where(scale != 0, scale * change, 0)


def _by_expert(array):
    """[N, E, ...] -> [E N, ...]."""
    return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])
