"""Per-token losses to `(sum, denominator)`, and sums over the sequences of packed rows.

Sums and denominators add up over micro-batches and devices and are divided once, at the end. A sequence never crosses
a row, so what is computed per sequence here is whole in every micro-batch.

Axes: rows of a micro-batch, time (tokens).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from trace_jax.config import ConfigError
from trace_jax.learner.packing import LearnerBatch

Tokens = Float[Array, "rows time"]

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")


def aggregate(
    losses: Tokens, batch: LearnerBatch, aggregation: str, constant: float = 1.0
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum and denominator of per-token losses; the mean is sum / denominator over all micro-batches together.

    A sequence without a trained token is in neither. w is the sequence's weight, n its number of trained tokens:

        token_mean            sum_t w l_t             / sum_t w
        seq_mean_token_mean   sum_s w mean_t l_t      / sum_s w      (GRPO)
        seq_mean_token_sum    sum_s w sum_t l_t       / sum_s w
        seq_sum_constant      sum_s w sum_t l_t / c   / sum_s w      (Dr.GRPO)
    """
    mask = batch.loss_mask
    weights = jnp.where(mask, batch.weights, 0.0)
    losses = jnp.where(mask, losses, 0.0)
    if aggregation == "token_mean":
        return jnp.sum(weights * losses), jnp.sum(weights)
    per_sequence = weights / jnp.maximum(sequence_sums(mask.astype(jnp.float32), batch.segments), 1.0)
    if aggregation == "seq_mean_token_mean":
        return jnp.sum(per_sequence * losses), jnp.sum(per_sequence)
    if aggregation == "seq_mean_token_sum":
        return jnp.sum(weights * losses), jnp.sum(per_sequence)
    if aggregation == "seq_sum_constant":
        return jnp.sum(weights * losses) / constant, jnp.sum(per_sequence)
    raise ConfigError(f"aggregation `{aggregation}` is unknown: choose one of {', '.join(AGGREGATIONS)}")


def sequence_sums(values: Tokens, segments: Int[Array, "rows time"]) -> Tokens:
    """At every token, the sum of `values` over its sequence."""
    count = values.shape[1] + 1  # segment ids run from 0 (padding) to at most the row length

    def row(v, s):
        return jax.ops.segment_sum(v, s, num_segments=count)[s]

    return jax.vmap(row)(values, segments)


def sequence_means(values: Tokens, batch: LearnerBatch) -> Tokens:
    """At every token, the mean of `values` over the trained tokens of its sequence; 0 where there are none."""
    mask = batch.loss_mask
    counts = sequence_sums(mask.astype(jnp.float32), batch.segments)
    return sequence_sums(jnp.where(mask, values, 0.0), batch.segments) / jnp.maximum(counts, 1.0)
