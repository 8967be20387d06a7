"""Log-probabilities of given tokens and entropies, without an array of all tokens by the whole vocabulary.

Only the tokens asked for are scored, chunk by chunk, as many chunks as they fill. The scores of the first chunks are
kept for the backward pass, those of later ones are computed again there. Tokens are gathered and cut into chunks inside
each block of rows, so they stay on their devices.

Axes: B rows, T tokens of a row, G blocks of rows, N tokens of a block, P places for them (N and padding), C places of a
chunk, D model width, V vocabulary, k ids kept by the sampler.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax.policy.placement import Placement

# The score of an id that a truncated sampler left out: its probability is zero, p log p and its gradient are finite.
LEFT_OUT = -1e30
MATRIX_AXES = ("vocab", "embed")
STEPS = 4  # chunks whose scores are kept for the backward pass


def logprobs(
    hidden: Float[Array, "B T D"],
    matrix: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    kept: Int[Array, "B T k"] | None,
    wanted: Bool[Array, "B T"] | None,
    temperature: float,
    chunk: int,
    placement: Placement,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """See `transformer.token_logprobs`; `matrix` is the output matrix as stored, one row for each id."""
    rows, time = targets.shape

    def grouped(x):
        flat = x.reshape(placement.blocks, rows * time // placement.blocks, *x.shape[2:])
        return placement.used(flat, ("rows", *[""] * (flat.ndim - 1)))

    hidden, targets, kept, wanted = jax.tree.map(grouped, (hidden, targets, kept, wanted))
    streams = _Streams(targets, kept, wanted, jnp.asarray(temperature, jnp.float32))
    result = _scored(hidden, matrix, streams, chunk, placement)
    return tuple(placement.used(x.reshape(rows, time), ("rows", "")) for x in result)


class _Streams(NamedTuple):
    """What is known of every token without a gradient."""

    targets: Int[Array, "G N"]
    kept: Int[Array, "G N k"] | None
    wanted: Bool[Array, "G N"] | None
    temperature: Float[Array, ""]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _scored(hidden, matrix, streams, chunk, placement):
    return _forward(hidden, matrix, streams, chunk, placement)[0]


def _forward(hidden, matrix, streams, chunk, placement):
    plan = _plan(streams, chunk)
    weight = placement.used(matrix.astype(hidden.dtype), MATRIX_AXES)

    def one(i, statistics):
        places = plan.places(i)
        scores = _scores(hidden, weight, streams, places, placement)
        new = _statistics(scores, _take(streams.targets, places))
        return scores, jax.tree.map(partial(_put, at=i * plan.step), statistics, new)

    def store(i, carry):
        scores, statistics = one(i, carry[1])
        return _put(carry[0], scores, i * plan.step), statistics

    zeros = jnp.zeros(plan.order.shape, jnp.float32)
    kept = placement.used(jnp.zeros((*plan.order.shape[:1], STEPS * plan.step, len(matrix))), ("rows", "", "vocab"))
    stored, statistics = jax.lax.fori_loop(0, jnp.minimum(plan.chunks, STEPS), store, (kept, (zeros,) * 3))
    if plan.longer:
        statistics = jax.lax.fori_loop(STEPS, plan.chunks, lambda i, x: one(i, x)[1], statistics)
    chosen, normaliser, entropy = statistics
    result = plan.restored(chosen - normaliser), plan.restored(entropy)
    if streams.wanted is not None:
        result = jax.tree.map(lambda x: jnp.where(streams.wanted, x, 0.0), result)
    return result, (hidden, matrix, streams, stored, normaliser, entropy)


def _backward(chunk, placement, saved, d_result):
    hidden, matrix, streams, stored, normaliser, entropy = saved
    plan = _plan(streams, chunk)
    weight = placement.used(matrix.astype(hidden.dtype), MATRIX_AXES)
    d_logprob, d_entropy = (_take(d, plan.order) for d in d_result)

    def through(i, scores, d_hidden):
        at, size = i * plan.step, plan.step
        d_l, d_e, log_total, spread = (
            _cut(x, at, size)[..., None] for x in (d_logprob, d_entropy, normaliser, entropy)
        )
        logp = scores - log_total
        target = jnp.arange(scores.shape[-1]) == _take(streams.targets, plan.places(i))[..., None]
        d_scores = jnp.where(target, d_l, 0.0) - jnp.exp(logp) * (d_l + d_e * (logp + spread))
        d_scores = jnp.where(plan.real(i)[..., None], d_scores / streams.temperature, 0.0)
        d_scores = placement.used(d_scores, ("rows", "", "vocab"))
        new = jnp.einsum("gcv,vd->gcd", d_scores.astype(hidden.dtype), weight)
        return d_scores, _put(d_hidden, placement.used(new, ("rows", "", "")), at)

    def from_stored(i, carry):
        stored, d_hidden = carry
        d_scores, d_hidden = through(i, _cut(stored, i * plan.step, plan.step), d_hidden)
        return _put(stored, d_scores, i * plan.step), d_hidden

    def again(i, carry):
        d_hidden, d_weight = carry
        scores = _scores(hidden, weight, streams, plan.places(i), placement)
        d_scores, d_hidden = through(i, scores, d_hidden)
        return d_hidden, d_weight + outer(d_scores, plan.places(i))

    def outer(d_scores, places):
        h = _take(hidden, places)
        product = jnp.einsum("gcv,gcd->gvd", d_scores.astype(h.dtype), h, preferred_element_type=jnp.float32)
        return placement.used(product, ("rows", *MATRIX_AXES))

    def first(count):
        size = count * plan.step
        return lambda d_scores: outer(d_scores[:, :size], plan.order[:, :size])

    known = jnp.minimum(plan.chunks, STEPS)
    d_hidden = placement.used(jnp.zeros((*plan.order.shape, hidden.shape[-1]), hidden.dtype), ("rows", "", ""))
    d_scores, d_hidden = jax.lax.fori_loop(0, known, from_stored, (stored, d_hidden))
    d_weight = jax.lax.switch(known, [first(count) for count in range(STEPS + 1)], d_scores)
    if plan.longer:
        d_hidden, d_weight = jax.lax.fori_loop(STEPS, plan.chunks, again, (d_hidden, d_weight))
    # summed over devices once, not in every chunk
    return plan.restored(d_hidden), placement.stored(jnp.sum(d_weight, axis=0), MATRIX_AXES), None


_scored.defvjp(_forward, _backward)


class _Plan(NamedTuple):
    """The order in which tokens are scored: those wanted first, each block on its own.

    Attributes:
        order: token of each place, those beyond the last token filled with the first.
        count: wanted tokens of each block.
        tokens: N.
        step: places of a chunk.
        chunks: that hold a wanted token of some block.
    """

    order: Int[Array, "G P"]
    count: Int[Array, "G 1"]
    tokens: int
    step: int
    chunks: Int[Array, ""]

    @property
    def longer(self) -> bool:
        """Whether there may be chunks whose scores are not stored."""
        return self.order.shape[1] > STEPS * self.step

    def places(self, i) -> Int[Array, "G C"]:
        """Tokens of a chunk."""
        return _cut(self.order, i * self.step, self.step)

    def real(self, i) -> Bool[Array, "G C"]:
        """Which of them are wanted."""
        return i * self.step + jnp.arange(self.step) < self.count

    def restored(self, x: Float[Array, "G P *d"]) -> Float[Array, "G N *d"]:
        """From places to tokens."""
        return _take(x, jnp.argsort(self.order[:, : self.tokens], axis=1))


def _plan(streams: _Streams, chunk: int) -> _Plan:
    blocks, tokens = streams.targets.shape
    step = -(-min(chunk, tokens) // STEPS)
    if streams.wanted is None:
        order = jnp.broadcast_to(jnp.arange(tokens), (blocks, tokens))
        count = jnp.full((blocks, 1), tokens)
    else:
        order = jnp.argsort(~streams.wanted, axis=1, stable=True)
        count = jnp.sum(streams.wanted, axis=1, keepdims=True)
    places = max(-(-tokens // step), STEPS) * step
    order = jnp.pad(order, ((0, 0), (0, places - tokens)))
    return _Plan(order, count, tokens, step, -(-jnp.max(count) // step))


def _scores(hidden, weight, streams, places, placement) -> Float[Array, "G C V"]:
    h = _take(hidden, places)
    scores = jnp.einsum("gcd,vd->gcv", h, weight, preferred_element_type=jnp.float32) / streams.temperature
    if streams.kept is not None:
        allowed = jax.vmap(partial(_allowed, vocab_size=weight.shape[0]))(_take(streams.kept, places))
        scores = jnp.where(allowed, scores, LEFT_OUT)
    return placement.used(scores, ("rows", "", "vocab"))


def _statistics(scores: Float[Array, "G C V"], targets: Int[Array, "G C"]) -> tuple[Float[Array, "G C"], ...]:
    """Score of the target, log of the sum of exponentials, entropy."""
    chosen = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    top = jnp.max(scores, axis=-1, keepdims=True)
    weight = jnp.exp(scores - top)
    total = jnp.sum(weight, axis=-1)
    mean = jnp.sum(weight * (scores - top), axis=-1) / total
    return chosen, top[..., 0] + jnp.log(total), jnp.log(total) - mean


def _allowed(kept: Int[Array, "n k"], vocab_size: int) -> Bool[Array, "n V"]:
    """Whether each id is kept; all are in a row that names none."""
    rows = jnp.arange(kept.shape[0])[:, None]
    named = jnp.zeros((kept.shape[0], vocab_size), bool)
    named = named.at[rows, jnp.where(kept < 0, vocab_size, kept)].set(True, mode="drop")
    return named | jnp.all(kept < 0, axis=1, keepdims=True)


def _take(x: Float[Array, "G N *d"], index: Int[Array, "G C"]) -> Float[Array, "G C *d"]:
    return jax.vmap(lambda a, i: a[i])(x, index)


def _cut(x: Float[Array, "G P *d"], at, size: int) -> Float[Array, "G C *d"]:
    return jax.lax.dynamic_slice_in_dim(x, at, size, axis=1)


def _put(x: Float[Array, "G P *d"], part: Float[Array, "G C *d"], at) -> Float[Array, "G P *d"]:
    return jax.lax.dynamic_update_slice_in_dim(x, part, at, axis=1)
