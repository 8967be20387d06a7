"""Several curves with bands in one SVG file that stands alone: readable in a browser or a README, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trace_jax.report.svg import nice_ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 54, 210, 14, 34
# Hues that differ for most colour-blind readers (Okabe and Ito), then the same dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        name: for the legend.
        points: (x, y), at least one.
        band: (x, low, high).
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]]


def chart(lines: Sequence[Line], *, title: str, x_label: str, y_label: str) -> str:
    """The file's text."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, low, high in line.band for y in (low, high)]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    x1, margin = (x1 if x1 > x0 else x0 + 1), (y1 - y0) * 0.04 or 0.5
    y0, y1 = y0 - margin, y1 + margin

    def at(x: float, y: float) -> str:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        "<style>svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#333}.grid{stroke:#ddd}"
        "@media(prefers-color-scheme:dark){svg{background:#11161c}text{fill:#ccd}.grid{stroke:#333c47}}</style>",
    ]
    for y in nice_ticks(y0, y1, 6):
        level = at(x0, y).split(",")[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(level) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in nice_ticks(x0, x1, 8):
        parts.append(f'<text x="{at(x, y0).split(",")[0]}" y="{HEIGHT - 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text x="{LEFT + 4}" y="{TOP + 10}">{escape(y_label)}</text>')
    for i, line in enumerate(lines):
        colour, dash = COLOURS[i % len(COLOURS)], ' stroke-dasharray="6 3"' if i >= len(COLOURS) else ""
        edge = [at(x, high) for x, _, high in line.band] + [at(x, low) for x, low, _ in reversed(line.band)]
        parts.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity=".10"/>')
        curve = " ".join(at(x, y) for x, y in line.points)
        stroke = f'fill="none" stroke="{colour}" stroke-width="1.8"{dash}'
        parts.append(f'<polyline points="{curve}" {stroke}/>')
        y, left = TOP + 14 + 20 * i, WIDTH - RIGHT + 14
        parts.append(f'<line x1="{left}" x2="{left + 26}" y1="{y}" y2="{y}" {stroke}/>')
        parts.append(f'<text x="{left + 32}" y="{y + 4}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>\n"])
