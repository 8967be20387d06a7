"""How far answers can be trusted: agreement among samples, calibration, abstention, strict parsing, economy of calls.

An episode's *voted* answer is the one that most of its samples give (cause, and slice of a segment cause; the
earliest sample's among equals), its *agreement* the share of samples that give it. Agreement needs several samples;
an agent's own confidence (`Transcript.confidence`: the mean log-probability of a policy's answer, the margin of a
baseline's rules) needs none, and only its order counts.

Axis letter: E episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.simulator.causes import NO_SIGNAL

if TYPE_CHECKING:
    from trace_jax.evaluation.metrics import EvalRecord

COVERAGES = tuple(round(0.05 * i, 2) for i in range(1, 21))  # points of an abstention curve
SELECTIVE = 0.8  # coverage whose accuracy stands in the table

Ratio = Callable[..., dict[str, float | None]]


def said(record: EvalRecord) -> tuple[str | None, str | None]:
    """What an answer says, as far as it is graded. Records of earlier versions do not hold the slice."""
    return record.predicted, record.driver


def voted(group: Sequence[EvalRecord]) -> tuple[EvalRecord, float]:
    """The first of the samples that give the most frequent answer, and the share of samples that do."""
    answers = Counter(map(said, group))  # most_common keeps the order of first appearance among equals
    answer, count = answers.most_common(1)[0]
    return next(r for r in group if said(r) == answer), count / len(group)


def curve(sure: Float[np.ndarray, " E"], right: Bool[np.ndarray, " E"]) -> list[dict[str, float]]:
    """Accuracy of the answers kept when the least sure are withheld.

    Episodes that are equally sure count as if they came in random order: a coverage within such a group takes the
    group's mean accuracy.
    """
    levels, place = np.unique(-sure, return_inverse=True)
    size = np.bincount(place.reshape(-1), minlength=len(levels)).astype(float)
    good = np.bincount(place.reshape(-1), weights=right.astype(float), minlength=len(levels))
    upto = np.concatenate([[0.0], np.cumsum(size)])
    correct = np.concatenate([[0.0], np.cumsum(good)])
    points = []
    for coverage in COVERAGES:
        kept = coverage * len(sure)
        points.append({"coverage": coverage, "accuracy": float(np.interp(kept, upto, correct) / kept)})
    return points


def calibration(agreement: Float[np.ndarray, " E"], right: Bool[np.ndarray, " E"]) -> dict[str, Any]:
    """Accuracy of voted answers by agreement, and the expected calibration error: how far they differ, on average."""
    bins = []
    for level in np.unique(agreement):
        here = agreement == level
        bins.append({"agreement": float(level), "episodes": int(here.sum()), "accuracy": float(right[here].mean())})
    error = sum(b["episodes"] * abs(b["accuracy"] - b["agreement"]) for b in bins) / len(right)
    return {"bins": bins, "error": {"value": float(error), "low": None, "high": None}}


def decided(group: Sequence[EvalRecord], threshold: float) -> EvalRecord:
    """The answer of a voter that abstains as soon as a share `threshold` of the samples does.

    Else the voted answer among the others. The share of samples that abstain estimates the probability with which the
    agent does; whatever temperature its decisions are drawn at, a threshold on it is one point of the same curve.
    """
    quiet = [r for r in group if r.predicted == NO_SIGNAL]
    others = [r for r in group if r.predicted != NO_SIGNAL]
    if not others or (quiet and len(quiet) >= threshold * len(group) - 1e-9):
        return quiet[0]
    return voted(others)[0]


def tradeoff(groups: Sequence[Sequence[EvalRecord]], ratio: Ratio) -> list[dict[str, Any]]:
    """What abstaining costs: by `threshold` (see `decided`), from one sample in all to all of them, `no_signal`, the
    share of episodes without a signal that are left alone, and `signal`, FullAttr of the others."""
    size = max(map(len, groups))
    silent = np.array([g[0].cause == NO_SIGNAL for g in groups])
    points = []
    for count in range(1, size + 1):
        right = np.array([bool(decided(g, count / size).full_right) for g in groups])
        sides = {"no_signal": ratio(right & silent, silent), "signal": ratio(right & ~silent, ~silent)}
        points.append({"threshold": count / size} | sides)
    return points


def reliability(groups: Sequence[Sequence[EvalRecord]], ratio: Ratio) -> dict[str, Any]:
    """Entries of `extra` in a result.

    Args:
        groups: the answers to each episode.
        ratio: (numerator, denominator) by episode -> value and interval.

    Returns:
        strict: `full_attr_at_1` where answers in anything but the exact schema are wrong, `lost` (lenient minus strict)
            and `answers`, right ones that are lost.
        efficiency: `right_per_call`, and mean `calls_right` and `calls_wrong` of right and wrong answers.
        voted: FullAttr of voted answers; calibration: of agreement. Null with one sample an episode.
        signal: FullAttr@1 of episodes with a signal.
        abstention: curves by "agreement" and by "confidence", null where there is none; `selective`: the accuracy at
            SELECTIVE of the first that is there; `decision`: `tradeoff`, null with one sample an episode.
    """
    n = np.array([len(g) for g in groups])
    sums = {
        "full": [sum(r.full_right for r in g) for g in groups],
        "strict": [sum(r.full_right and r.exact_parsed for r in g) for g in groups],
        "calls": [sum(r.tool_calls for r in g) for g in groups],
        "calls_right": [sum(r.tool_calls for r in g if r.full_right) for g in groups],
    }
    full, strict, calls, calls_right = (np.array(sums[k], np.float64) for k in sums)
    silent = np.array([g[0].cause == NO_SIGNAL for g in groups])
    votes = [voted(g) for g in groups]
    right = np.array([bool(r.full_right) for r, _ in votes])
    several = bool((n > 1).all())
    agreement = np.array([share for _, share in votes])
    says = any(r.confidence is not None for g in groups for r in g)
    curves = {
        "agreement": curve(agreement, right) if several else None,
        "confidence": curve(np.array([_confidence(g) for g in groups]), right) if says else None,
    }
    return {
        "strict": {
            "full_attr_at_1": ratio(strict / n, np.ones(len(n))),
            "lost": ratio((full - strict) / n, np.ones(len(n))),
            "answers": int((full - strict).sum()),
        },
        "efficiency": {
            "right_per_call": ratio(full, calls),
            "calls_right": ratio(calls_right, full),
            "calls_wrong": ratio(calls - calls_right, n - full),
        },
        "voted": ratio(right * 1.0, np.ones(len(n))) if several else None,
        "calibration": calibration(agreement, right) if several else None,
        "signal": ratio(np.where(silent, 0.0, full / n), ~silent),
        "abstention": {
            **curves,
            "selective": _selective(curves),
            "decision": tradeoff(groups, ratio) if several else None,
        },
    }


def _confidence(group: Sequence[EvalRecord]) -> float:
    """Mean confidence of the samples that give the voted answer. Without an answer there is none, which is least."""
    answer = said(voted(group)[0])
    return float(np.mean([-np.inf if r.confidence is None else r.confidence for r in group if said(r) == answer]))


def _selective(curves: Mapping[str, list[dict[str, float]] | None]) -> dict[str, Any] | None:
    """Accuracy at `SELECTIVE` of agreement where there is any, else of confidence."""
    by = next((name for name, points in curves.items() if points is not None), None)
    if by is None:
        return None
    accuracy = next(p["accuracy"] for p in curves[by] or () if p["coverage"] == SELECTIVE)
    return {"by": by, "coverage": SELECTIVE, "value": accuracy, "low": None, "high": None}
