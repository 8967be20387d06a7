"""What is wrong with the tables, before anything is concluded from them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np

from trace_jax.config import ConfigError
from trace_jax.diagnose import synonyms
from trace_jax.diagnose.loading import Loaded
from trace_jax.diagnose.series import ALL, Series

DIFFERENT = 0.01  # relative difference of two totals that is worth a line
LAG_DAYS = 7  # conversions of so many last days may still come in
LATE_Z = 3.0
EXPECTED = 20  # clicks or orders that days without any would have had, or clicks and orders without an amount
HALF_DAY = 0.3  # a last day with a smaller share of the usual impressions ended too early


@dataclass(frozen=True)
class Finding:
    """One line of the report; `serious` ones make the answer doubtful."""

    name: str
    text: str
    serious: bool = False


@dataclass(frozen=True)
class Report:
    """All findings, and how many last days are incomplete (late conversions, or a day cut short)."""

    findings: tuple[Finding, ...]
    incomplete: int = 0


def report(loaded: Loaded, found: Series, lag: int | None, begins: datetime.date | None = None) -> Report:
    """Looks at a campaign's series.

    Args:
        lag: last days to leave out; None: as many as look incomplete.
        begins: first day of the later window, where the user gave it.

    Raises:
        ConfigError: the days to leave out are the whole of that window.
    """
    rows, cells = loaded.ask("SELECT count(*), count(DISTINCT ds) FROM mine")[0]
    out = [
        Finding(
            "span",
            f"{found.first} to {found.last}: {cells} days with rows, {rows:,} rows of campaign {found.campaign!r}",
        )
    ]
    out += [Finding("note", text) for text in loaded.notes] + [Finding("doubt", text, True) for text in loaded.problems]
    out += _gaps(found) + _counts(loaded, found) + _agreement(loaded, found)
    looks, text = incomplete_days(found)
    used = looks if lag is None else lag
    inside = begins is not None and found.date(found.days - used) <= begins <= found.last
    if lag and inside:
        raise ConfigError(
            f"--lag {lag} leaves out all days of --after, which begins on {begins} (the tables end on {found.last}): "
            "give a smaller --lag, or an --after that begins earlier"
        )
    if looks and lag is None and inside:
        out.append(Finding("late", f"{text}: kept, as --after begins in them; they may look like a fall of CVR", True))
        used = 0
    elif looks and lag is None:
        out.append(Finding("late", f"{text}: left out (--lag 0 keeps them)", True))
    elif looks and lag < looks:
        out.append(Finding("late", f"{text}: kept, as --lag {lag} says; they may look like a fall of CVR", True))
    elif lag:
        out.append(Finding("late", f"the last {lag} days are left out, as --lag says"))
    elif "orders" in found.totals:
        out.append(Finding("late", "conversions of the last days look complete"))
    return Report(tuple(out), used)


def _days(dates: list[datetime.date]) -> str:
    shown = ", ".join(map(str, dates[:5]))
    return shown + (f" and {len(dates) - 5} more" if len(dates) > 5 else "")


def _gaps(found: Series) -> list[Finding]:
    days = np.flatnonzero(found.present)
    steps = np.diff(days)
    if len(steps) and np.median(steps) >= 6:
        rhythm = "weeks" if np.median(steps) < 10 else "months"
        return [Finding("gaps", f"rows are {rhythm}, not days: noise is hardly to be measured; export by day", True)]
    missing = [found.date(t) for t in np.flatnonzero(~found.present)]
    if not missing:
        return [Finding("gaps", "no day is missing")]
    return [Finding("gaps", f"{len(missing)} days have no rows: {_days(missing)}", len(missing) > 0.2 * found.days)]


def _counts(loaded: Loaded, found: Series) -> list[Finding]:
    out = []
    shown = found.totals["impressions"]
    empty = [found.date(t) for t in np.flatnonzero(found.present & (shown <= 0))]
    if empty:
        out.append(Finding("zeros", f"{len(empty)} days have rows but no impressions: {_days(empty)}", True))
    zero, cells = loaded.ask("SELECT count(*) FILTER (impressions = 0), count(*) FROM mine")[0]
    if zero:
        out.append(Finding("zeros", f"{zero:,} of {cells:,} rows have no impressions; their rates are unknown, not 0"))
    for smaller, larger in (("clicks", "impressions"), ("orders", "clicks")):
        if not {smaller, larger} <= set(loaded.metrics):
            continue
        count = loaded.ask(f"SELECT count(*) FROM mine WHERE {smaller} > {larger}")[0][0]
        if count:
            why = "impossible" if smaller == "clicks" else "orders after a view, or of another day's click"
            out.append(
                Finding("counts", f"{count:,} rows have more {smaller} than {larger} ({why})", smaller == "clicks")
            )
    out += _stopped(found)
    for metric in loaded.metrics:
        own = f"SELECT count(*) FROM cells WHERE {metric} < 0 AND (? OR campaign = ?)"
        count = loaded.ask(own, found.campaign == ALL, found.campaign)[0][0]
        if count:
            text = f"{count:,} rows have negative {metric} (corrections?); taken as 0, added up only in the evidence"
            out.append(Finding("counts", text, True))
    return out


def _stopped(found: Series) -> list[Finding]:
    """Metrics that are 0 on all first or all last days, and not in between: a fall to nothing, or a report that does
    not have them."""
    out = []
    for metric, below in (("clicks", "impressions"), ("orders", "clicks"), ("spend", "clicks"), ("sales", "orders")):
        if not {metric, below} <= found.totals.keys():
            continue
        days = np.flatnonzero(found.present & (found.totals[below] > 0))
        some = found.totals[metric][days] > 0
        if not some.any():
            continue
        first, last = days[some][0], days[some][-1]
        rate = 1.0  # an amount belongs to every click or order
        if metric in synonyms.COUNTS:
            rate = found.totals[metric][first : last + 1].sum() / found.totals[below][first : last + 1].sum()
        sides = ((days < first, f"before {found.date(first)}"), (days > last, f"after {found.date(last)}"))
        for side, where in sides:
            own = days[side]
            if len(own) >= 2 and rate * found.totals[below][own].sum() >= EXPECTED:
                why = "did the report, or its tracking, have them then?"
                out.append(Finding("zeros", f"{metric} are 0 on all {len(own)} days {where}: {why}", True))
    return out


def _agreement(loaded: Loaded, found: Series) -> list[Finding]:
    """Totals of their own file against the sums of the rows by slice."""
    if not loaded.own_totals:
        return []
    out, compared, differ = [], [], False
    own = "SELECT DISTINCT ds FROM own_totals WHERE (? OR campaign = ?)"
    both, alone = loaded.ask(
        "SELECT count(*) FILTER (s.ds IS NOT NULL), count(*) FILTER (s.ds IS NULL)"
        f" FROM ({own}) d LEFT JOIN (SELECT DISTINCT ds FROM mine) s USING (ds)",
        found.campaign == ALL,
        found.campaign,
    )[0]
    if alone > 0.2 * (both + alone):
        out.append(
            Finding("totals", f"{alone} days are in the totals only, without slices: they are not looked at", True)
        )
    if not both:
        return out
    for metric in (*synonyms.COUNTS, *synonyms.AMOUNTS):
        if metric not in loaded.metrics or metric not in loaded.own_totals or metric not in found.totals:
            continue
        days = loaded.ask(
            f"WITH d AS (SELECT ds, sum({metric}) x FROM daily GROUP BY ds),"
            f" s AS (SELECT ds, sum({metric}) x FROM mine GROUP BY ds)"
            " SELECT ds, d.x, s.x FROM d JOIN s USING (ds)"
            f" WHERE abs(d.x - s.x) > {DIFFERENT} * greatest(abs(d.x), abs(s.x)) + 0.5 ORDER BY ds"
        )
        compared.append(metric)
        if days:
            differ = True
            day, total, summed = max(days, key=lambda r: abs(r[1] - r[2]))
            text = f"{metric} of the totals and of the slices differ on {len(days)} days, most on {day}"
            text += f": {total:,.6g} and {summed:,.6g}"
            out.append(Finding("totals", f"{text}; totals are used for the campaign, slices for slices", True))
    if compared and not differ:
        out.append(Finding("totals", f"{', '.join(compared)} of the totals and of the slices agree to {DIFFERENT:.0%}"))
    return out


def incomplete_days(found: Series) -> tuple[int, str]:
    """How many of the last days look incomplete, and why in words; 0 and "" for none.

    A fall of CVR that begins within the last days, grows from day to day and is largest on the very last one is what
    late conversions look like. A page that converts worse stays where it fell to, and where days before the last week
    of the same window have fallen too, nothing is taken away here.
    """
    shown, days = found.totals["impressions"], found.days
    usual = float(np.median(shown[:-1][found.present[:-1]])) if found.present[:-1].any() else 0.0
    weeks = np.arange(days - 1 - 7, -1, -7)  # the same weekday before: Sundays may always be quiet
    if found.present[weeks].sum() >= 2:
        usual = min(usual, float(np.median(shown[weeks][found.present[weeks]])))
    cut = 1 if days > 3 and shown[-1] < HALF_DAY * usual else 0
    if not {"orders", "clicks"} <= found.totals.keys() or days - cut < 3 * LAG_DAYS:
        return (
            cut,
            f"the last day ({found.last}) has {shown[-1] / max(usual, 1):.0%} of the usual impressions" if cut else "",
        )
    end = days - cut
    clicks, orders = found.totals["clicks"][:end], found.totals["orders"][:end]
    early, middle = slice(0, end - 2 * LAG_DAYS), slice(end - 2 * LAG_DAYS, end - LAG_DAYS)
    if clicks[early].sum() <= 0 or orders[early].sum() <= 0:
        return cut, ""
    rate = orders[early].sum() / clicks[early].sum()
    expected = rate * clicks
    residual = orders[early] - expected[early]
    noise = max(float((residual**2).sum() / max(expected[early].sum(), 1e-9)), 1.0)  # dispersion of the counts

    def z(part: slice) -> float:
        return float((orders[part] - expected[part]).sum() / np.sqrt(noise * max(expected[part].sum(), 1e-9)))

    last = slice(end - LAG_DAYS, end)
    ratio = orders[last] / np.maximum(expected[last], 1e-9)
    weight = expected[last] / max(expected[last].sum(), 1e-9)
    day = np.arange(LAG_DAYS) - (weight * np.arange(LAG_DAYS)).sum()
    falling = (weight * day * ratio).sum() < 0  # sign of the weighted slope
    late = z(slice(end - 3, end)) <= -LATE_Z and z(middle) > -2.0 and falling and ratio[-1] <= ratio[:-2].min()
    if not late:
        return (
            cut,
            f"the last day ({found.last}) has {shown[-1] / max(usual, 1):.0%} of the usual impressions" if cut else "",
        )
    fallen = np.flatnonzero(ratio < 1 - np.sqrt(noise / np.maximum(expected[last], 1e-9)))
    count = LAG_DAYS - int(fallen.min()) + cut
    return count, (
        f"the last {count} days look incomplete: orders a click fall day by day to {ratio[-1]:.0%} of the usual "
        "(late conversions)"
    )
