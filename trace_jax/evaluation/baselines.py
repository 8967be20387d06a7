"""Agents without a policy, graded by the same environment and in the same record form as a trained one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads import analyst
from trace_jax.environments.base import Environment
from trace_jax.evaluation.evaluate import record_of
from trace_jax.evaluation.metrics import EvalRecord


def evaluate_analyst(
    environment: Environment,
    indices: Sequence[int],
    config: EnvironmentConfig,
    *,
    samples: int = 1,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[EvalRecord]:
    """The scripted analyst, the SFT teacher, on the episodes `indices`.

    Args:
        config: its prompt style decides how the analyst words its answer.
        samples: investigations per episode; its order, depth and phrasing vary between them.
        seed: investigation `s` of episode `i` is a function of (seed, i, s).
        on_progress: called with (episodes done, episodes in all).
    """
    records = []
    for done, index in enumerate(indices, 1):
        task = environment.task(index)
        for sample in range(samples):
            episode = environment.open(task)
            try:
                rng = np.random.default_rng([seed, index, sample])
                transcript = analyst.investigate(episode, task, rng, config.prompt)
                reward = episode.grade(transcript.answer)
            finally:
                episode.close()
            calls = len(transcript.steps)
            records.append(record_of(task.index, sample, task.labels, reward.info, calls, "finished"))
        if on_progress is not None:
            on_progress(done, len(indices))
    return records
