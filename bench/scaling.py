"""Step time from 8 to 4,096 chips, modelled: what a compile report says of one chip, and trajectories that differ.

    python bench/scaling.py docs/compile/qwen3_30b_a3b_v5p64.json ... [--plot docs/scaling.svg] [--price v5p=4.2]

Prints one JSON object; --markdown prints tables instead, --plot draws them. Nothing here was measured on an
accelerator. From measurement come only the shapes of two distributions (bench/results/turns-nano-cpu-2cores.json:
sampled tokens of a turn and turns of a trajectory, relative to their means) and the latency of a tool call. From the
compiler come the seconds at their bounds, collectives and memory of a report. All else is an argument: the mean length
of trajectories, what share of the bounds is reached, prices.

The model. Learning: a step has as many rows as its trajectories fill, split over the row groups of the mesh; a
micro-batch takes the larger of its compute, memory and link bounds. Slices beyond the report's own size repeat it and
sum float32 gradients over the network between them. Sampling: a lane decodes its rows together; a decoding step reads
the lane's weights and the cache of each row once. Rows leave for their tools and come back. The rollout ends with its
slowest row, event by event. With shared chips a step is at least the sum of the time that both keep the chips busy,
and at least the latency of the slowest row.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "bench" / "results" / "turns-nano-cpu-2cores.json"
CHIPS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Assumed:
    """What is neither measured nor compiled.

    Attributes:
        tokens: mean of a trajectory, prompt and tool results included. sampled: of these by the policy. turns: mean.
        reach: share of the learner's bound that is reached. decode_reach: the same of the sampler's.
        tool_seconds: mean latency of a tool call; None: as measured, with cores that are not shared.
        steps: optimizer steps of a run.
    """

    tokens: float = 12_000
    sampled: float = 4_000
    turns: float = 12.7
    reach: float = 0.5
    decode_reach: float = 0.5
    tool_seconds: float | None = None
    steps: int = 300


def trajectories(measured: dict[str, Any], assumed: Assumed, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Sampled tokens of every turn of `count` trajectories: the measured shapes at the assumed means."""

    def draw(name: str, size: int) -> np.ndarray:
        table = measured[name]
        places, values = measured["percentiles"], table["at"]
        mean = np.interp(np.linspace(1, 100, 10_000), places, values).mean()  # of the curve through the percentiles
        return np.interp(rng.uniform(1, 100, size), places, values) / mean

    turns = np.maximum(np.rint(draw("turns_of_a_trajectory", count) * assumed.turns), 1).astype(int)
    each = assumed.sampled / assumed.turns
    return [np.maximum(np.rint(draw("sampled_tokens_of_a_turn", n) * each), 1) for n in turns]


def rollout(
    rows: list[np.ndarray], slots: int, weights: float, cache: float, bandwidth: float, tool: float
) -> tuple[float, float]:
    """Seconds until the last row of a lane has ended, and seconds that the lane was busy.

    Args:
        rows: tokens of the turns of each. slots: of the lane.
        weights: bytes that a decoding step reads whatever it decodes. cache: bytes it reads for each row, on average.
        bandwidth: bytes/s of a chip. tool: seconds of a call.
    """
    waiting, now, busy = [list(r) for r in rows], 0.0, 0.0
    active: list[list[float]] = []  # tokens left of the turn, then the turns after it
    away: list[tuple[float, list[float]]] = []
    while waiting or active or away:
        while waiting and len(active) + len(away) < slots:
            active.append(waiting.pop(0))
        back = min((t for t, _ in away), default=math.inf)
        if not active:
            now = back
        else:
            step = (weights + cache * len(active)) / bandwidth
            tokens = min(r[0] for r in active)
            if back < now + tokens * step:
                tokens = max(math.ceil((back - now) / step), 1)
            now, busy = now + tokens * step, busy + tokens * step
            for r in active:
                r[0] -= tokens
            for r in [r for r in active if r[0] <= 0]:
                active.remove(r)
                r.pop(0)
                if r:
                    away.append((now + tool, r))
        active += [r for t, r in away if t <= now]
        away = [(t, r) for t, r in away if t > now]
    return now, busy


