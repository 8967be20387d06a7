"""The behaviour distribution: what tokens are drawn from and which log-probabilities are stored.

Logits are divided by the temperature and then truncated: first to the `top_k` likeliest ids, then, of what that leaves,
to the likeliest ids that together reach the probability `top_p` (arXiv 1904.09751), then to the ids at least `min_p`
times as likely as the likeliest (arXiv 2407.01082). The rest is renormalised. This is the order of the samplers in
Hugging Face transformers; vLLM applies `min_p` before the other two, which differs only where both `top_p` and `min_p`
cut. At most `top_k` ids are ever left, of equally likely ones the lowest; `top_p` without a `top_k` leaves all that are
as likely as the last.

Stored log-probabilities are those of the distribution actually sampled, so the learner must score the same one: the
temperature it knows, and the ids that were left over are recorded (`kept`) wherever there is a `top_k` that bounds
their number. Samplers that it cannot reproduce are refused for training.
Axis letters: B rows, V vocabulary, k `top_k`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from trace_jax.config import ConfigError, EvaluationConfig, RolloutConfig


class Knobs(NamedTuple):
    """The numbers of a sampler that a compiled program takes as arguments: other values compile nothing new.

    Attributes:
      temperature: divides the logits.
      top_p, min_p: see `Sampling`.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token (greedy).
      top_k: only the k likeliest tokens can be drawn; 0 keeps the whole vocabulary.
      top_p: only the likeliest tokens that together reach this probability can be drawn; 1 keeps all.
      min_p: only tokens at least this fraction as likely as the likeliest can be drawn; 0 keeps all.

    Raises:
      ConfigError: a value that no sampler has.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"sampling temperature {self.temperature} is not a temperature; use a number >= 0")
        if self.top_k < 0:
            raise ConfigError(f"sampling top_k {self.top_k} is negative; use 0 for the whole vocabulary")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling top_p {self.top_p} is not a share; use a number above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"sampling min_p {self.min_p} is not a fraction; use a number between 0 and 1")

    @classmethod
    def of(cls, config: RolloutConfig | EvaluationConfig) -> Sampling:
        """The sampler that a section of the configuration describes."""
        return cls(config.temperature, config.top_k, config.top_p, config.min_p)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def trainable(self) -> bool:
        """Whether the learner can reproduce the log-probabilities: not of a greedy choice, and of a truncated
        distribution only when what was left is bounded by a `top_k` and therefore recorded."""
        return not self.greedy and (self.top_k > 0 or (self.top_p == 1 and self.min_p == 0))

    @property
    def static(self) -> dict[str, int | bool]:
        """Keywords of `draw` that a program is compiled for."""
        if self.greedy:  # truncation never removes the likeliest token
            return {"greedy": True, "top_k": 0, "truncate": False}
        return {"greedy": False, "top_k": self.top_k, "truncate": self.top_p < 1 or self.min_p > 0}

    @property
    def knobs(self) -> Knobs:
        """Numbers that `draw` takes as arguments."""
        return Knobs(np.float32(self.temperature), np.float32(self.top_p), np.float32(self.min_p))


def check_training(sampling: Sampling) -> None:
    """Refuses samplers whose distribution the learner does not reproduce.

    Raises:
      ConfigError: greedy sampling, or top-p or min-p over the whole vocabulary.
    """
    if sampling.greedy:
        raise ConfigError("sampling temperature 0 (greedy) has no log-probabilities to train on; use a temperature > 0")
    if not sampling.trainable:
        name = "top_p" if sampling.top_p < 1 else "min_p"
        raise ConfigError(
            f"sampling {name} {getattr(sampling, name)} without a top_k cannot train: what it leaves has no bound to "
            "record it in; set a top_k (64)"
        )


def token_keys(seeds: UInt32[Array, "B 2"], positions: Int[Array, " B"]) -> Array:
    """One PRNG key per row from the row's seed and the position of the token to draw.

    A position is drawn once in a trajectory, so that keys never repeat, and they depend on nothing else in the batch.
    """
    return jax.vmap(
        lambda seed, position: jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    )(seeds, positions)


