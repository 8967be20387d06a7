"""The two windows that are compared: as the user gave them, or split at the day that parts the series best.

The proposal fits one step to every series at every day: two levels, weighted by the denominators, noise from the
residuals of the same fit. The largest |step / standard error| over all series and days wins, if it is above `LOUD`;
about twenty series and twenty days are tried, so the bar lies well above the 2 of one test. Weekdays are taken out
of volumes first. One step only: a change that ends again, or two changes, are not found by it.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.config import ConfigError
from trace_jax.diagnose.reading import EARLIEST, LATEST
from trace_jax.diagnose.series import Series

LOUD = 5.0
SHORTEST = 5  # days of a proposed window
MIN_BEFORE, MIN_AFTER = 4, 2  # days with rows; the noise is measured before
FEW_CLICKS = 200  # a slice with fewer in all has no say
RATES = {"ctr": ("clicks", "impressions"), "cvr": ("orders", "clicks"), "cpc": ("spend", "clicks")}

Span = tuple[datetime.date, datetime.date]


@dataclass(frozen=True)
class Windows:
    """First and last day of either window, both included.

    Attributes:
        how: how they came about, in words.
        loudness: of the step at the proposed day; None of windows that were given.
    """

    before: Span
    after: Span
    how: str
    loudness: float | None = None


def parse(text: str, flag: str) -> Span:
    """ "A:B" as two dates. ConfigError otherwise."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d):(\d{4}-\d\d-\d\d)", text.strip())
    try:
        first, last = (datetime.date.fromisoformat(part) for part in found.groups()) if found else (None, None)
    except ValueError:
        first = last = None
    if first is None or last is None:
        raise ConfigError(f"{flag} {text}: give first and last day, e.g. {flag} 2026-11-02:2026-11-15")
    if last < first:
        raise ConfigError(f"{flag} {text}: the last day comes before the first")
    if first < EARLIEST or last > LATEST:
        raise ConfigError(f"{flag} {text}: days lie between {EARLIEST} and {LATEST}; name days that the tables hold")
    return first, last


def given(before: Span, after: Span, found: Series) -> Windows:
    """The user's windows. ConfigError if they overlap or hold too few days."""
    if after[0] <= before[1]:
        raise ConfigError(f"--after begins on {after[0]}, within or before --before: windows must follow each other")
    result = Windows(before, after, "as given")
    _check(result, found)
    return result


def _present(span: Span, found: Series) -> int:
    low, high = ((day - found.first).days for day in span)
    return int(found.present[max(low, 0) : max(high + 1, 0)].sum())


def _check(windows: Windows, found: Series) -> None:
    for name, span, least in (("before", windows.before, MIN_BEFORE), ("after", windows.after, MIN_AFTER)):
        there = _present(span, found)
        if there < least:
            held = f"the tables hold {found.first} to {found.last}"
            raise ConfigError(
                f"the window {name} ({span[0]} to {span[1]}) has {there} days with rows, it needs {least}; {held}"
            )


