"""What moved in a user's campaign: figures of both windows, and daily curves with the windows marked."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from trace_jax.diagnose import tables
from trace_jax.diagnose.findings import Diagnosis
from trace_jax.diagnose.series import Series, Sums
from trace_jax.diagnose.windows import RATES, Windows
from trace_jax.report.episode import SHARES, text_of
from trace_jax.report.episode_chart import Curve, Days, series_chart
from trace_jax.simulator.causes import CAUSES, FLAT

MOST_DAYS = 200  # drawn: both windows and as many days around them as fit
STYLES = ("main", "slice", "limit", "rest")  # of the values of a mix
NAMES = {
    "impressions": "Impressions a day",
    "share": "Share of the impressions",
    "ctr": "CTR (clicks an impression)",
    "cvr": "CVR (orders a click)",
    "cpc": "CPC (spend a click)",
    "spend": "Spend a day",
    "in_stock": "Catalogue in stock",
}
_OF_CAMPAIGN = ("impressions", "ctr", "cvr", "cpc", "spend", "in_stock")
_OF_SLICE = ("ctr", "cvr", "cpc", "share", "impressions")


@dataclass(frozen=True)
class Moved:
    """A metric in both windows: of the slice (or the campaign), and of what it is compared with, empty without."""

    name: str
    before: str
    after: str
    change: str
    other: tuple[str, str, str] | tuple[()]


@dataclass(frozen=True)
class Chart:
    """`keys`: (style, label) of each curve."""

    name: str
    keys: tuple[tuple[str, str], ...]
    svg: str


def _daily(sums: Sums, whole: Sums, metric: str) -> Float[np.ndarray, " T"] | None:
    """A metric by day, NaN where it has no denominator; None if the tables lack it."""
    if metric in RATES or metric == "share":
        n, d = RATES.get(metric, ("impressions", "impressions"))
        if n not in sums or d not in sums:
            return None
        below = whole[d] if metric == "share" else sums[d]
        return np.where(below > 0, sums[n] / np.where(below > 0, below, 1.0), np.nan)
    return sums.get(metric)


def _level(sums: Sums, whole: Sums, metric: str, days: np.ndarray) -> float:
    """A metric over some days: rates and shares as ratios of sums, others a day."""
    if not days.any():
        return float("nan")
    if metric in RATES or metric == "share":
        n, d = RATES.get(metric, ("impressions", "impressions"))
        below = (whole if metric == "share" else sums)[d][days].sum()
        return float(sums[n][days].sum() / below) if below > 0 else float("nan")
    return float(sums[metric][days].mean())


def _views(found: Series, slices: Mapping[str, Sums], diagnosis: Diagnosis) -> tuple[Sums, Sums | None, tuple, str]:
    """What is looked at, what it is compared with, the metrics, and the name of the comparison."""
    if diagnosis.pairs:
        return slices["slice"], slices["rest"], _OF_SLICE, "rest of the campaign"
    return found.totals, found.siblings or None, _OF_CAMPAIGN, "other campaigns"


def moved(found: Series, slices: Mapping[str, Sums], windows: Windows, diagnosis: Diagnosis) -> list[Moved]:
    """The figures of both windows side by side."""
    own, other, metrics, _ = _views(found, slices, diagnosis)
    masks, out = tables.masks(found, windows), []
    for metric in metrics:
        if _daily(own, found.totals, metric) is None:
            continue
        levels = [_level(own, found.totals, metric, mask) for mask in masks]
        beside: tuple[str, str, str] | tuple[()] = ()
        if other is not None and _daily(other, found.totals, metric) is not None and metric != "share":
            theirs = [_level(other, found.totals, metric, mask) for mask in masks]
            beside = (*(text_of(metric, v) for v in theirs), _change(*theirs))
        out.append(Moved(NAMES[metric], *(text_of(metric, v) for v in levels), _change(*levels), beside))
    return out


def in_figures(rows: Sequence[Moved], diagnosis: Diagnosis) -> str:
    """What the cause is known by, in the user's figures: the metrics that its signature says move."""
    signature = next((c.signature for c in CAUSES if c.name == diagnosis.cause), {})
    named = [m for m in ("volume", "ctr", "cvr", "cpc", "share", "in_stock") if signature.get(m, FLAT) != FLAT]
    wanted = {NAMES["impressions" if m == "volume" else m] for m in named}
    said = []
    for row in rows:
        if row.name in wanted:
            beside = f", {'the rest' if diagnosis.pairs else 'other campaigns'} {row.other[2]}" if row.other else ""
            said.append(f"{row.name.split(' (')[0]} {row.before} to {row.after} ({row.change}{beside})")
    where = "In the slice: " if diagnosis.pairs else ""
    return f"{where}{'; '.join(said)}." if said else ""


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if np.isfinite(after) and before > 0 else "-"


