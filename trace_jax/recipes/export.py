"""A run's policy in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx

from trace_jax.config import RunConfig
from trace_jax.policy import hf
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace


def command(run_dir: Path, config: RunConfig, *, stage: str, out: Path | None) -> dict[str, Any]:
    """Writes the policy of a stage ("latest": the most advanced) to `out`, by default `export/` of the run."""
    with RunDirectory.open(run_dir, config) as run, Interrupt() as interrupt:
        work = Workspace(run, Progress(), interrupt)
        stage = work.latest_stage() if stage == "latest" else stage
        path = write(work, stage, out or run.path / "export")
    print(f"{stage} policy: {path}")
    return {"stage": stage, "path": str(path)}


def write(work: Workspace, stage: str, out: Path) -> Path:
    """safetensors, `config.json`, generation settings and tokenizer of a stage's newest checkpoint."""
    model = nnx.merge(nnx.graphdef(work.model), work.trained_params(stage))
    hf.export(out, model, work.chat.tokenizer, work.chat)
    return out
