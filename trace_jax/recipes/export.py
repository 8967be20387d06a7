"""A run's policy in Hugging Face layout, or its adapters in that of PEFT."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from flax import nnx

from trace_jax.config import ConfigError
from trace_jax.policy import hf, hf_files, hf_peft
from trace_jax.policy.fast_tokenizer import FILES
from trace_jax.policy.hf_files import SHORT
from trace_jax.policy.hf_write import SHARD_BYTES
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Bar, Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import BASE, Workspace, on_this_machine

FORMATS = ("hf", "peft")
DTYPES = tuple(SHORT)


def command(
    run_dir: Path,
    *,
    stage: str,
    out: Path | None,
    form: str = "hf",
    dtype: str | None = None,
    shard_bytes: int | None = None,
) -> dict[str, Any]:
    """Writes the policy of a stage ("latest": the most advanced) to `out`, by default `export/` of the run for the most
    advanced one and `export-<stage>/` for any other; adapters to `adapter/` and `adapter-<stage>/`.

    Args:
        form: "hf", adapters are merged | "peft", the adapters alone.
        dtype: of all tensors; None: of an imported policy each as it was, else float32.
        shard_bytes: a weight file gets no larger; None: `SHARD_BYTES`. Adapters are one file.

    Raises:
        ConfigError: no run or no such policy, a damaged checkpoint, or `out` cannot be written.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: choose a directory")
    if form == "peft" and shard_bytes is not None:
        raise ConfigError("--shard-size does not go with --format peft, adapters are one file: leave it out")
    if out is not None:
        _refuse_others(out, form)
    inside = out is None or out.resolve().is_relative_to(run_dir.resolve())
    # Only reading, a command takes no lock: the run may be going on, or be write-protected.
    with RunDirectory.open(run_dir, lock=inside) as run, Interrupt() as interrupt:
        run.config = on_this_machine(run.config)
        work = Workspace(run, Progress(), interrupt)
        newest = _newest(work) if stage in ("latest", "grpo", "sft", BASE) else None
        stage = newest if stage == "latest" else stage
        name = "export" if form == "hf" else "adapter"
        out = out or run.path / (name if stage == newest else f"{name}-{stage}")
        if form == "hf":
            path = write(work, stage, out, dtype, shard_bytes or SHARD_BYTES)
        else:
            path = write_adapters(work, stage, out, dtype)
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
    origin, generation = hf.Origin(), None
    if work.imported:
        store = work.store(BASE)
        step = store.latest()
        origin = hf.Origin(**store.extra(step).get("origin", {}))
        if hf.GENERATION in store.files(step):
            generation = store.restore_file(step, hf.GENERATION).read_bytes()
    exact = (SHORT[dtype] if dtype else origin.dtype) != "BF16"
    params = work.base_params if stage == BASE else work.merged(work.trained_params(stage), exact)
    model = nnx.merge(nnx.graphdef(work.model), params)
    with contextlib.ExitStack() as stack:
        bars: list[Bar] = []

        def progress(done: int, total: int) -> None:
            work.interrupt.check()
            if not bars:
                bars.append(stack.enter_context(work.progress.bar("export", total)))
            bars[0].update(done)

        work.interrupt.check()
        hf.export(
            out,
            model,
            work.chat,
            origin=origin,
            dtype=dtype,
            shard_bytes=shard_bytes,
            generation=generation,
            progress=progress,
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


def _refuse_others(directory: Path, form: str) -> None:
    """Refuses a directory in which an export would destroy something, or make a mix of a model and adapters.

    Args:
        form: see `command`.

    Raises:
        ConfigError: it holds a run, files of a checkpoint that was not exported here, or an export of the other kind.
    """
    if (directory / hf.PARTIAL).exists() or not directory.is_dir():  # of an export that was killed
        return
    names = {path.name for path in directory.iterdir()}
    if "config.yaml" in names:
        raise ConfigError(f"--out {directory} is a run: choose another directory")
    weights = [name for name in names if hf_files.is_weights(name) or name.endswith(".safetensors")]
    checkpoint = names & {hf.CONFIG, hf_peft.CONFIG, hf.GENERATION, hf.TOKENIZER, *FILES}
    ours = [name for name in weights if hf_files.is_ours(directory / name)]
    if (weights or checkpoint) and (not ours or {*weights} - {*ours, hf_files.INDEX}):
        raise ConfigError(
            f"--out {directory} holds a checkpoint that was not exported here ({min({*weights} | checkpoint)}), which "
            "would be lost: choose another directory, or empty it"
        )
    if (hf_peft.CONFIG if form == "hf" else hf.CONFIG) in names:
        kinds = ("adapters", "a model") if form == "hf" else ("a model", "adapters")
        raise ConfigError(
            f"--out {directory} holds {kinds[0]}, and {kinds[1]} beside would be taken together: choose another "
            "directory, or empty it"
        )
