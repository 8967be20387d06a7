"""The whole recipe: teacher, tokenizer, SFT, GRPO, held-out evaluation, export, report; and its parts.

Each stage leaves what it made in the run directory and does nothing when it is there already, so resuming is running
again.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner import credit, objectives, packing
from trace_jax.learner.roles import role_meshes
from trace_jax.recipes import assess, export, grpo, sft, teacher, tracking, turn_probe
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, writing
from trace_jax.recipes.workspace import TOKENIZER, Workspace
from trace_jax.report import html


def command(
    name: str,
    run_dir: Path | None,
    config: RunConfig,
    *,
    resume: bool,
    source: Path | None = None,
    profile: int = 0,
    track: str | None = None,
) -> dict[str, Any]:
    """Runs `train`, `sft` or `grpo` in a run directory.

    Args:
        config: of the run; of a continued one only fields that no stage has used yet may have changed.
        resume: continue the run in `run_dir`.
        source: for `grpo`: start a new run from the SFT policy of this one.
        profile: training steps of each stage to trace (`recipes.profile`).
        track: where figures go beside the run directory, one of `tracking.SERVICES`.

    Returns:
        What `--json` prints: the final agent's results for `train`, else the stage's last metrics.

    Raises:
        ConfigError: bad input.
        Interrupted: a signal arrived; everything is saved.
    """
    check(config)
    tracking.require(track)
    continues = resume or (name == "grpo" and source is None)
    run = RunDirectory.open(run_dir, config) if continues else RunDirectory.create(run_dir, config)
    with run, Interrupt() as interrupt:
        work = Workspace(run, Progress(), interrupt)
        work.progress.note(f"run directory: {run.path}")
        try:
            if source is not None and not resume:
                _adopt(source, run)
            run.track(track)
            if name == "train":
                return _train(work, profile)
            metrics = _sft(work, profile) if name == "sft" else grpo.train(work, profile)
            print(f"{name} finished: {run.path}")
            return {"stage": name, "run_dir": str(run.path), **metrics}
        except Interrupted as stop:
            again = shlex.join(["trace-jax", name, "--run-dir", str(run.path), "--resume"])
            raise Interrupted(stop.status, again) from None


def check(config: RunConfig) -> None:
    """Refuses, before anything runs, what only these devices or the objective can tell.

    Raises:
        ConfigError: contradicting GRPO fields, a mesh that does not fit the devices, rows that do not split over it.
    """
    objectives.validate(config.grpo)
    credit.validate(config.grpo, config.rollout.context)
    turn_probe.check(config)
    mesh, sampling = role_meshes(config.mesh)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.grpo.turn_credit.enabled:
        asking = sampling.shape["data"] * sampling.shape["fsdp"]
        packing.validate(config.grpo.turn_credit.microbatch, "grpo.turn_credit.microbatch", asking)
    for name, stage in (("sft", config.sft), ("grpo", config.grpo)):
        packing.validate(stage.microbatch, f"{name}.microbatch", ways)


def _sft(work: Workspace, profile: int = 0) -> dict[str, float]:
    if work.is_finished("sft"):  # whatever became of the teacher's files
        return {}
    lessons = teacher.build(work.run, work.progress, work.interrupt)
    work.interrupt.check()
    work.train_tokenizer(lessons)
    work.interrupt.check()
    return sft.train(work, lessons, profile)


def _train(work: Workspace, profile: int = 0) -> dict[str, Any]:
    _sft(work, profile)
    for agent in ("untrained", *domain_of(work.config).agents, "sft"):
        final = assess.evaluate(work, agent)
    if work.config.grpo.steps:
        if not work.is_finished("grpo"):
            grpo.train(work, profile)
        final = assess.evaluate(work, "grpo")
    assess.show(work.run.path)
    path = export.write(work, work.latest_stage(), work.run.path / "export")
    page = html.write(work.run.path)
    print(f"policy: {path}\nreport: {page}")
    return final


def _adopt(source: Path, run: RunDirectory) -> None:
    """Copies the tokenizer and the finished SFT policy of another run."""
    with RunDirectory.open(source, lock=False) as other:
        origin = Workspace(other, Progress(), Interrupt())
        if not origin.is_finished("sft"):
            raise ConfigError(f"SFT of {source} is not finished: run `trace-jax sft --run-dir {source} --resume` first")
        step = origin.store("sft").latest()
        name = f"{step:08d}"
        run.folder("checkpoints")
        with writing(run.path / "checkpoints"):
            shutil.copy(other.path / TOKENIZER, run.path / TOKENIZER)
            shutil.copytree(other.checkpoints("sft") / name, run.checkpoints("sft") / name)
