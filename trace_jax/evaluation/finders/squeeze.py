"""Squeeze (Li et al., ISSRE 2019): leaves are clustered by how far they deviate, each cluster is then explained.

By the generalised ripple effect all leaves of one root cause have the same deviation score 2 (f - v) / (f + v). Bottom
up: leaves that hardly contribute are filtered out at the knee of the cumulated deviations, the rest is clustered along
the score where its density has minima. Top down: in each cuboid (set of attributes) the elements are sorted by descent
score, the share of their leaves that lie in the cluster, and cut where the generalised potential score

    GPS = 1 - (mean |v - a| over S1 + mean |v - f| over S2) / (mean |v - f| over S1 + mean |v - f| over S2)

is largest; S1 are the chosen elements' leaves, S2 the normal leaves outside, a = f (sum v / sum f over S1) what the
ripple effect expects. Cuboids compete by GPS less a price for many elements and attributes.

Simplified: cuboids have at most as many attributes as an answer may name; the density is NumPy's automatic histogram,
smoothed, and the knee is the point farthest from the chord, without the published code's tuning of either. Of several
clusters the one with the largest sum of absolute deviations counts, and of a set of elements the first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.evaluation.finders.leaves import MAX_ATTRIBUTES, Cuboid, Element, Leaves, deviation, layer

# Mean absolute deviation score of a cluster below which it is no anomaly: of the published code, whose score is half of
# ours and whose threshold is 0.2, and for rates of days, whose anomalies are that small (docs/baselines.md).
NORMAL, SLIGHT = 0.4, 0.2
ENOUGH = 0.9  # GPS at which cuboids of more attributes are not looked at
BAR = 0.02  # the histogram's bars are no narrower: what lies closer is one cluster
SAME = 1e-9  # rounding of a score
MOST = 12  # elements that one cluster may be explained by


def find(leaves: Leaves) -> Element | None:
    """The first element of the explanation of the largest cluster, which may deviate slightly."""
    causes = localise(leaves, normal=SLIGHT)
    return causes[0][0] if causes else None


def localise(leaves: Leaves, layers: int = MAX_ATTRIBUTES, normal: float = NORMAL) -> list[tuple[Element, ...]]:
    """Explanations of the clusters, that of the largest sum of absolute deviations first.

    Args:
        layers: attributes that an element fixes at most.
        normal: mean absolute deviation score from which on a cluster counts.
    """
    forecast = leaves.measure[0]
    leaves = leaves.where(forecast > 0)
    f, v = leaves.measure
    if not len(f):
        return []
    score = deviation(f, v)
    found = clusters(score, relevant(np.abs(f - v)), normal)
    found.sort(key=lambda inside: -np.abs(f - v)[inside].sum())
    weight = _weight(leaves.codes, found)
    tables = functools.cache(functools.partial(layer, leaves.codes))
    sizes = range(1, min(layers, leaves.codes.shape[1]) + 1)
    return [_explain(map(tables, sizes), f, v, inside, _normal(score, found), weight) for inside in found]


def relevant(change: Float[np.ndarray, " G"]) -> Bool[np.ndarray, " G"]:
    """Leaves up to the knee of the cumulated absolute changes, largest first."""
    order = np.argsort(-change, kind="stable")
    total = change.sum()
    if total <= 0:
        return np.zeros(len(change), bool)
    height = np.cumsum(change[order]) / total
    along = (np.arange(len(change)) + 1) / len(change)
    keep = np.zeros(len(change), bool)
    keep[order[: int((height - along).argmax()) + 1]] = True
    return keep


def clusters(
    score: Float[np.ndarray, " G"], keep: Bool[np.ndarray, " G"], normal: float
) -> list[Bool[np.ndarray, " G"]]:
    """Groups of leaves between minima of the density of the kept scores, without those closer to 0 than `normal`.

    A group takes in all leaves within the range of its kept ones."""
    chosen = score[keep]
    if not len(chosen):
        return []
    automatic = np.histogram_bin_edges(chosen, "auto") if np.ptp(chosen) > BAR else np.zeros(2)
    width = max(float(automatic[1] - automatic[0]), BAR)
    bars = int(np.ceil(np.ptp(chosen) / width)) + 3  # one more at either end, so that the density falls to 0
    edges = chosen.min() - 1.5 * width + width * np.arange(bars + 1)
    count, _ = np.histogram(chosen, edges)
    window = max(int((count > 0).sum()) // 10, 1)
    density = np.convolve(count, np.ones(window) / window, "same")
    # A minimum: lower than what comes before, not higher than what comes next.
    low = np.flatnonzero((density[1:-1] < density[:-2]) & (density[1:-1] <= density[2:])) + 1
    bounds = [-np.inf, *((edges[low] + edges[low + 1]) / 2).tolist(), np.inf]
    groups = []
    for left, right in zip(bounds[:-1], bounds[1:], strict=True):
        own = chosen[(chosen > left) & (chosen <= right)]
        if len(own) and np.abs(own).mean() >= normal:
            groups.append((score >= own.min() - SAME) & (score <= own.max() + SAME))
    return groups


def _normal(score: Float[np.ndarray, " G"], found: list[Bool[np.ndarray, " G"]]) -> Bool[np.ndarray, " G"]:
    """Leaves that deviate less than any in a cluster."""
    return np.abs(score) < np.abs(score[np.any(found, axis=0)]).min()


def _weight(codes: Int[np.ndarray, "G A"], found: list[Bool[np.ndarray, " G"]]) -> float:
    """What GPS counts against elements and attributes, larger for smaller clusters: as its authors corrected it, since
    the paper's formula is negative where clusters are many or large, and the worst explanation then wins."""
    if not found:
        return 0.0
    clusters, values = len(found), sum(len(np.unique(column)) for column in codes.T)
    share = sum(int(inside.sum()) for inside in found) / len(codes)
    return float(np.log(clusters + 1) / clusters * values / np.log(values + 1) * -np.log(share))


