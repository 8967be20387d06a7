"""GRPO: sample groups, grade them, train on group-relative advantages (arXiv 2402.03300, 2609.10315).

Everything a step does is a function of (seed, step) and the parameters before it, so a run that stopped anywhere goes
on as if it had not. Sampling for later steps may go on beside learning (`generation`).
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from trace_jax.config import RunConfig, TurnCreditConfig
from trace_jax.learner import metrics as learner_metrics
from trace_jax.learner import packing, turn_credit
from trace_jax.learner.checkpoint import CheckpointStore, restore_state, save_state
from trace_jax.learner.credit import CRASHED, grpo_sequences
from trace_jax.learner.groups import choose
from trace_jax.learner.objectives import grpo_objective
from trace_jax.learner.step import Learner, Params, TrainState
from trace_jax.recipes import distributed, phases, plan
from trace_jax.recipes.generation import VALIDATION, Collection, Generation
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.phases import PhaseTimer
from trace_jax.recipes.profile import Profiler
from trace_jax.recipes.rundir import writing
from trace_jax.recipes.turn_probe import TurnProbe, is_anchor, reference
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import Trajectory, write_parquet

STAGE = "grpo"
SCORE = "reward"  # of the validation episodes: the best checkpoints are kept for it


def train(work: Workspace, profile: int = 0) -> dict[str, float | None]:
    """Runs GRPO to its end from wherever the run stands; returns the last step's metrics (empty if it was done).

    Args:
        profile: training steps to trace into `profile/` of the run directory.

    Raises:
        ConfigError: SFT is not finished, the objective's fields contradict each other, or limits cut off most answers
            of the first step.
    """
    config, run = work.config.grpo, work.run
    start_params = work.start_params
    total = config.steps * config.iterations
    learner = work.learner(grpo_objective(config), config.optimizer, total, Sampling.of(work.config.rollout))
    anchor = learner.place(start_params) if config.kl_coefficient else None
    probe = None
    if config.turn_credit.enabled:
        shared = is_anchor(work.config)
        probe = TurnProbe(work, anchor if shared else reference(work, start_params), shared=shared)
    if probe is not None:
        probe.check(work.environment("train"))
    with work.store(STAGE) as store, Generation(work, STAGE, probe) as generation:
        restored = restore_state(store, learner, start_params)
        state, extra = restored or (learner.init(start_params), {})
        checkpoint, start = int(state.step), int(state.step) // config.iterations
        if checkpoint:
            run.refuse_edited("grpo.steps x grpo.iterations", total, extra["total_steps"])
            run.refuse_edited("steps done by grpo.iterations", start, extra.get("grpo_step", start))
        run.truncate(STAGE, start)
        run.truncate(VALIDATION, start if "validated" in extra else start - 1)
        like = learner.state_like(state.params).params
        generation.resume(
            lambda name: store.restore_file(checkpoint, name),
            lambda name: store.restore(checkpoint, {name: like})[0][name],
            start,
            extra.get("pending", {}),
            state.params,
        )
        del start_params
        loop = _Loop(work, learner, store, generation, state, anchor, total)
        loop.saved = start if restored else None
        best = store.best()
        loop.best = None if best is None else store.extra(best)["validated"]
        with work.progress.bar(STAGE, config.steps, start) as bar, Profiler(run.path / "profile", profile) as profiler:
            return loop.run(start, "validated" in extra, bar, profiler)


class _Loop:
    """The steps of one process, and what they carry along."""

    def __init__(
        self,
        work: Workspace,
        learner: Learner,
        store: CheckpointStore,
        generation: Generation,
        state: TrainState,
        anchor: Params | None,
        total: int,
    ):
        self.work, self.learner, self.store, self.generation = work, learner, store, generation
        self.state, self.anchor, self.total = state, anchor, total
        self.timer = PhaseTimer()
        self.saved: int | None = None  # step of the newest checkpoint
        self.best: float | None = None  # best score of a checkpoint
        self.score: float | None = None  # of the present parameters, when they were validated

    def run(self, start: int, validated: bool, bar, profiler: Profiler) -> dict[str, float | None]:
        work, config, interrupt, timer = self.work, self.work.config.grpo, self.work.interrupt, self.timer
        last: dict[str, float | None] = {}
        if not validated:
            self._validate(start)
        for step in range(start, config.steps):
            begun = time.perf_counter()
            profiler.step(step)
            collected = self._take(step)
            if distributed.leads():
                with writing(path := work.run.trajectories(STAGE, step + 1)):
                    write_parquet(path, collected.trajectories, step + 1)
            self.state, learned = update(
                self.learner,
                self.state,
                collected.trajectories,
                work.config,
                self.anchor,
                timer,
                work.chat.tokenizer.vocab_size,
            )
            with timer.phase("sync"):
                self.generation.publish(self.state.params, step + 1)
            lag = {"staleness": float(step - min(t.oldest_version for t in collected.trajectories))}
            last = collected.figures | learned | lag | timer.take() | phases.memory()
            if config.turn_credit.enabled:
                last["credit/probe_share"] = last["seconds/probe"] / (time.perf_counter() - begun)
            work.run.log(STAGE, step + 1, last)
            bar.update(step + 1, reward=last["reward"], loss=last["loss"], entropy=last["entropy"])
            self._validate(step + 1)
            interrupt.agree()
            due = (step + 1) % config.save_every == 0 or step + 1 == config.steps or interrupt.requested
            new_best = config.keep_best > 0 and self.score is not None and (self.best is None or self.score > self.best)
            if due or new_best:
                self._save(step + 1)
            interrupt.check()
        return last

    def _take(self, step: int) -> Collection:
        """Has the steps ahead collected for and waits for this one."""
        config, interrupt = self.work.config, self.work.interrupt
        try:
            interrupt.check()
            for ahead in range(config.grpo.staleness + 1):
                self.generation.ask(step + ahead)
            with self.timer.phase("wait"):
                collected = self.generation.take(step)
            interrupt.check()
        except Interrupted:
            self._save(step)
            raise
        for phase in ("reward", "probe"):  # grading and turn credit; `update` adds to them
            self.timer.add(phase, collected.figures.get(f"seconds/{phase}", 0.0))
        if step == 0:
            plan.check_truncation(collected.trajectories, config, self.work.run.path)
        lost = collected.figures["status/timed_out"] + collected.figures["status/tool_failure"]
        if lost >= 0.5:
            self.work.progress.note(
                f"grpo step {step + 1}: {lost:.0%} of the trajectories ran out of time or lost their tool and "
                "teach nothing; raise rollout.trajectory_seconds or rollout.tool_queue_seconds, or see tools/* in "
                "metrics.jsonl"
            )
        return collected

    def _validate(self, step: int) -> None:
        """Every `validate_every` steps."""
        config = self.work.config.grpo
        self.score = None
        if step % config.validate_every or not config.validation_episodes:
            return
        try:
            with self.timer.phase("validate"):
                figures = self.generation.validate(step)
        except Interrupted:  # it is made up for when the run goes on
            self._save(step)
            raise
        self.score = figures[SCORE]
        self.work.run.log(VALIDATION, step, figures)

    def _save(self, step: int) -> None:
        if step == self.saved:
            return  # already on disk
        # beside the checkpoints: the system's own place for such files may be small
        place = tempfile.TemporaryDirectory(dir=self.work.run.path, prefix=".pending-")
        with self.timer.phase("save"), place as folder:
            files, items, told = self.generation.pending(Path(folder))
            extra: dict[str, Any] = {"total_steps": self.total, "grpo_step": step, "policy_version": step}
            extra |= {"pending": told} | ({} if self.score is None else {"validated": self.score})
            save_state(self.store, self.state, extra, score=self.score, items=items, files=files)
        self.saved = step
        if self.score is not None:
            self.best = self.score if self.best is None else max(self.best, self.score)


def _scored_without_hints(
    learner: Learner, state: TrainState, trajectories: Sequence[Trajectory], config: RunConfig
) -> Sequence[Trajectory]:
    """Trajectories that were sampled with a hint, with log-probabilities of the learner's own under the prompt without
    it (arXiv 2604.05336): as they stand now, no sampler drew them."""
    hinted = [t for t in trajectories if t.info.get("hinted") and np.any(t.loss_mask)]
    if not hinted:
        return trajectories
    ways = learner.mesh.shape["data"] * learner.mesh.shape["fsdp"]
    sequences = [packing.Sequence(t.ids, t.loss_mask, kept=t.kept) for t in hinted]
    sequences = _with_prompts(sequences, config)
    batches = packing.pack_buckets(sequences, config.grpo.microbatch, config.rollout.top_k, ways)
    found = packing.unpack_buckets(
        learner.logprobs(state.params, batches), [len(t.ids) for t in hinted], config.grpo.microbatch, ways
    )
    scored = {
        id(t): dataclasses.replace(t, logprobs=np.where(t.loss_mask, values, 0.0).astype(np.float32))
        for t, values in zip(hinted, found, strict=True)
    }
    return [scored.get(id(t), t) for t in trajectories]


def _with_prompts(sequences: list[packing.Sequence], config: RunConfig) -> list[packing.Sequence]:
    """Where a gate over adapters is trained, with the length of each prompt: what was sampled begins behind it."""
    if not config.lora.gate:
        return sequences
    return [dataclasses.replace(s, prompt=int(np.argmax(s.loss_mask))) for s in sequences]


def update(
    learner: Learner,
    state: TrainState,
    trajectories: Sequence[Trajectory],
    config: RunConfig,
    anchor: Params | None,
    timer: PhaseTimer,
    vocabulary: int,
) -> tuple[TrainState, dict[str, float | None]]:
    """`iterations` optimizer steps on one collection. Returns the new state and the metrics of the last of them.

    Args:
        anchor: the policy that the KL penalty pulls to.
    """
    grpo, context = config.grpo, config.rollout.context
    trajectories = _scored_without_hints(learner, state, trajectories, config)
    with timer.phase("reward"):
        paid = partial(_paid, credit=grpo.turn_credit) if grpo.turn_credit.pays else None
        chosen, resampled = choose(trajectories, grpo, context, paid is not None)
        sequences, left_out, figures = grpo_sequences(chosen, grpo, context, paid)
        if grpo.turn_credit.enabled:
            asked = [t for t in trajectories if t.status not in CRASHED]
            figures |= turn_credit.figures([t.probes for t in asked], [t.reward for t in asked], grpo.turn_credit)
        ways = learner.mesh.shape["data"] * learner.mesh.shape["fsdp"]
        sequences, gated = _with_prompts(sequences, config), bool(config.lora.gate)
        batches = packing.pack_buckets(sequences, grpo.microbatch, config.rollout.top_k, ways, gated)
    with timer.phase("probe"):
        if grpo.old_policy == "learner":
            batches = learner.with_old(state.params, batches)
        if grpo.kl_coefficient:
            batches = learner.with_reference(anchor, batches)
    agreement: Mapping[str, float | None] = {}
    begun = time.perf_counter()
    with timer.phase("learn"):
        for iteration in range(grpo.iterations):
            state, last = learner.step(state, batches, denominator=left_out)
            if iteration == 0:  # before any update on these trajectories: how far sampler and learner disagree
                agreement = {k: last[k] for k in learner_metrics.MISMATCH}
    if not sequences:  # nothing was computed: zeros would read as a collapsed policy
        unknown = dict.fromkeys(last.keys() & learner_metrics.OF_TRAINED_TOKENS)
        return state, last | unknown | dict.fromkeys(agreement) | figures | resampled
    lengths = [len(s) for s in sequences]
    spent = time.perf_counter() - begun
    speed = phases.throughput(spent, lengths, grpo.iterations, config.policy, vocabulary, learner.mesh.size)
    return state, last | agreement | figures | resampled | speed


def _paid(trajectory: Trajectory, outcome: float, credit: TurnCreditConfig) -> Float[np.ndarray, " N"]:
    """Advantage of each of its tokens with turn credit."""
    t = trajectory
    return turn_credit.token_advantages(t.turn_index, t.loss_mask, t.probes, outcome, credit)
