"""`trace-jax capability run`: contrast, worlds, adapters, and the comparison with its routing, one after another.

Each stage leaves its results in `capability/` of the run and does nothing where they are there, so an interrupted run
goes on with the same command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.recipes import adapters, contrast, routing, stage_costs, worlds
from trace_jax.recipes.rundir import refuse_changes, stored_config, write_text
from trace_jax.recipes.stage_costs import StageCosts

CONTRASTED = ("capability.", "evaluation.", "data.validation")
COMPARED = ("evaluation.", "data.test")
PLAYED: dict[str, Callable[[dict[str, Any]], int | None]] = {  # trajectories that a stage sampled
    "contrast": lambda found: found["attempts"],
    "worlds": worlds.rollouts,
    "train": lambda found: sum(a["rollouts"] for a in found["adapters"].values()),
    "eval": lambda found: sum(s["extra"]["episodes"] * s["extra"]["samples"] for s in found.values()),
}


def command(
    run_dir: Path,
    overrides: Iterable[tuple[str, str]],
    *,
    seeds: int | None = None,
    rollouts: int | None = None,
) -> dict[str, Any]:
    """Runs all stages on a run's SFT policy.

    Args:
        overrides: fields of capability and evaluation for the contrast and the comparison, of grpo, lora, rollout and
            data for the adapters.
        seeds, rollouts: of each try of a world, see `worlds.command`.

    Returns:
        What each stage returns, by its name, and `costs` of each, see `stage_costs`.

    Raises:
        ConfigError: a stage refuses, or nothing is left to do: no capability was kept, no world accepted.
    """
    overrides = list(overrides)
    stored = stored_config(run_dir)
    may = tuple(dict.fromkeys((*CONTRASTED, *adapters.MAY_CHANGE, *COMPARED)))
    refuse_changes(stored, config_io.override(stored, overrides), may, "capability run")

    def with_(prefixes: tuple[str, ...]):
        return config_io.override(stored, [(n, v) for n, v in overrides if n.startswith(prefixes)])

    trained = [(n, v) for n, v in overrides if n.startswith(adapters.MAY_CHANGE)]
    stages = {
        "contrast": lambda: contrast.command(run_dir, with_(CONTRASTED), stage="sft"),
        "worlds": lambda: worlds.command(run_dir, stored, seeds=seeds, rollouts=rollouts),
        "train": lambda: adapters.command(
            run_dir, with_(adapters.MAY_CHANGE), trained, names=_all(run_dir / "capability")
        ),
        "eval": lambda: routing.evaluate(run_dir, with_(COMPARED), split="test"),
    }
    result: dict[str, Any] = {}
    costs = StageCosts(run_dir / "capability")
    for name, stage in stages.items():
        print(f"capability {name}", flush=True)
        with costs.timed(name):
            result[name] = stage()
        if (played := PLAYED[name](result[name])) is not None:
            costs.played(name, played)
    result["costs"] = costs.result()
    print(stage_costs.markdown(result["costs"]), end="")
    write_text(run_dir / "capability" / "run.json", json.dumps(result, indent=1) + "\n")
    return result


def _all(out: Path) -> list[str]:
    """The accepted worlds' adapters, and the two that they are compared to."""
    found = worlds.read(out / worlds.FILE)["worlds"]
    return [*(n for n, w in found.items() if w["accepted"]), adapters.MIX, adapters.TARGET]
