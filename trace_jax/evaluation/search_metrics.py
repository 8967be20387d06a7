"""Held-out metrics of a searching agent: right answers, in all and by hops, each with a bootstrap interval."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation.bootstrap import NULLS, UNFINISHED, at_k, interval, paired, resample_counts

_INTERVALS = ("right_at_1", "right_at_5", "parsed", "tool_calls")


@dataclass(frozen=True)
class SearchRecord:
    """One graded answer: sample `sample` of an agent on held-out question `index`."""

    index: int  # of the question in its split
    hops: int
    sample: int
    parsed: bool  # the answer could be read
    right: bool
    tool_calls: int
    status: str  # Trajectory.status


def record_of(
    index: int,
    sample: int,
    labels: Mapping[str, Any],
    info: Mapping[str, Any],
    tool_calls: int,
    status: str,
    *,
    confidence: float | None = None,
) -> SearchRecord:
    """One graded answer. An attempt without an answer has an empty `info`: not parsed, not right."""
    del confidence  # there is nothing to abstain from
    return SearchRecord(
        index=index,
        hops=int(labels["hops"]),
        sample=sample,
        parsed=bool(info.get("parsed", False)),
        right=bool(info.get("right", False)),
        tool_calls=tool_calls,
        status=status,
    )


OUTCOMES = ("right", "wrong answer", "unreadable", *UNFINISHED.values())


def outcome(record: SearchRecord) -> str:
    """What became of an answer, one of `OUTCOMES`. unreadable: no answer could be parsed."""
    if record.right:
        return "right"
    if record.status in UNFINISHED:
        return UNFINISHED[record.status]
    return "wrong answer" if record.parsed else "unreadable"


def check_record(record: SearchRecord) -> None:
    """ValueError for a record that no evaluation writes, beyond the types of its fields."""
    if record.hops < 1:
        raise ValueError("a question without hops")


def summarise(records: Sequence[SearchRecord], config: EvaluationConfig, *, seed: int = 0) -> dict[str, Any]:
    """The result object of `trace-jax eval --json` for the search environment.

    Args:
        records: every answer of one agent on one split, in any order.
        config: number of resamples and confidence level.
        seed: of the bootstrap; the same records and seed give the same numbers.

    Returns:
        `environment` ("search"), `right_at_1, right_at_5, parsed, tool_calls` and `by_hops` (Right@1 by number of hops,
        as text), every value `{"value", "low", "high"}`: mean and percentile interval of a bootstrap over questions;
        nulls for @5 with fewer than 5 answers to a question. `extra`: counts, confidence and statuses.

    Raises:
        ConfigError: no records.
    """
    if not records:
        raise ConfigError("nothing to evaluate: no evaluation records; the split is empty, set data.test above 0")
    groups = _groups(records)
    n = np.array([len(g) for g in groups])
    hops = np.array([g[0].hops for g in groups])
    counts = resample_counts(len(groups), config.bootstrap, seed)

    def total(read) -> np.ndarray:
        return np.array([sum(int(read(r)) for r in g) for g in groups], np.int64)

    def ratio(numerator, denominator) -> dict[str, float | None]:
        return interval(numerator, denominator, counts, config.confidence)

    right, one = total(lambda r: r.right), np.ones(len(groups))
    first = at_k(n, right, 1)
    return {
        "environment": "search",
        "right_at_1": ratio(first, one),
        "right_at_5": dict(NULLS) if np.any(n < 5) else ratio(at_k(n, right, 5), one),
        "parsed": ratio(total(lambda r: r.parsed), n),
        "tool_calls": ratio(total(lambda r: r.tool_calls), n),
        "by_hops": {str(h): ratio(np.where(hops == h, first, 0.0), 1.0 * (hops == h)) for h in np.unique(hops)},
        "extra": {
            "episodes": len(groups),
            "answers": len(records),
            "samples": int(n.min()),
            "confidence": config.confidence,
            "status": dict(sorted(Counter(r.status for r in records).items())),
        },
    }


def _groups(records: Sequence[SearchRecord]) -> list[list[SearchRecord]]:
    """Answers to each question, by its index."""
    by_question: dict[int, list[SearchRecord]] = defaultdict(list)
    for r in records:
        by_question[r.index].append(r)
    return [by_question[i] for i in sorted(by_question)]


def paired_difference(
    first: Sequence[SearchRecord], second: Sequence[SearchRecord], config: EvaluationConfig, *, seed: int = 0
) -> dict[str, float | None]:
    """Right@1 of `second` minus `first` on the questions both answered, see `bootstrap.paired`."""
    rates = [{g[0].index: float(np.mean([r.right for r in g])) for g in _groups(rs)} for rs in (first, second)]
    return paired(*rates, config, seed)


def rows(agents: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """(label, path into a result, decimals) of a table of these agents: hops as their questions have them."""
    hops = sorted({int(h) for result in agents.values() for h in result["by_hops"]})
    return (
        ("Right@1", ("right_at_1",), 3),
        ("Right@5", ("right_at_5",), 3),
        *((f"{h} hop{'s' if h > 1 else ''}", ("by_hops", str(h)), 3) for h in hops),
        ("parsed", ("parsed",), 3),
        ("tool calls", ("tool_calls",), 1),
    )


def intervals(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, interval) of everything in a result that tables and reports show. KeyError if one is missing."""
    for name in _INTERVALS:
        yield name, summary[name]
    for hops, node in summary["by_hops"].items():
        if not hops.isdecimal():
            raise ValueError("by_hops has an entry that is no number of hops")
        yield f"by_hops.{hops}", node
