"""The behaviour distribution: what tokens are drawn from and which log-probabilities are stored.

Stored log-probabilities are those of the distribution actually sampled. A truncated distribution (top-k) or a greedy
choice would put another distribution on the learner's side of the importance ratio, so both are refused for training.
Axis letters: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from trace_jax.config import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token (greedy).
      top_k: only the k likeliest tokens can be drawn; 0 keeps the whole vocabulary.

    Raises:
      ConfigError: a value that no sampler has.
    """

    temperature: float = 1.0
    top_k: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"sampling temperature {self.temperature} is not a temperature; use a number >= 0")
        if self.top_k < 0:
            raise ConfigError(f"sampling top_k {self.top_k} is negative; use 0 for the whole vocabulary")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def trainable(self) -> bool:
        """Whether the learner's log-probabilities describe this sampler."""
        return not self.greedy and self.top_k == 0


def check_training(sampling: Sampling) -> None:
    """Refuses samplers whose distribution the learner does not reproduce.

    Raises:
      ConfigError: greedy sampling, or top-k.
    """
    if sampling.greedy:
        raise ConfigError("sampling temperature 0 (greedy) has no log-probabilities to train on; use a temperature > 0")
    if sampling.top_k:
        raise ConfigError(
            f"sampling top_k {sampling.top_k} cannot train: the learner scores the whole vocabulary; use top_k 0"
        )


def token_keys(seeds: UInt32[Array, "B 2"], positions: Int[Array, " B"]) -> Array:
    """One PRNG key per row from the row's seed and the position of the token to draw.

    A position is drawn once in a trajectory, so that keys never repeat, and they depend on nothing else in the batch.
    """
    return jax.vmap(
        lambda seed, position: jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    )(seeds, positions)


def draw(
    keys: Array, logits: Float[Array, "B V"], temperature: Float[Array, ""], *, greedy: bool = False, top_k: int = 0
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token per row from softmax(logits / temperature), of the `top_k` largest logits when `top_k` > 0.

    One uniform number per row is inverted through the cumulative distribution, first over blocks of about sqrt(V) ids,
    then inside the block: a row costs one random number instead of V, and two short sums instead of one long one.

    Returns:
      Token ids and their log-probabilities (NaN when `greedy`: a greedy choice has no behaviour distribution).
    """
    if greedy:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jnp.full(tokens.shape, jnp.nan, jnp.float32)
    scores = logits.astype(jnp.float32) / temperature
    if 0 < top_k < scores.shape[-1]:
        scores = jnp.where(scores >= jax.lax.top_k(scores, top_k)[0][:, -1:], scores, -jnp.inf)
    scores -= jnp.max(scores, axis=-1, keepdims=True)
    rows, vocabulary = scores.shape
    block = 1 << (max(vocabulary - 1, 1).bit_length() + 1) // 2
    masses = jnp.pad(jnp.exp(scores), ((0, 0), (0, -vocabulary % block))).reshape(rows, -1, block)
    of_blocks = masses.sum(-1)
    cumulative = _running_sum(of_blocks)
    total = cumulative[:, -1]
    threshold = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys) * total
    chosen = _first_above(cumulative, of_blocks, threshold)
    row = jnp.arange(rows)
    inside = masses[row, chosen]
    rest = threshold - (cumulative[row, chosen] - of_blocks[row, chosen])
    tokens = chosen * block + _first_above(_running_sum(inside), inside, rest)
    return tokens, scores[row, tokens] - jnp.log(total)


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
