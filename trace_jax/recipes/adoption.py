"""Policies of other runs: what `grpo --init` begins with, and the reference of turn credit."""

from __future__ import annotations

import shutil
from pathlib import Path

from etils import epath

from trace_jax import config_io, config_rules
from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner.checkpoint_files import Folder
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, writing
from trace_jax.recipes.workspace import TOKENIZER, Workspace

# What the policy that is taken over was made with: another value would do nothing, or would not fit its arrays.
_MADE_WITH = (
    ("sft.", "tokenizer.", "environment.name", "environment.prompt")
    + tuple(
        f"policy.{name}"
        for name in (
            "layers",
            "width",
            "heads",
            "kv_heads",
            "head_dim",
            "mlp_width",
            "rope_theta",
            "norm_eps",
            "qk_norm",
        )
    )
    + ("policy.tie_embeddings",)
)


def check(source: Path, config: RunConfig) -> None:
    """Refuses what `adopt` would, before anything is written.

    Raises:
        ConfigError: no such run, its SFT is not finished, or `config` differs in what its policy was made with.
    """
    with RunDirectory.open(source, lock=False) as other:
        if not Workspace(other, Progress(), Interrupt()).is_finished("sft"):
            raise ConfigError(f"SFT of {source} is not finished: run `trace-jax sft --run-dir {source} --resume` first")
        if not (other.path / TOKENIZER).is_file():
            raise ConfigError(f"{source} has no {TOKENIZER}: restore it, {source}/export may hold a copy")
        for name in config_io.differences(other.config, config):
            if name.startswith(_MADE_WITH):
                old, new = (config_rules.shown(config_rules.get(c, name)) for c in (other.config, config))
                raise ConfigError(
                    f"`{name}` is {new}, but --init takes the SFT policy of {source}, which was made with {old}: leave "
                    "it as it was, or train another policy (`trace-jax sft`)"
                )


def adopt(source: Path, run: RunDirectory) -> None:
    """Copies the tokenizer and the finished SFT policy of another run into a new one.

    Raises:
        ConfigError: see `check`, or a damaged checkpoint. OSError: the copy cannot be written.
    """
    check(source, run.config)
    with RunDirectory.open(source, lock=False) as other:
        with writing(run.path / TOKENIZER):
            shutil.copyfile(other.path / TOKENIZER, run.path / TOKENIZER)
        copy_policy(Workspace(other, Progress(), Interrupt()), "sft", run, "sft")


def copy_policy(theirs: Workspace, stage: str, run: RunDirectory, name: str) -> None:
    """Copies the newest checkpoint of a stage of another run to `checkpoints/<name>`; it appears whole or not at all.

    Raises:
        ConfigError: it is damaged. OSError: the copy cannot be written.
    """
    newest = theirs.store(stage).latest()
    folder = Folder(epath.Path(theirs.run.checkpoints(stage)))
    folder.verify(newest, folder.manifest(newest)["files"])
    step = f"{newest:08d}"
    origin, target = theirs.run.checkpoints(stage) / step, run.checkpoints(name) / step
    if target.exists():
        return
    partial = target.with_name(f".{step}.copy")
    shutil.rmtree(partial, ignore_errors=True)
    for file in sorted(p for p in origin.rglob("*") if p.is_file()):
        copy = partial / file.relative_to(origin)
        with writing(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    partial.rename(target)
