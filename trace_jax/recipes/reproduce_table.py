"""The table and the curves of a study: means over seeds, with what the seeds say about their reliability."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.report import compared

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]  # figures by variant and seed

SMOOTH = 5  # steps whose mean counts as having reached a reward
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last, the normal one is near enough.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
SHOWN = {
    "reward": "training reward, last steps",
    "held_out": "held-out, all right",
    "steps_to_reach": "steps to the baseline's reward",
    "tool_calls": "tool calls",
    "wasted_groups": "groups of one reward",
    "clip_fraction": "clipped",
    "entropy": "entropy",
    "credit_positive": "turns with credit > 0",
    "credit_reward_correlation": "credit and reward",
    "probe_share": "probe's share of a step",
    "seconds_a_step": "seconds a step",
}


def summary(runs: Runs, baseline: str) -> dict[str, dict[str, Any]]:
    """By variant and figure: `mean`, `half` (half of a 95 % interval over seeds, Student's t; None with one seed) and,
    of rewards, `difference` and `difference_half` to the baseline, seed by seed."""
    result: dict[str, dict[str, Any]] = {}
    for name, seeds in runs.items():
        reached = {s: _reached(seeds[s], runs[baseline].get(s)) for s in seeds}
        figures: dict[str, Any] = {}
        for key in SHOWN:
            by_seed = reached if key == "steps_to_reach" else {s: seeds[s].get(key) for s in seeds}
            values = [v for v in by_seed.values() if v is not None]
            figures[key] = interval(values) | {"seeds": len(values)} if values else None
        for key in ("reward", "held_out"):
            pairs = [(seeds[s][key], runs[baseline][s][key]) for s in seeds if name != baseline and s in runs[baseline]]
            found = [a - b for a, b in pairs if a is not None and b is not None]
            if found:
                figures[key] |= {f"difference{'_half' * (k == 'half')}": v for k, v in interval(found).items()}
        result[name] = figures
    return result


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, and half the width of its 95 % interval."""
    n = len(values)
    half = None
    if n > 1:
        t = T95[n - 1] if n <= len(T95) else 1.96
        half = t * statistics.stdev(values) / math.sqrt(n)
    return {"mean": statistics.mean(values), "half": half}


def steps_to_reach(rewards: Sequence[float], target: float) -> int | None:
    """First step at which the mean reward of the last `SMOOTH` steps is at least the target; None if it never is."""
    for k in range(SMOOTH, len(rewards) + 1):
        if statistics.mean(rewards[k - SMOOTH : k]) >= target:
            return k
    return None


def _reached(run: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> int | None:
    return None if baseline is None else steps_to_reach(run["rewards"], baseline["reward"])


def markdown(result: Mapping[str, Any]) -> str:
    """The table for people: mean ± half of the 95 % interval; rewards also as difference to the baseline."""
    found, baseline = result["summary"], result["baseline"]
    shown = [k for k in SHOWN if any(f[k] is not None for f in found.values())]
    lines = ["| | " + " | ".join(SHOWN[k] for k in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    seeds = max((len(s) for s in result["runs"].values()), default=0)
    for name, figures in found.items():
        cells = []
        for key in shown:
            f = figures[key]
            cell = "-" if f is None else _number(f["mean"], f["half"])
            if f is not None and "difference" in f:
                cell += f" ({_number(f['difference'], f['difference_half'], sign=True)})"
            if f is not None and key == "steps_to_reach" and f["seeds"] < seeds:
                cell += f" in {f['seeds']} of {seeds}"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if seeds == 1:
        lines.append(f"\n{result['steps']} steps, 1 seed: no intervals; in brackets the difference to {baseline}.\n")
    else:
        lines.append(
            f"\n{result['steps']} steps, {seeds} seeds; ± is half of a 95 % interval over seeds (Student's t), in "
            f"brackets the difference to {baseline}, seed by seed.\n"
        )
    return "\n".join(lines)


def _number(mean: float, half: float | None, sign: bool = False) -> str:
    digits = 3 if abs(mean) < 10 else 1
    text = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return text if half is None else f"{text} ± {half:.{digits}f}"


def curves(runs: Runs) -> str:
    """Training reward by step, see `training_curves`."""
    return training_curves(runs, "rewards", title="training reward by step", y_label="reward")


def training_curves(runs: Runs, key: str, *, title: str, y_label: str) -> str:
    """A figure of every step, mean over seeds with the range between them, as one SVG file."""
    lines = []
    for name, seeds in runs.items():
        rewards = [s[key] for s in seeds.values()]
        length = min(map(len, rewards))
        smooth = [[statistics.mean(r[max(0, k - SMOOTH + 1) : k + 1]) for k in range(length)] for r in rewards]
        columns = list(zip(*smooth, strict=True))
        steps = range(1, length + 1)
        lines.append(
            compared.Line(
                name,
                [(k, statistics.mean(c)) for k, c in zip(steps, columns, strict=True)],
                [(k, min(c), max(c)) for k, c in zip(steps, columns, strict=True)],
            )
        )
    return compared.chart(lines, title=title, x_label="step", y_label=y_label)
