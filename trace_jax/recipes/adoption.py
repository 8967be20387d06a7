"""Policies of other runs: what `--init` begins with, and the reference of turn credit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from trace_jax import config_io, config_rules, config_rules_policy
from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner.checkpoint_files import Folder
from trace_jax.policy import chat_files
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import BASE, RunDirectory, writing
from trace_jax.recipes.workspace import TOKENIZER, Workspace

# What the SFT policy that is taken over was made with: another value would do nothing.
_MADE_WITH = ("sft.", "tokenizer.", "environment.name", "environment.prompt", "lora.", "chat.")


@dataclass(frozen=True)
class Takeover:
    """What a new run takes from another one.

    Attributes:
        stages: stage there -> name here, of the policies that are copied.
        fields: beginnings of the names of fields that must be as they were.
    """

    stages: Mapping[str, str]
    fields: tuple[str, ...]


def check(source: Path, config: RunConfig, stage: str = "grpo") -> Takeover:
    """Refuses what `adopt` would, before anything is written.

    Args:
        stage: that the new run begins with: "sft" ("train") or "grpo".

    Returns:
        What is to be taken: for GRPO the finished SFT policy, and what its adapters were trained on; where the new run
        trains adapters of its own, or another SFT, the policy of the other run as it stands.

    Raises:
        ConfigError: no such run, its SFT is not finished, or `config` differs in what its policy was made with.
    """
    with RunDirectory.open(source, lock=False, flag="--init") as other:
        theirs = Workspace(other, Progress(), Interrupt())
        trained, imported = theirs.is_finished("sft"), theirs.imported
        if not trained and not (imported and theirs.store("sft").latest() is None):
            raise ConfigError(f"SFT of {source} is not finished: run `trace-jax sft --run-dir {source} --resume` first")
        if not chat_files.tokenizer_files(other.path):
            raise ConfigError(f"{source} has no {TOKENIZER}: restore it, {source}/export may hold a copy")
        before = other.config
        refuse_gate(source, before)
        goes_on = stage == "grpo" and trained and (before.lora == config.lora or before.lora.rank > 0)
        if goes_on:
            found = Takeover({"sft": "sft"} | ({BASE: BASE} if imported else {}), _MADE_WITH)
        elif trained and before.lora.rank:
            raise ConfigError(
                f"the SFT policy of {source} is an adapter: only `grpo` goes on with it. `trace-jax export --run-dir "
                f"{source}` and `trace-jax import` make a policy of it"
            )
        else:
            found = Takeover({"sft" if trained else BASE: BASE}, ("tokenizer.",))
        # A tokenizer that was not trained owes nothing to the fields of training one.
        free = ("tokenizer.",) if chat_files.tokenizer_files(other.path)[0] != TOKENIZER else ()
        for name in config_io.differences(before, config):
            if name.startswith(free):
                continue
            section, _, field = name.partition(".")
            if name.startswith(found.fields) or (section == "policy" and field in config_rules_policy.SHAPE):
                old, new = (config_rules.shown(config_rules.get(c, name)) for c in (before, config))
                raise ConfigError(
                    f"`{name}` is {new}, but --init takes the policy of {source}, which was made with {old}: leave it "
                    "as it was, or train another policy (`trace-jax sft`)"
                )
        return found


def refuse_gate(source: Path, before: RunConfig) -> None:
    """Refuses a run whose policy is a gate over adapters, which is nothing to begin with.

    Raises:
        ConfigError: it is.
    """
    if before.lora.gate:
        raise ConfigError(
            f"the policy of {source} is a gate over adapters, which no other run can begin with: give the run that "
            "they were trained on"
        )


def adopt(source: Path, run: RunDirectory, stage: str = "grpo") -> None:
    """Copies the tokenizer and the policy of another run into a new one.

    Raises:
        ConfigError: see `check`, or a damaged checkpoint. OSError: the copy cannot be written.
    """
    found = check(source, run.config, stage)
    with RunDirectory.open(source, lock=False, flag="--init") as other:
        for name in chat_files.tokenizer_files(other.path):
            with writing(run.path / name):
                shutil.copyfile(other.path / name, run.path / name)
        theirs = Workspace(other, Progress(), Interrupt())
        for origin, target in found.stages.items():
            copy_policy(theirs, origin, run, target)


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
