"""`trace-jax reproduce`: a paper's ablation table at the size of a configuration.

A study is a list of variants of one GRPO run. All start from one SFT policy and take as many steps on the same prompts,
once for each seed. Every run is an ordinary run directory under the study's; what is finished is not repeated, so an
interrupted study goes on with the same command.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes import grpo, records, reproduce_table, study_place, train
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, stored_config, write_text
from trace_jax.recipes.studies import STUDIES, Study
from trace_jax.recipes.workspace import Workspace

SEEDS = (0, 1, 2)
LAST = 10  # steps whose mean is the training figure at the end


def command(
    name: str,
    config: RunConfig,
    out: Path,
    *,
    source: Path | None = None,
    seeds: Sequence[int] = SEEDS,
    variants: Sequence[str] = (),
    steps: int | None = None,
) -> dict[str, Any]:
    """Runs a study, or what is missing of it, and writes `table.json`, `table.md` and `curves.svg` into `out`.

    Args:
        name: of the study, one of `studies.STUDIES`.
        config: of every run, but for what the study and its variants set.
        out: directory of the study.
        source: run whose SFT policy all start from; None: one is trained in `out/sft`.
        seeds: one run of each variant for each.
        variants: names of those to run; empty: all.
        steps: of each run; None: as the study says.

    Returns:
        The content of `table.json`.

    Raises:
        ConfigError: bad input. Interrupted: everything is saved.
    """
    study = STUDIES[name]
    chosen = _chosen(study, variants)
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))} names one twice: each is a run of its own")
    for seed in seeds:
        config_io.override(config, [("seed", str(seed))])
    every = {v: _config(config, study, v, steps) for v in study.variants}
    planned = {v: every[v] for v in chosen}
    for planned_config in planned.values():
        train.check(planned_config)
        if source is not None:
            train.check_new("grpo", None, planned_config, source)
    out = study_place.claim(out, name)
    _same_source(out, source)
    keep_programs(out)
    source = _sft(config, out) if source is None else source
    table = _finished_runs(out, every)
    result: dict[str, Any] = {}
    count = len(seeds) * len(chosen)
    for number, (seed, variant) in enumerate((s, v) for s in seeds for v in chosen):
        print(f"{name}, run {number + 1} of {count}: {variant}, seed {seed}", flush=True)
        run_config = planned[variant].replace(seed=seed)
        if (other := study.references.get(variant)) is not None:
            pairs = [("grpo.turn_credit.reference", str(out / file_name(other, seed)))]
            run_config = config_io.override(run_config, pairs)
        logged = grpo_run(out / file_name(variant, seed), run_config, source)
        table.setdefault(variant, {})[seed] = _figures(logged, planned[variant])
        # after every run: the table can be read before it is whole
        shown = {v: dict(sorted(table[v].items())) for v in study.variants if v in table}
        first = next(iter(shown))
        result = {"study": name, "baseline": first, "steps": every[first].grpo.steps, "runs": shown}
        result |= {"summary": reproduce_table.summary(shown, first)}
        write_text(out / "table.json", json.dumps(result, indent=1))
        write_text(out / "table.md", reproduce_table.markdown(result))
        write_text(out / "curves.svg", reproduce_table.curves(shown))
    print(reproduce_table.markdown(result), end="")
    return result


def _chosen(study: Study, variants: Sequence[str]) -> list[str]:
    for v in variants:
        if v not in study.variants:
            meant = config_io.nearest(v, study.variants)
            mend = f"did you mean {meant!r}?" if meant else f"choose from {', '.join(map(repr, study.variants))}"
            raise ConfigError(f"--variants {v!r}: {mend}")
    # the first one is what the others are compared to; what a variant's reference comes from is run, too
    wanted = {*variants, *(study.references[v] for v in variants if v in study.references)}
    return [v for v in study.variants if not variants or v in wanted]


def _config(config: RunConfig, study: Study, variant: str, steps: int | None) -> RunConfig:
    fields: dict[str, Any] = dict(study.shape)
    if steps is not None:
        fields |= {"steps": steps, "validate_every": steps, "save_every": steps}
    fields["validation_episodes"] = min(fields["validation_episodes"], config.data.validation)
    fields |= study.variants[variant]
    pairs = [(f"grpo.{k}", json.dumps(v).strip('"')) for k, v in fields.items()]
    return config_io.override(config, pairs)


def _sft(config: RunConfig, out: Path) -> Path:
    """The SFT policy of a study that was given none."""
    path = out / "sft"
    begun = (path / "config.yaml").exists()
    if begun:
        changed = config_io.differences(stored_config(path), config)
        if changed := [f for f in changed if not f.startswith(("grpo.", "evaluation."))]:
            raise ConfigError(
                f"{path} is of another study (`{changed[0]}` differs): give another --out, or the old settings"
            )
    run_stage("sft", path, stored_config(path) if begun else config, resume=begun)
    return path


def grpo_run(path: Path, config: RunConfig, source: Path) -> list[dict[str, Any]]:
    """GRPO of one run with the SFT policy of `source`, from wherever it stands; its records."""
    begun = (path / "config.yaml").exists()
    if begun and (changed := config_io.differences(stored_config(path), config)):
        raise ConfigError(
            f"{path} is of another study (`{changed[0]}` differs): give another --out, or the old settings"
        )
    if not begun:
        share_data(source, path)
    if not begun or not finished(path, grpo.STAGE):
        run_stage("grpo", path, config, resume=begun, source=None if begun else source)
    return records.read(path)


def _same_source(out: Path, source: Path | None) -> None:
    """Keeps which SFT policy a study began with: runs from another one do not belong into its table."""
    file, mine = out / "source.txt", "sft" if source is None else str(source.resolve())
    if not file.exists():
        write_text(file, mine + "\n")
    elif (before := file.read_text(encoding="utf-8").strip()) != mine:
        raise ConfigError(
            f"{out} is a study from the policy of {before}, not of {mine}: give another --out, or its --init"
        )


def _finished_runs(out: Path, planned: Mapping[str, RunConfig]) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures of the runs that are there already, whoever asked for them."""
    table: dict[str, dict[int, dict[str, Any]]] = {}
    for variant, config in planned.items():
        stem = file_name(variant, 0)[:-1]
        for path in sorted(out.glob(f"{stem}*/config.yaml")):
            seed = path.parent.name.removeprefix(stem)
            if not seed.isdigit():
                continue
            stored = stored_config(path.parent)
            changed = config_io.differences(stored, config.replace(seed=int(seed)))
            if set(changed) <= {"grpo.turn_credit.reference"} and finished(path.parent, grpo.STAGE):
                table.setdefault(variant, {})[int(seed)] = _figures(records.read(path.parent), config)
    return table


