"""What the finders read of an episode: two queries on the agent-visible tables, as arrays.

Axis letters: T days that the tables have, S segments (combinations of the driver attributes), K candidate slices of
`simulator.slices` (every value of a driver attribute, and every pair of values of two).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.simulator import slices
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, DRIVER_ATTRIBUTES

Pair = tuple[str, str]
Rows = Sequence[Sequence[Any]]

COUNTS = ("impressions", "clicks", "orders", "spend")
_SUMS = ", ".join(f"sum({c}) {c}" for c in COUNTS)
SEGMENTS = f"select ds, {', '.join(DRIVER_ATTRIBUTES)}, {_SUMS} from segment_daily group by all order by all"
_SIBLINGS = ", ".join(f"coalesce(sum({c}) filter (not own), 0)" for c in COUNTS)
TOTALS = f"""select ds, max(in_stock) filter (own), max(budget) filter (own), {_SIBLINGS}
 from (select *, campaign_id in (select campaign_id from segment_daily) own from daily_campaign)
 left join inventory using (campaign_id, ds) group by ds order by ds"""
_CODES = {a: {v: i for i, v in enumerate(ATTRIBUTES[a])} for a in DRIVER_ATTRIBUTES}
# Place of each attribute of the vocabulary among the driver attributes.
_PLACE = np.array([DRIVER_ATTRIBUTES.index(a) if a in DRIVER_ATTRIBUTES else -1 for a in ATTRIBUTE_NAMES])
PAIRS: tuple[tuple[Pair, ...], ...] = tuple(
    tuple(
        (ATTRIBUTE_NAMES[a], ATTRIBUTES[ATTRIBUTE_NAMES[a]][v])
        for a, v in zip(attributes.tolist(), values.tolist(), strict=True)
        if a >= 0
    )
    for attributes, values in zip(slices.SLICE_ATTRIBUTES, slices.SLICE_VALUES, strict=True)
)
INDEX: dict[frozenset[Pair], int] = {frozenset(pairs): k for k, pairs in enumerate(PAIRS)}


@dataclass(frozen=True)
class Campaign:
    """One campaign over its window. Days that the export lacks are absent from all arrays.

    Attributes:
        values: code of each segment's value of each driver attribute, in the order of `DRIVER_ATTRIBUTES`.
        after: days of the second half, after the middle of the first and the last day.
        impressions, clicks, orders, spend: of each segment and day.
        siblings: the same four, summed over the advertiser's other campaigns; zeros without any.
        in_stock: share of the catalogue in stock; budget: daily budget.
    """

    values: Int[np.ndarray, "S A"]
    after: Bool[np.ndarray, " T"]
    impressions: Float[np.ndarray, "T S"]
    clicks: Float[np.ndarray, "T S"]
    orders: Float[np.ndarray, "T S"]
    spend: Float[np.ndarray, "T S"]
    siblings: Float[np.ndarray, "T 4"]
    in_stock: Float[np.ndarray, " T"]
    budget: Float[np.ndarray, " T"]

    @property
    def members(self) -> Float[np.ndarray, "S K"]:
        """1 where a segment lies in a candidate slice."""
        inside = np.ones((len(self.values), slices.SLICES), bool)
        for attributes, wanted in zip(slices.SLICE_ATTRIBUTES.T, slices.SLICE_VALUES.T, strict=True):
            inside &= (attributes < 0) | (self.values[:, _PLACE[attributes]] == wanted)
        return inside.astype(np.float64)


def of_rows(segments: Rows, totals: Rows) -> Campaign:
    """The campaign from the rows of the two queries."""
    days = [row[0] for row in totals]
    day = {d: t for t, d in enumerate(days)}
    keys = sorted({tuple(_CODES[a][v] for a, v in zip(DRIVER_ATTRIBUTES, r[1:5], strict=True)) for r in segments})
    place = {key: s for s, key in enumerate(keys)}
    cells = np.zeros((4, len(days), len(keys)))
    for row in segments:
        key = tuple(_CODES[a][v] for a, v in zip(DRIVER_ATTRIBUTES, row[1:5], strict=True))
        cells[:, day[row[0]], place[key]] = row[5:9]
    middle = days[0] + (days[-1] - days[0]) / 2  # of an even number of days: the last of the first half
    rest = np.array([[0.0 if x is None else float(x) for x in row[1:]] for row in totals])
    after = np.array([d > middle for d in days])
    return Campaign(np.array(keys), after, *cells, rest[:, 2:], rest[:, 0], rest[:, 1])


def read(query: Callable[[str], Rows]) -> Campaign:
    """The campaign of an episode.

    Args:
        query: runs SQL on the agent-visible tables and returns rows.
    """
    return of_rows(query(SEGMENTS), query(TOTALS))
