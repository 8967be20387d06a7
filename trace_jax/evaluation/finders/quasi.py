"""The quasi-likelihood scan: how much better the data are explained if something happened in a slice than if not.

A count y[t, s] of segment s on day t (clicks, given impressions; orders, given clicks; ...) has expectation

    e[t, s] r[s] c[t] (1 + b f[t] 1{s in slice})

with a level r of each segment, a factor c of each day that all segments share, and an effect b that follows an onset
shape f. Its variance is that of the counts plus a squared coefficient of variation times the squared expectation,
which comes from the baseline half: overdispersed days are no signal. The score of b is solved for each segment, and a
slice is held against the rest of the campaign, as in `simulator.statistics` (there for sudden onsets only, and with
the noise that days share still in it). Half the square of a z is the gain in quasi-log-likelihood.

Totals of the campaign are regressed, day by day, on those of its siblings, which share market and season.

Axis letters: F onset shapes, T days, S segments, K slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.evaluation.finders.campaign import Campaign

RATES = ("ctr", "cvr", "cpc", "share")
TOTALS = ("volume", "ctr", "cvr", "cpc", "stock")
DELAYS, RAMPS = (0.0, 0.2, 0.4, 0.6), (0.35, 0.7, 1.0)  # of the second half; sudden onsets, then lengths of ramps
GRADUAL = np.array([False] * len(DELAYS) + [True] * len(RAMPS))
MIN_EVENTS = 20  # clicks in the baseline that a slice and the rest of the campaign need
_PSEUDO = 2.0  # events that a segment's rate borrows from the campaign's
_STOCK_SD = 0.005  # a stock that never moves is known no better than that


def onsets(after: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "F T"]:
    """Shapes of an onset in the second half: 0 before, 1 at full size."""
    place = np.where(after, np.cumsum(after), 0.0) / max(int(after.sum()), 1)  # of the second half, in (0, 1]
    sudden = [(place > delay) & after for delay in DELAYS]
    return np.stack([*sudden, *(np.clip(place / length, 0.0, 1.0) for length in RAMPS)]).astype(np.float64)


@dataclass(frozen=True)
class Scan:
    """z of everything that is looked at, positive for a rise.

    Attributes:
        slices: of each slice against the rest of the campaign, by `RATES` and onset shape.
        totals: of the campaign against its siblings, by `TOTALS` and onset shape.
        testable: slices with enough clicks inside and outside.
    """

    slices: Float[np.ndarray, "4 F K"]
    totals: Float[np.ndarray, "5 F"]
    testable: Bool[np.ndarray, " K"]


def scan(campaign: Campaign) -> Scan:
    """All z of one campaign."""
    shapes, members = onsets(campaign.after), campaign.members
    day_total = np.broadcast_to(campaign.impressions.sum(1, keepdims=True), campaign.impressions.shape)
    series = (
        (campaign.clicks, campaign.impressions, "counts"),
        (campaign.orders, campaign.clicks, "counts"),
        (campaign.spend, campaign.clicks, "amounts"),
        (campaign.impressions, day_total, "shares"),
    )
    z = np.stack([_against_rest(*_segments(y, e, campaign.after, shapes, kind), members) for y, e, kind in series])
    clicks = campaign.clicks[~campaign.after].sum(0)
    inside = clicks @ members
    testable = (np.minimum(inside, clicks.sum() - inside) >= MIN_EVENTS) & (members.sum(0) > 0)
    return Scan(np.where(testable, z, 0.0), _totals(campaign, shapes), testable)


def _segments(
    y: Float[np.ndarray, "T S"],
    e: Float[np.ndarray, "T S"],
    after: Bool[np.ndarray, " T"],
    shapes: Float[np.ndarray, "F T"],
    kind: str,
) -> tuple[Float[np.ndarray, "F S"], Float[np.ndarray, "F S"]]:
    """Precision of each segment's own effect, and precision times effect.

    Args:
        kind: "counts": variance of counts plus that of rates; "amounts": of rates only; "shares": in proportion to the
            expectation.
    """
    rate = y.sum() / max(e.sum(), 1e-9)
    pseudo = _PSEUDO / max(rate, 1e-9)
    level = (y.sum(0) + _PSEUDO) / (e.sum(0) + pseudo)
    expected = e * level
    if kind != "shares":  # which add up to one on every day as they are
        expected = expected * (y.sum(1, keepdims=True) / np.maximum(expected.sum(1, keepdims=True), 1e-9))
    seen = expected > 0
    deviation = np.where(seen, y / np.where(seen, expected, 1.0) - 1.0, 0.0)
    weight = np.where(seen, _weights(y, expected, ~after, kind), 0.0)
    total = np.maximum(weight.sum(0), 1e-12)
    weighted = shapes @ weight  # [F, S]
    mean = weighted / total
    precision = np.maximum((shapes**2) @ weight - mean * weighted, 0.0)
    moved = shapes @ (weight * deviation) - mean * (weight * deviation).sum(0)
    return precision, moved


def _weights(
    y: Float[np.ndarray, "T S"], expected: Float[np.ndarray, "T S"], before: Bool[np.ndarray, " T"], kind: str
) -> Float[np.ndarray, "T S"]:
    """Inverse variance of y / expected. Noise is that of the baseline half around the baseline's own levels."""
    base, mean = y[before], expected[before]
    own = mean * (base.sum(0) / np.maximum(mean.sum(0), 1e-9))
    days = len(base)
    squares = ((base - own) ** 2).sum() * days / max(days - 1, 1)
    if kind == "shares":
        factor = max(squares / max(own.sum(), 1e-9), 1.0)
        return expected / factor
    beyond = max(squares - (own.sum() if kind == "counts" else 0.0), 0.0)
    variation = beyond / max((own**2).sum(), 1e-9)
    if kind == "counts":
        return expected / (1.0 + variation * expected)
    return np.full_like(expected, 1.0 / max(variation, 1e-6))


