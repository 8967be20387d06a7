"""Held-out metrics of a diagnosing agent, each with a bootstrap interval (metrics of arXiv 2609.10315).

Axis letters: E episodes, B bootstrap resamples. Every metric here is a ratio `sum_E numerator / sum_E denominator`, so
one matrix of resampling counts `[B, E]` gives the intervals of all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.simulator.causes import CAUSE_NAMES, EPISODE_TYPES, NO_SIGNAL, SEGMENT_CAUSES

UNPARSED = "UNPARSED"  # last column of the confusion matrix: no readable answer


@dataclass(frozen=True)
class EvalRecord:
    """One graded answer: sample `sample` of an agent on held-out episode `index`."""

    index: int  # of the episode in its split
    type: str  # one of EPISODE_TYPES
    cause: str  # the hidden cause, one of CAUSE_NAMES
    sample: int
    parsed: bool  # the lenient decision parser read the answer
    cause_right: bool
    full_right: bool  # cause and, for segment causes, the exact driver slice
    jaccard: float | None  # of predicted and true (attribute, value) pairs; None: not a segment cause, or no answer
    tool_calls: int
    status: str  # Trajectory.status
    predicted: str | None = None  # root cause of the answer; None when it did not parse
    exact_parsed: bool = False  # the exact-schema parser read it too (sensitivity analysis)


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


def _interval(numerator, denominator, counts, confidence: float) -> dict[str, float | None]:
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


@dataclass(frozen=True)
class _Table:
    """Answers folded by episode; every array has one entry per episode."""

    type: np.ndarray
    cause: np.ndarray
    n: Int[np.ndarray, " E"]
    cause_right: Int[np.ndarray, " E"]
    full_right: Int[np.ndarray, " E"]
    parsed: Int[np.ndarray, " E"]
    exact_parsed: Int[np.ndarray, " E"]
    tool_calls: Int[np.ndarray, " E"]
    jaccard_sum: Float[np.ndarray, " E"]  # over the answers with the right segment cause
    jaccard_count: Int[np.ndarray, " E"]


def _fold(records: Sequence[EvalRecord]) -> _Table:
    by_episode: dict[int, list[EvalRecord]] = defaultdict(list)
    for r in records:
        by_episode[r.index].append(r)
    groups = [by_episode[i] for i in sorted(by_episode)]
    for group in groups:
        first = group[0]
        if any((r.type, r.cause) != (first.type, first.cause) for r in group):
            raise ConfigError(f"evaluation records of episode {first.index} disagree on its cause: pass one split only")

    def total(read) -> np.ndarray:
        return np.array([sum(int(read(r)) for r in g) for g in groups], dtype=np.int64)

    def located(r: EvalRecord) -> bool:
        return r.cause in SEGMENT_CAUSES and r.cause_right

    return _Table(
        type=np.array([g[0].type for g in groups]),
        cause=np.array([g[0].cause for g in groups]),
        n=np.array([len(g) for g in groups], dtype=np.int64),
        cause_right=total(lambda r: r.cause_right),
        full_right=total(lambda r: r.full_right),
        parsed=total(lambda r: r.parsed),
        exact_parsed=total(lambda r: r.exact_parsed),
        tool_calls=total(lambda r: r.tool_calls),
        # An answer with the right cause and no readable slice has Jaccard 0, it is not left out.
        jaccard_sum=np.array([sum(r.jaccard or 0.0 for r in g if located(r)) for g in groups], dtype=np.float64),
        jaccard_count=total(located),
    )


def summarise(records: Sequence[EvalRecord], config: EvaluationConfig, *, seed: int = 0) -> dict:
    """The result object of `trace-jax eval --json`.

    Args:
        records: every answer of one agent on one split, in any order.
        config: number of resamples and confidence level.
        seed: of the bootstrap; the same records and seed give the same numbers.

    Returns:
        `cause_at_1, full_attr_at_1, full_attr_at_5, jaccard, no_signal, parsed, tool_calls`, `by_type` and `by_cause`
        (FullAttr@1 of each), every value `{"value", "low", "high"}`: mean and percentile interval of a bootstrap over
        episodes. A category without episodes, or @k with fewer than k answers, has nulls. `extra` holds counts,
        `cause_at_5`, Cause@1 by type, exact-schema parse rate, statuses and the confusion matrix.

    Raises:
        ConfigError: no records, or records of different splits mixed.
    """
    if not records:
        raise ConfigError("nothing to evaluate: no evaluation records; the split is empty, set data.test above 0")
    t = _fold(records)
    episodes = len(t.n)
    counts = resample_counts(episodes, config.bootstrap, seed)

    def ratio(numerator, denominator, where=None) -> dict[str, float | None]:
        where = np.ones(episodes, bool) if where is None else where
        return _interval(np.where(where, numerator, 0.0), np.where(where, denominator, 0.0), counts, config.confidence)

    one = np.ones(episodes)

    def attempts(right, k: int, where=None) -> dict[str, float | None]:
        if np.any(t.n < k):
            return {"value": None, "low": None, "high": None}
        return ratio(at_k(t.n, right, k), one, where)

    return {
        "cause_at_1": attempts(t.cause_right, 1),
        "full_attr_at_1": attempts(t.full_right, 1),
        "full_attr_at_5": attempts(t.full_right, 5),
        "jaccard": ratio(t.jaccard_sum, t.jaccard_count),
        "no_signal": attempts(t.cause_right, 1, t.cause == NO_SIGNAL),
        "parsed": ratio(t.parsed, t.n),
        "tool_calls": ratio(t.tool_calls, t.n),
        "by_type": {name: attempts(t.full_right, 1, t.type == name) for name in EPISODE_TYPES},
        "by_cause": {name: attempts(t.full_right, 1, t.cause == name) for name in CAUSE_NAMES},
        "extra": {
            "episodes": episodes,
            "answers": len(records),
            "samples": int(t.n.min()),
            "confidence": config.confidence,
            "cause_at_5": attempts(t.cause_right, 5),
            "exact_parsed": ratio(t.exact_parsed, t.n),
            "cause_by_type": {name: attempts(t.cause_right, 1, t.type == name) for name in EPISODE_TYPES},
            "status": dict(sorted(Counter(r.status for r in records).items())),
            "confusion": confusion(records),
        },
    }


def confusion(records: Sequence[EvalRecord]) -> dict:
    """Answers by hidden cause (rows) and answered cause (columns): `{"causes", "predicted", "counts"}`."""
    columns = (*CAUSE_NAMES, UNPARSED)
    row_of, column_of = ({name: i for i, name in enumerate(names)} for names in (CAUSE_NAMES, columns))
    counts = np.zeros((len(CAUSE_NAMES), len(columns)), dtype=np.int64)
    for r in records:
        counts[row_of[r.cause], column_of.get(r.predicted or UNPARSED, len(columns) - 1)] += 1
    return {"causes": list(CAUSE_NAMES), "predicted": list(columns), "counts": counts.tolist()}


def paired_difference(
    first: Sequence[EvalRecord], second: Sequence[EvalRecord], config: EvaluationConfig, *, seed: int = 0
) -> dict[str, float | None]:
    """FullAttr@1 of `second` minus `first` on the episodes both answered, resampled in pairs.

    Two agents are judged on the same episodes, whose difficulty they share; the interval of the difference is much
    narrower than the two intervals side by side suggest.
    """
    rates = []
    for records in (first, second):
        t, indices = _fold(records), sorted({r.index for r in records})
        rates.append(dict(zip(indices, t.full_right / t.n, strict=True)))
    shared = sorted(rates[0].keys() & rates[1].keys())
    if not shared:
        return {"value": None, "low": None, "high": None}
    change = np.array([rates[1][i] - rates[0][i] for i in shared])
    counts = resample_counts(len(shared), config.bootstrap, seed)
    return _interval(change, np.ones(len(shared)), counts, config.confidence)
