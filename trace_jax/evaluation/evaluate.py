"""Held-out evaluation of a policy: the rollout collector at evaluation temperature, folded into graded records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trace_jax.config import ConfigError, EvaluationConfig, RolloutConfig
from trace_jax.environments.base import Environment
from trace_jax.evaluation import metrics
from trace_jax.rollout.collect import Chat, collect
from trace_jax.rollout.generator import Generator
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.trajectory import Trajectory


def evaluate_policy(
    generator: Generator,
    chat: Chat,
    environment: Environment,
    indices: Sequence[int],
    config: EvaluationConfig,
    rollout: RolloutConfig,
    *,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
    adapters: Sequence[int] | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[Trajectory]:
    """`config.samples` investigations of each episode by the parameters that `generator` holds.

    Args:
        indices: episodes of `environment`, each once.
        config: number of samples, temperature (0 is greedy) and truncation.
        rollout: limits, slots and workers; its temperature and truncation are for training and not used.
        seed: of the sampling keys, which depend on (seed, episode, sample) alone: two stages of a run meet the same
            luck, and an episode is answered alike whatever else is evaluated with it.
        on_progress: called with (episodes done, episodes in all).
        adapters: which of those that `generator` holds investigates each episode, -1: none; by default the first.
        share: see `collect`.

    Returns:
        Trajectories in the order of `indices`, samples of an episode together; `records_of` turns them into records.

    Raises:
        ConfigError: an episode is named twice.
    """
    if len(set(indices)) != len(indices):
        raise ConfigError("evaluation: an episode is named twice; its answers would count as more samples of one")
    samples = config.samples

    def report(ended: int, total: int) -> None:
        if on_progress is not None:
            on_progress(ended // samples, total // samples)

    return collect(
        generator,
        chat,
        environment,
        list(indices),
        group=samples,
        config=rollout,
        seed=seed,
        step=0,
        sampling=Sampling.of(config),
        progress=report,
        adapters=adapters,
        share=share,
    )


def records_of(trajectories: Sequence[Trajectory], record_of: Callable[..., Any] = metrics.record_of) -> list[Any]:
    """Records of collected trajectories, made by `record_of` of their kind."""
    return [
        record_of(t.task_index, t.sample, t.labels, t.info, t.tool_calls, t.status, confidence=answer_confidence(t))
        for t in trajectories
    ]


def answer_confidence(trajectory: Trajectory) -> float | None:
    """Mean log-probability of the answer's tokens under the distribution they were drawn from.

    None without an answer, or where tokens were not drawn (greedy decoding)."""
    last = trajectory.loss_mask & (trajectory.turn_index == len(trajectory.versions) - 1)
    if trajectory.answer is None or not last.any():
        return None
    mean = float(trajectory.logprobs[last].mean())
    return mean if np.isfinite(mean) else None
