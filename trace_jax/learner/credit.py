"""From graded trajectories to sequences the learner can train on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

from trace_jax.config import ConfigError, GRPOConfig
from trace_jax.learner.advantages import GroupAdvantages, group_advantages
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
    experts: Int[np.ndarray, "n L e"] | None

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it off before its answer."""

    def behaviour_logprobs(self) -> Float[np.ndarray, " n"]:
        """Of the sampled ids; raises for a trajectory that was sampled greedily."""


# (trajectory, outcome advantage) -> advantage of each of its tokens
TokenAdvantages = Callable[[Trajectory, float], Float[np.ndarray, " n"]]


def validate(config: GRPOConfig, context: int) -> None:
    """Refuses an overlong penalty that would reach every trajectory.

    Raises:
        ConfigError: naming the field and what to set it to.
    """
    if config.overlong_buffer >= context:
        raise ConfigError(
            f"`grpo.overlong_buffer` is {config.overlong_buffer}, `rollout.context` {context}: every trajectory would "
            "be penalised, lower the buffer"
        )


def sft_sequence(trajectory: Trajectory) -> Sequence:
    """A demonstration: cross-entropy on its masked ids."""
    return Sequence(trajectory.ids, trajectory.loss_mask)


def overlong_penalty(length: int, truncated: bool, limit: int, buffer: int, penalty: float) -> float:
    """What the reward loses (soft overlong punishment, arXiv 2503.14476, eq. 13, there with penalty 1).

    Args:
        length: tokens of the whole trajectory, prompt and observations included.
        truncated: a limit cut it off: all of the penalty, whatever its length.
        limit: longest trajectory, tokens.
        buffer: the loss grows linearly over this many tokens before `limit`; 0: none at all.
    """
    if buffer == 0:
        return 0.0
    return penalty * (1.0 if truncated else min(max((length - (limit - buffer)) / buffer, 0.0), 1.0))


def outcome_advantages(
    trajectories: Seq[Trajectory], config: GRPOConfig, context: int | None = None, keep_constant: bool = False
) -> GroupAdvantages:
    """Advantage of every trajectory's reward, less its overlong penalty, inside its group.

    A trajectory that a limit cut off counts in its group's baseline, with the reward it got, even if `mask_truncated`
    keeps its own tokens out of the loss: running out of room is the policy's doing, and a baseline without these
    episodes would tell the others that they did worse than they did. A crashed one counts nowhere.

    Args:
        context: tokens at which a trajectory ends (`rollout.context`); `overlong_buffer` needs it.
        keep_constant: whatever `constant_groups` says.

    Returns:
        Of each trajectory; metrics of `group_advantages` and, with an `overlong_buffer`, `overlong_penalty`: its mean
        over the episodes that did not crash, and `overlong_share`: how many of them it reached. Where both are small,
        note that the deviation of a group of otherwise equal rewards is that of their penalties.

    Raises:
        ValueError: an `overlong_buffer` without `context`.
    """
    crashed = [t.status in CRASHED for t in trajectories]
    penalties = np.zeros(len(trajectories))
    if config.overlong_buffer:
        if context is None:
            raise ValueError("`overlong_buffer` needs `context`, the tokens at which a trajectory ends")
        buffer, penalty = config.overlong_buffer, config.overlong_penalty
        penalties[:] = [overlong_penalty(len(t.ids), t.truncated, context, buffer, penalty) for t in trajectories]
    result = group_advantages(
        [t.reward - p for t, p in zip(trajectories, penalties.tolist(), strict=True)],
        [t.group for t in trajectories],
        [t.sample for t in trajectories],
        divide_std=config.advantage_std,
        baseline=config.baseline,
        drop_constant=config.constant_groups != "count" and not keep_constant,
        lost_members=config.lost_members,
        members=config.group,
        crashed=crashed,
    )
    if config.overlong_buffer:
        alive = penalties[~np.array(crashed, bool)]
        result.metrics["overlong_penalty"] = float(alive.mean()) if len(alive) else 0.0
        result.metrics["overlong_share"] = float(np.mean(alive > 0)) if len(alive) else 0.0
    return result


def is_trained(trajectory: Trajectory, config: GRPOConfig) -> bool:
    """Whether its tokens are in the loss: it has some, and the overlong filter does not apply to it."""
    return bool(np.any(trajectory.loss_mask)) and not (trajectory.truncated and config.mask_truncated)


def denominator(sequence: Sequence, aggregation: str) -> float:
    """What a sequence adds to the denominator of `aggregation.aggregate`."""
    tokens = int(np.sum(sequence.loss_mask))
    return sequence.weight * (tokens if aggregation == "token_mean" else float(tokens > 0))


def grpo_sequences(
    trajectories: Seq[Trajectory],
    config: GRPOConfig,
    context: int | None = None,
    token_advantages: TokenAdvantages | None = None,
) -> tuple[list[Sequence], float, dict[str, float]]:
    """Every sampled token of an episode gets the advantage of the episode inside its group.

    Groups without spread count in the mean unless `constant_groups` drops them. As they carry no gradient, they are not
    computed even then (unless a KL or entropy term gives them one, or a correction may mask some of their tokens): pass
    the returned denominator to `Learner.step`.

    Args:
        trajectories: in any order; groups may be partial and their ids are `Trajectory.group`.
        context: tokens at which a trajectory ends (`rollout.context`); `overlong_buffer` needs it.
        token_advantages: turn credit: what each token gets instead of the outcome advantage. Groups without spread then
            have something to teach: they are neither dropped nor, unless all their tokens get 0, left out.

    Returns:
        Sequences to pack; the denominator of those left out; metrics of `outcome_advantages` plus `truncated`: share of
        episodes that a limit cut off, `computed_episodes`: share that reaches the learner.

    Raises:
        ConfigError: a trajectory was sampled greedily.
    """
    result = outcome_advantages(trajectories, config, context, keep_constant=token_advantages is not None)
    # a mask takes tokens out of the denominator, too: which ones is only known once they are computed
    needed = config.kl_coefficient > 0 or config.entropy_coefficient > 0 or config.correction.startswith("mask")
    sequences: list[Sequence] = []
    left_out = 0.0
    for t, advantage, kept in zip(trajectories, result.values.tolist(), result.kept, strict=True):
        if not kept or not is_trained(t, config):
            continue
        tokens = advantage if token_advantages is None else token_advantages(t, advantage)
        sequence = Sequence(t.ids, t.loss_mask, tokens, t.behaviour_logprobs(), kept=t.kept, experts=t.experts)
        if needed or np.any(np.where(t.loss_mask, tokens, 0.0)):
            sequences.append(sequence)
        else:
            left_out += denominator(sequence, config.aggregation)
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