def step_time(report: dict[str, Any], chips: int, measured: dict[str, Any], assumed: Assumed) -> dict[str, float]:
    """Seconds of a training step on so many chips, by part."""
    own = math.prod(report["mesh"].values())
    chip, counts = report["chip"], report["counts"]
    slices = max(1, chips // own)
    group = report["mesh"]["tensor"] * report["mesh"]["expert"]
    rows = math.ceil(counts["sequences"] * assumed.tokens / report["microbatch"][1])
    gradient = report["programs"]["accumulate"]
    # on fewer chips than the report's a micro-batch has fewer rows, a chip still one
    ways = max(1, min(chips, own * slices) // group)
    per_chip = report["microbatch"][0] / (own // group)
    micro = math.ceil(rows / (ways * per_chip))
    seconds = gradient["seconds"]
    fill = min(1.0, rows / (micro * ways * per_chip))  # rows of the last micro-batch that hold no token still take time
    bound = max(seconds["compute"], seconds["memory"], seconds["links"] + seconds["network"])
    parameters = report["memory"]["parameters"]
    between = 2 * parameters / chip["network_bandwidth"] * (slices - 1) / slices if slices > 1 else 0.0
    learn = micro * bound / assumed.reach + between + report["programs"]["apply"]["roofline_s"] / assumed.reach

    lanes = max(1, chips // group)
    rng = np.random.default_rng(0)
    drawn = trajectories(measured, assumed, counts["sequences"], rng)
    share = [drawn[i::lanes] for i in range(min(lanes, len(drawn)))]
    tool = measured["tool_call_seconds"]["mean"] if assumed.tool_seconds is None else assumed.tool_seconds
    slots = counts["slots_per_lane"]
    # half of the mean length is in the cache on average
    cache = report["memory"]["kv_cache"] / slots * (assumed.tokens / 2) / counts["context"]
    bandwidth = chip["hbm_bandwidth"] * assumed.decode_reach
    results = [rollout(part, slots, report["memory"]["sampler_parameters"], cache, bandwidth, tool) for part in share]
    ends, busy = max(r[0] for r in results), max(r[1] for r in results)
    sync = report["memory"]["sampler_parameters"] / chip["link_bandwidth"]
    total = max(learn + busy + sync, ends)
    longest = max(float(t.sum()) for t in drawn) / float(np.mean([t.sum() for t in drawn]))
    tokens = counts["sequences"] * assumed.tokens
    flops = report["flops"] / (counts["sequences"] * counts["context"]) * tokens
    return {
        "chips": chips, "learn": learn, "between_slices": between, "rollout": ends, "rollout_busy": busy, "sync": sync,
        "step": total, "micro_batches": micro, "fill": fill, "lanes": lanes, "longest_over_mean": longest,
        "tokens_per_s": tokens / total, "mfu": flops / (total * chips * chip["flops"]),
        "run_hours": assumed.steps * total / 3600, "fits": float(chips >= own),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="of trace-jax compile")
    for name, value in vars(Assumed()).items():
        kind = int if name == "steps" else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=f"default: {value}")
    parser.add_argument("--chips", type=int, nargs="+", default=CHIPS)
    parser.add_argument("--price", action="append", default=[], metavar="CHIP=AMOUNT", help="of one chip for an hour")
    parser.add_argument("--plot", type=Path, help="write a figure there (needs matplotlib)")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    assumed = Assumed(**{name: getattr(args, name) for name in vars(Assumed())})
    prices = {name: float(amount) for name, amount in (p.split("=") for p in args.price)}
    measured = json.loads(MEASURED.read_text())
    results = []
    for path in args.reports:
        report = json.loads(path.read_text())
        table = [step_time(report, chips, measured, assumed) for chips in args.chips]
        own = math.prod(report["mesh"].values())
        at = step_time(report, own, measured, assumed)
        price = prices.get(report["chip"]["name"])
        cost = None if price is None else at["run_hours"] * own * price
        entry = {"config": report["config"], "topology": report["topology"], "own": at, "table": table}
        results.append(entry | {"price": price, "cost": cost})
    if args.plot:
        plot(results, args.plot)
    if args.markdown:
        print(markdown(results))
    else:
        print(json.dumps({"assumed": vars(assumed), "measured": MEASURED.name, "results": results}))


def markdown(results: list[dict[str, Any]]) -> str:
    """Tables for docs/scaling.md and BUILD.md."""
    lines = ["| configuration | chips | step, s | a run, h | chip-hours | cost |", "|---|---|---|---|---|---|"]
    for r in results:
        at = r["own"]
        cost = "-" if r["cost"] is None else f"{r['cost']:,.0f}"
        lines.append(
            f"| {r['config']} | {at['chips']} | {at['step']:.0f} | {at['run_hours']:.1f} "
            f"| {at['run_hours'] * at['chips']:,.0f} | {cost} |"
        )
    for r in results:
        lines += ["", f"{r['config']} ({r['topology']})", ""]
        lines += [
            "| chips | learn, s | rollout, s | busy, s | step, s | tokens/s | MFU |",
            "|---|---|---|---|---|---|---|",
        ]
        for t in r["table"]:
            small = "" if t["fits"] else " (too few for the weights)"
            lines.append(
                f"| {t['chips']}{small} | {t['learn']:.1f} | {t['rollout']:.1f} | {t['rollout_busy']:.1f} "
                f"| {t['step']:.1f} | {t['tokens_per_s']:,.0f} | {t['mfu']:.1%} |"
            )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Seconds of a step over chips."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 3.4), squeeze=False, sharey=True)
    for ax, r in zip(axes[0], results, strict=True):
        chips = [t["chips"] for t in r["table"] if t["fits"]]
        for name, style in (("step", "k-o"), ("learn", "C0--"), ("rollout", "C1--"), ("rollout_busy", "C1:")):
            ax.loglog(chips, [t[name] for t in r["table"] if t["fits"]], style, markersize=3, label=name, base=2)
        ax.set_title(r["config"], fontsize=8)
        ax.set_xlabel("chips")
    axes[0][0].set_ylabel("seconds (modelled)")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