def propose(found: Series, last: int | None = None) -> Windows:
    """Windows that meet at the day where one step fits best, or in the middle if none stands out.

    Args:
        last: number of days to look at, from the first; the rest is incomplete.

    Raises:
        ConfigError: too few days.
    """
    days = found.days if last is None else max(last, 0)
    least = MIN_BEFORE + MIN_AFTER
    there = int(found.present[:days].sum())
    if there < least:
        held = f"one day ({found.first})" if there == 1 else f"{there} days"
        cut = f" without the last {found.days - days} (--lag)" if days < found.days else ""
        raise ConfigError(
            f"the tables hold {held} of campaign {found.campaign!r}{cut}: a diagnosis needs at least {least} to compare"
        )
    loudest, at, name = 0.0, 0, ""
    shortest, able = max(min(SHORTEST, days // 3), MIN_AFTER), _able(found.present[:days])
    for label, y, weight in _tracks(found, days):
        scores = np.where(able, step_scores(y, weight, shortest), 0.0)
        t = int(np.argmax(np.abs(scores)))
        if abs(scores[t]) > loudest:
            loudest, at, name = float(abs(scores[t])), t, label
    end = found.date(days - 1)
    if loudest >= LOUD:
        how = f"proposed: {name} steps on {found.date(at)} (step / standard error {loudest:.1f}; one step per series)"
    else:
        at = (days + 1) // 2
        if not able[at]:  # days are missing: halves of those that are there
            at = int(np.flatnonzero(found.present[:days])[max(there // 2, MIN_BEFORE)])
        how = f"proposed: halves, no day stands out (largest step / standard error {loudest:.1f}, needed {LOUD:g})"
    result = Windows((found.first, found.date(at - 1)), (found.date(at), end), how, loudest)
    _check(result, found)
    return result


def _able(present: Bool[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
    """Days before which two windows can meet: both then hold enough days with rows."""
    earlier = np.cumsum(present) - present
    return (earlier >= MIN_BEFORE) & (present.sum() - earlier >= MIN_AFTER)


def step_scores(y: Float[np.ndarray, " T"], weight: Float[np.ndarray, " T"], shortest: int) -> Float[np.ndarray, " T"]:
    """Step / standard error of two weighted levels that meet before day t; 0 where a level would be too short."""
    total, wy, wyy = np.cumsum(weight), np.cumsum(weight * y), np.cumsum(weight * y * y)
    freedom, out = int((weight > 0).sum()) - 2, np.zeros(len(y))
    t = np.arange(shortest, len(y) - shortest + 1)
    t = t[(total[t - 1] > 0) & (total[-1] - total[t - 1] > 0)]
    if freedom < 2 or not len(t):
        return out
    w1, w2 = total[t - 1], total[-1] - total[t - 1]
    m1, m2 = wy[t - 1] / w1, (wy[-1] - wy[t - 1]) / w2
    rest = wyy[-1] - w1 * m1 * m1 - w2 * m2 * m2
    variance = np.maximum(rest, 1e-12 * max(wyy[-1], 1e-300)) / freedom
    out[t] = (m2 - m1) / np.sqrt(variance * (1 / w1 + 1 / w2))
    return out


def _tracks(found: Series, days: int):
    """(name, values, weights) of the series that may step: log volume, rates, and rates and shares of every value."""
    present = found.present[:days].astype(float)
    volume = found.totals["impressions"][:days]
    shown = (volume > 0) & (present > 0)
    log = np.log(np.where(shown, volume, 1.0))
    others = found.siblings.get("impressions")
    if others is not None and (others[:days][shown] > 0).all():
        log = log - np.log(np.where(shown, others[:days], 1.0))
    yield "volume", weekdays_out(log, shown, found.first.weekday()), shown.astype(float)
    for name, (n, d) in RATES.items():
        if {n, d} <= found.totals.keys():
            yield name.upper(), *ratio(found.totals[n][:days], found.totals[d][:days], present)
    for (dimension, value), own in found.values.items():
        clicks, impressions = own["clicks"][:days], own["impressions"][:days]
        all_clicks = found.totals["clicks"][:days]
        if clicks.sum() < FEW_CLICKS or all_clicks.sum() - clicks.sum() < FEW_CLICKS:
            continue
        rest = np.maximum(all_clicks - clicks, 0) / np.maximum(volume - impressions, 1)
        usual = np.maximum(rest, rest.mean() / 10)
        y, w = ratio(clicks / usual * usual.mean(), impressions, present)
        yield f"CTR of {dimension} {value!r} against the rest", y, w
        yield f"share of {dimension} {value!r}", *ratio(impressions, volume, present)


def ratio(n: np.ndarray, d: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Daily ratios and their weights, the denominators; 0 on days without."""
    there = (d > 0) & (present > 0)
    return np.where(there, n / np.where(there, d, 1.0), 0.0), np.where(there, d, 0.0)


def weekdays_out(y: np.ndarray, there: np.ndarray, first: int) -> np.ndarray:
    """A series without the mean of each weekday; as it is when it has no two weeks."""
    if there.sum() < 14:
        return y
    weekday = (np.arange(len(y)) + first) % 7
    out, mean = y.copy(), y[there].mean()
    for k in range(7):
        own = there & (weekday == k)
        if own.sum() >= 2:
            out[weekday == k] -= y[own].mean() - mean
    return out
