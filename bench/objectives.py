"""Objectives side by side at the size of a run: `python bench/objectives.py SFT_RUN OUT [--steps N] [--seeds 0 1 2]`.

Every variant starts from the SFT policy of SFT_RUN and takes the same number of steps with the same prompts; held-out
figures are those of the validation split at the last step. Runs that are finished are not repeated, so an interrupted
table is continued by the same command. Prints a Markdown table and writes OUT/objectives.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"}
VARIANTS: dict[str, dict[str, object]] = {
    "GRPO": {"objective": "grpo", "aggregation": "seq_mean_token_mean"},
    "Dr.GRPO": {
        "objective": "dr_grpo",
        "advantage_std": False,
        "aggregation": "seq_sum_constant",
        "aggregation_constant": 64.0,
    },
    "DAPO": {"objective": "dapo", "constant_groups": "resample", "overlong_buffer": 32},
    "GSPO": {"objective": "gspo", **GSPO},
    "GRPO, one step behind": {"objective": "grpo", "aggregation": "seq_mean_token_mean", "staleness": 1},
}
LAST = 10  # steps whose mean is the training figure


def run(source: Path, out: Path, name: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One run; its figures."""
    path = out / f"{name.lower().replace(' ', '-').replace(',', '').replace('.', '')}-{seed}"
    shape = {"steps": args.steps, "prompts": args.prompts, "validate_every": args.steps}
    shape |= {"validation_episodes": args.episodes, "validation_samples": args.samples, "save_every": args.steps}
    shape |= {"keep_best": 0, "iterations": 2}  # with one, every ratio is 1 and no clip acts
    options = [str(x) for k, v in (shape | VARIANTS[name]).items() for x in (f"--grpo.{k}", json.dumps(v).strip('"'))]
    begun = ["--run-dir", str(path), "--resume"] if (path / "config.yaml").exists() else None
    command = begun or ["--init", str(source), "--run-dir", str(path), "--seed", str(seed), *options]
    subprocess.run([sys.executable, "-m", "trace_jax.cli", "grpo", *command], check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["stage"] == "grpo"]
    held = {r["step"]: r for r in records if r["stage"] == "validation"}
    # Seconds between the ends of steps, without the first, which compiles, and without validation.
    pace = [b["seconds"] - a["seconds"] for a, b in zip(steps, steps[1:], strict=False)]
    return {
        "train_full_right": statistics.mean(r["full_right"] for r in steps[-LAST:]),
        "train_reward": statistics.mean(r["reward"] for r in steps[-LAST:]),
        "held_out_before": held[0]["full_right"],
        "held_out": held[args.steps]["full_right"],
        "held_out_reward": held[args.steps]["reward"],
        "clip_fraction": statistics.mean(r["clip_fraction"] or 0.0 for r in steps),
        "entropy": steps[-1]["entropy"],
        "seconds_a_step": statistics.median(pace),
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error over seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return statistics.mean(values), spread / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="run directory with a finished SFT stage")
    parser.add_argument("out", type=Path, help="where the runs and the table go")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=128, help="of the validation split")
    parser.add_argument("--samples", type=int, default=2, help="of each validation episode")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table = {}
    for seed in args.seeds:  # all variants of a seed first: a table can be read before it is whole
        for name in args.variants:
            table.setdefault(name, {})[seed] = run(args.source, args.out, name, seed, args)
            print(f"{name}, seed {seed}: {table[name][seed]['held_out']:.3f}", file=sys.stderr)
            (args.out / "objectives.json").write_text(json.dumps({"settings": vars(args), "runs": table}, default=str))
    names = list(next(iter(next(iter(table.values())).values())))
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for name, runs in table.items():
        cells = ["{:.3f} ± {:.3f}".format(*mean_and_error([r[n] for r in runs.values()])) for n in names]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
