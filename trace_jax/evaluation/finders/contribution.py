"""Contribution analysis in SQL, as a dashboard's "explain this change" does it.

The change of CTR is a sum of what segments contribute: (mean share of the impressions) x (change of the rate), plus
what the shift of the mix contributes (the same split as `environments.ads.decompose`). A slice's excess is its rate
part beyond what it would have contributed had its rate moved like the campaign's:

    excess(k) = (s1 + s2)/2 ((r2 - r1 of the slice) - (R2 - R1 of the campaign))

The value with the largest fall is named; it is drilled into where one value of a second attribute carries most of its
excess. There is no model of noise: a small slice's bad luck counts in full, only its share keeps it small.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from trace_jax.evaluation.finders.campaign import Pair, Rows
from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES

CONCENTRATION = "concentration"  # name of the one figure that is fitted: see `choose`
_GRID = tuple(round(0.5 + 0.05 * i, 2) for i in range(15))
_SETS = ", ".join(f"({', '.join(c)})" for n in (1, 2) for c in combinations(DRIVER_ATTRIBUTES, n))
_NAMES = ", ".join(DRIVER_ATTRIBUTES)
SQL = f"""with s as (select *, ds > (select list_median([min(ds), max(ds)]) from segment_daily) b from segment_daily)
, g as (select {_NAMES}, sum(impressions) filter (not b) i1, sum(impressions) filter (b) i2,
 sum(clicks) filter (not b) c1, sum(clicks) filter (b) c2 from s group by grouping sets ({_SETS}, ()))
, t as (select i1 n1, i2 n2, c1 / i1 r1, c2 / i2 r2 from g where coalesce({_NAMES}) is null)
select {_NAMES}, (i1 / n1 + i2 / n2) / 2 * ((c2 / i2 - c1 / i1) - (r2 - r1)) excess
 from g, t where coalesce({_NAMES}) is not null and i1 > 0 and i2 > 0 order by excess, {_NAMES}"""
_ATTRIBUTE_OF = {value: a for a in DRIVER_ATTRIBUTES for value in ATTRIBUTES[a]}


def fit(rows: Sequence[Rows], drivers: Sequence[tuple[Pair, ...]]) -> float:
    """The concentration that finds most slices, the middle one of several.

    Args:
        rows: of the query, of training episodes that have a driver slice; drivers: those slices.
    """
    right = [sum(set(choose(r, x)) == set(d) for r, d in zip(rows, drivers, strict=True)) for x in _GRID]
    best = [x for x, n in zip(_GRID, right, strict=True) if n == max(right)]
    return best[len(best) // 2]


def choose(rows: Rows, concentration: float) -> tuple[Pair, ...]:
    """The slice that the rows of the query point at.

    Args:
        rows: values of the driver attributes (NULL where a slice leaves one open), then the excess; lowest first.
        concentration: of a value's excess that one of its parts must carry to be named instead. It may exceed 1: other
            parts may have moved the other way.
    """
    found = [(tuple(v for v in row[:-1] if v is not None), float(row[-1])) for row in rows]
    single = next(((values, excess) for values, excess in found if len(values) == 1), None)
    if single is None or single[1] >= 0:
        return ()
    inside = [(values, excess) for values, excess in found if len(values) == 2 and single[0][0] in values]
    values = inside[0][0] if inside and inside[0][1] <= concentration * single[1] else single[0]
    return _pairs(values)


def _pairs(values: Sequence[str]) -> tuple[Pair, ...]:
    return tuple((_ATTRIBUTE_OF[v], v) for v in values)
