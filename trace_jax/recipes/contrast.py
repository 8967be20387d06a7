"""`trace-jax capability contrast`: which capabilities a policy's failed attempts lack and its passed ones do not.

Sampled trajectories are kept as they come, in parts of `PART` tasks, so that an interrupted contrast goes on with the
same command, and other thresholds or another labeller cost no sampling.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_jax import config_io
from trace_jax.capability import attempts, contrast, endpoint, table
from trace_jax.config import ConfigError, RunConfig
from trace_jax.environments.capability import Attempt, Capability, Label
from trace_jax.evaluation import form
from trace_jax.evaluation.evaluate import evaluate_policy
from trace_jax.recipes import places
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, refuse_changes, stored_config, write_text, writing
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import Trajectory, read_parquet, write_parquet

EPISODES, SAMPLES = 256, 4
PART = 64  # tasks sampled between two savings


def command(
    run_dir: Path | None,
    config: RunConfig,
    *,
    stage: str | None = None,
    split: str | None = None,
    episodes: int | None = None,
    samples: int | None = None,
    trajectories: Path | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Samples, labels and contrasts; writes `contrast.json`, `contrast.md`, `contrast.svg` and `labels.parquet`.

    Args:
        config: the run's configuration with changes to capability, evaluation or data.
        stage: whose policy, "latest", "best", "grpo" or "sft"; None: the latest.
        split: "train" or "validation"; None: validation.
        episodes: the first so many of the split; None: `EPISODES`, or all of a smaller split.
        samples: attempts at each; None: `SAMPLES`, one of a greedy policy.
        trajectories: a file of the run with trajectories to contrast instead of sampling.
        out: None: `capability/contrast-<stage>-<split>` of the run directory.

    Returns:
        The content of `contrast.json`.

    Raises:
        ConfigError: bad input. Interrupted: everything is saved.
    """
    capabilities = domain_of(config).capabilities
    if not capabilities:
        raise ConfigError(
            f"`environment.name` {config.environment.name} has no capability dictionary: `capability` works on ads only"
        )
    given = {"stage": stage, "split": split, "episodes": episodes, "samples": samples}
    if trajectories is not None and (clash := [name for name, value in given.items() if value is not None]):
        raise ConfigError(f"--{clash[0]} is about sampling and --trajectories needs none: leave one of them out")
    may = ("capability.", "evaluation.", "data.seed", f"data.{split or 'validation'}")
    refuse_changes(stored_config(run_dir or Path()), config, may, "capability contrast")
    with RunDirectory.open(run_dir) as run, Interrupt() as interrupt:
        run.config = config
        out = None if out is None else places.folder(out)
        work = Workspace(run, Progress(), interrupt)
        if trajectories is not None:
            found, name = read_parquet(trajectories), f"contrast-{trajectories.stem}"
            out = run.folder(f"capability/{name}") if out is None else out
            settings: dict[str, Any] = {"trajectories": str(trajectories)}
            _same(out, settings)
        else:
            stage = work.latest_stage() if stage in (None, "latest") else stage
            split = split or "validation"
            out = run.folder(f"capability/contrast-{stage}-{split}") if out is None else out
            found, settings = _sampled(work, stage, split, episodes, samples, out)
        if not found:
            raise ConfigError(f"{trajectories} holds no trajectory: name another file")
        return _contrast(work, found, capabilities, settings, out)


def _sampled(
    work: Workspace, stage: str, split: str, episodes: int | None, samples: int | None, out: Path
) -> tuple[list[Trajectory], dict[str, Any]]:
    """Attempts of a policy at the first episodes of a split, and what they depend on."""
    config, environment = work.config, work.environment(split)
    if episodes is not None and episodes > len(environment):
        raise ConfigError(f"--episodes {episodes}: {split} has {len(environment)}, see `data.{split}`")
    episodes = min(EPISODES, len(environment)) if episodes is None else episodes
    greedy = config.evaluation.temperature == 0
    if greedy and (samples or 1) > 1:
        raise ConfigError(f"--samples {samples}: with `evaluation.temperature` 0 all of them would be the same")
    samples = (1 if greedy else SAMPLES) if samples is None else samples
    params = work.trained_params(stage)
    store = work.store("grpo" if stage == "best" else stage)
    settings = {"stage": stage, "step": store.best() if stage == "best" else store.latest(), "split": split}
    settings |= {"episodes": episodes, "samples": samples}
    kept = ("seed", "evaluation.temperature", "evaluation.top", "evaluation.min_p", "data.seed", f"data.{split}")
    settings |= {name: value for name, value in config_io.flatten(config) if name.startswith(kept)}
    _same(out, settings)
    asked, found = dataclasses.replace(config.evaluation, samples=samples), []
    with work.progress.bar(f"sample {stage}", episodes) as bar:
        for start in range(0, episodes, PART):
            path = out / "trajectories" / f"{start // PART:05d}.parquet"
            indices = range(start, min(start + PART, episodes))
            if not path.exists():
                work.engine.set_params(params, 0)

                def report(done: int, _: int, start: int = start) -> None:
                    bar.update(start + done)
                    work.interrupt.check()

                part = evaluate_policy(
                    work.engine,
                    work.chat,
                    environment,
                    indices,
                    asked,
                    config.rollout,
                    seed=config.seed,
                    on_progress=report,
                )
                work.interrupt.check()  # a terminal's Ctrl-C also reaches the tool's processes: the last may be spoilt
                write_parquet(path, part)
            found += read_parquet(path)
            bar.update(indices.stop)
    return found, settings


