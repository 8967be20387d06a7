"""The contrast of failures with successes: which capabilities failed attempts lack and passed ones do not.

arXiv 2604.05336. By run of labels and capability:

    Cov = lacking_failed / failed
    ER- = lacking / (lacking + present) among the failed, ER+ the same among the passed, gap = ER- - ER+

A run selects a capability if Cov and gap reach their thresholds; it is kept if enough runs select it. A ratio of
nothing is 0: where no passed attempt shows a capability either way, none of them lacks it.

Axis letters: R runs of labels, T attempts, C capabilities, B bootstrap resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.config import CapabilityConfig
from trace_jax.environments.capability import Label
from trace_jax.evaluation.bootstrap import resample_counts

ROUNDING = 1e-9
FIGURES = ("coverage", "er_failed", "er_passed", "gap")


@dataclass(frozen=True)
class Rates:
    """Figures of the contrast, all of one shape whose last axis is C."""

    coverage: Float[np.ndarray, "*R C"]
    er_failed: Float[np.ndarray, "*R C"]
    er_passed: Float[np.ndarray, "*R C"]

    @property
    def gap(self) -> Float[np.ndarray, "*R C"]:
        return self.er_failed - self.er_passed


@dataclass(frozen=True)
class Contrast:
    """What the runs found.

    Attributes:
        value: figures of all attempts, the mean over runs of labels. low, high: bounds of each, tasks resampled.
        mean_gap: over the runs. selected: runs that select each capability. kept: selected by enough of them.
        order: capabilities, the kept ones first, each part by falling mean of what `capability.rank` names, equal ones
            by falling coverage.
    """

    value: Rates
    low: dict[str, Float[np.ndarray, " C"]]
    high: dict[str, Float[np.ndarray, " C"]]
    mean_gap: Float[np.ndarray, " C"]
    selected: Int[np.ndarray, " C"]
    kept: Bool[np.ndarray, " C"]
    order: Int[np.ndarray, " C"]


def rates(labels: Int[np.ndarray, "R T C"], passed: Bool[np.ndarray, " T"], counts: Float[np.ndarray, "R T"]) -> Rates:
    """The figures of each run.

    Args:
        labels: values of `Label`; one run of them serves all runs of `counts`.
        passed: whether the attempt was right.
        counts: how often each attempt counts in each run.

    Returns:
        Arrays [R, C].
    """
    shape = (counts.shape[0], *labels.shape[1:])

    def tally(which: Label, among: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "R C"]:
        weights = np.where(among, counts, 0.0)
        if labels.shape[0] == 1:
            return weights @ (labels[0] == which)
        return np.einsum("rt,rtc->rc", weights, np.broadcast_to(labels == which, shape))

    failed = np.where(passed, 0.0, counts).sum(axis=1)[:, None]
    lacking, present = tally(Label.LACKING, ~passed), tally(Label.PRESENT, ~passed)
    lacking_passed, present_passed = tally(Label.LACKING, passed), tally(Label.PRESENT, passed)
    return Rates(
        _ratio(lacking, np.broadcast_to(failed, lacking.shape)),
        _ratio(lacking, lacking + present),
        _ratio(lacking_passed, lacking_passed + present_passed),
    )


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0)


def selects(found: Rates, config: CapabilityConfig) -> Bool[np.ndarray, "R C"]:
    """Which capabilities each run selects."""
    # .6 - .4 is a gap of .2, whatever floating point makes of it
    return (found.coverage >= config.coverage - ROUNDING) & (found.gap >= config.gap - ROUNDING)


def by_task(tasks: Int[np.ndarray, " T"], resamples: int, seed: int) -> Float[np.ndarray, "B T"]:
    """Resamples of tasks, as counts of their attempts: attempts of one task share its difficulty."""
    _, position = np.unique(tasks, return_inverse=True)
    return resample_counts(int(position.max(initial=-1)) + 1, resamples, seed)[:, position].astype(float)


def contrast(
    labels: Int[np.ndarray, "R T C"],
    passed: Bool[np.ndarray, " T"],
    tasks: Int[np.ndarray, " T"],
    config: CapabilityConfig,
    *,
    resamples: int,
    confidence: float,
    seed: int,
) -> Contrast:
    """Contrasts failed with passed attempts.

    Args:
        labels: independent runs of a labeller that may differ from run to run. One run of a deterministic labeller
            becomes `config.runs` runs over resampled tasks.
        tasks: the task of each attempt.
        config: thresholds and number of runs.
        resamples: of the intervals. confidence: their level. seed: of all resampling.

    Raises:
        ValueError: there is no attempt.
    """
    attempts = labels.shape[1]
    if not attempts:
        raise ValueError("nothing to contrast: there is no attempt")
    if labels.shape[0] == 1:
        runs = rates(labels, passed, by_task(tasks, config.runs, seed))
    else:
        runs = rates(labels, passed, np.ones((labels.shape[0], attempts)))
    whole = _mean(rates(labels, passed, np.ones((labels.shape[0], attempts))))
    drawn = by_task(tasks, resamples, seed + 1)
    again = [rates(labels[r : r + 1], passed, drawn) for r in range(labels.shape[0])]
    low, high = {}, {}
    for name in FIGURES:
        values = np.mean([getattr(a, name) for a in again], axis=0)
        low[name], high[name] = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    selected = selects(runs, config).sum(axis=0)
    kept, mean_gap = selected >= config.keep, runs.gap.mean(axis=0)
    by = mean_gap if config.rank == "gap" else (runs.coverage * runs.gap).mean(axis=0)
    order = np.lexsort((-runs.coverage.mean(axis=0), -by.round(9), ~kept))
    return Contrast(whole, low, high, mean_gap, selected, kept, order)


def _mean(found: Rates) -> Rates:
    return Rates(found.coverage.mean(axis=0), found.er_failed.mean(axis=0), found.er_passed.mean(axis=0))
