"""One episode in 80 columns: what was asked, the hidden truth, curves, confounders, the oracle's weakest margins."""

from __future__ import annotations

import math
import textwrap

import numpy as np
from jaxtyping import Float

from trace_jax.report.episode import text_of
from trace_jax.report.episode_facts import Facts
from trace_jax.simulator.causes import NO_SIGNAL

WIDTH = 80
BARS = "▁▂▃▄▅▆▇█"
GAP = "·"
SHOWN_MARGINS = 8
_HALF = 14  # characters of a half's curve; longer windows take several days a character
_LABEL = 12
_LEAST_SPAN = 0.5  # of the highest value: noise does not fill the whole height


def lines(facts: Facts, title: str, question: str) -> list[str]:
    """The view; no line is longer than WIDTH (in characters)."""
    out = [f" {title} ".center(WIDTH, "─"), *_wrapped("asked", question), *_truth(facts), ""]
    out.append(_row("campaign", _head(facts), "before", "after", "change", "siblings"))
    for metric in ("impressions", "ctr", "cvr", "cpc", "spend", "in_stock"):
        out.append(_measured(facts, metric, "campaign", metric, "siblings"))
    if facts.record.cause != NO_SIGNAL:
        out.append(_onset(facts))
    if "slice" in facts.groups:
        out += ["", *_wrapped("slice", f"{facts.slice} against the rest")]
        out.append(_measured(facts, "share", "slice", "share"))
        for metric in ("ctr", "cvr", "cpc"):
            out.append(_measured(facts, metric, "slice", metric))
            out.append(_measured(facts, "  rest", "rest", metric))
    out += ["", *_confounders(facts), *_margins(facts)]
    return out


def _wrapped(label: str, text: str) -> list[str]:
    broken = textwrap.wrap(text, WIDTH - _LABEL) or [""]
    return [f"{label if n == 0 else '':<{_LABEL}}{line}" for n, line in enumerate(broken)]


def _truth(facts: Facts) -> list[str]:
    record = facts.record
    said = record.cause + (f" in {facts.slice}" if facts.slice else "")
    found = [*_wrapped("hidden", f"{said} ({record.type})")]
    if record.cause != NO_SIGNAL:
        effects = "".join(f", {name} x {value:.2f}" for name, value in facts.effects.items())
        found += _wrapped("", f"{record.profile} onset, strength {record.strength:.2f}{effects}")
    if facts.accepted:
        return [*found, *_wrapped("oracle", "accepts it")]
    for n, reason in enumerate(facts.failing):
        found += _wrapped("" if n else "oracle", f"{'' if n else 'rejects it: '}{reason}")
    return found


def _size(facts: Facts) -> int:
    """Days of one character."""
    return max(1, math.ceil((facts.days - facts.half) / _HALF))


def _head(facts: Facts) -> str:
    size = _size(facts)
    unit = "1 day" if size == 1 else f"{size} days"
    return f"{unit} a bar"


def curve(values: Float[np.ndarray, " T"], half: int, size: int) -> str:
    """Bars of the days before | in the window, from the lowest to the highest; a dot where there is nothing."""
    halves = [
        [part[start : start + size] for start in range(0, len(part), size)] for part in (values[:half], values[half:])
    ]
    means = [[np.nanmean(x) if np.isfinite(x).any() else np.nan for x in bins] for bins in halves]
    known = [m for part in means for m in part if np.isfinite(m)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    low = max(0.0, min(low, high - _LEAST_SPAN * abs(high)))
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    drawn = ["".join(BARS[round((m - low) * scale)] if np.isfinite(m) else GAP for m in part) for part in means]
    return "|".join(drawn)


def _short(metric: str, value: float) -> str:
    text = text_of(metric, value)
    return text if len(text) <= 10 else f"{value:.3g}"


def _percent(change: float) -> str:
    return f"{change:+.1%}" if np.isfinite(change) else "-"


def _row(label: str, drawn: str, *columns: str) -> str:
    widths = (11, 11, 8, 9)
    cells = "".join(f"{text:>{width}}" for text, width in zip(columns, widths, strict=False))
    return f"{label:<{_LABEL}}{drawn:<29}{cells}".rstrip()


def _measured(facts: Facts, label: str, group: str, metric: str, against: str = "") -> str:
    before, after = (_short(metric, v) for v in facts.level(group, metric))
    other = _percent(facts.change(against, metric)) if metric in facts.groups.get(against, {}) else ""
    drawn = curve(facts.groups[group][metric], facts.half, _size(facts))
    return _row(label, drawn, before, after, _percent(facts.change(group, metric)), other)


def _onset(facts: Facts) -> str:
    size, onset = _size(facts), facts.record.onset
    column = math.ceil(facts.half / size) + 1 + (onset - facts.half) // size
    return f"{'onset':<{_LABEL}}{' ' * column}^ day {onset}, {facts.date(onset)}"


def _confounders(facts: Facts) -> list[str]:
    found = []
    for n, c in enumerate(facts.confounders):
        text = f"{c.name} {c.shown}"
        found.append(f"{'' if n else 'confounders':<{_LABEL}}{text}"[:WIDTH])
    return found or ["confounders none"]


def _margins(facts: Facts) -> list[str]:
    """Of all kinds, the weakest first."""
    order = sorted(facts.margins, key=lambda m: m.slack)
    found = []
    for n, m in enumerate(order[:SHOWN_MARGINS]):
        unit = "z" if m.unit == "z" else "ll"
        name = m.name if m.kind == "check" else f"rival {m.name}"
        text = f"{'' if n else 'margins':<{_LABEL}}{m.slack:+7.2f} {unit:<2} {name}"
        found.append(text if len(text) <= WIDTH else text[: WIDTH - 1] + "…")
    more = f"{len(order) - SHOWN_MARGINS} more; " if len(order) > SHOWN_MARGINS else ""
    found.append(f"{'':<{_LABEL}}{more}negative fails; z: standard errors, ll: log-likelihood")
    return found
