"""Agents without a policy, graded by the same environment and in the same record form as a trained one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads import analyst
from trace_jax.environments.base import Environment, Episode, Task, Transcript
from trace_jax.evaluation import metrics
from trace_jax.evaluation.metrics import EvalRecord


def evaluate_agent(
    environment: Environment,
    indices: Sequence[int],
    agent: Callable[[Episode, Task, np.random.Generator], Transcript],
    record_of: Callable[..., Any],
    *,
    samples: int = 1,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """A scripted agent on the episodes `indices`.

    Args:
        record_of: makes the records, see `evaluation.kinds`.
        samples: investigations per episode, which may vary with the generator.
        seed: investigation `s` of episode `i` is a function of (seed, i, s).
        on_progress: called with (episodes done, episodes in all).
    """
    records = []
    for done, index in enumerate(indices, 1):
        task = environment.task(index)
        for sample in range(samples):
            episode = environment.open(task)
            try:
                transcript = agent(episode, task, np.random.default_rng([seed, index, sample]))
                reward = episode.grade(transcript.answer)
            finally:
                episode.close()
            calls = len(transcript.steps)
            sure = transcript.confidence
            records.append(record_of(task.index, sample, task.labels, reward.info, calls, "finished", confidence=sure))
        if on_progress is not None:
            on_progress(done, len(indices))
    return records


def evaluate_analyst(
    environment: Environment, indices: Sequence[int], config: EnvironmentConfig, **options: Any
) -> list[EvalRecord]:
    """The scripted analyst, the SFT teacher of the advertising environment.

    Args:
        config: its prompt style decides how the analyst words its answer.
        options: of `evaluate_agent`.
    """

    def agent(episode: Episode, task: Task, rng: np.random.Generator) -> Transcript:
        return analyst.investigate(episode, task, rng, config.prompt)

    return evaluate_agent(environment, indices, agent, metrics.record_of, **options)
