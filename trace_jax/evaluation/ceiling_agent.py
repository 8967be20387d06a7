"""The likelihood ceiling (`evaluation.ceiling`) in record form, to stand beside agents on the same episodes.

It is no agent: it knows the simulator's equations and parameters, and reads arrays instead of asking. Of the episodes
it reads what agents can see; the labels only grade its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trace_jax.config import RunConfig
from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.ads.reward import grade
from trace_jax.evaluation import metrics
from trace_jax.evaluation.ceiling import NONE, diagnose
from trace_jax.evaluation.finders.campaign import PAIRS
from trace_jax.simulator.causes import CAUSE_NAMES
from trace_jax.simulator.difficulty import params_of


def evaluate_ceiling(
    environment: AdsEnvironment, config: RunConfig, on_progress: Callable[[int, int], Any]
) -> list[metrics.EvalRecord]:
    """One answer to every episode, the most likely cause and slice; confidence is its probability, tool calls are 0."""
    found = diagnose(environment.episodes.batch, params_of(config.simulator), on_progress)
    records = []
    for i in range(len(environment)):
        k, task = int(found.slice[i]), environment.task(i)
        answer = format_answer(CAUSE_NAMES[int(found.cause[i])], () if k == NONE else PAIRS[k])
        reward = grade(answer, task.labels["cause"], task.labels["driver"], config.environment)
        sure = float(found.probability[i])
        records.append(metrics.record_of(i, 0, task.labels, reward.info, 0, "finished", confidence=sure))
    return records
