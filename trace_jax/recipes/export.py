"""A run's policy in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.policy import hf
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace


def command(run_dir: Path, *, stage: str, out: Path | None) -> dict[str, Any]:
    """Writes the policy of a stage ("latest": the most advanced) to `out`, by default `export/` of the run for the most
    advanced one and `export-<stage>/` for any other.

    Raises:
        ConfigError: no run or no such policy, a damaged checkpoint, or `out` cannot be written.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: choose a directory")
    inside = out is None or out.resolve().is_relative_to(run_dir.resolve())
    # Only reading, a command takes no lock: the run may be going on, or be write-protected.
    with RunDirectory.open(run_dir, lock=inside) as run, Interrupt() as interrupt:
        work = Workspace(run, Progress(), interrupt)
        newest = work.latest_stage() if stage in ("latest", "grpo", "sft") else None
        stage = newest if stage == "latest" else stage
        path = write(work, stage, out or run.path / ("export" if stage == newest else f"export-{stage}"))
    print(f"{stage} policy: {path}")
    return {"stage": stage, "path": str(path)}


def write(work: Workspace, stage: str, out: Path) -> Path:
    """safetensors, `config.json`, generation settings and tokenizer of a stage's newest checkpoint."""
    model = nnx.merge(nnx.graphdef(work.model), work.merged(work.trained_params(stage)))
    work.interrupt.check()
    hf.export(out, model, work.chat.tokenizer, work.chat)
    return out
