"""GRPO: sample groups, grade them, train on group-relative advantages (arXiv 2402.03300, 2609.10315).

Everything a step does is a function of (seed, step) and the parameters before it, so a run that stopped anywhere goes
on as if it had not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_jax.config import ConfigError, GRPOConfig, RunConfig
from trace_jax.learner import metrics as learner_metrics
from trace_jax.learner import packing
from trace_jax.learner.checkpoint import restore_state, save_state
from trace_jax.learner.credit import grpo_sequences
from trace_jax.learner.objectives import grpo_objective
from trace_jax.learner.step import Learner, Params
from trace_jax.recipes import schedule
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.rundir import writing
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.collect import CollectStats, collect, metrics
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import Trajectory, write_parquet

STAGE, VALIDATION = "grpo", "validation"


def train(work: Workspace) -> dict[str, float | None]:
    """Runs GRPO to its end from wherever the run stands; returns the last step's metrics (empty if it was done).

    Raises:
        ConfigError: SFT is not finished, or the objective's fields contradict each other.
    """
    config, run, interrupt = work.config.grpo, work.run, work.interrupt
    if not work.is_finished("sft"):
        raise ConfigError(f"SFT of {run.path} is not finished: run `trace-jax sft --run-dir {run.path} --resume` first")
    start_params = work.trained_params("sft")
    total = config.steps * config.iterations
    learner = work.learner(grpo_objective(config), config.optimizer, total, Sampling.of(work.config.rollout))
    store = work.store(STAGE)
    restored = restore_state(store, learner, start_params)
    state = restored[0] if restored else learner.init(start_params)
    reference = learner.place(start_params)
    start, last = int(state.step) // config.iterations, {}
    run.truncate(STAGE, start)
    run.truncate(VALIDATION, start - 1)
    environment = work.environment("train")
    no_signal = [i for i in range(len(environment)) if environment.task(i).labels["type"] == "no_signal"]

    def save(step: int) -> None:
        if step == start and restored:
            return  # already on disk
        save_state(store, state, {"total_steps": total, "grpo_step": step, "policy_version": step})

    with work.progress.bar(STAGE, config.steps, start) as bar:
        for step in range(start, config.steps):
            work.engine.set_params(state.params, step)
            prompts = _prompts(work.config, step, len(environment), no_signal)
            try:
                # A terminal's Ctrl-C also reaches the tool's worker processes and may spoil what is being collected:
                # it is dropped, the parameters are saved, and a resumed run collects it again.
                interrupt.check()
                validation = _validate(work, step)
                trajectories, figures = _collect(work, "train", prompts, config.group, STAGE, step)
                interrupt.check()
            except Interrupted:
                save(step)
                raise
            if validation:
                run.log(VALIDATION, step, validation)
            lost = figures["status/timed_out"] + figures["status/tool_failure"]
            if lost >= 0.5:
                work.progress.note(
                    f"grpo step {step + 1}: {lost:.0%} of the trajectories ran out of time or lost their tool and "
                    "teach nothing; raise rollout.trajectory_seconds or rollout.tool_queue_seconds, or see tools/* in "
                    "metrics.jsonl"
                )
            with writing(path := run.trajectories(STAGE, step + 1)):
                write_parquet(path, trajectories, step + 1)
            state, last = _update(learner, state, trajectories, config, reference, work.config.rollout.top_k)
            last = figures | last
            run.log(STAGE, step + 1, last)
            bar.update(step + 1, reward=last["reward"], loss=last["loss"], entropy=last["entropy"])
            if (step + 1) % config.save_every == 0 or step + 1 == config.steps or interrupt.requested:
                save(step + 1)
            interrupt.check()
    return last


def _prompts(config: RunConfig, step: int, count: int, no_signal: Sequence[int]) -> list[int]:
    """Episodes of the training split for a step; with a curriculum those of its stage only."""
    stages = max(len(config.data.curriculum), 1)
    low, high, first = schedule.curriculum(step, config.grpo.steps, stages, count)
    quiet = [i - low for i in no_signal if low <= i < high]
    grpo = config.grpo
    chosen = schedule.grpo_prompts(config.seed, step - first, grpo.prompts, high - low, quiet, grpo.no_signal_share)
    return [low + i for i in chosen]


def _collect(
    work: Workspace, split: str, indices: Sequence[int], group: int, purpose: str, step: int
) -> tuple[list[Trajectory], dict[str, float]]:
    """Trajectories of `group` samples of each episode, and their figures."""
    environment, stats = work.environment(split), CollectStats()
    before = work.engine.stats
    trajectories = collect(
        work.engine,
        work.chat,
        environment,
        list(indices),
        group=group,
        config=work.config.rollout,
        seed=schedule.collection_seed(work.config.seed, purpose, step),
        step=step,
        stats=stats,
        progress=work.interrupt.check,
    )
    right = float(np.mean([bool(t.info.get("full_right")) for t in trajectories]))
    figures = metrics(trajectories, stats) | work.engine.stats.since(before).figures()
    figures["rollout_tokens"] = figures.pop("tokens")  # the learner's `tokens` are those trained on
    return trajectories, figures | {"full_right": right}


def _validate(work: Workspace, step: int) -> dict[str, float]:
    """Figures of the first validation episodes, every `validate_every` steps; otherwise nothing."""
    config = work.config.grpo
    if step % config.validate_every or not config.validation_episodes:
        return {}
    return _collect(work, "validation", range(config.validation_episodes), 1, VALIDATION, step)[1]


def _update(
    learner: Learner,
    state,
    trajectories: Sequence[Trajectory],
    config: GRPOConfig,
    reference: Params,
    top_k: int = 0,
):
    """`iterations` optimizer steps on one collection. Returns the new state and the metrics of the last of them."""
    sequences, left_out, figures = grpo_sequences(trajectories, config)
    batches = packing.pack(sequences, config.microbatch.row_length, config.microbatch.rows, top_k)
    if config.kl_coefficient:
        batches = learner.with_reference(reference, batches)
    for iteration in range(config.iterations):
        state, last = learner.step(state, batches, denominator=left_out)
        if iteration == 0:  # before any update on these trajectories: how far sampler and learner disagree
            agreement = {"sampler_gap": last["logprob_gap"]}
    if not sequences:  # nothing was computed: zeros would read as a collapsed policy
        means = {"loss", *learner_metrics.PER_TOKEN.values(), *learner_metrics.MAXIMA}
        last = last | dict.fromkeys(last.keys() & means)
        agreement = {"sampler_gap": None}
    return state, last | agreement | figures