def _same(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuses to mix what was sampled with other settings."""
    path = out / "settings.json"
    wanted = json.loads(json.dumps(settings, default=list))
    before = form.read(path, {}, f"remove {out}, or choose another --out") if path.exists() else None
    if before is None:
        write_text(path, json.dumps(wanted, indent=1) + "\n")
    elif before != wanted:
        name = next(k for k in {**before, **wanted} if before.get(k) != wanted.get(k))
        raise ConfigError(
            f"{out} holds trajectories of other settings ({name} {before.get(name)}, not {wanted.get(name)}): remove "
            "it or choose another --out"
        )


def _contrast(
    work: Workspace,
    trajectories: Sequence[Trajectory],
    capabilities: Sequence[Capability],
    settings: Mapping[str, Any],
    out: Path,
) -> dict[str, Any]:
    config = work.config
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    read = [attempts.of_trajectory(t, work.chat, config.rollout) for t in trajectories]
    labels, unread = _labels(work, read, capabilities, out)
    passed = np.array([a.passed for a in read])
    found = contrast.contrast(
        labels,
        passed,
        np.array([t.task_index for t in trajectories]),
        config.capability,
        resamples=config.evaluation.bootstrap,
        confidence=config.evaluation.confidence,
        seed=config.seed,
    )
    notes = ["Nothing failed: nothing can be lacking."] if passed.all() else []
    notes += ["No attempt passed: ER+ counts as 0, and gaps are ER- alone."] if not passed.any() else []
    notes += [f"{unread} replies could not be read; their labels are NA."] if unread else []
    entries = table.entries(found, labels, passed, capabilities)
    result = {
        "attempts": len(read),
        "failed": int((~passed).sum()),
        "labeller": config.capability.labeller,
        "runs": config.capability.runs,
        "thresholds": {name: getattr(config.capability, name) for name in ("coverage", "gap", "keep")},
        "rank": config.capability.rank,
        "confidence": config.evaluation.confidence,
        "kept": [e["capability"] for e in entries if e["kept"]],
        "capabilities": entries,
        "notes": notes,
        "settings": dict(settings),
        "out": str(out),
    }
    _write_labels(out / "labels.parquet", trajectories, read, labels, capabilities)
    write_text(out / "contrast.json", json.dumps(result, indent=1, default=list, allow_nan=False) + "\n")
    write_text(out / "contrast.md", text := table.markdown(result))
    write_text(out / "contrast.svg", table.chart(result))
    print(text, end="")
    return json.loads(json.dumps(result, default=list))


def _labels(
    work: Workspace, read: Sequence[Attempt], capabilities: Sequence[Capability], out: Path
) -> tuple[np.ndarray, int]:
    """Labels [R, T, C], R = 1 where they are computed, and the number of replies that could not be read."""
    config = work.config.capability
    total = len(read) * (config.runs if config.labeller == "endpoint" else 1)
    with work.progress.bar("label", total) as bar:
        if config.labeller == "endpoint":

            def report(done: int, _: int) -> None:
                bar.update(done)
                work.interrupt.check()

            return endpoint.label(read, capabilities, config, out / "replies.jsonl", on_progress=report)
        labels = np.zeros((1, len(read), len(capabilities)), np.int8)
        for i, attempt in enumerate(read):
            labels[0, i] = [c.label(attempt) for c in capabilities]
            bar.update(i + 1)
            work.interrupt.check()
    return labels, 0


def _write_labels(
    path: Path,
    trajectories: Sequence[Trajectory],
    read: Sequence[Attempt],
    labels: np.ndarray,
    capabilities: Sequence[Capability],
) -> None:
    rows = [
        {"run": run, "task_index": t.task_index, "sample": t.sample, "passed": a.passed, "ending": a.ending}
        | {c.name: Label(int(value)).name for c, value in zip(capabilities, values, strict=True)}
        for run, of_run in enumerate(labels)
        for t, a, values in zip(trajectories, read, of_run, strict=True)
    ]
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        pq.write_table(pa.Table.from_pylist(rows), partial, compression="zstd")
        partial.replace(path)
