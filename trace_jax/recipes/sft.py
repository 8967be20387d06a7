"""Supervised fine-tuning: cross-entropy on the turns of the analyst's transcripts."""

from __future__ import annotations

from trace_jax.config import ConfigError
from trace_jax.learner.checkpoint import restore_state, save_state
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import Sequence, pack
from trace_jax.recipes import schedule, teacher
from trace_jax.recipes.teacher import Lesson
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.sampling import Sampling

STAGE = "sft"


def train(work: Workspace, lessons: list[Lesson]) -> dict[str, float]:
    """Runs SFT to its end from wherever the run stands; returns the last step's metrics (empty if it was done)."""
    config = work.config.sft
    encoded, left_out = teacher.encode(lessons, work.chat, work.config)
    if left_out:
        work.progress.note(f"sft: {left_out} of {len(lessons)} transcripts exceed the rollout limits and are left out")
    items = [Sequence(ids=e.ids, loss_mask=e.loss_mask) for e in encoded]
    steps = schedule.sft_steps(len(items), config.batch, config.epochs)
    if steps == 0:
        raise ConfigError(f"`sft.batch` ({config.batch}) exceeds the {len(items)} usable transcripts: lower it")
    learner = work.learner(sft_objective(), config.optimizer, steps, Sampling())
    store = work.store(STAGE)
    restored = restore_state(store, learner, work.initial_params)
    state = restored[0] if restored else learner.init(work.initial_params)
    start, metrics = int(state.step), {}
    work.run.truncate(STAGE, start)
    work.interrupt.check()
    with work.progress.bar(STAGE, steps, start) as bar:
        for step in range(start, steps):
            chosen = schedule.sft_batch(work.config.seed, step, config.batch, len(items))
            micro = pack([items[i] for i in chosen], config.microbatch.row_length, config.microbatch.rows)
            state, metrics = learner.step(state, micro)
            done = step + 1
            work.run.log(STAGE, done, metrics)
            bar.update(done, loss=metrics["loss"], entropy=metrics["entropy"])
            if done % config.save_every == 0 or done == steps or work.interrupt.requested:
                save_state(store, state, {"total_steps": steps})
            work.interrupt.check()
    return metrics
