"""A measure before and after, by leaf: what root-cause localisation over many attributes starts from.

Axis letters: G leaves (full assignments of the attributes), A attributes, N elements (values of some of the
attributes).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.evaluation.finders.campaign import Campaign, Pair
from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES

MAX_ATTRIBUTES = 2  # an answer fixes one or two


@dataclass(frozen=True)
class Element:
    """Values of some attributes: `codes[j]` is that of attribute `attributes[j]` (both are numbers)."""

    attributes: tuple[int, ...]
    codes: tuple[int, ...]


@dataclass(frozen=True)
class Leaves:
    """A ratio of two sums in each leaf.

    Attributes:
        codes: of each leaf's value of each attribute.
        top, bottom: numerator and denominator, forecast in row 0 and actual in row 1.
    """

    codes: Int[np.ndarray, "G A"]
    top: Float[np.ndarray, "2 G"]
    bottom: Float[np.ndarray, "2 G"]

    @property
    def measure(self) -> Float[np.ndarray, "2 G"]:
        """Forecast and actual ratio of each leaf, 0 where there is nothing to divide by."""
        return np.where(self.bottom > 0, self.top / np.where(self.bottom > 0, self.bottom, 1.0), 0.0)

    def where(self, keep: Bool[np.ndarray, " G"]) -> Leaves:
        """Some of the leaves."""
        return Leaves(self.codes[keep], self.top[:, keep], self.bottom[:, keep])


def cuboids(attributes: int, layer: int) -> list[tuple[int, ...]]:
    """All sets of so many attributes."""
    return list(combinations(range(attributes), layer))


def elements(codes: Int[np.ndarray, "G A"], cuboid: tuple[int, ...]) -> tuple[list[Element], Bool[np.ndarray, "N G"]]:
    """The elements that occur in a cuboid, and which leaves belong to each."""
    values, inverse = np.unique(codes[:, cuboid], axis=0, return_inverse=True)
    inside = np.arange(len(values))[:, None] == inverse.reshape(-1)[None]
    return [Element(cuboid, tuple(v)) for v in values.tolist()], inside


def deviation(forecast: Float[np.ndarray, " G"], actual: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """2 (f - v) / (f + v): leaves of one root cause share it, whatever their size (the ripple effect)."""
    total = forecast + actual
    return np.where(total > 0, 2.0 * (forecast - actual) / np.where(total > 0, total, 1.0), 0.0)


def click_rate(campaign: Campaign) -> Leaves:
    """CTR by segment, in which every segment cause shows first: forecast is the baseline, actual the second half."""
    halves = (~campaign.after, campaign.after)
    top, bottom = (
        np.stack([x[half].sum(0) / max(int(half.sum()), 1) for half in halves])
        for x in (campaign.clicks, campaign.impressions)
    )
    return Leaves(campaign.values, top, bottom)


def pairs(element: Element | None) -> tuple[Pair, ...]:
    """An element of a campaign in words; empty for none."""
    if element is None:
        return ()
    names = [DRIVER_ATTRIBUTES[a] for a in element.attributes]
    return tuple((a, ATTRIBUTES[a][code]) for a, code in zip(names, element.codes, strict=True))