def draw(
    keys: Array,
    logits: Float[Array, "B V"],
    knobs: Knobs,
    *,
    greedy: bool = False,
    top_k: int = 0,
    truncate: bool = False,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Int[Array, "B k"] | None]:
    """Draws one token per row from the truncated softmax(logits / temperature) that the module describes.

    Args:
      keys: one per row, of `token_keys`. A row costs one uniform number.
      greedy: take the likeliest token, whatever the knobs say.
      top_k: 0 is the whole vocabulary.
      truncate: whether `top_p` and `min_p` are looked at.

    Returns:
      Token ids; their log-probabilities (NaN when `greedy`: a greedy choice has no behaviour distribution); the ids
      that could have been drawn, likeliest first and -1 where fewer than `top_k` were left (None without a `top_k`).
    """
    if greedy:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jnp.full(tokens.shape, jnp.nan, jnp.float32), None
    scores = logits.astype(jnp.float32) / knobs.temperature
    if not top_k:
        scores -= jnp.max(scores, axis=-1, keepdims=True)
        if truncate:
            masses = jnp.exp(scores)
            least = jnp.maximum(_nucleus_edge(masses, knobs.top_p), knobs.min_p)
            # The largest mass is 1 but for the rounding of a fused subtraction, which a min_p of 1 would fall into.
            least = jnp.minimum(least, jnp.max(masses, axis=-1, keepdims=True))
            scores = jnp.where(masses >= least, scores, -jnp.inf)
        return *_invert(keys, scores), None
    rows, vocabulary = scores.shape
    width = min(top_k, vocabulary)
    # Behind the barrier nothing is rewritten into slices of a whole sort, which is 40 times slower on CPU.
    scores, ids = jax.lax.optimization_barrier(jax.lax.top_k(scores, width))
    scores -= scores[:, :1]
    if truncate:
        masses = jnp.exp(scores)
        before = jnp.cumsum(masses, axis=-1) - masses
        # a top_p of 1 keeps even what rounding puts beyond the total
        nucleus = (before < knobs.top_p * jnp.sum(masses, axis=-1, keepdims=True)) | (knobs.top_p >= 1)
        least = jnp.minimum(knobs.min_p, jnp.max(masses, axis=-1, keepdims=True))  # as above
        scores = jnp.where(nucleus & (masses >= least), scores, -jnp.inf)
    index, logprobs = _invert(keys, scores)
    kept = jnp.where(scores > -jnp.inf, ids, -1)
    return (
        ids[jnp.arange(rows), index],
        logprobs,
        jnp.pad(kept, ((0, 0), (0, top_k - width)), constant_values=-1),
    )


def _nucleus_edge(masses: Float[Array, "B V"], top_p: Float[Array, ""]) -> Float[Array, "B 1"]:
    """The largest mass such that entries of at least it reach the share `top_p` of the total; masses are at most 1.

    Found by bisection, as a sort of the vocabulary costs far more than 31 sums over it. Floats from 0 to 1 are ordered
    as the integers that their bits spell, so the result is exact.
    """
    wanted = top_p * jnp.sum(masses, axis=-1, keepdims=True)

    def halve(_, bounds):  # low reaches the share, high does not
        low, high = bounds
        middle = low + (high - low) // 2
        edge = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(masses >= edge, masses, 0.0), axis=-1, keepdims=True) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.zeros_like(wanted, jnp.int32)
    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, one + 1)))
    edge = jax.lax.bitcast_convert_type(low, jnp.float32)
    return jnp.where(top_p >= 1, 0.0, edge)


def _invert(keys: Array, scores: Float[Array, "B n"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """An index per row drawn from softmax(scores), and its log-probability; the largest score of a row is 0.

    One uniform number per row is inverted through the cumulative distribution, first over blocks of about sqrt(n)
    entries, then inside the block: a row costs one random number instead of n, and two short sums instead of one long
    one.
    """
    rows, count = scores.shape
    block = 1 << (max(count - 1, 1).bit_length() + 1) // 2
    masses = jnp.pad(jnp.exp(scores), ((0, 0), (0, -count % block))).reshape(rows, -1, block)
    of_blocks = masses.sum(-1)
    cumulative = _running_sum(of_blocks)
    total = cumulative[:, -1]
    threshold = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys) * total
    chosen = _first_above(cumulative, of_blocks, threshold)
    row = jnp.arange(rows)
    inside = masses[row, chosen]
    rest = threshold - (cumulative[row, chosen] - of_blocks[row, chosen])
    index = chosen * block + _first_above(_running_sum(inside), inside, rest)
    return index, scores[row, index] - jnp.log(total)


def _running_sum(x: Float[Array, "B n"]) -> Float[Array, "B n"]:
    """Cumulative sum of short rows as one matmul."""
    return jnp.dot(x, jnp.triu(jnp.ones((x.shape[1], x.shape[1]), x.dtype)), precision="highest")


def _first_above(
    cumulative: Float[Array, "B n"], masses: Float[Array, "B n"], threshold: Float[Array, " B"]
) -> Int[Array, " B"]:
    """First index whose cumulative mass exceeds the threshold; never an index of mass zero, whatever the rounding."""
    first = jnp.sum(cumulative <= threshold[:, None], axis=-1)
    last = jnp.max(jnp.where(masses > 0, jnp.arange(masses.shape[1]), 0), axis=-1)
    return jnp.minimum(first, last).astype(jnp.int32)
