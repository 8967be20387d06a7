"""Two agents on the same episodes: is the difference more than luck.

Episodes are the unit: answers to one episode share its difficulty, so neither the interval nor the test may count
them as independent. The interval resamples episodes in pairs (`bootstrap.paired`). The test is the exact sign test
over episodes: of those whose mean scores differ, how likely is so uneven a split if either agent were as likely to be
ahead. With one answer an episode the episodes that differ are the discordant pairs, and it is the exact McNemar test;
with several a McNemar test of single answers would take five samples of one episode for five episodes and find far
too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation.bootstrap import interval, resample_counts
from trace_jax.evaluation.metrics import EvalRecord, by_episode
from trace_jax.evaluation.table import ResultTable
from trace_jax.simulator.causes import EPISODE_TYPES, NO_SIGNAL
from trace_jax.warehouse.identity import same

Score = Callable[[EvalRecord], float]
Where = Callable[[EvalRecord], bool]

_EVERYWHERE: Where = lambda r: True  # noqa: E731
# What is compared: name, label, score of an answer, and the episodes it is of.
_ROWS: tuple[tuple[str, str, Score, Where], ...] = (
    ("full_attr_at_1", "FullAttr@1", lambda r: r.full_right, _EVERYWHERE),
    ("cause_at_1", "Cause@1", lambda r: r.cause_right, _EVERYWHERE),
    *(
        (f"by_type.{kind}", kind.replace("_", " "), lambda r: r.full_right, lambda r, kind=kind: r.type == kind)
        for kind in EPISODE_TYPES
        if kind != "no_signal"
    ),
    ("no_signal", "no-signal", lambda r: r.cause_right, lambda r: r.cause == NO_SIGNAL),
    ("signal", "with a signal", lambda r: r.full_right, lambda r: r.cause != NO_SIGNAL),
    ("strict", "strict FullAttr@1", lambda r: r.full_right and r.exact_parsed, _EVERYWHERE),
    ("parsed", "parsed", lambda r: r.parsed, _EVERYWHERE),
    ("tool_calls", "tool calls", lambda r: r.tool_calls, _EVERYWHERE),
)


def sign_test(ahead: int, behind: int) -> float:
    """Two-sided exact p-value of a split at least as uneven, were either side as likely."""
    n, most = ahead + behind, max(ahead, behind)
    ways = tail = math.comb(n, most)
    for k in range(most, n):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)  # whole numbers: exact however many there are


def compare(
    first: Sequence[EvalRecord], second: Sequence[EvalRecord], config: EvaluationConfig, *, seed: int = 0
) -> dict[str, Any]:
    """`second` against `first`.

    Returns:
        `episodes`, `samples` of each, and `metrics`: by name `label`, `first`, `second`, `difference` (second minus
        first, with interval), `p` of the sign test, and episodes on which second is `ahead` or `behind`. A metric
        without episodes is left out.

    Raises:
        ConfigError: the episodes differ.
    """
    groups = [by_episode(records) for records in (first, second)]
    _check_same(*groups)
    metrics = {}
    for name, label, score, where in _ROWS:
        pairs = [(a, b) for a, b in zip(*groups, strict=True) if where(a[0])]
        if pairs:
            means = np.array([[float(np.mean([score(r) for r in g])) for g in pair] for pair in pairs])
            metrics[name] = {"label": label, **_compared(means, config, seed)}
    return {
        "episodes": len(groups[0]),
        "samples": [min(len(g) for g in side) for side in groups],
        "confidence": config.confidence,
        "test": "exact sign test over episode means (exact McNemar with one sample an episode)",
        "metrics": metrics,
    }


def _compared(means: Float[np.ndarray, "E 2"], config: EvaluationConfig, seed: int) -> dict[str, Any]:
    change = means[:, 1] - means[:, 0]
    ahead, behind = int((change > 1e-12).sum()), int((change < -1e-12).sum())
    counts = resample_counts(len(means), config.bootstrap, seed)
    return {
        "episodes": len(means),
        "first": float(means[:, 0].mean()),
        "second": float(means[:, 1].mean()),
        "difference": interval(change, np.ones(len(means)), counts, config.confidence),
        "p": sign_test(ahead, behind),
        "ahead": ahead,
        "behind": behind,
    }


def _check_same(first: Sequence[Sequence[EvalRecord]], second: Sequence[Sequence[EvalRecord]]) -> None:
    what = [{(g[0].index, g[0].type, g[0].cause) for g in side} for side in (first, second)]
    if what[0] == what[1]:
        return
    shared = len(what[0] & what[1])
    raise ConfigError(
        f"cannot compare answers to different episodes ({len(what[0])} and {len(what[1])}, {shared} the same): "
        "evaluate both on one split of one data.seed"
    )


def check_benchmark(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Refuses results that say they were made on different episodes.

    Returns:
        Whether both say that they were made on the same; results of earlier versions do not say.

    Raises:
        ConfigError: they are not the same.
    """
    known = [result["benchmark"] for result in (first, second) if result.get("benchmark")]
    if len(known) < 2:
        return False
    if not same(*known):
        hashes = " and ".join(benchmark["sha256"][:12] for benchmark in known)
        raise ConfigError(
            f"cannot compare answers to different episodes (benchmark {hashes}): evaluate both with the same "
            "simulator.*, data.seed and split"
        )
    return True


UNVERIFIED = "not verified: results of an earlier version do not say which episodes they were made on; evaluate again"


def table(result: Mapping[str, Any], names: tuple[str, str]) -> ResultTable:
    """The comparison for people; `result["verified"]` is what `check_benchmark` said."""
    rows = []
    for name, row in result["metrics"].items():
        decimals = 1 if name == "tool_calls" else 3
        d = row["difference"]
        bounds = "" if d["low"] is None else f" [{d['low']:+.{decimals}f}, {d['high']:+.{decimals}f}]"
        cells = (
            f"{row['first']:.{decimals}f}",
            f"{row['second']:.{decimals}f}",
            f"{d['value']:+.{decimals}f}{bounds}",
            f"{row['p']:.2g}",
            f"{row['ahead']}:{row['behind']}",
        )
        rows.append((row["label"], cells))
    notes = (
        f"{result['episodes']} episodes; brackets: {result['confidence']:.0%} paired bootstrap interval over episodes",
        "p: exact sign test over episode means (with one sample an episode: exact McNemar); ahead:behind: episodes",
    )
    notes += () if result["verified"] else (UNVERIFIED,)
    columns = (*names, "difference", "p", "ahead:behind")
    return ResultTable(columns, tuple(rows), notes, f"{names[1]} against {names[0]}, the same held-out episodes")
