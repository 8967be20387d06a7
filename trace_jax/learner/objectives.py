"""Objectives as pure functions of per-token streams.

An objective maps (log-probs, entropies, batch) to per-token losses; an aggregation turns these into `(sum,
denominator)`. Sums and denominators add up over micro-batches and devices and are divided once, at the end, so a result
never depends on how the batch was split or padded. Masks select with `where`: whatever stands on a masked token, even
inf or NaN, has no effect.

Axes: rows of a micro-batch, time (tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trace_jax.config import ConfigError, GRPOConfig
from trace_jax.learner.packing import LearnerBatch

Tokens = Float[Array, "rows time"]
Sums = dict[str, Float[Array, ""]]
# (log-probs, entropies, batch) -> (loss sum, denominator, metric sums and maxima of `metrics.py`)
Objective = Callable[[Tokens, Tokens, LearnerBatch], tuple[Float[Array, ""], Float[Array, ""], Sums]]

# A log-ratio beyond this is a bug elsewhere; the exponential must stay finite so that one token cannot spoil the step.
LOG_RATIO_LIMIT = 20.0

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")

# What each named objective fixes. "grpo" leaves everything to the explicit fields.
PRESETS: dict[str, dict[str, object]] = {
    "grpo": {},
    "dr_grpo": {"advantage_std": False, "aggregation": "seq_sum_constant"},  # arXiv 2503.20783
    "dapo": {"advantage_std": True, "aggregation": "token_mean"},  # arXiv 2503.14476
}


def validate(config: GRPOConfig) -> None:
    """Refuses values and combinations that contradict the named objective.

    Raises:
        ConfigError: naming the field and what to set it to.
    """
    if config.objective not in PRESETS:
        raise ConfigError(f"`grpo.objective` is `{config.objective}`: choose one of {', '.join(PRESETS)}")
    if config.aggregation not in AGGREGATIONS:
        raise ConfigError(f"`grpo.aggregation` is `{config.aggregation}`: choose one of {', '.join(AGGREGATIONS)}")
    for name, wanted in PRESETS[config.objective].items():
        value = getattr(config, name)
        if value != wanted:
            raise ConfigError(
                f"`grpo.objective` {config.objective} contradicts `grpo.{name}` {value}: "
                f"set grpo.{name} to {str(wanted).lower()}, or grpo.objective to grpo"
            )
    if not 0.0 < config.clip_low < 1.0:
        raise ConfigError(f"`grpo.clip_low` is {config.clip_low}: it must be between 0 and 1, both excluded")
    if not config.clip_high > 0.0:
        raise ConfigError(f"`grpo.clip_high` is {config.clip_high}: it must be above 0")
    if config.objective == "dapo" and config.clip_high <= config.clip_low:
        raise ConfigError(
            f"`grpo.objective` dapo clips higher above than below, but `grpo.clip_high` {config.clip_high} is not "
            f"above `grpo.clip_low` {config.clip_low}: raise grpo.clip_high (0.28) or set grpo.objective to grpo"
        )
    if config.aggregation == "seq_sum_constant" and not config.aggregation_constant > 0:
        raise ConfigError(f"`grpo.aggregation_constant` is {config.aggregation_constant}: it must be above 0")


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
    per_sequence = weights / jnp.maximum(_segment_totals(mask.astype(jnp.float32), batch.segments), 1.0)
    if aggregation == "seq_mean_token_mean":
        return jnp.sum(per_sequence * losses), jnp.sum(per_sequence)
    if aggregation == "seq_mean_token_sum":
        return jnp.sum(weights * losses), jnp.sum(per_sequence)
    if aggregation == "seq_sum_constant":
        return jnp.sum(weights * losses) / constant, jnp.sum(per_sequence)
    raise ConfigError(f"aggregation `{aggregation}` is unknown: choose one of {', '.join(AGGREGATIONS)}")


def clipped_surrogate(
    log_ratio: Tokens, advantages: Tokens, clip_low: float, clip_high: float
) -> tuple[Tokens, Tokens]:
    """`-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` (arXiv 1707.06347), and where the clip took the gradient."""
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    raw, clipped = ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    return -jnp.minimum(raw, clipped), clipped < raw


def k3(logprobs: Tokens, reference: Tokens) -> Tokens:
    """Unbiased, non-negative estimate of KL(policy || reference): `exp(x) - 1 - x`, x = log ref - log policy."""
    x = jnp.clip(reference - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(x) - 1.0 - x


def policy_objective(
    *,
    clip_low: float,
    clip_high: float,
    aggregation: str,
    constant: float = 1.0,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
) -> Objective:
    """Clipped surrogate + kl_coefficient * k3 to the reference - entropy_coefficient * entropy, aggregated together."""

    def objective(logprobs, entropies, batch):
        logprobs, entropies, batch = _select(logprobs, entropies, batch)
        log_ratio = logprobs - batch.old_logprobs
        losses, clipped = clipped_surrogate(log_ratio, batch.advantages, clip_low, clip_high)
        sums = {"clipped": _count(clipped, batch)}
        if kl_coefficient:
            kl = k3(logprobs, batch.reference_logprobs)
            losses += kl_coefficient * kl
            sums["reference_kl"] = jnp.sum(jnp.where(batch.loss_mask, kl, 0.0))
        if entropy_coefficient:
            losses -= entropy_coefficient * entropies
        total, denominator = aggregate(losses, batch, aggregation, constant)
        return total, denominator, sums | _ratio_sums(log_ratio, batch) | _common_sums(logprobs, entropies, batch)

    return objective


def sft_objective(aggregation: str = "token_mean") -> Objective:
    """Cross-entropy (nats) of the trained tokens."""

    def objective(logprobs, entropies, batch):
        logprobs, entropies, batch = _select(logprobs, entropies, batch)
        total, denominator = aggregate(-logprobs, batch, aggregation)
        return total, denominator, _common_sums(logprobs, entropies, batch)

    return objective


def grpo_objective(config: GRPOConfig) -> Objective:
    """The objective a `GRPOConfig` describes.

    Raises:
        ConfigError: see `validate`.
    """
    validate(config)
    return policy_objective(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        aggregation=config.aggregation,
        constant=config.aggregation_constant,
        kl_coefficient=config.kl_coefficient,
        entropy_coefficient=config.entropy_coefficient,
    )


def _select(logprobs: Tokens, entropies: Tokens, batch: LearnerBatch) -> tuple[Tokens, Tokens, LearnerBatch]:
    """Neutral values on masked tokens *before* any arithmetic: a `where` after it would let a NaN into gradients."""
    mask = batch.loss_mask
    return (
        jnp.where(mask, logprobs, 0.0),
        jnp.where(mask, entropies, 0.0),
        replace(
            batch,
            advantages=jnp.where(mask, batch.advantages, 0.0),
            old_logprobs=jnp.where(mask, batch.old_logprobs, 0.0),
            reference_logprobs=jnp.where(mask, batch.reference_logprobs, 0.0),
        ),
    )


def _segment_totals(values: Tokens, segments: Array) -> Tokens:
    """At every token, the sum of `values` over its sequence."""
    count = values.shape[1] + 1  # segment ids run from 0 (padding) to at most the row length

    def row(v, s):
        return jax.ops.segment_sum(v, s, num_segments=count)[s]

    return jax.vmap(row)(values, segments)


def _count(flags: Array, batch: LearnerBatch) -> Float[Array, ""]:
    return jnp.sum(jnp.where(batch.loss_mask, flags, False), dtype=jnp.float32)


def _common_sums(logprobs: Tokens, entropies: Tokens, batch: LearnerBatch) -> Sums:
    return {
        "tokens": jnp.sum(batch.loss_mask, dtype=jnp.float32),
        "entropy": jnp.sum(entropies),
        "logprob": jnp.sum(logprobs),
        "filled": jnp.sum(batch.segments > 0, dtype=jnp.float32),
        "positions": jnp.float32(batch.segments.size),
    }


def _ratio_sums(log_ratio: Tokens, batch: LearnerBatch) -> Sums:
    log_ratio = jax.lax.stop_gradient(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    ratio = jnp.exp(log_ratio)
    return {
        "ratio": jnp.sum(jnp.where(batch.loss_mask, ratio, 0.0)),
        "ratio_max": jnp.max(jnp.where(batch.loss_mask, ratio, 0.0)),
        "old_kl": jnp.sum(jnp.where(batch.loss_mask, ratio - 1.0 - log_ratio, 0.0)),
        "logprob_gap": jnp.sum(jnp.where(batch.loss_mask, jnp.abs(log_ratio), 0.0)),
    }
