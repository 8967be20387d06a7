"""Surrogates of the policy gradient, one small function each, and the one table that names them.

A surrogate maps log-probs and a batch to a loss per token and to where its clip acted. What a surrogate does with a
token does not depend on the row it stands in or on other sequences. Advantages may differ from token to token.

Axes: rows of a micro-batch, time (tokens). A = advantage, r = exp(log-prob - old log-prob), sg = stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from trace_jax.learner.aggregation import Tokens, sequence_means
from trace_jax.learner.packing import LearnerBatch

# A log-ratio beyond this is a bug elsewhere; the exponential must stay finite so that one token cannot spoil the step.
LOG_RATIO_LIMIT = 20.0


class Clip(NamedTuple):
    """Bounds of the ratio: [1 - low, 1 + high]; `dual` bounds ratio x |A| where A < 0 (0: no bound)."""

    low: float
    high: float
    dual: float = 0.0


# (log-probs, batch, clip) -> (loss, where the clip acted). The batch is clean: neutral values on masked tokens.
Surrogate = Callable[[Tokens, LearnerBatch, Clip], tuple[Tokens, Bool[Array, "rows time"]]]


def exp_ratio(log_ratio: Tokens) -> Tokens:
    """`exp`, kept finite."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def clipped_surrogate(
    log_ratio: Tokens, advantages: Tokens, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tokens, Bool[Array, "rows time"]]:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)` (arXiv 1707.06347), and where the clip took the gradient.

    With a dual clip c (arXiv 1912.09729): `-max(min(r A, clip(r) A), c A)` where A < 0. Without it an action that has
    become much likelier and turned out bad has a loss, and a gradient, without bound.
    """
    ratio = exp_ratio(log_ratio)
    raw, clipped = ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    losses, taken = -jnp.minimum(raw, clipped), clipped < raw
    if not dual_clip:
        return losses, taken
    bound = -dual_clip * advantages
    beyond = (advantages < 0) & (losses > bound)
    return jnp.where(beyond, bound, losses), taken | beyond


def token_surrogate(logprobs: Tokens, batch: LearnerBatch, clip: Clip):
    """The ratio of each token, clipped (GRPO, arXiv 2402.03300; DAPO, arXiv 2503.14476)."""
    return clipped_surrogate(logprobs - batch.old_logprobs, batch.advantages, *clip)


def sequence_surrogate(logprobs: Tokens, batch: LearnerBatch, clip: Clip):
    """GSPO (arXiv 2507.18071): one ratio `s = exp(mean of log r)` over the trained tokens of a sequence, clipped.

    A is the mean of the sequence's advantages. Where they differ from turn to turn that mean is all that is left of
    them: use `sequence_token_surrogate`.
    """
    log_ratio = sequence_means(logprobs - batch.old_logprobs, batch)
    return clipped_surrogate(log_ratio, sequence_means(batch.advantages, batch), *clip)


def sequence_token_surrogate(logprobs: Tokens, batch: LearnerBatch, clip: Clip):
    """GSPO-token (arXiv 2507.18071): `s_t = sg(s) p_t / sg(p_t)`, clipped, with the advantage of each token.

    The value of every s_t is s; its gradient is that of its own token. With one advantage in a sequence the loss and
    the gradient of the sequence are those of GSPO.
    """
    log_s = jax.lax.stop_gradient(sequence_means(logprobs - batch.old_logprobs, batch))
    return clipped_surrogate(log_s + logprobs - jax.lax.stop_gradient(logprobs), batch.advantages, *clip)


def cispo_surrogate(logprobs: Tokens, batch: LearnerBatch, clip: Clip):
    """CISPO (arXiv 2506.13585): `-sg(clip(r, 1 - low, 1 + high)) A log p`; no token loses its gradient.

    Its value is not an objective's (log p weighs in): only its gradient means something. The clip says where a weight
    was cut. `low` 1 is no lower bound, as in the paper.
    """
    ratio = exp_ratio(logprobs - batch.old_logprobs)
    weights = jnp.clip(ratio, 1.0 - clip.low, 1.0 + clip.high)
    return -jax.lax.stop_gradient(weights) * batch.advantages * logprobs, weights != ratio


@dataclass(frozen=True)
class Named:
    """An objective.

    Attributes:
        surrogate: its loss per token.
        fixes: fields of `GRPOConfig` that the name settles, with the values it allows, the usual one first.
        by_sequence: its ratio is the sequence's, and so is every weight that corrects it.
        one_advantage: of the advantages of a sequence only their mean acts.
    """

    surrogate: Surrogate
    fixes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    by_sequence: bool = False
    one_advantage: bool = False


OBJECTIVES: dict[str, Named] = {
    "grpo": Named(token_surrogate),  # leaves everything to the explicit fields
    "dr_grpo": Named(  # arXiv 2503.20783
        token_surrogate, {"advantage_std": (False,), "aggregation": ("seq_sum_constant",)}
    ),
    "dapo": Named(  # arXiv 2503.14476; it also clips higher above than below
        token_surrogate,
        {"advantage_std": (True,), "aggregation": ("token_mean",), "constant_groups": ("resample", "drop")},
    ),
    # a mean over sequences: over tokens, a sequence would count as often as it is long
    "gspo": Named(sequence_surrogate, {"aggregation": ("seq_mean_token_mean",)}, by_sequence=True, one_advantage=True),
    "gspo_token": Named(sequence_token_surrogate, {"aggregation": ("seq_mean_token_mean",)}, by_sequence=True),
    "cispo": Named(cispo_surrogate),
}
