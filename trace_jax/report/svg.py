"""Small line charts as inline SVG: no plotting library, no script, colours from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 26
MAX_POINTS = 300  # more points than pixels only make the page heavy


def nice_ticks(low: float, high: float, target: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high] from inside."""
    if not high > low:
        return [low]
    raw = (high - low) / target
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about `limit` points: means of equal runs, so that no part of a curve is dropped."""
    size = math.ceil(len(points) / limit)
    if size <= 1:
        return list(points)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in r) / len(r), sum(y for _, y in r) / len(r)) for r in runs]


def line_chart(
    points: Sequence[tuple[float, float]],
    *,
    title: str,
    x_label: str = "step",
    beside: Sequence[tuple[float, float]] = (),
) -> str:
    """One curve with axes and ticks, and another one `beside` it (class "other"); the heading is the caller's, `title`
    is what a screen reader says.

    Points whose value is not finite leave a gap in the curve; a chart without any finite point is an empty string.
    """
    curves = [("", thin(points)), (" other", thin(beside))]
    finite = [(x, y) for _, curve in curves for x, y in curve if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return ""
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    margin = (y1 - y0) * 0.05 or abs(y1) * 0.05 or 1.0
    y0, y1 = y0 - margin, y1 + margin
    x1 = x1 if x1 > x0 else x0 + 1

    def at(x: float, y: float) -> str:
        return (
            f"{LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT):.1f},"
            f"{HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM):.1f}"
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for y in nice_ticks(y0, y1):
        left, right = at(x0, y), at(x1, y)
        level = float(left.split(",")[1])
        parts.append(f'<polyline class="grid" points="{left} {right}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in nice_ticks(x0, x1):
        across = at(x, y0).split(",")[0]
        parts.append(f'<text class="tick" x="{across}" y="{HEIGHT - 8}" text-anchor="middle">{_number(x)}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(x_label)}</text>')
    for style, curve in reversed(curves):  # the first lies on top
        run: list[str] = []
        for x, y in [*curve, (math.nan, math.nan)]:
            if math.isfinite(x) and math.isfinite(y):
                run.append(at(x, y))
            elif run:
                # A single point has no line: draw it as one of its own.
                line = f'<polyline class="curve{style}" points="{" ".join(run)}"/>'
                parts.append(_dot(run[0], style) if len(run) == 1 else line)
                run = []
        known = [p for p in curve if math.isfinite(p[0]) and math.isfinite(p[1])]
        parts += [_dot(at(*known[-1]), style)] if known else []
    return "".join([*parts, "</svg>"])


def _dot(place: str, style: str = "") -> str:
    x, y = place.split(",")
    return f'<circle class="dot{style}" cx="{x}" cy="{y}" r="2.5"/>'


def _number(x: float) -> str:
    if x != 0 and (abs(x) < 1e-3 or abs(x) >= 1e6):
        return f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{x:g}"