def charts(found: Series, slices: Mapping[str, Sums], windows: Windows, diagnosis: Diagnosis) -> list[Chart]:
    """Daily curves: of the slice against the rest, of the shares of a mix, of the campaign against its siblings."""
    days, cut = _days(found, windows)
    masks, whole, out = tables.masks(found, windows), found.totals, []
    own, other, metrics, beside = _views(found, slices, diagnosis)
    label = "slice" if diagnosis.pairs else "campaign"
    if slices and not diagnosis.pairs:
        names = list(slices)[: len(STYLES)]
        curves = [
            Curve(name, style, _daily(slices[name], whole, "share")[cut], None)
            for name, style in zip(names, STYLES, strict=False)
        ]
        out.append(_chart("share", curves, days))
    for metric in metrics:
        daily = _daily(own, whole, metric)
        if daily is None or not np.isfinite(daily[cut]).any():
            continue
        levels = tuple(_level(own, whole, metric, mask) for mask in masks)
        shown = np.where(found.present, daily, np.nan)
        curves = [Curve(label, "slice" if diagnosis.pairs else "main", shown[cut], levels)]
        theirs = None if other is None or metric == "share" else _daily(other, whole, metric)
        if theirs is not None:
            level = _level(other, whole, metric, masks[0])
            scale = levels[0] / level if level > 0 and levels[0] > 0 and metric != "in_stock" else 1.0
            curves.append(Curve(f"{beside}, at the level of the {label} before", "rest", (theirs * scale)[cut]))
        if metric == "spend" and not diagnosis.pairs and "budget" in whole:
            curves.append(Curve("budget", "limit", whole["budget"][cut]))
        out.append(_chart(metric, curves, days))
    return [chart for chart in out if chart.svg]


def _chart(metric: str, curves: list[Curve], days: Days) -> Chart:
    most = 1.0 if metric in SHARES else np.inf
    svg = series_chart(f"{NAMES[metric]} by day", curves, days, lambda v: text_of(metric, v), most)
    return Chart(NAMES[metric], tuple((c.style, c.label) for c in curves), svg)


def _days(found: Series, windows: Windows) -> tuple[Days, slice]:
    """The time axis, and which days of the series it shows."""
    low, high = (windows.before[0] - found.first).days, (windows.after[1] - found.first).days + 1
    around = max(MOST_DAYS - (high - low), 0)
    first, end = max(0, low - around), min(found.days, max(high + around, 1))
    dates = [found.date(t) for t in range(first, end)]
    both = windows.before, windows.after
    spans = [tuple(_at(found, first, day, last) for last, day in enumerate(span)) for span in both]
    return (
        Days(
            dates=tuple(map(str, dates)),
            weekdays=tuple(day.weekday() for day in dates),
            present=found.present[first:end],
            half=spans[1][0],
            onset=None,
            windows=(spans[0], spans[1]),
        ),
        slice(first, end),
    )


def _at(found: Series, first: int, day: datetime.date, last: int) -> int:
    """Position of a day on the axis; of a last day the position after it."""
    return min(max((day - found.first).days - first + last, 0), found.days - first)
