"""Objectives as pure functions of per-token streams.

An objective maps (log-probs, entropies, batch) to per-token losses; an aggregation turns these into `(sum,
denominator)`. Sums and denominators add up over micro-batches and devices and are divided once, at the end, so a result
never depends on how the batch was split or padded. Masks select with `where`: whatever stands on a masked token, even
inf or NaN, has no effect.

The parts: `surrogates` (one table of the named objectives), `divergence` (KL to a reference), `corrections` (of the gap
between sampler and learner), `aggregation`, `objective_rules` (what a config may combine).

Axes: rows of a micro-batch, time (tokens).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trace_jax.config import GRPOConfig
from trace_jax.learner.aggregation import Tokens, aggregate
from trace_jax.learner.corrections import correct, mismatch_sums
from trace_jax.learner.divergence import kl_loss
from trace_jax.learner.objective_rules import validate
from trace_jax.learner.packing import LearnerBatch
from trace_jax.learner.surrogates import LOG_RATIO_LIMIT, OBJECTIVES, Clip

Sums = dict[str, Float[Array, ""]]
# (log-probs, entropies, batch) -> (loss sum, denominator, metric sums and maxima of `metrics.py`)
Objective = Callable[[Tokens, Tokens, LearnerBatch], tuple[Float[Array, ""], Float[Array, ""], Sums]]


def policy_objective(
    *,
    objective: str = "grpo",
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    correction: str = "none",
    correction_low: float = 0.5,
    correction_high: float = 2.0,
    aggregation: str,
    constant: float = 1.0,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coefficient: float = 0.0,
) -> Objective:
    """Surrogate + kl_coefficient * KL to the reference - entropy_coefficient * entropy, aggregated together.

    Args: as the fields of `GRPOConfig`; `objective` names the surrogate only. A correction expects the learner's
        log-probs in `old_logprobs` (`Learner.with_old`).
    """
    named = OBJECTIVES[objective]
    clip = Clip(clip_low, clip_high, dual_clip)

    def compute(logprobs, entropies, batch):
        logprobs, entropies, batch = _select(logprobs, entropies, batch)
        sums = mismatch_sums(logprobs, batch)
        batch, factor, kept = correct(batch, correction, correction_low, correction_high, named.by_sequence)
        losses, clipped = named.surrogate(logprobs, batch, clip)
        if factor is not None:
            losses = factor * losses
        sums |= kept | {"clipped": _count(clipped, batch)}
        if kl_coefficient:
            loss, kl = kl_loss(kl_estimator, logprobs, batch.old_logprobs, batch.reference_logprobs)
            losses += kl_coefficient * loss
            sums["reference_kl"] = jnp.sum(jnp.where(batch.loss_mask, kl, 0.0))
        if entropy_coefficient:
            losses -= entropy_coefficient * entropies
        total, denominator = aggregate(losses, batch, aggregation, constant)
        log_ratio = logprobs - batch.old_logprobs
        return total, denominator, sums | _ratio_sums(log_ratio, batch) | _common_sums(logprobs, entropies, batch)

    return compute


def sft_objective(aggregation: str = "token_mean") -> Objective:
    """Cross-entropy (nats) of the trained tokens."""

    def objective(logprobs, entropies, batch):
        logprobs, entropies, batch = _select(logprobs, entropies, batch)
        total, denominator = aggregate(-logprobs, batch, aggregation)
        return total, denominator, _common_sums(logprobs, entropies, batch)

    return objective


@functools.lru_cache(maxsize=16)  # equal configurations have one objective, so that runs can share a learner
def grpo_objective(config: GRPOConfig) -> Objective:
    """The objective a `GRPOConfig` describes.

    Raises:
        ConfigError: see `validate`.
    """
    validate(config)
    return policy_objective(
        objective=config.objective,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        correction=config.correction,
        correction_low=config.correction_low,
        correction_high=config.correction_high,
        aggregation=config.aggregation,
        constant=config.aggregation_constant,
        kl_coefficient=config.kl_coefficient,
        kl_estimator=config.kl_estimator,
        entropy_coefficient=config.entropy_coefficient,
    )


def _select(logprobs: Tokens, entropies: Tokens, batch: LearnerBatch) -> tuple[Tokens, Tokens, LearnerBatch]:
    """Neutral values on masked tokens *before* any arithmetic: a `where` after it would let a NaN into gradients."""
    mask = batch.loss_mask
    streams = ("advantages", "old_logprobs", "behaviour_logprobs", "reference_logprobs")
    return (
        jnp.where(mask, logprobs, 0.0),
        jnp.where(mask, entropies, 0.0),
        replace(batch, **{name: jnp.where(mask, getattr(batch, name), 0.0) for name in streams}),
    )


def _count(flags: Array, batch: LearnerBatch) -> Float[Array, ""]:
    return jnp.sum(jnp.where(batch.loss_mask, flags, False), dtype=jnp.float32)


def _common_sums(logprobs: Tokens, entropies: Tokens, batch: LearnerBatch) -> Sums:
    """`batch.loss_mask` may be smaller than when the batch was cleaned: a correction takes tokens out."""
    return {
        "tokens": jnp.sum(batch.loss_mask, dtype=jnp.float32),
        "entropy": jnp.sum(jnp.where(batch.loss_mask, entropies, 0.0)),
        "logprob": jnp.sum(jnp.where(batch.loss_mask, logprobs, 0.0)),
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
