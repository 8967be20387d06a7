"""Do the user's figures bear an answer out? What its cause is known by, from the registry, against what moved.

A small policy can be sure and wrong, and all of its investigations alike. What it is told by is checked here with plain
arithmetic: two levels of a daily series, their difference in standard errors of what is left of the days
(`windows.propose` has the same statistic), against the other campaigns or the rest of the campaign where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.diagnose import tables
from trace_jax.diagnose.limits import MARKET_RATE, MARKET_VOLUME
from trace_jax.diagnose.series import Series, Sums
from trace_jax.diagnose.windows import FEW_CLICKS, LOUD, RATES, Windows, ratio, weekdays_out
from trace_jax.simulator.causes import CAUSES, FLAT, NO_SIGNAL, PRIMARY

STILL = 2.0  # standard errors: less may be chance
COMPARED = 0.1  # logarithm: what a series may differ by from what it is compared with, before it is said to have moved
NOTHING = 1e-4  # share of the other level that a level of 0 counts as
_AT_ONCE, _AROUND = 0.8, 3  # share of a change within so many days before and after its first day

Masks = tuple[Bool[np.ndarray, " T"], Bool[np.ndarray, " T"]]


@dataclass(frozen=True)
class Move:
    """A metric in both windows: `change` is a logarithm, `z` its standard errors."""

    change: float
    z: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{np.expm1(self.change):+.0%} ({abs(self.z):.1f} standard errors)"


def against(cause: str, found: Series, slices: Mapping[str, Sums], windows: Windows) -> tuple[str, ...]:
    """What speaks against an answer; nothing for NO_SIGNAL if nothing stands out.

    Args:
        slices: "slice" and "rest" for a cause in a slice.
    """
    if cause == NO_SIGNAL:
        return unexplained(found, windows)
    known = next(c for c in CAUSES if c.name == cause)
    masks = tables.masks(found, windows)
    own, rest = (slices["slice"], slices["rest"]) if "slice" in slices else (found.totals, found.siblings or None)
    out = []
    for metric, says in known.signature.items():
        move = _move(metric, own, rest, found, masks)
        if move is None:
            continue
        name = _name(metric, "slice" in slices, rest is not None)
        if says in PRIMARY:
            if PRIMARY[says] * move.z < STILL:
                out.append(f"{cause} is told by {name} going {says}, and it went {move.text}")
        elif says == FLAT and abs(move.z) >= LOUD and abs(move.change) > _least(metric, rest):
            out.append(f"{cause} leaves {name} as it is, and it went {move.text}")
    return tuple(out)


def at_once(cause: str, found: Series, slices: Mapping[str, Sums], windows: Windows) -> tuple[str, ...]:
    """What of a cause that builds up came within days; of the twelve it may still be the nearest."""
    known, masks = next(c for c in CAUSES if c.name == cause), tables.masks(found, windows)
    if not known.gradual or "slice" not in slices:
        return ()
    own, rest, out = slices["slice"], slices["rest"], []
    for metric in (m for m, says in known.signature.items() if says in PRIMARY):
        move = _move(metric, own, rest, found, masks)
        if move is not None and abs(move.z) >= 2 * LOUD and _within_days(metric, own, rest, found, masks, move):
            out.append(f"{cause} comes gradually, and {_name(metric, True, True)} went {move.text} within days")
    return tuple(out)


def unexplained(found: Series, windows: Windows) -> tuple[str, ...]:
    """The largest move that is more than noise and market, if there is one."""
    masks, rest = tables.masks(found, windows), found.siblings or None
    tried: list[tuple[str, Move, float]] = []
    for metric in ("volume", *RATES):
        move = _move(metric, found.totals, rest, found, masks)
        if move is not None:
            tried.append((_name(metric, False, rest is not None), move, _least(metric, rest)))
    for (dimension, value), own in found.values.items():
        others = {m: np.maximum(found.totals[m] - own[m], 0) for m in own if m in found.totals}
        if min(own["clicks"].sum(), others["clicks"].sum()) < FEW_CLICKS:
            continue
        for metric in ("share", *RATES):
            move = _move(metric, own, others, found, masks)
            if move is not None:
                name = _name(metric, True, True).removesuffix(" of the slice against the rest")
                beside = " against the rest" if metric != "share" else ""
                tried.append((f"{name} of {dimension} {value!r}{beside}", move, COMPARED))
    loud = [(name, move) for name, move, least in tried if abs(move.z) >= LOUD and abs(move.change) > least]
    if not loud:
        return ()
    name, move = max(loud, key=lambda x: abs(x[1].z))
    return (f"{name} went {move.text}: more than noise, and no cause was named for it",)


def _name(metric: str, inside: bool, compared: bool) -> str:
    named = {"volume": "the number of impressions", "share": "the share of impressions"}.get(metric, metric.upper())
    if inside:
        return f"{named} of the slice" + (" against the rest" if metric != "share" else "")
    return f"{named} against the other campaigns" if compared else named


def _least(metric: str, rest: Sums | None) -> float:
    if rest is not None:
        return COMPARED
    return MARKET_VOLUME if metric == "volume" else MARKET_RATE


def _track(
    metric: str, own: Sums, rest: Sums | None, found: Series
) -> tuple[Float[np.ndarray, " T"], Float[np.ndarray, " T"]] | None:
    """Daily values and weights, divided by what it is compared with; None without the columns."""
    present = found.present.astype(float)
    if metric == "share":
        return ratio(own["impressions"], found.totals["impressions"], present)
    if metric == "volume":
        shown = (own["impressions"] > 0) & found.present
        log = np.log(np.where(shown, own["impressions"], 1.0))
        if rest is not None and (rest["impressions"][shown] > 0).all():
            log = log - np.log(np.where(shown, rest["impressions"], 1.0))
        return np.exp(weekdays_out(log, shown, found.first.weekday())), shown.astype(float)
    if metric not in RATES or not set(RATES[metric]) <= own.keys():
        return None
    n, d = RATES[metric]
    counts = own[n]
    if rest is not None and {n, d} <= rest.keys():
        usual = rest[n] / np.maximum(rest[d], 1)
        usual = np.maximum(usual, usual.mean() / 10)
        if usual.mean() <= 0:
            return None
        counts = counts / usual * usual.mean()
    return ratio(counts, own[d], present)


def _move(metric: str, own: Sums, rest: Sums | None, found: Series, masks: Masks) -> Move | None:
    track = _track(metric, own, rest, found)
    if track is None:
        return None
    y, weight = track
    levels, squares, days, inverse = [], 0.0, 0, 0.0
    for mask in masks:
        w = np.where(mask, weight, 0.0)
        if (w > 0).sum() < 2:
            return None
        levels.append(float((w * y).sum() / w.sum()))
        squares += float((w * (y - levels[-1]) ** 2).sum())
        days += int((w > 0).sum())
        inverse += 1 / float(w.sum())
    if max(levels) <= 0 or days < 4:
        return None
    error = np.sqrt(max(squares, 1e-12) / (days - 2) * inverse)
    first, second = np.maximum(levels, NOTHING * max(levels))  # from or to nothing has no logarithm
    return Move(float(np.log(second / first)), (levels[1] - levels[0]) / float(error))


def _within_days(metric: str, own: Sums, rest: Sums | None, found: Series, masks: Masks, whole: Move) -> bool:
    """Whether most of a change lies between the last days before and the first days after."""
    before, after = (np.flatnonzero(mask) for mask in masks)
    close = tuple(np.isin(np.arange(found.days), days) for days in (before[-_AROUND:], after[:_AROUND]))
    jump = _move(metric, own, rest, found, close)
    return jump is not None and jump.change / whole.change >= _AT_ONCE