def _explain(
    layers: Iterable[list[Cuboid]],
    f: Float[np.ndarray, " G"],
    v: Float[np.ndarray, " G"],
    cluster: Bool[np.ndarray, " G"],
    normal: Bool[np.ndarray, " G"],
    weight: float,
) -> tuple[Element, ...]:
    """The elements of the best cuboid."""
    best: tuple[float, tuple[Element, ...]] = (-np.inf, ())
    among = cluster | normal
    for size, cuboids in enumerate(layers, 1):
        reached = -np.inf
        for cuboid in cuboids:
            hits = cuboid.sums(cluster)
            order = np.argsort(-hits / cuboid.sums(np.ones(len(f))), kind="stable")
            order = order[hits[order] > 0][: min(MOST, len(hits) - 1)]
            place = np.full(len(hits), MOST)
            place[order] = np.arange(len(order))
            scores = _gps(f[among], v[among], place[cuboid.of[among]], len(order))
            if not len(scores):
                continue
            n = int(np.argmax(scores)) + 1
            reached = max(reached, scores[n - 1])
            rank = scores[n - 1] * weight - n * size
            if rank > best[0]:
                best = rank, tuple(cuboid.element(i) for i in order[:n])
        if reached > ENOUGH:
            break
    return best[1]


def _gps(
    f: Float[np.ndarray, " G"], v: Float[np.ndarray, " G"], place: Int[np.ndarray, " G"], most: int
) -> Float[np.ndarray, " most"]:
    """Generalised potential score of the leaves whose element is among the first 1, 2, ... `most`, against the others.

    Args:
        f, v: forecast and actual value of leaves of the cluster and normal ones.
        place: of each leaf's element in the order in which elements are chosen.
    """

    def mean(x: np.ndarray) -> float:
        return float(np.abs(x).mean()) if len(x) else 0.0

    scores = []
    for n in range(1, most + 1):
        inside = place < n
        expected = f[inside] * (v[inside].sum() / max(f[inside].sum(), 1e-12))
        rest = mean(v[~inside] - f[~inside])
        before = mean(v[inside] - f[inside]) + rest
        scores.append(1.0 - (mean(v[inside] - expected) + rest) / before if before > 0 else -np.inf)
    return np.array(scores)
