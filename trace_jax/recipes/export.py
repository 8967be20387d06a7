"""A run's policy in Hugging Face layout, or its adapters in that of PEFT."""

from __future__ import annotations

import contextlib
import datetime
import json
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from flax import nnx

from trace_jax import config_io
from trace_jax.config import ConfigError
from trace_jax.config_rules_policy import parameters
from trace_jax.policy import hf, hf_files, hf_peft
from trace_jax.policy.fast_tokenizer import FILES
from trace_jax.policy.hf_files import SHORT
from trace_jax.policy.hf_write import SHARD_BYTES
from trace_jax.recipes import assess, places, shipped
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Bar, Progress
from trace_jax.recipes.rundir import RunDirectory, write_text
from trace_jax.recipes.workspace import BASE, Workspace, on_this_machine

FORMATS = ("hf", "peft", "shipped")
NAMES = {"hf": "export", "peft": "adapter", "shipped": "shipped"}  # of the directory in the run
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
        form: "hf", adapters are merged | "peft", the adapters alone | "shipped", as "hf" with the configuration and a
            manifest that holds the score of what was written: what `--agent shipped` uses, by default in `shipped/`.
        dtype: of all tensors; None: of an imported policy each as it was, else float32.
        shard_bytes: a weight file gets no larger; None: `SHARD_BYTES`. Adapters are one file.

    Raises:
        ConfigError: no run or no such policy, a damaged checkpoint, or `out` cannot be written.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: choose a directory")
    if form != "hf" and shard_bytes is not None:
        raise ConfigError(f"--shard-size does not go with --format {form}, which is one file: leave it out")
    refuse = _refuse_unshipped if form == "shipped" else partial(_refuse_others, form=form)
    if out is not None:
        refuse(out)
    inside = out is None or out.resolve().is_relative_to(run_dir.resolve())
    # Only reading, a command takes no lock: the run may be going on, or be write-protected.
    with RunDirectory.open(run_dir, lock=inside) as run, Interrupt() as interrupt:
        run.config = on_this_machine(run.config)
        work = Workspace(run, Progress(), interrupt)
        newest = _newest(work) if stage in ("latest", "grpo", "sft", BASE) else None
        stage = newest if stage == "latest" else stage
        name = NAMES[form]
        out = out or run.path / (name if stage == newest else f"{name}-{stage}")
        more = {}
        if form == "shipped":
            refuse(out)  # the default place, too
        if form == "hf":
            write(work, stage, out, dtype, shard_bytes or SHARD_BYTES)
        elif form == "shipped":
            more = write_shipped(work, stage, out, dtype)
        else:
            write_adapters(work, stage, out, dtype)
    print(f"{stage} {'adapters' if form == 'peft' else 'policy'}: {out}")
    if more:
        full = more["measured"]["full_attr_at_1"]
        print(f"FullAttr@1 {full['value']:.3f} [{full['low']:.3f}, {full['high']:.3f}]")
    return {"stage": stage, "path": str(out), **({"manifest": more} if more else {})}


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


_VERSIONS = ("trace-jax", "jax", "flax", "duckdb", "sentencepiece")
_MEASURED = ("cause_at_1", "full_attr_at_1", "full_attr_at_5", "no_signal", "parsed", "tool_calls")


def write_shipped(work: Workspace, stage: str, out: Path, dtype: str | None = None) -> dict[str, Any]:
    """What `shipped.FOLDER` holds: a checkpoint, its configuration, and the manifest, with the score of the files as
    they were written on the run's test split. Returns the manifest.

    All of it is written and measured beside what `out` holds, and takes its place at the end: an interrupted export
    leaves the earlier one.

    Raises:
        ConfigError: see `command`, or the policy is not from scratch. Interrupted: nothing is left of it.
    """
    config = work.config
    if work.imported or config.lora.rank:
        raise ConfigError("--format shipped is for policies trained from scratch: use --format hf")
    with places.beside(out) as unfinished:
        found = _shipped(work, stage, unfinished, dtype)
        work.interrupt.check()
        places.put(unfinished, out, shipped.MANIFEST)
    return found


def _shipped(work: Workspace, stage: str, folder: Path, dtype: str | None) -> dict[str, Any]:
    """Writes and measures what `write_shipped` puts in place; returns the manifest."""
    config = work.config
    write(work, stage, folder, dtype)
    write_text(folder / shipped.CONFIG, config_io.dump(config))
    store = work.store("grpo" if stage == "best" else stage)
    found: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "stage": stage,
        "step": store.best() if stage == "best" else store.latest(),
        "parameters": parameters(config.policy, config.policy.vocab_size or work.chat.tokenizer.vocab_size),
        "dtype": dtype or "float32",
        "date": str(datetime.date.today()),
        "versions": {name: metadata.version(name) for name in _VERSIONS},
    }
    names = (hf_files.WEIGHTS, hf.CONFIG, hf.TOKENIZER, shipped.CONFIG)
    found["files"] = {name: shipped.digest(folder / name) for name in names}
    write_text(folder / shipped.MANIFEST, json.dumps(found) + "\n")
    with tempfile.TemporaryDirectory() as scratch, RunDirectory.create(Path(scratch) / "run", config) as run:
        own = Workspace(run, work.progress, work.interrupt)
        own.furnish(folder)
        result = assess.score(own, shipped.AGENT, "test", shipped.AGENT)
    found["measured"] = {"split": "test", **{name: result["extra"][name] for name in ("episodes", "samples")}}
    found["measured"] |= {name: result[name] for name in _MEASURED} | {"benchmark": result["benchmark"]}
    write_text(folder / shipped.MANIFEST, json.dumps(found, indent=1) + "\n")
    return found


def _newest(work: Workspace) -> str:
    """The most advanced stage that has a checkpoint, "base" where nothing was trained since the import."""
    folders = [work.run.checkpoints(stage) for stage in ("sft", "grpo")]
    if work.imported and not any(folder.is_dir() and any(folder.iterdir()) for folder in folders):
        return BASE
    return work.latest_stage()


def _refuse_unshipped(directory: Path) -> None:
    """Refuses a directory that holds anything but an earlier export of this kind.

    Raises:
        ConfigError: what is there.
    """
    there = {path.name for path in directory.iterdir()} - {places.PARTIAL} if directory.is_dir() else set()
    if there and not shipped.is_one(directory):
        raise ConfigError(
            f"--out {directory} holds something else ({min(there)}), and no policy that --format shipped wrote: choose "
            "an empty directory"
        )


def _refuse_others(directory: Path, form: str) -> None:
    """Refuses a directory in which an export would destroy something, or make a mix of a model and adapters.

    Args:
        form: "hf" or "peft".

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
    if (hf.CONFIG if form == "peft" else hf_peft.CONFIG) in names:
        kinds = ("a model", "adapters") if form == "peft" else ("adapters", "a model")
        raise ConfigError(
            f"--out {directory} holds {kinds[0]}, and {kinds[1]} beside would be taken together: choose another "
            "directory, or empty it"
        )
