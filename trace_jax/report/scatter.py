"""Points with error bars and the curves that they lie on, in one SVG file that stands alone, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trace_jax.report.compared import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from trace_jax.report.svg import nice_ticks

_STYLE = (
    "<style>svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#333}.grid{stroke:#ddd}"
    "@media(prefers-color-scheme:dark){svg{background:#11161c}text{fill:#ccd}.grid{stroke:#333c47}}</style>"
)


@dataclass(frozen=True)
class Mark:
    """One point.

    Attributes:
        name: for the legend.
        at: (x, y).
        x_range, y_range: ends of its error bars; None: it has none.
        curve: points that a thin line joins.
    """

    name: str
    at: tuple[float, float]
    x_range: tuple[float, float] | None
    y_range: tuple[float, float] | None
    curve: Sequence[tuple[float, float]] = ()


def chart(marks: Sequence[Mark], *, title: str, x_label: str, y_label: str) -> str:
    """The file's text."""
    xs = [x for m in marks for x in (m.at[0], *(m.x_range or ()), *(p[0] for p in m.curve))]
    ys = [y for m in marks for y in (m.at[1], *(m.y_range or ()), *(p[1] for p in m.curve))]
    (x0, x1), (y0, y1) = _padded(xs), _padded(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        _STYLE,
    ]
    for y in nice_ticks(y0, y1, 6):
        level = at(x0, y)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in nice_ticks(x0, x1, 8):
        parts.append(f'<text x="{at(x, y0)[0]:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT + 4}" y="{TOP + 10}">{escape(y_label)}</text>')
    for i, mark in enumerate(marks):
        colour = COLOURS[i % len(COLOURS)]
        if mark.curve:
            line = " ".join("{:.1f},{:.1f}".format(*at(*p)) for p in mark.curve)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity=".55"/>')
        (x, y), bar = mark.at, f'stroke="{colour}" stroke-width="1.2"'
        for ends in (
            [(e, y) for e in mark.x_range] if mark.x_range else [],
            [(x, e) for e in mark.y_range] if mark.y_range else [],
        ):
            if ends:
                (ax, ay), (bx, by) = (at(*e) for e in ends)
                parts.append(f'<line x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}" {bar}/>')
        across, up = at(x, y)
        parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="4.5" fill="{colour}"/>')
        row, left = TOP + 14 + 20 * i, WIDTH - RIGHT + 14
        parts.append(f'<circle cx="{left + 6}" cy="{row}" r="4.5" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="{row + 4}">{escape(mark.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.04 or 0.5
    return low - margin, high + margin
