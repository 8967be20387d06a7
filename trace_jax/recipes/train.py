"""The whole recipe: teacher, tokenizer, SFT, GRPO, held-out evaluation, export, report; and its parts.

Each stage leaves what it made in the run directory and does nothing when it is there already, so resuming is running
again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner import credit, multihost, objectives, packing
from trace_jax.learner.roles import role_meshes, set_apart
from trace_jax.recipes import (
    adoption,
    assess,
    distributed,
    export,
    grpo,
    processes,
    sft,
    teacher,
    tracking,
    turn_probe,
)
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.rundir import ADAPTERS, RunDirectory, stored_config
from trace_jax.recipes.workspace import Workspace
from trace_jax.report import html
from trace_jax.rollout.placement import LANE_MEND, check_compiled


def command(
    name: str,
    run_dir: Path | None,
    config: RunConfig,
    *,
    resume: bool,
    source: Path | None = None,
    profile: int = 0,
    track: str | None = None,
    prepare: Callable[[Workspace], None] | None = None,
) -> dict[str, Any]:
    """Runs `train`, `sft` or `grpo` in a run directory.

    Args:
        config: of the run; of a continued one only fields that no stage has used yet may have changed.
        resume: continue the run in `run_dir`.
        source: start a new run from the policy of this one.
        profile: training steps of each stage to trace (`recipes.profile`).
        track: where figures go beside the run directory, one of `tracking.SERVICES`.
        prepare: called with the workspace before any work, e.g. to `share` what another run of this process holds.

    Returns:
        What `--json` prints: the final agent's results for `train`, else the stage's last metrics.

    Raises:
        ConfigError: bad input.
        Interrupted: a signal arrived; everything is saved.
    """
    if resume and source is not None:
        raise ConfigError("--init starts a new run and --resume continues one: leave one of them out")
    check(config)
    if config.lora.gate:
        _check_gate(name, run_dir, source, prepared=prepare is not None)
    tracking.require(track)

    def open_it(path: Path | None) -> RunDirectory:
        if resume or (name == "grpo" and source is None):
            return RunDirectory.open(path, config)
        if source is None:
            return RunDirectory.create(path, config)
        return RunDirectory.create(path, config, partial(adoption.adopt, source, stage=name))

    run = processes.open_run(run_dir, config, open_it, new=not resume)
    profile = profile if distributed.leads() else 0  # one trace says what there is to say
    with run, Interrupt() as interrupt:
        work = Workspace(run, processes.progress(run), interrupt)
        if prepare is not None:
            prepare(work)
        work.progress.note(f"run directory: {run.path}")
        try:
            run.track(track)
            if name == "train":
                return _train(work, profile)
            metrics = _sft(work, profile) if name == "sft" else grpo.train(work, profile)
            if distributed.leads():
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
    processes.check(config)
    objectives.validate(config.grpo)
    credit.validate(config.grpo, config.rollout.context)
    turn_probe.check(config)
    mesh, sampling = role_meshes(config.mesh)
    processes.check_lanes(config, sampling)
    check_compiled(mesh.size, "the learner", "set `mesh.rollout_devices` to 0", jax.devices())
    lane = sampling.shape["tensor"] * sampling.shape["expert"]
    check_compiled(lane, "a sampling lane", LANE_MEND, jax.devices())
    apart = set_apart(mesh, sampling)
    field = "tensor" if sampling is mesh else "rollout_tensor"
    if config.policy.kv_heads % sampling.shape["tensor"]:
        raise ConfigError(
            f"`mesh.{field}` ({sampling.shape['tensor']}) does not divide `policy.kv_heads` "
            f"({config.policy.kv_heads}): sampling splits the cache by key/value heads, change one"
        )
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.grpo.turn_credit.enabled:
        probing = sampling if apart else mesh
        asking = probing.shape["data"] * probing.shape["fsdp"]
        packing.validate(config.grpo.turn_credit.microbatch, "grpo.turn_credit.microbatch", asking)
    for name, stage in (("sft", config.sft), ("grpo", config.grpo)):
        packing.validate(stage.microbatch, f"{name}.microbatch", ways)


def _check_gate(name: str, run_dir: Path | None, source: Path | None, prepared: bool) -> None:
    """Refuses a gate without adapters, and other stages than GRPO, which know no prompt for it to read."""
    if name != "grpo":
        raise ConfigError(f"`lora.gate` is trained by GRPO alone: `trace-jax grpo` continues the run, {name} cannot")
    if not prepared and source is not None:
        adoption.refuse_gate(source, stored_config(source))
    if not prepared and not (run_dir is not None and (run_dir / "checkpoints" / ADAPTERS).is_dir()):
        raise ConfigError(
            "`lora.gate` needs adapters to mix: train it with `trace-jax capability train --capabilities gate`"
        )


def check_new(name: str, run_dir: Path | None, config: RunConfig, source: Path) -> None:
    """Refuses, before anything is written, a run that cannot begin with the policy of `source`.

    Raises:
        ConfigError: see `adoption.check`; or the directory holds a run already.
    """
    adoption.check(source, config, name)
    if run_dir is not None:
        RunDirectory.refuse_taken(run_dir)


def _sft(work: Workspace, profile: int = 0) -> dict[str, float]:
    if _finished(work, "sft"):  # whatever became of the teacher's files
        return {}
    interrupt = work.interrupt
    lessons = processes.in_turn(interrupt, "teacher", lambda: teacher.build(work.run, work.progress, interrupt))
    work.interrupt.check()
    processes.in_turn(interrupt, "tokenizer", lambda: work.train_tokenizer(lessons))
    work.interrupt.check()
    return sft.train(work, lessons, profile)


def _finished(work: Workspace, stage: str) -> bool:
    return multihost.first(f"finished-{stage}", lambda: work.is_finished(stage))


def _train(work: Workspace, profile: int = 0) -> dict[str, Any]:
    _sft(work, profile)
    for agent in ("untrained", *domain_of(work.config).agents, "sft"):
        final = assess.evaluate(work, agent)
    if work.config.grpo.steps:
        if not _finished(work, "grpo"):
            grpo.train(work, profile)
        final = assess.evaluate(work, "grpo")
    if multihost.count() > 1:
        return _conclude(work, final)
    assess.show(work.run.path)
    path = export.write(work, work.latest_stage(), work.run.path / "export")
    page = html.write(work.run.path)
    print(f"policy: {path}\nreport: {page}")
    return final


def _conclude(work: Workspace, final: dict[str, Any]) -> dict[str, Any]:
    """The end of several processes, none of which has the whole policy: all but the export."""

    def conclude() -> None:
        assess.show(work.run.path)
        again = shlex.join(["trace-jax", "export", "--run-dir", str(work.run.path)])
        print(f"report: {html.write(work.run.path)}\npolicy: write it with `{again}`, in one process")

    processes.lead(work.interrupt, "conclude", conclude)
    return final
