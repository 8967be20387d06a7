"""Held-out metrics of a diagnosing agent, each with a bootstrap interval (metrics of arXiv 2609.10315).

Axis letter: E episodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation.bootstrap import UNFINISHED, at_k, interval, paired, resample_counts
from trace_jax.evaluation.reliability import SELECTIVE, reliability
from trace_jax.simulator.causes import CAUSE_NAMES, EPISODE_TYPES, NO_SIGNAL, SEGMENT_CAUSES

# (label, path into the result of `summarise`, decimals)
PAPER_ROWS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("Cause@1", ("cause_at_1",), 3),
    ("FullAttr@1", ("full_attr_at_1",), 3),
    ("FullAttr@5", ("full_attr_at_5",), 3),
    ("Jaccard (cause right)", ("jaccard",), 3),
    ("campaign", ("by_type", "campaign"), 3),
    ("mix", ("by_type", "mix"), 3),
    ("segment 1-D", ("by_type", "segment_1d"), 3),
    ("segment 2-D", ("by_type", "segment_2d"), 3),
    ("no-signal", ("no_signal",), 3),
    ("parsed", ("parsed",), 3),
    ("tool calls", ("tool_calls",), 1),
)
ROWS = (
    *PAPER_ROWS,
    ("right per tool call", ("extra", "efficiency", "right_per_call"), 3),
    ("strict FullAttr@1", ("extra", "strict", "full_attr_at_1"), 3),
    ("voted FullAttr", ("extra", "voted"), 3),
    ("calibration error", ("extra", "calibration", "error"), 3),
    (f"right at {SELECTIVE:.0%} coverage", ("extra", "abstention", "selective"), 3),
)
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
    driver: str | None = None  # slice that the answer gives to a segment cause, "attribute=value & attribute=value"
    confidence: float | None = None  # how sure the agent was, in a unit of its own (`Transcript.confidence`)


def record_of(
    index: int,
    sample: int,
    labels: Mapping[str, Any],
    info: Mapping[str, Any],
    tool_calls: int,
    status: str,
    *,
    confidence: float | None = None,
) -> EvalRecord:
    """One graded answer. An investigation without an answer has an empty `info`: not parsed, nothing right."""
    return EvalRecord(
        index=index,
        type=labels["type"],
        cause=labels["cause"],
        sample=sample,
        parsed=bool(info.get("parsed", False)),
        cause_right=bool(info.get("cause_right", False)),
        full_right=bool(info.get("full_right", False)),
        jaccard=info.get("slice_jaccard"),
        tool_calls=tool_calls,
        status=status,
        predicted=info.get("cause"),
        exact_parsed=bool(info.get("exact_parsed", False)),
        driver=info.get("driver"),
        confidence=confidence,
    )


OUTCOMES = ("right", "wrong slice", "wrong cause", "false alarm", "missed", "unreadable", *UNFINISHED.values())


def outcome(record: EvalRecord) -> str:
    """What became of an answer, one of `OUTCOMES`.

    wrong slice: the cause is right. false alarm: a cause where nothing happened. missed: "nothing happened" where
    something did. unreadable: no decision could be parsed.
    """
    if record.full_right:
        return "right"
    if record.status in UNFINISHED:
        return UNFINISHED[record.status]
    if not record.parsed:
        return "unreadable"
    if record.cause_right:
        return "wrong slice"
    if record.cause == NO_SIGNAL:
        return "false alarm"
    return "missed" if record.predicted == NO_SIGNAL else "wrong cause"


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


def by_episode(records: Sequence[EvalRecord]) -> list[list[EvalRecord]]:
    """The answers to each episode, in the order of the episodes and of the samples.

    Raises:
        ConfigError: they disagree on what the episode is.
    """
    found: dict[int, list[EvalRecord]] = defaultdict(list)
    for r in sorted(records, key=lambda r: (r.index, r.sample)):
        found[r.index].append(r)
    groups = list(found.values())
    for group in groups:
        first = group[0]
        if any((r.type, r.cause) != (first.type, first.cause) for r in group):
            raise ConfigError(f"evaluation records of episode {first.index} disagree on its cause: pass one split only")
    return groups


def _fold(groups: Sequence[Sequence[EvalRecord]]) -> _Table:
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
        `cause_at_5`, Cause@1 by type, exact-schema parse rate, statuses, the confusion matrix, and what
        `reliability.reliability` gives.

    Raises:
        ConfigError: no records, or records of different splits mixed.
    """
    if not records:
        raise ConfigError("nothing to evaluate: no evaluation records; the split is empty, set data.test above 0")
    groups = by_episode(records)
    t = _fold(groups)
    episodes = len(t.n)
    counts = resample_counts(episodes, config.bootstrap, seed)

    def ratio(numerator, denominator, where=None) -> dict[str, float | None]:
        where = np.ones(episodes, bool) if where is None else where
        return interval(np.where(where, numerator, 0.0), np.where(where, denominator, 0.0), counts, config.confidence)

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
            **reliability(groups, ratio),
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
    """FullAttr@1 of `second` minus `first` on the episodes both answered, see `bootstrap.paired`."""
    rates = []
    for records in (first, second):
        rates.append({g[0].index: float(np.mean([r.full_right for r in g])) for g in by_episode(records)})
    return paired(*rates, config, seed)


_INTERVALS = ("cause_at_1", "full_attr_at_1", "full_attr_at_5", "jaccard", "no_signal", "parsed", "tool_calls")


def intervals(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, interval) of everything in a result that tables and reports show. KeyError if one is missing."""
    for name in _INTERVALS:
        yield name, summary[name]
    for group, names in (("by_type", EPISODE_TYPES), ("by_cause", CAUSE_NAMES)):
        yield from ((f"{group}.{name}", summary[group][name]) for name in names)


def check_record(record: EvalRecord) -> None:
    """ValueError for a record that no evaluation writes, beyond the types of its fields."""
    if record.type not in EPISODE_TYPES or record.cause not in CAUSE_NAMES:
        raise ValueError("unknown episode type or cause")
