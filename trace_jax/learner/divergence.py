"""Estimators of KL(policy || reference) from sampled tokens, as loss terms (names: J. Schulman, "Approximating KL
divergence", 2020).

Each has a value, which is reported, and a loss, which is differentiated. They are 0, with gradient 0, where the
policy is the reference. On-policy, in expectation over tokens drawn from the policy:

          value            gradient of the loss
    k1    the KL           of KL(policy || reference): exact; loses its sign token by token (high variance)
    k2    its 2nd order    of KL(policy || reference): exact
    k3    the KL           of KL(reference || policy): equal to second order near the reference; never negative

Differentiated directly, k1 would pull nowhere (the expectation of its gradient is 0, whatever the reference), so its
loss is the score-function form `r sg(k1)`, r = policy / old policy; that one is exact off-policy, too. k2 and k3 carry
no ratio, as is usual: off-policy they weigh tokens as they were sampled.

Axes: rows of a micro-batch, time (tokens).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from trace_jax.learner.aggregation import Tokens
from trace_jax.learner.surrogates import LOG_RATIO_LIMIT, exp_ratio


def k1(logprobs: Tokens, reference: Tokens) -> Tokens:
    """Unbiased, of either sign: log policy - log reference."""
    return logprobs - reference


def k2(logprobs: Tokens, reference: Tokens) -> Tokens:
    """Biased, small variance: half the squared log-ratio."""
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tokens, reference: Tokens) -> Tokens:
    """Unbiased, non-negative estimate of KL(policy || reference): `exp(x) - 1 - x`, x = log ref - log policy."""
    x = jnp.clip(reference - logprobs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(x) - 1.0 - x


KL_ESTIMATORS: dict[str, Callable[[Tokens, Tokens], Tokens]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(estimator: str, logprobs: Tokens, old_logprobs: Tokens, reference: Tokens) -> tuple[Tokens, Tokens]:
    """Loss and value of an estimator at every token."""
    value = KL_ESTIMATORS[estimator](logprobs, reference)
    if estimator == "k1":
        return exp_ratio(logprobs - old_logprobs) * jax.lax.stop_gradient(value), value
    return value, value
