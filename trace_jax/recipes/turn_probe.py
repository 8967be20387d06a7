"""The reference of turn credit in a run: which policy it is, and what it says about trajectories."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from trace_jax.config import ConfigError, RunConfig
from trace_jax.environments.base import Environment
from trace_jax.learner import sharding, turn_credit
from trace_jax.learner.probe import Probe, Question, transformer_scores
from trace_jax.learner.roles import set_apart
from trace_jax.learner.step import Params
from trace_jax.policy import chat_files, lora
from trace_jax.policy.transformer import logical_axes
from trace_jax.recipes import processes
from trace_jax.recipes.adoption import copy_policy
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import Trajectory

ASKED = 64  # tasks whose answers are looked at before a run begins
STAGE = "reference"  # its folder among the checkpoints, if it is the policy of another run


class TurnProbe:
    """Asks a frozen policy for the gold answer after every tool turn. Thread-safe: it has no state."""

    def __init__(self, work: Workspace, params: Params, *, shared: bool = False):
        """
        Args:
            params: of the reference; copied to the sampler's devices, which are free while others learn. The base of
                adapters is shared with the learner, unless the sampler has devices of its own.
            shared: `params` are on these devices already, see `is_anchor`; or None: the base of adapters alone.
        """
        self._chat, self._context = work.chat, work.config.rollout.context
        scores = transformer_scores(nnx.graphdef(work.model))
        batches = work.config.grpo.turn_credit.microbatch
        self._row_length = batches.row_length
        frozen = work.frozen
        apart = set_apart(work.mesh, work.sampling_mesh)
        mesh = work.sampling_mesh if apart else work.mesh
        if frozen is not None and apart:
            axes = lora.Frozen(logical_axes(work.model), ("",))
            frozen = sharding.place(frozen, sharding.shardings(frozen, axes, mesh))
        self._probe = Probe(scores, params, mesh, work.axes, batches, frozen, shared=shared)

    def check(self, environment: Environment) -> None:
        """Refuses, before anything is sampled, rows in which the longest trajectory and an answer do not fit.

        Raises:
            ConfigError: of the tasks looked at, the longest answer needs more.
        """
        count = len(environment)
        looked_at = (environment.task(i) for i in range(0, count, -(-count // ASKED)))
        branches = [self._chat.encode_probe(*(t.probe or ("", t.gold_answer))) for t in looked_at]
        longest = max(len(scaffold) + len(answer) for scaffold, answer in branches)
        if self._context + longest > self._row_length:
            raise ConfigError(
                f"`grpo.turn_credit.microbatch.row_length` ({self._row_length}) has no room for a trajectory of "
                f"`rollout.context` ({self._context}) and an answer of {longest} tokens: raise it to "
                f"{self._context + longest} or more"
            )

    def __call__(self, trajectories: Sequence[Trajectory], environment: Environment) -> tuple[list[Trajectory], float]:
        """The trajectories with `probes`, and the seconds it took.

        Raises:
            ConfigError: one of them does not fit a row.
        """
        begun = time.perf_counter()
        answers: dict[int, tuple[list[int], list[int]]] = {}
        questions = []
        for t in trajectories:
            if t.task_index not in answers:
                task = environment.task(t.task_index)
                answers[t.task_index] = self._chat.encode_probe(*(task.probe or ("", task.gold_answer)))
            ends = turn_credit.boundaries(t.turn_index, t.loss_mask)
            questions.append(Question(t.ids, ends, *answers[t.task_index]))
        found = [tuple(values.tolist()) for values in self._probe(questions)]
        probed = [dataclasses.replace(t, probes=p) for t, p in zip(trajectories, found, strict=True)]
        return probed, time.perf_counter() - begun


def is_anchor(config: RunConfig) -> bool:
    """Whether the reference is the policy that the KL penalty pulls to and lies on the same devices: then one copy
    serves both."""
    grpo = config.grpo
    alone = not grpo.turn_credit.reference and not config.mesh.rollout_devices
    return grpo.turn_credit.enabled and bool(grpo.kl_coefficient) and alone


def reference(work: Workspace, start: Params) -> Params:
    """Parameters of the reference.

    Args:
        start: the policy that the stage began with.

    Raises:
        ConfigError: `grpo.turn_credit.reference` is no run, or its policy reads other tokens or has another shape.
    """
    source = work.config.grpo.turn_credit.reference
    if not source:
        return start

    def adopt() -> None:
        if work.store(STAGE).latest() is None:
            _adopt(Path(source), work)

    processes.lead(work.interrupt, "reference", adopt)
    return work.trained_params(STAGE)


def check(config: RunConfig) -> None:
    """Refuses, before anything runs, a reference that cannot be one.

    Raises:
        ConfigError: see `reference`; whether the tokenizers agree is only known when this run has one.
    """
    if config.grpo.turn_credit.enabled and config.grpo.turn_credit.reference:
        source = Path(config.grpo.turn_credit.reference)
        with RunDirectory.open(source, lock=False, flag="--grpo.turn_credit.reference") as other:
            _same_policy(other.config, config, source)
            Workspace(other, Progress(), Interrupt()).latest_stage()


def _same_policy(theirs: RunConfig, ours: RunConfig, source: Path) -> None:
    if (theirs.policy, theirs.lora) != (ours.policy, ours.lora):
        raise ConfigError(
            f"`grpo.turn_credit.reference` {source} has another policy (its `policy` or `lora` section differs): "
            "choose a run with this run's policy, or leave the field empty"
        )


def _adopt(source: Path, work: Workspace) -> None:
    """Copies the newest policy of another run, so that the reference stays what it was whatever becomes of that run."""
    with RunDirectory.open(source, lock=False, flag="--grpo.turn_credit.reference") as other:
        _same_policy(other.config, work.config, source)
        names = chat_files.tokenizer_files(work.run.path)
        if names != chat_files.tokenizer_files(other.path) or any(
            (other.path / name).read_bytes() != (work.run.path / name).read_bytes() for name in names
        ):
            raise ConfigError(
                f"`grpo.turn_credit.reference` {source} has another tokenizer: choose a run that began from the same "
                "SFT policy (`trace-jax grpo --init`), or leave the field empty"
            )
        theirs = Workspace(other, Progress(), Interrupt())
        copy_policy(theirs, theirs.latest_stage(), work.run, STAGE)
