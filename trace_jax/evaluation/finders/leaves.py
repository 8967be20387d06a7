"""A measure before and after, by leaf: what root-cause localisation over many attributes starts from.

Axis letters: G leaves (full assignments of the attributes), A attributes, N elements (values of some of the
attributes; all values of a set of attributes are its cuboid).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.evaluation.finders.campaign import Campaign, Pair
from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES

MAX_ATTRIBUTES = 2  # an answer fixes one or two; tables of other origin may ask for more


@dataclass(frozen=True)
class Element:
    """Values of some attributes: `codes[j]` is that of attribute `attributes[j]` (both are numbers)."""

    attributes: tuple[int, ...]
    codes: tuple[int, ...]


@dataclass(frozen=True)
class Leaves:
    """A ratio of two sums in each leaf, or a plain measure: `Leaves.plain`.

    Attributes:
        codes: of each leaf's value of each attribute.
        top, bottom: numerator and denominator, forecast in row 0 and actual in row 1.
    """

    codes: Int[np.ndarray, "G A"]
    top: Float[np.ndarray, "2 G"]
    bottom: Float[np.ndarray, "2 G"]

    @classmethod
    def plain(
        cls, codes: Int[np.ndarray, "G A"], forecast: Float[np.ndarray, " G"], actual: Float[np.ndarray, " G"]
    ) -> Leaves:
        """A measure that adds up: the table of forecast and actual values on which the literature tests finders."""
        return cls(codes, np.stack([forecast, actual]), np.ones((2, len(codes))))

    @property
    def measure(self) -> Float[np.ndarray, "2 G"]:
        """Forecast and actual ratio of each leaf, 0 where there is nothing to divide by."""
        return np.where(self.bottom > 0, self.top / np.where(self.bottom > 0, self.bottom, 1.0), 0.0)

    def where(self, keep: Bool[np.ndarray, " G"]) -> Leaves:
        """Some of the leaves."""
        return Leaves(self.codes[keep], self.top[:, keep], self.bottom[:, keep])


@dataclass(frozen=True)
class Cuboid:
    """The elements of some attributes that occur among leaves.

    Attributes:
        attributes: their numbers.
        codes: values of each element, in lexicographic order.
        of: place of each leaf's element in `codes`.
    """

    attributes: tuple[int, ...]
    codes: Int[np.ndarray, "N layer"]
    of: Int[np.ndarray, " G"]

    def sums(self, x: Float[np.ndarray, " G"]) -> Float[np.ndarray, " N"]:
        """Sum of a leaf's quantity over the leaves of each element."""
        return np.bincount(self.of, x, len(self.codes))

    def element(self, i: int) -> Element:
        return Element(self.attributes, tuple(self.codes[i].tolist()))


def cuboid(codes: Int[np.ndarray, "G A"], attributes: tuple[int, ...]) -> Cuboid:
    """The cuboid of a set of attributes; time and memory grow with the leaves, not with leaves times elements."""
    chosen = codes[:, attributes]
    sizes = tuple((chosen.max(0) + 1).tolist()) if len(chosen) else (1,) * len(attributes)
    keys, of = np.unique(np.ravel_multi_index(chosen.T, sizes), return_inverse=True)
    return Cuboid(attributes, np.stack(np.unravel_index(keys, sizes), 1), of)


def layer(codes: Int[np.ndarray, "G A"], size: int) -> list[Cuboid]:
    """The cuboids of all sets of so many attributes."""
    return [cuboid(codes, attributes) for attributes in combinations(range(codes.shape[1]), size)]


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
