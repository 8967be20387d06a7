"""RiskLoc (Kalander, arXiv 2205.10004): leaves in two partitions, elements by how much of their weight is abnormal.

Deviation scores of normal leaves lie around 0, so what lies beyond the mirror image of the less extreme side is
abnormal. A leaf weighs its distance from 0 if it is abnormal, from the cut if it is normal, at most 1. An element's
risk is

    r1 - r2,   r1 = abnormal weight / (abnormal + normal weight + 1)
               r2 = mean |deviation from what the ripple effect expects| / mean |deviation from the forecast|

over its leaves. Layer by layer, the first whose risk reaches a threshold and whose explanatory power (share of the
change) is the largest is a root cause; its leaves are taken away and the search goes on while the rest explains
anything.

Simplified: elements have at most as many attributes as an answer may name (`layers`), and pruning is left out (it saves
time only). For a ratio the measure of a leaf is its own ratio, as in the published code. Thresholds are
the paper's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.evaluation.finders.leaves import MAX_ATTRIBUTES, Cuboid, Element, Leaves, deviation, layer

RISK = 0.5  # of a root cause, at least
EXPLAINED = 0.02  # of the abnormal part's change, at least
OUTLIERS = 5  # scores at either end that do not decide where the cut lies
_ROUNDING = 1e-9  # a single leaf of full weight has a risk of exactly RISK, which rounding must not decide


def find(leaves: Leaves) -> Element | None:
    """The root cause that is found first."""
    causes = localise(leaves, most=1)
    return causes[0] if causes else None


def cut(score: Float[np.ndarray, " G"]) -> float:
    """Where abnormal begins: positive if scores above it are abnormal, negative if those below."""
    values = np.unique(score)
    low, high = values[min(OUTLIERS, len(values) - 1)], values[max(len(values) - 1 - OUTLIERS, 0)]
    return -float(low if abs(low) <= abs(high) else high)


def risk(
    score: Float[np.ndarray, " G"],
    f: Float[np.ndarray, " G"],
    v: Float[np.ndarray, " G"],
    abnormal: Bool[np.ndarray, " G"],
    weight: Float[np.ndarray, " G"],
    inside: Bool[np.ndarray, " G"],
) -> float:
    """Risk of the element with the leaves `inside`."""
    heavy, light = weight[inside & abnormal].sum(), weight[inside & ~abnormal].sum()
    seen = inside & (f > 0) & (v > 0)
    expected = f[seen] * (v[seen].sum() / max(f[seen].sum(), 1e-12))
    own = np.abs(score[seen]).sum()
    rippled = np.abs(deviation(expected, v[seen])).sum()
    return float(heavy / (heavy + light + 1.0) - (rippled / own if own > 0 else 0.0))


def localise(leaves: Leaves, most: int | None = None, layers: int = MAX_ATTRIBUTES) -> list[Element]:
    """Root causes in the order in which they are found, at most so many, of at most `layers` attributes each."""
    f, v = leaves.measure
    score = deviation(f, v)
    line = cut(score)
    abnormal = score > line if not np.signbit(line) else score < line
    weight = np.where(abnormal, np.abs(score), np.abs(line - score))
    weight = np.minimum(np.where((f == 0) & (v == 0), 0.0, weight), 1.0)
    change = v - f
    power = change / change.sum() if abs(change.sum()) > 1e-15 else np.zeros_like(change)
    if power[abnormal].sum() < 0:
        power = -power
    bar = EXPLAINED * power[abnormal].sum()
    left, found = np.ones(len(f), bool), []
    tables = functools.cache(functools.partial(layer, leaves.codes))
    while abnormal[left].any() and power[abnormal & left].sum() >= bar and (most is None or len(found) < most):
        searched = (tables(size) for size in range(1, min(layers, leaves.codes.shape[1]) + 1))
        cause = _search(searched, score, f, v, abnormal, weight, power, left, bar)
        if cause is None:
            break
        found.append(cause[0])
        left = left & ~cause[1]
    return found


def _search(
    layers: Iterable[list[Cuboid]],
    score: Float[np.ndarray, " G"],
    f: Float[np.ndarray, " G"],
    v: Float[np.ndarray, " G"],
    abnormal: Bool[np.ndarray, " G"],
    weight: Float[np.ndarray, " G"],
    power: Float[np.ndarray, " G"],
    left: Bool[np.ndarray, " G"],
    bar: float,
) -> tuple[Element, Bool[np.ndarray, " G"]] | None:
    """The risky element of the lowest layer that explains most, and its leaves."""
    for cuboids in layers:
        best, most = None, bar
        for cuboid in cuboids:
            explains = np.where(cuboid.sums(abnormal & left) > 0, cuboid.sums(power * left), -np.inf)
            for i in np.argsort(-explains, kind="stable"):
                if explains[i] <= most:
                    break
                inside = left & (cuboid.of == i)
                if risk(score, f, v, abnormal, weight, inside) >= RISK - _ROUNDING:
                    best, most = (cuboid.element(i), inside), float(explains[i])
                    break
        if best is not None:
            return best
    return None
