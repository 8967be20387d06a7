"""One table of all agents that answered the same episodes, what a paper reports beside it, and paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import compare, paper
from trace_jax.evaluation.metrics import PAPER_ROWS, EvalRecord
from trace_jax.evaluation.table import ResultTable, cell
from trace_jax.warehouse.identity import same

RIVALS = ("scan", "analyst")  # agents without a policy that a trained one is tested against
_MAIN = "full_attr_at_1"
_TESTED = (_MAIN, *(f"by_type.{t}" for t in ("campaign", "mix", "segment_1d", "segment_2d")), "no_signal", "tool_calls")


@dataclass(frozen=True)
class Entry:
    """An agent: `label` in the table, result, where it is from, and its answers."""

    label: str
    summary: Mapping[str, Any]
    source: str
    records: Sequence[EvalRecord]


def check(entries: Sequence[Entry]) -> dict[str, Any]:
    """What the entries say they were made on.

    Raises:
        ConfigError: it differs, or one does not say.
    """
    first = entries[0]
    for entry in entries:
        found, wanted = (e.summary.get("benchmark") for e in (entry, first))
        if not found:
            raise ConfigError(
                f"{entry.source}: the result of {entry.label} is of an earlier version and does not say which "
                "episodes it was made on: evaluate it again"
            )
        if not same(found, wanted):
            raise ConfigError(
                f"{entry.source}: {entry.label} answered other episodes (benchmark {found['sha256'][:12]}) than "
                f"{first.label} of {first.source} ({wanted['sha256'][:12]}): evaluate all with the same simulator.*, "
                "data.seed and data.test"
            )
    return dict(first.summary["benchmark"])


def table(entries: Sequence[Entry], benchmark: Mapping[str, Any]) -> ResultTable:
    """Agents as rows, then what arXiv 2609.10315 reports."""
    shown = [(entry.label, entry.summary) for entry in entries]
    shown += [(f"paper: {name} †", result) for name, result in paper.ROWS.items()]
    rows = tuple((name, tuple(cell(r, path, d, True) for _, path, d in PAPER_ROWS)) for name, r in shown)
    levels = {entry.summary["extra"]["confidence"] for entry in entries}
    level = f"{levels.pop():.0%} " if len(levels) == 1 else ""
    notes = (
        f"{benchmark['episodes']} held-out episodes, sha256 {benchmark['sha256'][:16]}; brackets: {level}bootstrap "
        "interval over episodes",
        "† measured on another set: reported in arXiv 2609.10315 for a 35B model (the last one: for that model) in "
        "that paper's own environment, for reference only",
    )
    title = "FullAttr@1 and companions, the same held-out episodes"
    return ResultTable(tuple(label for label, _, _ in PAPER_ROWS), rows, notes, title, corner="agent")


def tests(
    agents: Sequence[Entry], rivals: Sequence[Entry], config: EvaluationConfig, seed: int
) -> list[dict[str, Any]]:
    """Each agent against each rival, see `compare.compare`, and `says`: "better", "worse" or "no difference shown" in
    FullAttr@1, which takes an interval and a p-value that agree."""
    found = []
    for agent in agents:
        for rival in rivals:
            compared = compare.compare(rival.records, agent.records, config, seed=seed)
            main = compared["metrics"][_MAIN]
            low, high = (main["difference"][k] for k in ("low", "high"))
            sure = main["p"] < 1 - config.confidence
            says = "better" if sure and low > 0 else "worse" if sure and high < 0 else "no difference shown"
            found.append({"agent": agent.label, "rival": rival.label, "says": says, **compared})
    return found


def tests_table(found: Sequence[Mapping[str, Any]]) -> ResultTable:
    """The tests: metrics as rows, a column for each pair."""
    rows = []
    for name in _TESTED:
        rowed = [pair["metrics"].get(name) for pair in found]
        if any(rowed):
            decimals = 1 if name == "tool_calls" else 3
            label = next(r["label"] for r in rowed if r)
            rows.append((label, tuple("-" if r is None else _difference(r, decimals) for r in rowed)))
    rows.append(("in FullAttr@1", tuple(pair["says"] for pair in found)))
    columns = tuple(f"{pair['agent']} - {pair['rival']}" for pair in found)
    notes = (
        "differences with paired bootstrap intervals over episodes; p: exact sign test over episode means; better or "
        "worse: both say so",
    )
    return ResultTable(columns, tuple(rows), notes, "policies against agents without one")


def _difference(row: Mapping[str, Any], decimals: int) -> str:
    d = row["difference"]
    return f"{d['value']:+.{decimals}f} [{d['low']:+.{decimals}f}, {d['high']:+.{decimals}f}], p {row['p']:.2g}"
