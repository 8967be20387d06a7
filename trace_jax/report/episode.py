"""One episode as one self-contained HTML page: curves, the hidden truth, mix and rate, the oracle's margins."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa

from trace_jax.environments.ads.decompose import RATIOS, deviation
from trace_jax.report.episode_chart import Curve, Days, series_chart
from trace_jax.report.episode_facts import Facts, Margin
from trace_jax.report.episode_template import PAGE
from trace_jax.report.target import put
from trace_jax.simulator.causes import CAUSES, NO_SIGNAL
from trace_jax.simulator.oracle import OracleParams

SHOWN_ROWS = 6  # of each table
_DESCRIPTIONS = {cause.name: cause.description for cause in CAUSES}
_NAMES = {
    "impressions": "Impressions a day",
    "share": "Share of the campaign's impressions",
    "ctr": "CTR",
    "cvr": "CVR",
    "cpc": "CPC",
    "spend": "Spend a day",
    "in_stock": "Catalogue in stock",
}
_OF_CAMPAIGN = ("impressions", "ctr", "cvr", "cpc", "spend", "in_stock")
_OF_SLICE = ("share", "impressions", "ctr", "cvr", "cpc", "spend")
SHARES = ("share", "ctr", "cvr", "in_stock")
_HEADINGS = {"check": "Checks of the label", "rival cause": "Rival causes", "rival slice": "Nearest rival slices"}


def write(out: Path, facts: Facts, title: str, question: str) -> Path:
    """Build the page and put it in place in one step.

    Raises:
        ConfigError: it cannot be written.
    """
    return put(out, build(facts, title, question))


def build(facts: Facts, title: str, question: str) -> str:
    """The page as text."""
    record = facts.record
    days = days_of(facts)
    onset = "" if days.onset is None else days.dates[days.onset]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(
        title=title,
        subtitle=f"campaign {record.campaign_id}, {days.dates[0]} to {days.dates[-1]}, window from "
        f"{days.dates[facts.half]}",
        question=question,
        truth=_truth(facts, onset),
        accepted=facts.accepted,
        failing=facts.failing,
        onset=onset,
        missing=", ".join(days.dates[t] for t in np.flatnonzero(~facts.present)),
        campaign=_charts(
            facts, days, "campaign", "siblings", ("impressions", "ctr", "cvr", "cpc", "spend", "in_stock")
        ),
        slice=facts.slice if "slice" in facts.groups else "",
        local=_charts(facts, days, "slice", "rest", _OF_SLICE),
        summary=_summary(facts),
        breakdowns=[_breakdown(facts, a) for a in facts.attributes],
        confounders=facts.confounders,
        evidence=[(name, f"{change:+.1%}", f"{z:+.1f}", wanted) for name, change, z, wanted in facts.evidence],
        local_evidence=record.type.startswith("segment"),
        gap=f"{OracleParams().slice_gap:g}",
        margins=_margins(facts.margins),
        tables=[
            *(_table(name, table, False) for name, table in record.visible().items()),
            *(_table(name, table, True) for name, table in record.hidden().items()),
        ],
    )


def text_of(metric: str, value: float) -> str:
    """A value of a metric as people read it."""
    if not np.isfinite(value):
        return "-"
    if metric in SHARES:
        return f"{value:.2%}" if abs(value) < 0.1 else f"{value:.1%}"
    return f"{value:,.2f}" if metric == "cpc" else f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}"


def days_of(facts: Facts) -> Days:
    """The time axis."""
    dates = tuple(facts.date(t) for t in range(facts.days))
    return Days(
        dates=dates,
        weekdays=tuple(datetime.date.fromisoformat(d).weekday() for d in dates),
        present=facts.present,
        half=facts.half,
        onset=None if facts.record.cause == NO_SIGNAL else facts.record.onset,
    )


def _truth(facts: Facts, onset: str) -> list[tuple[str, str]]:
    record = facts.record
    truth = [("hidden cause", f"{record.cause}: {_DESCRIPTIONS[record.cause]}"), ("type", record.type)]
    if facts.slice:
        truth.insert(1, ("in the slice", facts.slice))
    if onset:
        truth.append(("onset", f"{onset} (day {record.onset} of {facts.days}), {record.profile}"))
        truth.append(("strength", f"{record.strength:.2f} of the cause's range"))
        if facts.effects:
            effects = ", ".join(f"{name} x {value:.2f}" for name, value in facts.effects.items())
            truth.append(("at full onset", effects))
    return truth


def _charts(facts: Facts, days: Days, group: str, against: str, metrics: tuple[str, ...]) -> list[dict[str, str]]:
    """Each metric of `group`, and of `against` at the baseline level of `group`."""
    charts = []
    for metric in metrics if group in facts.groups else ():
        values, levels = facts.groups[group][metric], facts.level(group, metric)
        style = "slice" if group == "slice" else "main"
        curves = [Curve(group, style, values, levels)]
        note = f"{group} {_step(facts, group, metric)}"
        if metric in facts.groups.get(against, {}):
            other = facts.level(against, metric)[0]
            scale = levels[0] / other if other > 0 and levels[0] > 0 and metric != "in_stock" else 1.0
            curves.append(Curve(against, "rest", facts.groups[against][metric] * scale))
            note += f"; {against} {_step(facts, against, metric)}"
        if metric == "spend" and group == "campaign":
            curves.append(Curve("budget", "limit", facts.groups[group]["budget"]))
        most = 1.0 if metric in SHARES else np.inf
        title = f"{_NAMES[metric]} of the {group} by day"
        svg = series_chart(title, curves, days, lambda v, m=metric: text_of(m, v), most)
        if svg:
            charts.append({"name": _NAMES[metric], "note": note, "svg": svg})
    return charts


def _step(facts: Facts, group: str, metric: str) -> str:
    before, after = facts.level(group, metric)
    change = facts.change(group, metric)
    said = f" ({change:+.1%})" if np.isfinite(change) else ""
    return f"{text_of(metric, before)} to {text_of(metric, after)}{said}"


def _unit(metric: str, value: float) -> str:
    """A part of a change: percentage points for rates."""
    return f"{value:+.3f}" if metric == "cpc" else f"{100 * value:+.3f} pp"


def _summary(facts: Facts) -> dict[str, Any]:
    rows = []
    for attribute in facts.attributes:
        row = [attribute]
        for metric in RATIOS:
            parts = facts.breakdown(metric, attribute).parts
            row += [text_of(metric, np.nan if x is None else x) for x in (parts.before, parts.after)]
            row += [_unit(metric, float(part.sum())) for part in (parts.mix, parts.rate)]
        rows.append(row)
    return {"metrics": [metric.upper() for metric in RATIOS], "rows": rows}


def _breakdown(facts: Facts, attribute: str) -> dict[str, Any]:
    found = facts.breakdown("ctr", attribute)
    own = dict(facts.record.driver)
    (d1, d2), (n1, n2) = found.denominator, found.numerator
    ratio = [n / np.where(d > 0, d, np.nan) for n, d in ((n1, d1), (n2, d2))]
    expected = np.where(d1 > 0, d2 * n1 / np.where(d1 > 0, d1, 1.0), n2)
    score = deviation(n2, expected)
    rows = []
    for g, value in enumerate(found.values):
        cells = [value, *(f"{d[g] / max(d.sum(), 1):.1%}" for d in (d1, d2)), *(text_of("ctr", r[g]) for r in ratio)]
        cells += [_unit("ctr", found.parts.mix[g]), _unit("ctr", found.parts.rate[g]), f"{score[g]:+.3f}"]
        rows.append(("mark" if own.get(attribute) == value else "", cells))
    parts = found.parts
    levels = [text_of("ctr", np.nan if x is None else x) for x in (parts.before, parts.after)]
    totals = [_unit("ctr", float(part.sum())) for part in (parts.mix, parts.rate)]
    rows.append(("sum", ["total", "", "", *levels, *totals, ""]))
    return {"attribute": attribute, "rows": rows, "warning": parts.warning}


def _margins(margins: tuple[Margin, ...]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """By kind: heading, unit, and rows with the bar's width in percent of the column. Widths grow with the square root:
    one margin of a thousand leaves the small ones visible."""
    result = []
    for kind, heading in _HEADINGS.items():
        rows = [m for m in margins if m.kind == kind]
        longest = max((abs(m.slack) for m in rows), default=1.0) or 1.0
        drawn = [
            {
                "name": m.name,
                "passed": m.passed,
                "text": f"{m.slack:+.2f}",
                "width": round(100 * float(np.sqrt(abs(m.slack) / longest)), 1) if np.isfinite(m.slack) else 0.0,
            }
            for m in rows
        ]
        if rows:
            result.append((heading, " or ".join(dict.fromkeys(m.unit for m in rows)), drawn))
    return result


def _table(name: str, table: pa.Table, hidden: bool) -> dict[str, Any]:
    head = [
        [f"{v:.4g}" if isinstance(v, float) and abs(v) < 1e3 else f"{v:.2f}" if isinstance(v, float) else str(v)
         for v in row.values()]
        for row in table.slice(0, SHOWN_ROWS).to_pylist()
    ]  # fmt: skip
    return {"name": name, "rows": table.num_rows, "columns": table.column_names, "head": head, "hidden": hidden}