def run_stage(*args: Any, **kwargs: Any) -> None:
    """`train.command` inside a study."""
    try:
        train.command(*args, **kwargs)
    except Interrupted as stop:
        raise Interrupted(stop.status) from None  # what continues is the command of the study


def finished(path: Path, stage: str) -> bool:
    """Whether a stage of a run has made its last step."""
    with RunDirectory.open(path, lock=False) as run:
        return Workspace(run, Progress(), Interrupt()).is_finished(stage)


def share_data(source: Path, path: Path) -> None:
    """The episodes of the source's splits: a run with other ones does not take them, see `splits.load_split`."""
    for file in (source / "data").glob("*.npz"):
        (path / "data").mkdir(parents=True, exist_ok=True)
        target = path / "data" / file.name
        if not target.exists():
            try:
                target.hardlink_to(file)
            except OSError:  # another file system
                shutil.copy(file, target)


def _figures(logged: Sequence[Mapping[str, Any]], config: RunConfig) -> dict[str, Any]:
    """What a run came to, and its curve of training rewards."""
    steps = [r for r in logged if r["stage"] == "grpo"]
    held = {r["step"]: r for r in logged if r["stage"] == "validation"}
    # Seconds between the ends of steps, without the first, which compiles.
    pace = [b["seconds"] - a["seconds"] for a, b in zip(steps, steps[1:], strict=False) if b["seconds"] > a["seconds"]]
    last = steps[-LAST:]

    def mean(key: str, rows: Sequence[Mapping[str, Any]] = last) -> float | None:
        values = [r[key] for r in rows if r.get(key) is not None]
        return statistics.mean(values) if values else None

    final = held.get(config.grpo.steps, {})
    return {
        "reward": mean("reward"),
        "held_out_before": held.get(0, {}).get("full_right"),
        "held_out": final.get("full_right"),
        "held_out_reward": final.get("reward"),
        "tool_calls": mean("tool_calls"),
        "wasted_groups": mean("constant_groups", steps),
        "clip_fraction": mean("clip_fraction", steps),
        "entropy": mean("entropy"),
        "credit_positive": mean("credit/positive"),
        "credit_std": mean("credit/std"),
        "credit_reward_correlation": mean("credit/reward_correlation"),
        "probe_share": mean("credit/probe_share", steps[2:]),
        "seconds_a_step": statistics.median(pace) if pace else None,
        "rewards": [r["reward"] for r in steps],
    }


def keep_programs(out: Path) -> None:
    """The runs of a study compile the same programs."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(out / "programs"))


def file_name(variant: str, seed: int) -> str:
    """Directory of a run in its study's."""
    words = "".join(c if c.isalnum() else " " for c in variant.lower()).split()
    return "-".join([*words, str(seed)])
