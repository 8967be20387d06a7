"""Tables and charts of studies that are scored on the held-out episodes.

Two kinds of luck have a part in a difference between two rows: which policies the seeds gave, and which episodes were
drawn. Over seeds, the interval is Student's t of the differences within each seed; over episodes, the bootstrap of the
answers of all seeds, in pairs. An ordering holds, or is contradicted, only if both intervals leave out 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.config import EvaluationConfig
from trace_jax.evaluation import compare, paper
from trace_jax.evaluation.metrics import PAPER_ROWS, EvalRecord, summarise
from trace_jax.recipes.reproduce_table import SMOOTH, interval, training_curves
from trace_jax.recipes.studies import FORMAT, Ordering, ScoredStudy
from trace_jax.report import scatter

Figures = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by row and seed
Records = Mapping[str, Mapping[int, Sequence[EvalRecord]]]

SIGNAL = ("extra", "signal")
METRICS = (*PAPER_ROWS, ("FullAttr@1 with a signal", SIGNAL, 3))
_LABELS = {path: label for label, path, _ in METRICS}
_MAIN = "full_attr_at_1"


def _key(path: Sequence[str]) -> str:
    return ".".join(path)


def value_of(result: Mapping[str, Any] | None, path: Sequence[str]) -> float | None:
    """A metric of a result, None where it has none."""
    node: Any = result or {}
    for key in path:
        node = node.get(key) or {}
    return node.get("value")


def metrics_of(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of a result that stand in a study's table, by name."""
    return {_key(path): value_of(summary, path) for _, path, _ in METRICS}


def decision_of(summary: Mapping[str, Any]) -> list[tuple[float | None, float | None]]:
    """(no-signal accuracy, FullAttr with a signal) at each threshold of a voter; empty with one answer an episode."""
    points = (summary["extra"].get("abstention") or {}).get("decision") or ()
    return [(value_of(p, ("no_signal",)), value_of(p, ("signal",))) for p in points]


def summary(
    figures: Figures, records: Records, study: ScoredStudy, config: EvaluationConfig
) -> dict[str, list | dict[str, Any]]:
    """`summary`: by row and metric `mean`, `half` (of a 95 % interval over seeds) and, of the main metric,
    `difference` and `difference_half` to the baseline; `episodes`: by row `no_signal` and `signal` with intervals over
    episodes; `orderings`: see `ordering`."""
    table: dict[str, dict[str, Any]] = {}
    for row, seeds in figures.items():
        table[row] = {}
        for _, path, _ in METRICS:
            values = [v for s in seeds.values() if (v := s["metrics"][_key(path)]) is not None]
            table[row][_key(path)] = interval(values) if values else None
        if row != study.baseline and (changes := _changes(figures, row, study.baseline, (_MAIN,))):
            found = interval(changes)
            table[row][_MAIN] |= {"difference": found["mean"], "difference_half": found["half"]}
    over = {row: summarise([r for rs in seeds.values() for r in rs], config) for row, seeds in records.items()}
    wanted = [o for o in study.orderings if o.higher in figures and o.lower in figures]
    return {
        "summary": table,
        "episodes": {row: {"no_signal": s["no_signal"], "signal": s["extra"]["signal"]} for row, s in over.items()},
        "orderings": [found for o in wanted if (found := ordering(o, figures, records, study, config)) is not None],
    }


def _changes(figures: Figures, higher: str, lower: str, path: Sequence[str]) -> list[float]:
    """Differences of a metric, seed by seed."""
    pairs = [
        (figures[higher][s]["metrics"][_key(path)], figures[lower][s]["metrics"][_key(path)])
        for s in sorted(figures[higher].keys() & figures[lower].keys())
    ]
    return [a - b for a, b in pairs if a is not None and b is not None]


def ordering(
    claim: Ordering, figures: Figures, records: Records, study: ScoredStudy, config: EvaluationConfig
) -> dict[str, Any] | None:
    """What the runs say of a claim: `reported` difference of the paper, `seeds` (mean, half; half is None with one
    seed), `episodes` (value, low, high), and `holds`: "yes", "no" or "undecided". None: no seed has both rows."""
    shared = sorted(figures[claim.higher].keys() & figures[claim.lower].keys())
    changes = _changes(figures, claim.higher, claim.lower, claim.metric)
    if not changes:
        return None
    sides = [[r for s in shared for r in records[row][s]] for row in (claim.lower, claim.higher)]
    compared = compare.compare(*sides, config)["metrics"][_key(claim.metric).removeprefix("extra.")]
    names = [study.rows[row].reported for row in (claim.higher, claim.lower)]
    reported = [value_of(paper.ROWS.get(name), claim.metric) for name in names]
    seeds, episodes = interval(changes), compared["difference"]
    return {
        "higher": claim.higher,
        "lower": claim.lower,
        "metric": _key(claim.metric),
        "label": _LABELS[claim.metric],
        "reported": None if None in reported else reported[0] - reported[1],
        "seeds": seeds,
        "episodes": episodes,
        "p": compared["p"],
        "holds": verdict(seeds, episodes),
    }


def verdict(seeds: Mapping[str, float | None], episodes: Mapping[str, float | None]) -> str:
    """Whether a difference above 0 was seen; one seed leaves the episodes to decide."""
    spread = seeds["half"] or 0.0
    low = min(seeds["mean"] - spread, episodes["low"])
    high = max(seeds["mean"] + spread, episodes["high"])
    return "yes" if low > 0 else "no" if high < 0 else "undecided"


