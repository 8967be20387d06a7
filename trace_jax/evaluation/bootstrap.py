"""Metrics over held-out episodes with bootstrap intervals, whatever the environment.

Axis letters: E episodes, B bootstrap resamples. Every metric here is a ratio `sum_E numerator / sum_E denominator`, so
one matrix of resampling counts `[B, E]` gives the intervals of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from trace_jax.config import EvaluationConfig

# What became of an attempt without an answer, by `Trajectory.status`.
UNFINISHED: Mapping[str, str] = {
    "malformed": "malformed turn",
    "truncated": "cut off",
    "timed_out": "timed out",
    "tool_failure": "tool failure",
}
NULLS: Mapping[str, None] = {"value": None, "low": None, "high": None}


def at_k(n: Int[np.ndarray, " E"], c: Int[np.ndarray, " E"], k: int) -> Float[np.ndarray, " E"]:
    """Chance that at least one of k answers drawn without replacement from n, of which c are right, is right.

    `1 - C(n-c, k) / C(n, k)`, written as a product so that no binomial coefficient overflows.

    Args:
        n: answers per episode, each >= k.
        c: right answers per episode, 0 <= c <= n.
        k: answers drawn, >= 1.

    Raises:
        ValueError: an episode has fewer than k answers, or c is outside [0, n].
    """
    n, c = np.asarray(n, dtype=np.int64), np.asarray(c, dtype=np.int64)
    if k < 1 or np.any(n < k):
        raise ValueError(f"at_k needs 1 <= k <= n, got k={k}, smallest n={n.min() if n.size else 0}")
    if np.any(c < 0) or np.any(c > n):
        raise ValueError("at_k needs 0 <= c <= n")
    drawn = np.arange(k)
    # A factor reaches 0 exactly when fewer than k wrong answers exist; later negative factors are cut off there.
    wrong = np.maximum(n[..., None] - c[..., None] - drawn, 0)
    return 1.0 - np.prod(wrong / (n[..., None] - drawn), axis=-1)


def resample_counts(episodes: int, resamples: int, seed: int) -> Int[np.ndarray, "B E"]:
    """How often each episode is drawn in each bootstrap resample of `episodes` draws with replacement."""
    rng = np.random.default_rng([seed, episodes])
    return rng.multinomial(episodes, np.full(episodes, 1.0 / episodes), size=resamples)


def interval(numerator, denominator, counts, confidence: float) -> dict[str, float | None]:
    """`{"value", "low", "high"}` of a ratio of sums over episodes, percentile bootstrap; nulls when empty."""
    total = float(np.sum(denominator))
    if total <= 0:
        return {"value": None, "low": None, "high": None}
    tops, bottoms = counts @ np.asarray(numerator, np.float64), counts @ np.asarray(denominator, np.float64)
    drawn = bottoms > 0  # a small category may be missing from a resample
    ratios = tops[drawn] / bottoms[drawn]
    value = float(np.sum(numerator)) / total
    if ratios.size == 0:
        return {"value": value, "low": None, "high": None}
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    # Outcomes are often all equal in a small category: the bounds then differ from the value by rounding alone.
    return {"value": value, "low": min(float(low), value), "high": max(float(high), value)}


def paired(
    first: Mapping[int, float], second: Mapping[int, float], config: EvaluationConfig, seed: int
) -> dict[str, float | None]:
    """`second` minus `first` on the episodes both answered, resampled in pairs.

    Two agents are judged on the same episodes, whose difficulty they share; the interval of the difference is much
    narrower than the two intervals side by side suggest.

    Args:
        first, second: share of right answers by episode.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return dict(NULLS)
    change = np.array([second[i] - first[i] for i in shared])
    counts = resample_counts(len(shared), config.bootstrap, seed)
    return interval(change, np.ones(len(shared)), counts, config.confidence)