def _against_rest(
    precision: Float[np.ndarray, "F S"], moved: Float[np.ndarray, "F S"], members: Float[np.ndarray, "S K"]
) -> Float[np.ndarray, "F K"]:
    """z of the effect inside each slice against that of the rest of the campaign."""
    inside, inside_moved = precision @ members, moved @ members
    outside, outside_moved = precision.sum(1, keepdims=True) - inside, moved.sum(1, keepdims=True) - inside_moved
    known = (inside > 1e-9) & (outside > 1e-9)
    safe_in, safe_out = np.where(known, inside, 1.0), np.where(known, outside, 1.0)
    gap = inside_moved / safe_in - outside_moved / safe_out
    return np.where(known, gap * np.sqrt(safe_in * safe_out / (safe_in + safe_out)), 0.0)


def _totals(campaign: Campaign, shapes: Float[np.ndarray, "F T"]) -> Float[np.ndarray, "5 F"]:
    """z of the campaign's own totals."""
    own = [x.sum(1) for x in (campaign.impressions, campaign.clicks, campaign.orders, campaign.spend)]
    theirs = list(campaign.siblings.T)
    rows = [regressed(_log(own[0]), [_log(theirs[0])], shapes)]
    for top, bottom in ((1, 0), (2, 1), (3, 1)):
        z = regressed(_log(own[top]) - _log(own[bottom]), [_log(theirs[top]) - _log(theirs[bottom])], shapes)
        rows.append(z)
    return np.stack([*rows, regressed(campaign.in_stock, [], shapes, floor=_STOCK_SD)])


def _log(x: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    return np.log(np.maximum(x, 0.5))


def regressed(
    y: Float[np.ndarray, " T"],
    others: Sequence[Float[np.ndarray, " T"]],
    shapes: Float[np.ndarray, "F T"],
    floor: float = 1e-3,
) -> Float[np.ndarray, " F"]:
    """t of each shape in the regression of y on a constant, other series and that shape alone.

    Args:
        floor: least standard deviation of a day.
    """
    known = np.stack([np.ones_like(y), *(x for x in others if np.ptp(x) > 1e-12)])
    basis, _ = np.linalg.qr(known.T)
    rest, left = y - basis @ (basis.T @ y), shapes - (shapes @ basis) @ basis.T
    square = (left**2).sum(1)
    free = max(len(y) - len(known) - 1, 1)
    explained = (left @ rest) ** 2 / np.maximum(square, 1e-12)
    variance = np.maximum((rest @ rest - explained) / free, floor**2)
    return np.where(square > 1e-9, (left @ rest) / np.sqrt(np.maximum(square, 1e-12) * variance), 0.0)
