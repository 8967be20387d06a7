"""Dynamic sampling: which groups teach nothing, and which are trained on once others were sampled in their place
(arXiv 2503.14476, section 3.2).

Everything here is a function of the trajectories; their order does not matter, the ordinal of their group does. Groups
of later collections must have larger ordinals than those before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeVar

from trace_jax.config import GRPOConfig
from trace_jax.learner.credit import Trajectory, is_trained, outcome_advantages

# What the chosen groups know nothing of, or too little
_HIDDEN = ("constant_groups", "dropped_groups", "crashed_episodes", "missing_episodes")

T = TypeVar("T", bound=Trajectory)


def useless(
    trajectories: Seq[Trajectory], config: GRPOConfig, context: int | None = None, turn_credit: bool = False
) -> list[int]:
    """Groups that no outcome can be learned from, ascending: dropped, constant, or without a token in the loss whose
    advantage is not 0.

    Args:
        context: as of `grpo_sequences`.
        turn_credit: tokens have advantages of their own, so a constant group is of use.
    """
    result = outcome_advantages(trajectories, config, context, keep_constant=True)
    useful = {
        t.group
        for t, advantage, kept in zip(trajectories, result.values, result.kept, strict=True)
        if kept and is_trained(t, config) and (turn_credit or advantage != 0.0)
    }
    return sorted({t.group for t in trajectories} - useful)


def missing(
    trajectories: Seq[Trajectory], config: GRPOConfig, context: int | None = None, turn_credit: bool = False
) -> int:
    """How many further prompts a step needs until `prompts` of its groups are of use; 0 unless `constant_groups` is
    "resample". Arguments as of `useless`."""
    if config.constant_groups != "resample":
        return 0
    groups = {t.group for t in trajectories}
    return max(config.prompts - len(groups) + len(useless(trajectories, config, context, turn_credit)), 0)


def choose(
    trajectories: Seq[T], config: GRPOConfig, context: int | None = None, turn_credit: bool = False
) -> tuple[list[T], dict[str, float]]:
    """What a step trains on: all trajectories or, if `constant_groups` is "resample", those of the first `prompts`
    useful groups in order of their ordinals. What resampling did not replace stays out.

    Returns:
        Trajectories in their given order, and with "resample" the metrics
        `resampled_groups`: groups beyond the first `prompts`; `useless_groups`: share of all groups (near 1: prompts
        are too easy or too hard); `chosen_groups`: fewer than `prompts` when `resample_limit` ended the search; and
        of `outcome_advantages` over all groups those that choosing hides: let them replace the ones of the chosen.
    """
    if config.constant_groups != "resample":
        return list(trajectories), {}
    groups = sorted({t.group for t in trajectories})
    idle = set(useless(trajectories, config, context, turn_credit))
    chosen = set([g for g in groups if g not in idle][: config.prompts])
    whole = outcome_advantages(trajectories, config, context).metrics
    return [t for t in trajectories if t.group in chosen], {k: whole[k] for k in _HIDDEN} | {
        "resampled_groups": float(max(len(groups) - config.prompts, 0)),
        "useless_groups": len(idle) / max(len(groups), 1),
        "chosen_groups": float(len(chosen)),
    }
