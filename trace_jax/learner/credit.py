"""From graded trajectories to sequences the learner can train on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.config import GRPOConfig
from trace_jax.learner.advantages import group_advantages
from trace_jax.learner.packing import Sequence

# The policy is not to blame for these endings: such an episode teaches nothing and stays out of its group's baseline.
CRASHED = ("tool_failure", "timed_out")


class Trajectory(Protocol):
    """What is used of `rollout.trajectory.Trajectory`; the learner itself imports nothing of the rollout."""

    ids: Int[np.ndarray, " n"]
    loss_mask: Bool[np.ndarray, " n"]
    status: str
    group: int
    sample: int
    reward: float
    kept: Int[np.ndarray, "n k"] | None

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it off before its answer."""

    def behaviour_logprobs(self) -> Float[np.ndarray, " n"]:
        """Of the sampled ids; raises for a trajectory that was sampled greedily."""


def sft_sequence(trajectory: Trajectory) -> Sequence:
    """A demonstration: cross-entropy on its masked ids."""
    return Sequence(trajectory.ids, trajectory.loss_mask)


def grpo_sequences(trajectories: Seq[Trajectory], config: GRPOConfig) -> tuple[list[Sequence], float, dict[str, float]]:
    """Every sampled token of an episode gets the advantage of the episode inside its group.

    Objective "dapo" drops groups without spread. Otherwise they count in the mean; as they carry no gradient (unless a
    KL or entropy term gives them one), they are not computed: pass the returned denominator to `Learner.step`.

    Args:
        trajectories: in any order; groups may be partial and their ids are `Trajectory.group`.

    Returns:
        Sequences to pack; the denominator of those left out; metrics of `group_advantages` plus `truncated`: share of
        episodes that a limit cut off, `computed_episodes`: share that reaches the learner.

    Raises:
        ConfigError: a trajectory was sampled greedily.
    """
    result = group_advantages(
        [t.reward for t in trajectories],
        [t.group for t in trajectories],
        [t.sample for t in trajectories],
        divide_std=config.advantage_std,
        drop_constant=config.objective == "dapo",
        crashed=[t.status in CRASHED for t in trajectories],
    )
    regularised = config.kl_coefficient > 0 or config.entropy_coefficient > 0
    sequences: list[Sequence] = []
    left_out = 0.0
    for t, advantage, kept in zip(trajectories, result.values, result.kept, strict=True):
        tokens = int(np.sum(t.loss_mask))
        if not kept or tokens == 0 or (t.truncated and config.mask_truncated):
            continue
        if advantage == 0.0 and not regularised:
            left_out += tokens if config.aggregation == "token_mean" else 1.0
            continue
        sequences.append(Sequence(t.ids, t.loss_mask, float(advantage), t.behaviour_logprobs(), kept=t.kept))
    count = max(len(trajectories), 1)
    return (
        sequences,
        left_out,
        result.metrics
        | {
            "truncated": sum(t.truncated for t in trajectories) / count,
            "computed_episodes": len(sequences) / count,
        },
    )
