"""A run's policy in Hugging Face layout, or its adapters in that of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.policy import hf, hf_peft
from trace_jax.policy.hf_files import SHORT
from trace_jax.policy.hf_write import SHARD_BYTES
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import BASE, Workspace

FORMATS = ("hf", "peft")
DTYPES = tuple(SHORT)


def command(
    run_dir: Path,
    *,
    stage: str,
    out: Path | None,
    form: str = "hf",
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Writes the policy of a stage ("latest": the most advanced) to `out`, by default `export/` of the run for the most
    advanced one and `export-<stage>/` for any other; adapters to `adapter/` and `adapter-<stage>/`.

    Args:
        form: "hf", adapters are merged | "peft", the adapters alone.
        dtype: of all tensors; None: of an imported policy each as it was, else float32.
        shard_bytes: a weight file gets no larger.

    Raises:
        ConfigError: no run or no such policy, a damaged checkpoint, or `out` cannot be written.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: choose a directory")
    inside = out is None or out.resolve().is_relative_to(run_dir.resolve())
    # Only reading, a command takes no lock: the run may be going on, or be write-protected.
    with RunDirectory.open(run_dir, lock=inside) as run, Interrupt() as interrupt:
        work = Workspace(run, Progress(), interrupt)
        newest = _newest(work) if stage in ("latest", "grpo", "sft", BASE) else None
        stage = newest if stage == "latest" else stage
        name = "export" if form == "hf" else "adapter"
        out = out or run.path / (name if stage == newest else f"{name}-{stage}")
        path = write(work, stage, out, dtype, shard_bytes) if form == "hf" else write_adapters(work, stage, out, dtype)
    print(f"{stage} {'policy' if form == 'hf' else 'adapters'}: {path}")
    return {"stage": stage, "path": str(path)}


def write(work: Workspace, stage: str, out: Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """safetensors, `config.json`, generation settings and tokenizer of a stage's newest checkpoint.

    Args:
        stage: or "base", the policy as it was imported.
        dtype, shard_bytes: see `command`.

    Raises:
        ConfigError: see `command`.
    """
    if stage == BASE and not work.imported:
        raise ConfigError(f"{work.run.path} has no imported policy (--stage {BASE}): choose sft or grpo")
    params = work.base_params if stage == BASE else work.merged(work.trained_params(stage))
    model = nnx.merge(nnx.graphdef(work.model), params)
    origin, generation = hf.Origin(), None
    if work.imported:
        store = work.store(BASE)
        step = store.latest()
        origin = hf.Origin(**store.extra(step).get("origin", {}))
        if hf.GENERATION in store.files(step):
            generation = store.restore_file(step, hf.GENERATION).read_bytes()
    work.interrupt.check()
    hf.export(
        out,
        model,
        work.chat,
        origin=origin,
        dtype=dtype,
        shard_bytes=shard_bytes,
        generation=generation,
        check=work.interrupt.check,
    )
    return out


def write_adapters(work: Workspace, stage: str, out: Path, dtype: str | None = None) -> Path:
    """The adapters of a stage's newest checkpoint as `peft` opens them.

    Raises:
        ConfigError: see `command`, or the run has no adapters that PEFT has a form for.
    """
    hf_peft.check(work.config.lora)
    if stage == BASE:
        raise ConfigError(f"the imported policy of {work.run.path} has no adapters: train first, or use --format hf")
    hf_peft.export(out, work.config.policy, work.config.lora, work.trained_params(stage), SHORT[dtype or "float32"])
    return out


def _newest(work: Workspace) -> str:
    """The most advanced stage that has a checkpoint, "base" where nothing was trained since the import."""
    folders = [work.run.checkpoints(stage) for stage in ("sft", "grpo")]
    if work.imported and not any(folder.is_dir() and any(folder.iterdir()) for folder in folders):
        return BASE
    return work.latest_stage()