def markdown(result: Mapping[str, Any], study: ScoredStudy) -> str:
    """The tables for people."""
    shown = [m for m in METRICS if m[1] != SIGNAL or any(o.metric == SIGNAL for o in study.orderings)]
    lines = [
        f"| | {' | '.join(label for label, _, _ in shown)} | FullAttr@1 over {study.baseline} |",
        "|---" * (len(shown) + 2) + "|",
    ]
    for row, found in result["summary"].items():
        cells = [_cell(found[_key(path)], decimals) for _, path, decimals in shown]
        main = found[_MAIN]
        if "difference" in (main or {}):
            change = _cell({"mean": main["difference"], "half": main["difference_half"]}, 3, "+")
        else:
            change = "-"
        lines.append(f"| {row} | {' | '.join(cells)} | {change} |")
    for row in result["summary"]:
        if reported := study.rows[row].reported:
            values = [value_of(paper.ROWS[reported], path) for _, path, _ in shown]
            cells = ["-" if v is None else f"{v:.{d}f}" for v, (_, _, d) in zip(values, shown, strict=True)]
            lines.append(f"| *paper: {reported}* | {' | '.join(cells)} | |")
    seeds = max(len(runs) for runs in result["runs"].values())
    lines += ["", _note(result["steps"], seeds)]
    if any(study.rows[row].reported for row in result["summary"]):
        lines.append(
            "Rows of the paper: arXiv 2609.10315, a 35B model on episodes of that paper's own simulator; for reference."
        )
    lines += [*_from_nothing(result), "", f"## {study.question}", ""]
    lines += ["| higher | lower | in | paper | over seeds | over episodes | holds |", "|---|---|---|---|---|---|---|"]
    for o in result["orderings"]:
        e = o["episodes"]
        reported = "-" if o["reported"] is None else f"{o['reported']:+.3f}"
        over = f"{e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}]"
        cells = [o["higher"], o["lower"], o["label"], reported, _cell(o["seeds"], 3, "+"), over, f"**{o['holds']}**"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Differences are higher minus lower. Over seeds: within each seed, with half of a 95 % interval (Student's t); "
        "over episodes: all seeds' answers, paired bootstrap. yes or no: both intervals leave out 0"
        + ("; with one seed the episodes decide alone." if seeds == 1 else "."),
        "",
    ]
    return "\n".join(lines)


def _note(steps: int, seeds: int) -> str:
    if seeds == 1:
        return f"{steps} steps of GRPO, 1 seed: no intervals over seeds."
    return f"{steps} steps of GRPO, {seeds} seeds; ± is half of a 95 % interval over seeds (Student's t)."


def _from_nothing(result: Mapping[str, Any]) -> list[str]:
    """Why there is no RL from the untrained policy, where none of its answers can be read."""
    runs = result["runs"].get("untrained", {})
    if not runs or any(s["metrics"]["parsed"] for s in runs.values()):
        return []
    return [
        "No answer of the untrained policy can be read. Its rewards are all 0, its groups all constant and its "
        "gradients 0, so RL cannot begin there, as it can with a pretrained model: the row that stands for the paper's "
        f"RL from base begins with `{FORMAT}`, a policy that has seen a part of the lessons once."
    ]


def _cell(found: Mapping[str, float | None] | None, decimals: int, sign: str = "") -> str:
    if found is None:
        return "-"
    text = f"{found['mean']:{sign}.{decimals}f}"
    return text if found["half"] is None else f"{text} ± {found['half']:.{decimals}f}"


def chart(name: str, result: Mapping[str, Any]) -> str | None:
    """The study's figure: of abstention the trade-off, of others the share of right answers in training. None: there
    is nothing to draw yet."""
    if name == "abstention":
        return tradeoff(result)
    runs = {row: seeds for row, seeds in result["runs"].items() if all("full_right" in s for s in seeds.values())}
    if not runs:
        return None
    title = f"fully right answers in training, mean of {SMOOTH} steps"
    return training_curves(runs, "full_right", title=title, y_label="fully right")


def tradeoff(result: Mapping[str, Any]) -> str | None:
    """FullAttr of episodes with a signal against accuracy without: each row with intervals over episodes, and the curve
    of a voter that abstains at other thresholds, the mean over seeds. None: there are no episodes of one kind."""
    marks = []
    for row, found in result["episodes"].items():
        quiet, signal = found["no_signal"], found["signal"]
        if quiet["value"] is None or signal["value"] is None:
            continue
        curves = [
            s["decision"] for s in result["runs"][row].values()
        ]  # of as many thresholds, and never undefined here
        curve = [
            tuple(statistics.mean(side) for side in zip(*points, strict=True)) for points in zip(*curves, strict=True)
        ]
        ends = [(side["low"], side["high"]) for side in (quiet, signal)]
        marks.append(scatter.Mark(row, (quiet["value"], signal["value"]), *ends, curve=curve))
    if not marks:
        return None
    return scatter.chart(
        marks,
        title="FullAttr with a signal against accuracy without one",
        x_label="accuracy on episodes without a signal",
        y_label="FullAttr@1 on episodes with one",
    )
