"""Two values with their intervals in each row of one SVG file that stands alone, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 860, 250, 24, 40, 34, 34
FIRST, SECOND = "#d55e00", "#0072b2"  # differ for most colour-blind readers (Okabe and Ito)


@dataclass(frozen=True)
class Row:
    """One row; each value is (value, low, high) in [0, 1]. `bold`: the name stands out."""

    name: str
    first: tuple[float, float, float]
    second: tuple[float, float, float]
    bold: bool = False


def chart(rows: Sequence[Row], *, title: str, first: str, second: str) -> str:
    """The file's text; `first` and `second` name the two values."""
    height = TOP + ROW * len(rows) + BOTTOM

    def at(x: float) -> str:
        return f"{LEFT + x * (WIDTH - LEFT - RIGHT):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        "<style>svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#333}.grid{stroke:#ddd}.b{font-weight:600}"
        "@media(prefers-color-scheme:dark){svg{background:#11161c}text{fill:#ccd}.grid{stroke:#333c47}}</style>",
    ]
    for name, colour, x in ((first, FIRST, 0.0), (second, SECOND, 0.4)):
        parts.append(f'<circle cx="{at(x)}" cy="18" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{float(at(x)) + 10:.1f}" y="22">{escape(name)}</text>')
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x = at(tick)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{x}" y="{height - 14}" text-anchor="middle">{tick:g}</text>')
    for i, row in enumerate(rows):
        y = TOP + ROW * i + ROW / 2
        weight = ' class="b"' if row.bold else ""
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end"{weight}>{escape(row.name)}</text>')
        for (value, low, high), colour, shift in ((row.first, FIRST, -5), (row.second, SECOND, 5)):
            line = f'x1="{at(low)}" x2="{at(high)}" y1="{y + shift}" y2="{y + shift}"'
            parts.append(f'<line {line} stroke="{colour}" stroke-width="3" stroke-opacity=".35"/>')
            parts.append(f'<circle cx="{at(value)}" cy="{y + shift}" r="5" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>\n"])
