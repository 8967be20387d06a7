"""The gap between sampler and learner: how large it is, and what makes up for it.

The same parameters give other log-probs in the sampler than in the learner (other kernels, lower precision, a cache),
and a stale sampler has other parameters. Where the ratio of the surrogate is new / old of the *learner*, the weight
`w = exp(old - behaviour)` of a token is what is missing. All of it is constant under differentiation.

    truncate         the surrogate of a token is multiplied by min(w, high): truncated importance sampling
    mask_tokens      tokens with w outside [low, high] are not trained on
    mask_sequences   nor is any token of a sequence whose w, the geometric mean of its tokens', is outside

A mask removes and does not reweigh. What it removes was never there: it leaves numerator *and* denominator of every
aggregation, the KL and entropy terms and the mean ratio of its sequence, as a truncated trajectory under the overlong
filter. Numerators and denominators still add up over micro-batches, because both are sums over what remains. For
objectives whose ratio is the sequence's (`Named.by_sequence`), the weight that is truncated is the sequence's as well.

Axes: rows of a micro-batch, time (tokens).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trace_jax.config import ConfigError
from trace_jax.learner.aggregation import Tokens, sequence_means
from trace_jax.learner.packing import LearnerBatch
from trace_jax.learner.surrogates import LOG_RATIO_LIMIT, exp_ratio

CORRECTIONS = ("none", "truncate", "mask_tokens", "mask_sequences")


def truncated(log_weight: Tokens, cap: float) -> Tokens:
    """`min(exp(log_weight), cap)`, without gradient."""
    return jax.lax.stop_gradient(jnp.minimum(exp_ratio(log_weight), cap))


def correct(
    batch: LearnerBatch, correction: str, low: float, high: float, by_sequence: bool = False
) -> tuple[LearnerBatch, Tokens | None, dict[str, Float[Array, ""]]]:
    """Applies a correction of `CORRECTIONS` to a clean batch (neutral values on masked tokens).

    Returns:
        The batch with what a mask removed taken out of `loss_mask`; the factor of each token's surrogate, None when
        there is none; the sums `mismatch_kept` and `mismatch_total` of the weight after and before.

    Raises:
        ConfigError: an unknown correction.
    """
    if correction not in CORRECTIONS:
        raise ConfigError(f"correction `{correction}` is unknown: choose one of {', '.join(CORRECTIONS)}")
    mask = batch.loss_mask
    log_weight = batch.old_logprobs - batch.behaviour_logprobs
    factor = None
    if correction == "truncate":
        log_weight = sequence_means(log_weight, batch) if by_sequence else log_weight
        factor = truncated(log_weight, high)
    elif correction != "none":
        bounded = sequence_means(log_weight, batch) if correction == "mask_sequences" else log_weight
        inside = (exp_ratio(bounded) >= low) & (exp_ratio(bounded) <= high)
        batch = replace(batch, loss_mask=mask & inside)
    weight = exp_ratio(log_weight)
    left = jnp.where(batch.loss_mask, weight if factor is None else factor, 0.0)
    sums = {"mismatch_kept": jnp.sum(left), "mismatch_total": jnp.sum(jnp.where(mask, weight, 0.0))}
    return batch, factor, jax.lax.stop_gradient(sums)


def mismatch_sums(logprobs: Tokens, batch: LearnerBatch) -> dict[str, Float[Array, ""]]:
    """Sums and maximum of log-ratios learner / sampler over the tokens that a clean batch trains on.

    See `metrics.finish` for what becomes of them and how to read it.
    """
    gap = jax.lax.stop_gradient(jnp.clip(logprobs - batch.behaviour_logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    gap = jnp.where(batch.loss_mask, gap, 0.0)
    weight = jnp.where(batch.loss_mask, jnp.exp(gap), 0.0)
    return {
        "mismatch_tokens": jnp.sum(batch.loss_mask, dtype=jnp.float32),
        "mismatch": jnp.sum(gap),
        "mismatch_gap": jnp.sum(jnp.abs(gap)),
        "mismatch_max": jnp.max(jnp.abs(gap)),
        "mismatch_weight": jnp.sum(weight),
        "mismatch_square": jnp.sum(weight * weight),
    }
