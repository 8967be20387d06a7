"""A contrast as JSON, as a table for people and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from trace_jax.capability.contrast import FIGURES, Contrast
from trace_jax.environments.capability import Capability, Label
from trace_jax.report import spans


def entries(
    found: Contrast,
    labels: Int[np.ndarray, "R T C"],
    passed: Bool[np.ndarray, " T"],
    capabilities: Sequence[Capability],
) -> list[dict[str, Any]]:
    """One JSON object for each capability, in the order of the contrast. Counts are means over runs of labels."""
    result = []
    for c in found.order.tolist():
        figures = {
            name: {
                "value": float(getattr(found.value, name)[c]),
                "low": float(found.low[name][c]),
                "high": float(found.high[name][c]),
            }
            for name in FIGURES
        }
        counts = {
            f"{label.name.lower()}_{who}": float((labels[:, among, c] == label).sum() / labels.shape[0])
            for label in (Label.LACKING, Label.PRESENT)
            for who, among in (("failed", ~passed), ("passed", passed))
        }
        entry = {"capability": capabilities[c].name, "title": capabilities[c].title}
        entry |= {"kept": bool(found.kept[c]), "runs_selecting": int(found.selected[c])}
        result.append(entry | {"mean_gap": float(found.mean_gap[c]), **figures, "attempts": counts})
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """The table of `contrast.md`."""
    lines = [
        "| capability | Cov | ER- | ER+ | gap | runs | |",
        "|---|---|---|---|---|---|---|",
    ]
    for e in result["capabilities"]:
        gap = e["gap"]
        cells = [f"{e[name]['value']:.2f}" for name in ("coverage", "er_failed", "er_passed")]
        if not _asked(e):
            cells[-1] = "-"
        kept = "**kept**" if e["kept"] else ""
        lines.append(
            f"| {e['title']} (`{e['capability']}`) | {' | '.join(cells)} | {gap['value']:+.2f} "
            f"[{gap['low']:+.2f}, {gap['high']:+.2f}] | {e['runs_selecting']} of {result['runs']} | {kept} |"
        )
    lines.append(
        f"\n{result['failed']} of {result['attempts']} attempts failed. Cov: share of them that lacks it; ER-, ER+: "
        "share lacking it among the failed and among the passed attempts that show either. A run selects a capability "
        f"at Cov >= {result['thresholds']['coverage']:g} and gap >= {result['thresholds']['gap']:g}; kept: in at least "
        f"{result['thresholds']['keep']} runs. Brackets: {100 * result['confidence']:g} % over resampled tasks.\n"
    )
    notes = [*result["notes"]]
    if result["failed"] < result["attempts"] and not all(map(_asked, result["capabilities"])):
        notes.append("ER+ -: no attempt that passed shows or lacks it; it counts as 0, and the gap is ER- alone.")
    return "\n".join([*lines, *(f"{note}\n" for note in notes)])


def _asked(entry: Mapping[str, Any]) -> bool:
    """Whether an attempt that passed called for the capability."""
    return entry["attempts"]["lacking_passed"] + entry["attempts"]["present_passed"] > 0


def chart(result: Mapping[str, Any]) -> str:
    """The chart of `contrast.svg`."""

    def span(e: Mapping[str, Any], name: str) -> tuple[float, float, float]:
        return e[name]["value"], e[name]["low"], e[name]["high"]

    rows = [
        spans.Row(e["title"], span(e, "er_failed"), span(e, "er_passed"), e["kept"]) for e in result["capabilities"]
    ]
    title = "share of attempts that lack each capability, failed against passed"
    return spans.chart(rows, title=title, first="lacking among failed (ER-)", second="lacking among passed (ER+)")
