"""Studies of `trace-jax reproduce` whose every policy is scored on the held-out episodes: `causal`, `abstention`.

For each seed an SFT policy is trained, which the rows that begin with it share; lessons, splits and tokenizer do not
depend on the seed and are made once. Every run is an ordinary run directory under the study's; what is finished and
scored is not repeated. Studies with one `--out` share the runs that they have in common.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.config_rules import get, require_environment, shown
from trace_jax.evaluation import store
from trace_jax.evaluation.metrics import EvalRecord
from trace_jax.policy.chat_files import tokenizer_files
from trace_jax.recipes import adoption, assess, records, reproduce, scored_table, study_place, train
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, first_used, stored_config, write_text, writing
from trace_jax.recipes.studies import SCORED, SCORED_SHAPE, Row, ScoredStudy
from trace_jax.recipes.workspace import Workspace

SEEDS = reproduce.SEEDS
WARM = 4  # a short SFT warms up for at most this fraction of its steps
# What an SFT policy does not depend on: two studies with one --out may differ in it.
_AFTER_SFT = ("grpo.", "environment.reward_", "environment.penalty_")


@dataclass(frozen=True)
class Scored:
    """What one run came to: figures for the table, and the answers that they are made of."""

    figures: dict[str, Any]
    records: list[EvalRecord]


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
    """Runs a study, or what is missing of it, and writes `NAME.json`, `NAME.md` and `NAME.svg` into `out`.

    Args:
        name: of the study, one of `studies.SCORED`.
        config: of every run, but for what the study and its rows set.
        out: directory of the study.
        source: run whose lessons, splits and tokenizer to use, and whose SFT policy for its own seed.
        seeds: one run of each row for each.
        variants: names of rows; those that they begin with and the baseline are run, too. Empty: all.
        steps: of GRPO; None: as the study says.

    Returns:
        The content of `NAME.json`.

    Raises:
        ConfigError: bad input. Interrupted: everything is saved.
    """
    require_environment(config, "ads", name)
    study = SCORED[name]
    chosen = _chosen(study, variants)
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))} names one twice: each is a run of its own")
    every = {row: config_of(config, study, row, steps) for row in study.rows}
    for seed in seeds:
        config_io.override(config, [("seed", str(seed))])
    for row in chosen:
        train.check(every[row])
        _check_different(config, row, study.rows[row])
    if source is not None:
        _check_source(source, every[study.baseline])
    runs = [(seed, row) for seed in seeds for row in chosen]
    for seed, row in runs:
        _place(out, row, study.rows[row], seed, every)
    out = study_place.claim(out, name)
    reproduce.keep_programs(out)
    found = {row: dict(_known(out, row, study.rows[row], every)) for row in study.rows}
    result: dict[str, Any] = {}
    for number, (seed, row) in enumerate(runs):
        print(f"{name}, row {number + 1} of {len(runs)}: {row}, seed {seed}", flush=True)
        was_there = seed in found[row]
        found[row][seed] = _row(out, study, row, seed, every, source)
        if not was_there or number == len(runs) - 1:  # after every run: the table can be read before it is whole
            result = _write(name, study, every[study.baseline], out, found)
    print(scored_table.markdown(result, study), end="")
    return result


def _write(
    name: str, study: ScoredStudy, config: RunConfig, out: Path, found: Mapping[str, Mapping[int, Scored]]
) -> dict[str, Any]:
    shown_rows = {row: dict(sorted(runs.items())) for row, runs in found.items() if runs}
    figures = {row: {seed: s.figures for seed, s in runs.items()} for row, runs in shown_rows.items()}
    answers = {row: {seed: s.records for seed, s in runs.items()} for row, runs in shown_rows.items()}
    result = {"study": name, "baseline": study.baseline, "steps": config.grpo.steps, "runs": figures}
    result |= scored_table.summary(figures, answers, study, config.evaluation)
    write_text(out / f"{name}.json", json.dumps(result, indent=1) + "\n")
    write_text(out / f"{name}.md", scored_table.markdown(result, study))
    if (chart := scored_table.chart(name, result)) is not None:
        write_text(out / f"{name}.svg", chart)
    return result


def _chosen(study: ScoredStudy, variants: Sequence[str]) -> list[str]:
    for v in variants:
        if v not in study.rows:
            meant = config_io.nearest(v, study.rows)
            mend = f"did you mean {meant!r}?" if meant else f"choose from {', '.join(map(repr, study.rows))}"
            raise ConfigError(f"--variants {v!r}: {mend}")
    wanted = {study.baseline, *variants}
    wanted |= {study.rows[v].begins for v in wanted if study.rows[v].begins}
    # what others begin with comes first, and of that the row whose lessons the others share
    order = sorted(study.rows, key=lambda row: (study.rows[row].agent != "sft", -study.rows[row].lessons))
    return [v for v in order if not variants or v in wanted]


def config_of(config: RunConfig, study: ScoredStudy, row: str, steps: int | None) -> RunConfig:
    """The configuration of a row's run, but for its seed."""
    own = study.rows[row]
    first = study.rows[own.begins] if own.begins else own
    fields: dict[str, Any] = {f"grpo.{k}": v for k, v in SCORED_SHAPE.items()} | {**first.fields, **own.fields}
    if steps is not None:
        fields |= {"grpo.steps": steps, "grpo.save_every": min(steps, SCORED_SHAPE["save_every"])}
    if first.lessons < 1:
        sft = config.sft
        count = max(round(first.lessons * sft.trajectories), sft.batch)
        warm = min(sft.optimizer.warmup_steps, count // sft.batch // WARM)
        fields |= {"sft.trajectories": count, "sft.epochs": 1, "sft.optimizer.warmup_steps": warm}
    return config_io.override(config, [(k, json.dumps(v).strip('"')) for k, v in fields.items()])


def _check_different(config: RunConfig, name: str, row: Row) -> None:
    """Refuses a configuration that has already what a row is there to change."""
    for field, value in row.fields.items():
        if field != "grpo.kl_estimator" and get(config, field) == value:
            raise ConfigError(
                f"`{field}` is {shown(value)} already, which is what the row {name!r} changes: leave it out"
            )


def _check_source(source: Path, config: RunConfig) -> None:
    """Refuses a run whose lessons or tokenizer are not those of the study."""
    adoption.check(source, config)
    before = stored_config(source, "--init")
    for name in config_io.differences(before, config):
        if name != "seed" and first_used(name) in ("teacher", "tokenizer", "sft"):
            old, new = (shown(get(c, name)) for c in (before, config))
            raise ConfigError(
                f"`{name}` is {new}, but the lessons of --init {source} were made with {old}: leave it as it was, or "
                "leave --init out"
            )


def _place(out: Path, name: str, row: Row, seed: int, every: Mapping[str, RunConfig]) -> tuple[Path, RunConfig]:
    """Directory and configuration of a row's run.

    Raises:
        ConfigError: there is a run with other settings.
    """
    folder = row.begins if row.agent == "untrained" else name
    path, config = out / reproduce.file_name(folder, seed), every[folder].replace(seed=seed)
    if (path / "config.yaml").exists() and (changed := _changed(path, config, row.agent)):
        raise ConfigError(
            f"{path} is of another study (`{changed[0]}` differs): give another --out, or the old settings"
        )
    return path, config


def _known(out: Path, name: str, row: Row, every: Mapping[str, RunConfig]) -> Iterator[tuple[int, Scored]]:
    """What is scored already, whoever asked for it, by seed."""
    folder = row.begins if row.agent == "untrained" else name
    stem = reproduce.file_name(folder, 0)[:-1]
    for path in sorted(p.parent for p in out.glob(f"{stem}*/config.yaml")):
        seed = path.name.removeprefix(stem)
        if not seed.isdigit():
            continue
        config = every[folder].replace(seed=int(seed))
        if _changed(path, config, row.agent) or not reproduce.finished(path, _stage(row)):
            continue
        if assess.stored(path, config, row.agent) is not None:
            yield int(seed), _read(path, config, row.agent)


def _stage(row: Row) -> str:
    """What has to be finished before a row is scored."""
    return "grpo" if row.agent == "grpo" else "sft"


def _changed(path: Path, config: RunConfig, agent: str) -> list[str]:
    """Fields in which a run that is there differs, as far as they have a part in the agent that is scored."""
    fields = config_io.differences(stored_config(path), config)
    return fields if agent == "grpo" else [f for f in fields if not f.startswith(_AFTER_SFT)]


def _row(
    out: Path, study: ScoredStudy, name: str, seed: int, every: Mapping[str, RunConfig], source: Path | None
) -> Scored:
    """Trains and scores one row, from wherever it stands."""
    row = study.rows[name]
    path, config = _place(out, name, row, seed, every)
    begun = (path / "config.yaml").exists()
    done = begun and reproduce.finished(path, _stage(row))
    if row.agent == "grpo":
        reproduce.grpo_run(path, config, out / reproduce.file_name(row.begins, seed))
    elif not done:
        if not begun:
            RunDirectory.create(path, config, partial(_begin, out, source)).__exit__()
        reproduce.run_stage("sft", path, stored_config(path), resume=True)
    # What was scored before it was finished, by hand, is of an older checkpoint.
    if not done or assess.stored(path, config, row.agent) is None:
        with RunDirectory.open(path) as run, Interrupt() as interrupt:
            assess.score(Workspace(run, Progress(), interrupt), row.agent)
    return _read(path, config, row.agent)


def _begin(out: Path, source: Path | None, run: RunDirectory) -> None:
    """Puts into a new SFT run what others have made already: splits, lessons and tokenizer, which are the same for all
    seeds, and where `source` is the very run that this one would become, its policy."""
    others = [p.parent for p in sorted(out.glob("*/config.yaml"))]
    for other in ([] if source is None else [source]) + others:
        reproduce.share_data(other, run.path)
        lessons = sorted((other / "data" / "teacher").glob("*.parquet"))  # a run of GRPO alone has none
        whole = lessons and any((other / "checkpoints" / "sft").glob("[0-9]*"))  # and its tokenizer
        enough = stored_config(other).sft.trajectories >= run.config.sft.trajectories
        if whole and enough and not tokenizer_files(run.path):
            _copy(lessons, run.path / "data" / "teacher")
            _copy([other / name for name in tokenizer_files(other)], run.path)
    if source is None:
        return
    if all(first_used(f) in ("", "grpo") for f in config_io.differences(stored_config(source), run.config)):
        with RunDirectory.open(source, lock=False, flag="--init") as other:
            adoption.copy_policy(Workspace(other, Progress(), Interrupt()), "sft", run, "sft")


def _copy(files: Sequence[Path], folder: Path) -> None:
    for file in files:
        target = folder / file.name
        part = target.with_name(f"{target.name}.part")
        with writing(target):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, part)
            part.replace(target)


def _read(path: Path, config: RunConfig, agent: str) -> Scored:
    """What a scored run came to."""
    summary = assess.stored(path, config, agent)
    known = (summary.get("benchmark") or {}).get("sha256")  # results of earlier versions do not say
    figures: dict[str, Any] = {"metrics": scored_table.metrics_of(summary), "benchmark": known}
    figures["decision"] = scored_table.decision_of(summary)
    if agent == "grpo":
        steps = records.steps(path, ("full_right",))
        figures["full_right"] = [r["full_right"] for r in steps]
        figures["rewards"] = [r["reward"] for r in steps]
    return Scored(figures, store.load_records(path, agent))
