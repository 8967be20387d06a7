"""Supervised fine-tuning: cross-entropy on the turns of the teacher's transcripts."""

from __future__ import annotations

from trace_jax.config import ConfigError
from trace_jax.learner.checkpoint import CheckpointStore, restore_state, save_state
from trace_jax.learner.objectives import sft_objective
from trace_jax.learner.packing import Sequence, pack_buckets
from trace_jax.learner.step import Learner
from trace_jax.recipes import phases, schedule, teacher
from trace_jax.recipes.profile import Profiler
from trace_jax.recipes.teacher import Lesson
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.sampling import Sampling

STAGE = "sft"


def train(work: Workspace, lessons: list[Lesson], profile: int = 0) -> dict[str, float]:
    """Runs SFT to its end from wherever the run stands; returns the last step's metrics (empty if it was done).

    Args:
        profile: training steps to trace into `profile/` of the run directory.
    """
    config = work.config.sft
    encoded, left_out = teacher.encode(lessons, work.chat, work.config)
    if left_out:
        work.progress.note(f"sft: {left_out} of {len(lessons)} transcripts exceed the rollout limits and are left out")
    items = [Sequence(ids=e.ids, loss_mask=e.loss_mask) for e in encoded]
    steps = schedule.sft_steps(len(items), config.batch, config.epochs)
    if steps == 0:
        raise ConfigError(f"`sft.batch` ({config.batch}) exceeds the {len(items)} usable transcripts: lower it")
    learner = work.learner(sft_objective(), config.optimizer, steps, Sampling())
    with work.store(STAGE) as store:
        return _steps(work, learner, store, items, steps, profile)


def _steps(
    work: Workspace, learner: Learner, store: CheckpointStore, items: list[Sequence], steps: int, profile: int
) -> dict[str, float]:
    config = work.config.sft
    restored = restore_state(store, learner, work.initial_params)
    state = restored[0] if restored else learner.init(work.initial_params)
    if restored and int(state.step):
        work.run.refuse_edited("the number of SFT steps", steps, restored[1]["total_steps"])
    start, metrics = int(state.step), {}
    work.run.truncate(STAGE, start)
    work.interrupt.check()
    ways = learner.mesh.shape["data"] * learner.mesh.shape["fsdp"]
    timer, vocabulary = phases.PhaseTimer(), work.chat.tokenizer.vocab_size
    bar = work.progress.bar(STAGE, steps, start)
    with bar as bar, Profiler(work.run.path / "profile", profile) as profiler:
        for step in range(start, steps):
            profiler.step(step)
            chosen = [items[i] for i in schedule.sft_batch(work.config.seed, step, config.batch, len(items))]
            micro = pack_buckets(chosen, config.microbatch, ways=ways)
            with timer.phase("learn"):
                state, metrics = learner.step(state, micro)
            done, spent = step + 1, timer.take()
            speed = phases.throughput(
                spent["seconds/learn"], [len(s) for s in chosen], 1, work.config.policy, vocabulary, learner.mesh.size
            )
            metrics = metrics | spent | speed | phases.memory()
            work.run.log(STAGE, done, metrics)
            bar.update(done, loss=metrics["loss"], entropy=metrics["entropy"])
            work.interrupt.agree()
            if done % config.save_every == 0 or done == steps or work.interrupt.requested:
                with timer.phase("save"):  # counted in the next record: figures are written before their checkpoint
                    save_state(store, state, {"total_steps": steps})
            work.interrupt.check()
    return metrics
