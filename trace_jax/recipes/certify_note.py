"""The note and the figure of `trace-jax certify`, from its numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trace_jax.evaluation.ceiling import FINDING
from trace_jax.report.panels import Panel, Value, figure

_CURVES = (
    ("ceiling", "ceiling_set"),
    ("ceiling, all proposals", "ceiling_all"),
    ("analyst", "analyst"),
    ("analyst, all proposals", "analyst_all"),
    ("acceptance", "acceptance"),
)
_TITLES = {
    "difficulty": ("Difficulty", "preset"),
    "strength": ("Strength of the causes", "times the paper's"),
    "noise": ("Noise", "times the paper's"),
    "confounder_strength": ("Confounders", "times the paper's size"),
    "slice_attributes": ("Slice of segment causes", "attributes"),
}
_CHECKS = {
    "detectability": "signature too weak",
    "confounder": "confounder as strong",
    "rival_cause": "another cause fits",
    "rival_slice": "another slice fits",
    "unnamed": "its slice does not stand out",
}


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(x: dict[str, Any]) -> str:
    return "-" if x["value"] is None else f"{x['value']:.3f} ({x['low']:.3f}-{x['high']:.3f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> list[str]:
    marks = [":--" if i < left else "--:" for i in range(len(head))]
    return [f"| {' | '.join(str(c) for c in row)} |" for row in (head, marks, *rows)] + [""]


def summary(headline: dict[str, Any]) -> str:
    """The result in a line."""
    return (
        f"likelihood ceiling {_share(headline['accepted']['value'])} on accepted and "
        f"{_share(headline['rejected']['value'])} on rejected proposals, quiet without a signal "
        f"{_share(headline['no_signal_quiet']['value'])}, analyst {_share(headline['analyst']['value'])}"
    )


def _acceptance(presets: dict[str, Any]) -> list[str]:
    head = ["cause", "attributes of the slice", *presets, "rejected most often because"]
    rows = []
    for i, first in enumerate(next(iter(presets.values()))["acceptance"]):
        cells = []
        for preset in presets.values():
            row = preset["acceptance"][i]
            cells.append(f"{row['accepted'] / row['proposals']:.2f}" if row["proposals"] else "-")
        worst = (presets.get("paper") or next(iter(presets.values())))["acceptance"][i]["failed_most"]
        rows.append([first["cause"], first["dimensions"] or "-", *cells, _CHECKS.get(worst, "-")])
    totals = [
        sum(r["accepted"] for r in p["acceptance"]) / sum(r["proposals"] for r in p["acceptance"])
        for p in presets.values()
    ]
    return _table(head, [*rows, ["all", "", *(f"{t:.2f}" for t in totals), ""]], left=1)


def _ceiling(presets: dict[str, Any]) -> list[str]:
    head = ["", "group", *(f"{name}: {which}" for name in presets for which in ("accepted", "rejected"))]
    rows = []
    for i, first in enumerate(next(iter(presets.values()))["ceiling"]):
        cells = []
        for preset in presets.values():
            row = preset["ceiling"][i]
            cells += [f"{_share(row[f'{w}_full'])} ({row[w]})" for w in ("accepted", "rejected")]
        rows.append([first["section"], first["group"], *cells])
    return _table(head, rows, left=2)


def _sweep(rows: list[dict[str, Any]], label: str) -> list[str]:
    columns = {
        "acceptance": "acceptance",
        "ceiling, accepted": "accepted",
        "ceiling, rejected": "rejected",
        "ceiling, set": "ceiling_set",
        "analyst, set": "analyst",
        "analyst, all proposals": "analyst_all",
    }
    head, keys = [label, *columns], columns.values()
    return _table(head, [[row["value"], *(_interval(row[k]) for k in keys)] for row in rows])


def markdown(result: dict[str, Any]) -> str:
    """The note: what was measured, on what, and every table."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    shape = result["shape"]
    head = result["headline"]
    lines = [
        "# Certificate",
        "",
        "Written by `trace-jax certify`; do not edit. Numbers: [certificate.json](certificate.json).",
        "",
        f"{result['date']}; {versions}; {result['device']}; seed {result['seed']}; {result['proposals']} proposals and "
        f"{result['accepted']} accepted episodes of the paper's composition at each setting; {shape['days']} days, up "
        f"to {shape['segments']} segments, {shape['siblings']} siblings, generator {shape['rng']}.",
        "",
        "- **Acceptance**: share of proposals whose label the oracle certifies.",
        "- **Ceiling**: FullAttr@1 of a diagnostician that knows the simulator (its equations, noise, ranges of "
        "effects, onset shapes, where a cause may sit) but not the label. It reads what an agent can see and answers "
        "with the most likely cause and slice, so its score is what is attainable. Without a signal it is quiet when "
        f"no cause reaches a probability of {FINDING}.",
        "- **Analyst**: FullAttr@1 of the scripted analyst, through the same tool and reward as a trained agent.",
        "- **Set**: accepted episodes in the paper's mix of causes, as in a data set. Proposals are made in that mix, "
        "too, but not accepted at equal rates. What a knob makes harder is rejected more often, so scores on certified "
        "episodes move less than those on all proposals.",
        "",
        f"At the paper's difficulty: {summary(head)}. Intervals are Wilson's, 95 %.",
        "",
        "![FullAttr@1 of ceiling and analyst, and acceptance, by difficulty](difficulty.svg)",
        "",
        "## Acceptance",
        "",
        "The last column is the check that fails most often at the paper's difficulty; several can fail at once.",
        "",
        *_acceptance(result["presets"]),
        "## Ceiling",
        "",
        "FullAttr@1 of the diagnostician (number of proposals). Slice: segment causes. Onset and strength: all "
        "episodes in which something happens. Strength: thirds of the range of every cause's effects.",
        "",
        *_ceiling(result["presets"]),
        "## Knobs",
        "",
        "One knob at a time, the others as in `--difficulty paper`.",
        "",
    ]
    for knob, rows in result["sweeps"].items():
        title, label = _TITLES[knob]
        lines += [f"### {title}", "", *_sweep(rows, label)]
    return "\n".join(lines)


def _value(x: dict[str, Any]) -> Value | None:
    return None if x["value"] is None else (x["value"], x["low"], x["high"])


def svg(result: dict[str, Any]) -> str:
    """One panel for every knob."""
    panels = []
    for knob, rows in result["sweeps"].items():
        title, label = _TITLES[knob]
        words = knob in ("difficulty", "slice_attributes")
        ticks = [str(row["value"]) if words else row["value"] for row in rows]
        curves = {name: [_value(row[key]) for row in rows] for name, key in _CURVES}
        panels.append(Panel(title=title, label=label, ticks=ticks, curves=curves))
    return figure(panels, "FullAttr@1 of the likelihood ceiling and the analyst across the knobs")
