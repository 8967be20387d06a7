"""`trace-jax reproduce capability-targeting`: are an adapter for each capability and a choice between them better than
the same number of rollouts spent otherwise (arXiv 2604.05336)?

One SFT policy is contrasted, and a world searched for every capability that it lacks. For each seed, the adapters of
accepted worlds take as many steps each; one adapter on the task itself (`target`) and one on all worlds (`mix`) take as
many as those do together. What came out is scored on the task's held-out episodes and in each world; on demand so is a
gate over base and adapters (`gating`), trained on the task after them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import require_environment
from trace_jax.evaluation import form
from trace_jax.recipes import adapters, contrast, in_worlds, reproduce, routing, stage_costs, study_place, worlds
from trace_jax.recipes.adapter_runs import GATE, GATE_MIX, MIX, TARGET
from trace_jax.recipes.reproduce_table import interval
from trace_jax.recipes.rundir import stored_config, write_text
from trace_jax.recipes.stage_costs import StageCosts
from trace_jax.recipes.studies import TARGETING as NAME

SEEDS = (0, 1, 2)
SINGLE = "best adapter"  # of a seed, by its result on the held-out episodes themselves: in its favour
ORDER = ("base", TARGET, MIX, SINGLE, routing.SUM, routing.ROUTED, GATE, GATE_MIX, routing.ORACLE)


def command(
    config: RunConfig,
    overrides: Iterable[tuple[str, str]],
    out: Path,
    *,
    source: Path | None,
    seeds: Sequence[int] = SEEDS,
    steps: int | None = None,
    size: tuple[int | None, int | None] = (None, None),
    gate_steps: int | None = None,
) -> dict[str, Any]:
    """Runs the study, or what is missing of it, and writes `table.json` and `table.md` into `out`.

    Args:
        config: of the run `source` with `overrides`, which are fields of grpo, lora, rollout and evaluation.
        source: run whose SFT policy is the base.
        seeds: adapters of all kinds for each.
        steps: of each capability's adapter; None: `grpo.steps`.
        size: episodes and rollouts of each try of a world; None: those of the paper.
        gate_steps: of a gate over base and adapters on the task, in addition to all others; None: no gate.

    Returns:
        The content of `table.json`.

    Raises:
        ConfigError: bad input, no capability was kept, or no world accepted. Interrupted: everything is saved.
    """
    require_environment(config, "ads", NAME)
    if source is None:
        raise ConfigError(f"{NAME} takes the SFT policy of a run: give --init DIR")
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))} names one twice: each is a run of its own")
    overrides, stored = list(overrides), stored_config(source)
    for seed in seeds:
        config_io.override(config, [("seed", str(seed))])
    allowed = (*adapters.MAY_CHANGE, "capability.")
    for name, _ in overrides:
        if not name.startswith(allowed):
            raise ConfigError(f"--{name} is of the SFT policy and fixed: {NAME} takes fields of {', '.join(allowed)}")
    steps = config.grpo.steps if steps is None else steps
    out = _begin(out, source, steps, overrides)
    reproduce.keep_programs(out)
    labelled = config_io.override(stored, [(n, v) for n, v in overrides if n.startswith("capability.")])
    costs = StageCosts(out)
    with costs.timed("contrast"):
        found = contrast.command(source, labelled, stage="sft", out=out / "contrast")
    costs.played("contrast", found["attempts"])
    if not found["kept"]:
        raise ConfigError(f"{out / 'contrast'} kept no capability: this policy lacks nothing that could be targeted")
    with costs.timed("worlds"):
        searched = worlds.command(source, stored, names=found["kept"], seeds=size[0], rollouts=size[1], out=out)
    costs.played("worlds", worlds.rollouts(searched))
    accepted = {n: w["level"] for n, w in searched["worlds"].items() if w["accepted"]}
    result: dict[str, Any] = {"study": NAME, "steps": steps, "kept": found["kept"], "worlds": accepted, "runs": {}}
    for number, seed in enumerate(seeds):
        print(f"{NAME}, seed {seed} ({number + 1} of {len(seeds)})", flush=True)
        folder = out / f"seed-{seed}"
        write_text(folder / worlds.FILE, json.dumps(searched, indent=1) + "\n")
        with costs.timed(f"seed {seed}: adapters"):
            trained = _train(source, stored, overrides, list(accepted), seed, steps, folder)
        if gate_steps is not None:
            with costs.timed(f"seed {seed}: gate"):
                gate = _train_some(source, stored, overrides, [GATE], seed, gate_steps, folder)
            costs.played(f"seed {seed}: gate", gate[GATE]["rollouts"])
        costs.played(f"seed {seed}: adapters", sum(a["rollouts"] for a in trained.values()))
        scored = config_io.override(stored, [(n, v) for n, v in overrides if n.startswith("evaluation.")])
        with costs.timed(f"seed {seed}: routing and held-out episodes"):
            summaries = routing.evaluate(source, scored, split="test", out=folder)
        answers = sum(s["extra"]["episodes"] * s["extra"]["samples"] for s in summaries.values())
        costs.played(f"seed {seed}: routing and held-out episodes", answers)
        with costs.timed(f"seed {seed}: episodes of the worlds"):
            inside = in_worlds.command(source, stored, accepted, out=folder)
        if gate_steps is not None:
            trained |= gate
        result["costs"] = costs.result()
        result["runs"][seed] = _figures(summaries, inside, trained, folder)
        # after every seed: the table can be read before it is whole
        result["summary"] = summary(result["runs"])
        write_text(out / "table.json", json.dumps(result, indent=1) + "\n")
        write_text(out / "table.md", markdown(result))
    print(markdown(result), end="")
    return result


def _begin(out: Path, source: Path, steps: int, overrides: Sequence[tuple[str, str]]) -> Path:
    """The study's directory, with what it began with: other settings do not belong into its table.

    Raises:
        ConfigError: it is of others, see `study_place.claim`.
    """
    mine = {"source": str(source.resolve()), "steps": steps, "fields": dict(overrides)}
    out = study_place.claim(out, NAME, mine)
    before = form.read(out / study_place.FILE, {}, "restore it, or choose another --out")
    if changed := next((k for k in mine if before.get(k) != mine[k]), None):
        raise ConfigError(f"{out} is a study with other {changed} ({before.get(changed)}): give another --out")
    return out


def _train(
    source: Path,
    stored: RunConfig,
    overrides: Sequence[tuple[str, str]],
    accepted: Sequence[str],
    seed: int,
    steps: int,
    folder: Path,
) -> dict[str, Any]:
    """Figures of all adapters of a seed: of each world, then, with as many steps as those together, mix and target."""
    result = {}
    for names, length in ((accepted, steps), ((MIX, TARGET), steps * len(accepted))):
        result |= _train_some(source, stored, overrides, names, seed, length, folder)
    return result


def _train_some(
    source: Path,
    stored: RunConfig,
    overrides: Sequence[tuple[str, str]],
    names: Sequence[str],
    seed: int,
    steps: int,
    folder: Path,
) -> dict[str, Any]:
    """Figures of some adapters of a seed, or of a gate over them."""
    pairs = [(n, v) for n, v in overrides if n.startswith(adapters.MAY_CHANGE)]
    pairs += [("seed", str(seed)), ("grpo.steps", str(steps))]
    config = config_io.override(stored, pairs)
    return adapters.command(source, config, pairs, names=names, out=folder)["adapters"]


def _figures(
    summaries: Mapping[str, Mapping[str, Any]],
    inside: Mapping[str, Any],
    trained: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    def rate(s: Mapping[str, Any]) -> float:
        return s["full_attr_at_1"]["value"]

    routes = routing.read(folder / routing.FILE)
    return {
        "held_out": {name: rate(s) for name, s in summaries.items()},
        "in_worlds": inside,
        "routing": {k: routes[k] for k in ("agreement", "chance", "chosen", "oracle")},
        "steps": {name: a["steps"] for name, a in trained.items()},
        "rollouts": {name: a["rollouts"] for name, a in trained.items()},
        "seconds": {name: a["seconds"] for name, a in trained.items()},
    }


def _rows(run: Mapping[str, Any]) -> dict[str, float]:
    """Held-out results of a seed by row of the table."""
    found = run["held_out"]
    singles = {n: v for n, v in found.items() if n not in ORDER}
    return {k: found[k] for k in ORDER if k in found} | ({SINGLE: max(singles.values())} if singles else {}) | singles


def summary(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """By row of the table: `mean` and `half` of its held-out result over seeds, and of its difference to the base and
    to `target` of the same seed (`over_base`, `over_target`)."""
    rows = {seed: _rows(run) for seed, run in runs.items()}
    names = [n for n in ORDER if all(n in r for r in rows.values())]
    names += [n for n in next(iter(rows.values())) if n not in names]
    result = {}
    for name in names:
        result[name] = interval([r[name] for r in rows.values()])
        for other, key in (("base", "over_base"), (TARGET, "over_target")):
            if name not in ("base", other):
                result[name][key] = interval([r[name] - r[other] for r in rows.values()])
    return result


def _in_worlds(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Success in worlds, mean over seeds."""
    first = next(iter(runs.values()))["in_worlds"]
    return {
        agent: {
            w: {"success": sum(r["in_worlds"][agent][w]["success"] for r in runs.values()) / len(runs)} for w in row
        }
        for agent, row in first.items()
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The tables for people."""
    runs = result["runs"]

    def cell(found: Mapping[str, Any] | None, sign: str = "") -> str:
        if found is None:
            return "-"
        return f"{found['mean']:{sign}.3f}" + ("" if found["half"] is None else f" ± {found['half']:.3f}")

    lines = ["| | held-out, all right | over base | over target |", "|---|---|---|---|"]
    for name, s in result["summary"].items():
        cells = [cell(s), cell(s.get("over_base"), "+"), cell(s.get("over_target"), "+")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    gates = {run.get("steps", {}).get(GATE) for run in runs.values()} - {None}
    gated = f"; `{GATE}` {', '.join(map(str, sorted(gates)))} on the task besides, over all of those" if gates else ""
    levels = ", ".join(f"{n}@{level:g}" for n, level in result["worlds"].items())
    lines.append(
        f"\nWorlds: {levels}; {result['steps']} steps for each one's adapter, {MIX} and {TARGET} as many as all of "
        f"them{gated}; {len(runs)} seeds, ± is half of a 95 % interval over them (Student's t). `{SINGLE}`: the one "
        "that does best on these very episodes, seed by seed.\n"
    )
    lines.append(in_worlds.markdown(_in_worlds(runs)))
    for seed, run in runs.items():
        agreement, chance = run["routing"]["agreement"], run["routing"]["chance"]
        cost = ", ".join(
            f"{n} {run['rollouts'][n]} rollouts in {run['seconds'][n] or 0:.0f} s" for n in run["rollouts"]
        )
        lines.append(f"Seed {seed}: routing is the oracle's in {agreement:.0%}, by chance in {chance:.0%}; {cost}.\n")
    if result.get("costs"):
        lines.append(stage_costs.markdown(result["costs"]))
    return "\n".join(lines)
