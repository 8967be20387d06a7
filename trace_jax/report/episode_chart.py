"""Daily curves of an episode, or of a user's campaign, as inline SVG: windows shaded, onset marked, missing days as
gaps. Colours come from the page's CSS variables, values by day from the browser's own tooltips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.report.svg import nice_ticks

WIDTH, HEIGHT = 540, 180
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 22
MIN_SPAN = 0.25  # of the largest value: a flat curve looks flat
_TICK_PIXELS = 48  # room of a date


@dataclass(frozen=True)
class Curve:
    """`style`: class of the CSS. `levels`: means before and in the window, drawn as steps if given."""

    label: str
    style: str
    values: Float[np.ndarray, " T"]  # NaN: a gap
    levels: tuple[float, float] | None = None


@dataclass(frozen=True)
class Days:
    """The time axis that all charts of a page share."""

    dates: tuple[str, ...]  # ISO
    weekdays: tuple[int, ...]  # 0: Monday
    present: Bool[np.ndarray, " T"]
    half: int  # first day of the intervention window
    onset: int | None  # None: nothing happened
    windows: tuple[tuple[int, int], tuple[int, int]] | None = None  # [first, end) of both, if they are not the halves

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """[first, end) of the days before and of the days in question."""
        return self.windows or ((0, self.half), (self.half, len(self.dates)))

    def x(self, t: float) -> float:
        """Left edge of day `t`."""
        return LEFT + t / len(self.dates) * (WIDTH - LEFT - RIGHT)


def series_chart(
    title: str, curves: Sequence[Curve], days: Days, text: Callable[[float], str], most: float = math.inf
) -> str:
    """The curves over the days; empty if none has a finite value. `text` spells a value, `most` is the highest there
    can be."""
    drawn = [c for c in curves if np.isfinite(c.values).any()]
    if not drawn:
        return ""
    known = np.concatenate([c.values[np.isfinite(c.values)] for c in drawn])
    low, high = _span(float(known.min()), float(known.max()))
    high = min(high, max(most, float(known.max())))

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    if days.windows is not None:
        parts.append(_column("before", *map(days.x, days.windows[0])))
    parts.append(_column("window", *map(days.x, days.spans[1])))
    parts += [_column("missing", days.x(t), days.x(t + 1)) for t in np.flatnonzero(~days.present)]
    for value in nice_ticks(low, high, 5):
        parts.append(_line("grid", LEFT, y(value), WIDTH - RIGHT, y(value)))
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{text(value)}</text>')
    mondays = [t for t, weekday in enumerate(days.weekdays) if weekday == 0]
    step = max(1, math.ceil(_TICK_PIXELS * len(mondays) / (WIDTH - LEFT - RIGHT)))
    for t in mondays[::step]:
        anchor = "end" if days.x(t) > WIDTH - _TICK_PIXELS else "start"
        parts.append(_line("grid", days.x(t), TOP, days.x(t), HEIGHT - BOTTOM))
        parts.append(
            f'<text class="tick" x="{days.x(t):.1f}" y="{HEIGHT - 7}" text-anchor="{anchor}">{days.dates[t][5:]}</text>'
        )
    if days.onset is not None:
        parts.append(_line("onset", days.x(days.onset), TOP, days.x(days.onset), HEIGHT - BOTTOM))
    for curve in reversed(drawn):  # the first lies on top
        places = [
            f"{days.x(t + 0.5):.1f},{y(float(v)):.1f}" if math.isfinite(v) else None for t, v in enumerate(curve.values)
        ]
        parts += _runs(curve.style, places)
        for level, (a, b) in zip(curve.levels or (), days.spans, strict=False):
            if low <= level <= high:
                parts.append(_line(f"level {curve.style}", days.x(a), y(level), days.x(b), y(level)))
    for t, date in enumerate(days.dates):
        said = "; ".join(f"{c.label} {text(float(c.values[t]))}" for c in drawn if math.isfinite(c.values[t]))
        parts.append(_column("hover", days.x(t), days.x(t + 1), f"{date}: {said or 'no data'}"))
    return "".join([*parts, "</svg>"])


def _span(low: float, high: float) -> tuple[float, float]:
    """Range of the axis. What cannot be negative is not shown to be."""
    least = MIN_SPAN * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        low, high = min(low, middle - least / 2), max(high, middle + least / 2)
    margin = (high - low) * 0.04
    return max(low - margin, 0.0) if low >= 0 else low - margin, high + margin


def _runs(style: str, places: Sequence[str | None]) -> list[str]:
    """Polylines of the days without a gap; a single day is a dot."""
    parts: list[str] = []
    run: list[str] = []
    for place in [*places, None]:
        if place is not None:
            run.append(place)
        elif run:
            x, y = run[0].split(",")
            dot = f'<circle class="dot {style}" cx="{x}" cy="{y}" r="2"/>'
            parts.append(dot if len(run) == 1 else f'<polyline class="curve {style}" points="{" ".join(run)}"/>')
            run = []
    return parts


def _line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _column(style: str, left: float, right: float, said: str = "") -> str:
    inner = f"<title>{escape(said)}</title>" if said else ""
    return (
        f'<rect class="{style}" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM}">{inner}</rect>'
    )
