"""Several small charts in one SVG file that needs nothing else: no script, no font, no style sheet of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from trace_jax.report.svg import nice_ticks

WIDTH, HEIGHT, GAP, COLUMNS = 320, 220, 16, 3
LEFT, RIGHT, TOP, BOTTOM = 40, 14, 30, 40
LEGEND = 26
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #5f6b7a; } .title { font-size: 13px; font-weight: 600; fill: #1c2430; }
.page { fill: #ffffff; } .grid { stroke: #dfe4ea; fill: none; } .curve { fill: none; stroke-width: 1.8; }
.range { stroke-width: 1; opacity: 0.6; }
.c0, .c1 { stroke: #1f6feb; } .c2, .c3 { stroke: #c2410c; } .c4 { stroke: #1a7f37; } .c1, .c3 { stroke-dasharray: 5 3; }
.c4 { stroke-dasharray: 2 2; } .d0, .d1 { fill: #1f6feb; } .d2, .d3 { fill: #c2410c; } .d4 { fill: #1a7f37; }
@media (prefers-color-scheme: dark) { .page { fill: #11161c; } text { fill: #9aa7b6; } .title { fill: #e6eaf0; }
.grid { stroke: #333c47; } }
"""
_CLASSES = 5  # curves that the style can tell apart: two pairs, solid and dashed, and a dotted one

Value = tuple[float, float, float]  # value and its interval


@dataclass(frozen=True)
class Panel:
    """One chart of shares in [0, 1].

    Attributes:
        ticks: what stands under the points; numbers are placed to scale, words at equal distances.
        curves: a value with interval (or None: not measured) for every tick, by name.
    """

    title: str
    label: str
    ticks: Sequence[float | str]
    curves: Mapping[str, Sequence[Value | None]]


def _places(ticks: Sequence[float | str]) -> list[float]:
    """Horizontal places of the ticks in [0, 1]."""
    if any(isinstance(t, str) for t in ticks):
        return [(i + 0.5) / len(ticks) for i in range(len(ticks))]
    low, high = min(ticks), max(ticks)
    return [(t - low) / (high - low) if high > low else 0.5 for t in ticks]


def _panel(panel: Panel, names: Sequence[str], x0: float, y0: float) -> list[str]:
    inner, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    at = [x0 + LEFT + p * inner for p in _places(panel.ticks)]

    def level(v: float) -> float:
        return y0 + TOP + (1.0 - v) * tall

    parts = [f'<text class="title" x="{x0 + LEFT}" y="{y0 + 18}">{escape(panel.title)}</text>']
    for v in nice_ticks(0.0, 1.0, 5):
        parts.append(f'<path class="grid" d="M{x0 + LEFT} {level(v):.1f}H{x0 + WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{x0 + LEFT - 6}" y="{level(v) + 4:.1f}" text-anchor="end">{v:g}</text>')
    for x, tick in zip(at, panel.ticks, strict=True):
        text = tick if isinstance(tick, str) else f"{tick:g}"
        parts.append(f'<text x="{x:.1f}" y="{y0 + HEIGHT - 24}" text-anchor="middle">{escape(text)}</text>')
    middle = x0 + LEFT + inner / 2
    parts.append(f'<text x="{middle:.1f}" y="{y0 + HEIGHT - 8}" text-anchor="middle">{escape(panel.label)}</text>')
    for name, values in panel.curves.items():
        code = names.index(name) % _CLASSES
        run: list[str] = []
        for x, value in [*zip(at, values, strict=True), (0.0, None)]:
            if value is not None:
                run.append(f"{x:.1f},{level(value[0]):.1f}")
                parts.append(f'<path class="range c{code}" d="M{x:.1f} {level(value[1]):.1f}V{level(value[2]):.1f}"/>')
                parts.append(f'<circle class="d{code}" cx="{x:.1f}" cy="{level(value[0]):.1f}" r="2.6"/>')
            elif run:
                parts.append(f'<polyline class="curve c{code}" points="{" ".join(run)}"/>')
                run = []
    return parts


def figure(panels: Sequence[Panel], title: str) -> str:
    """The charts in rows of three, with one legend for all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    rows = -(-len(panels) // COLUMNS)
    width = min(len(panels), COLUMNS) * (WIDTH + GAP) + GAP
    height = LEGEND + rows * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]
    x = GAP + LEFT
    for code, name in enumerate(names):
        parts.append(f'<path class="curve c{code % _CLASSES}" d="M{x} 18h22"/>')
        parts.append(f'<text x="{x + 28}" y="22">{escape(name)}</text>')
        x += 48 + 7 * len(name)
    for i, panel in enumerate(panels):
        x0, y0 = GAP + i % COLUMNS * (WIDTH + GAP), LEGEND + GAP + i // COLUMNS * (HEIGHT + GAP)
        parts += _panel(panel, names, x0, y0)
    return "\n".join([*parts, "</svg>"]) + "\n"
