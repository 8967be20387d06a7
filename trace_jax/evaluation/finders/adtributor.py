"""Adtributor (Bhagwan et al., NSDI 2014): the attribute, and its values, that explain a change and surprise.

An element's explanatory power is its share of the change of the whole measure; for a ratio of sums it is the partial
derivative in finite differences, scaled so that the elements of an attribute add up to one. Its surprise is its part
of the Jensen-Shannon divergence between the forecast's and the actual distribution, for a ratio the sum of those of
numerator and denominator. An attribute's elements are taken by surprise, those with too little explanatory power left
out, until they explain enough; attributes are ranked by the surprise of what was taken.

Simplified: all elements of an attribute are weighed without the paper's streaming or pruning; thresholds are the
paper's. Adtributor names values of one attribute. A slice of two is beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from trace_jax.evaluation.finders.leaves import Element, Leaves, cuboid

EXPLAINED, EACH = 0.67, 0.10  # of the change: by all elements that are taken, and at least by each of them


@dataclass(frozen=True)
class Candidate:
    """What one attribute offers: its elements by surprise, and what they explain and how they surprise in sum."""

    elements: tuple[Element, ...]
    explained: float
    surprise: float


def explanatory_power(
    top: Float[np.ndarray, "2 N"], bottom: Float[np.ndarray, "2 N"] | None = None
) -> Float[np.ndarray, " N"]:
    """Share of each element of an attribute in the change of the sum of `top`, or of the ratio of the two sums.

    Args:
        top, bottom: forecast in row 0, actual in row 1.
    """
    change = top[1] - top[0]
    if bottom is not None:
        total, shift = bottom[0].sum(), bottom[1] - bottom[0]
        change = (change * total - shift * top[0].sum()) / np.maximum(total * (total + shift), 1e-12)
    whole = change.sum()
    return change / whole if abs(whole) > 1e-15 else np.zeros_like(change)


def surprise(measure: Float[np.ndarray, "2 N"]) -> Float[np.ndarray, " N"]:
    """Each element's part of the Jensen-Shannon divergence (nats) of actual and forecast shares."""
    p, q = measure / np.maximum(measure.sum(1, keepdims=True), 1e-12)
    middle = np.where(p + q > 0, (p + q) / 2, 1.0)

    def part(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x * np.log(np.where(x > 0, x, 1.0) / middle), 0.0)

    return 0.5 * (part(p) + part(q))


def candidates(leaves: Leaves, *, ratio: bool = True) -> list[Candidate]:
    """What each attribute offers, the most surprising first; attributes that do not explain enough are left out.

    Args:
        ratio: whether the measure is the ratio of the sums, or else the sum of the numerators.
    """
    found = []
    for a in range(leaves.codes.shape[1]):
        values = cuboid(leaves.codes, (a,))
        top, bottom = (np.stack([values.sums(row) for row in rows]) for rows in (leaves.top, leaves.bottom))
        power = explanatory_power(top, bottom if ratio else None)
        startle = surprise(top) + (surprise(bottom) if ratio else 0.0)
        order = [i for i in np.argsort(-startle, kind="stable") if power[i] > EACH]
        enough = np.flatnonzero(np.cumsum(power[order]) > EXPLAINED)
        if len(enough):
            taken = order[: enough[0] + 1]
            found.append(
                Candidate(
                    tuple(values.element(i) for i in taken), float(power[taken].sum()), float(startle[taken].sum())
                )
            )
    return sorted(found, key=lambda c: -c.surprise)


def find(leaves: Leaves) -> Element | None:
    """The most surprising value of the best attribute."""
    best = candidates(leaves)
    return best[0].elements[0] if best else None
