"""Outcome advantages of GRPO groups (arXiv 2402.03300; without the standard deviation: Dr.GRPO, arXiv 2503.20783).

A group is all samples of one task. The baseline counts every *episode* once, however many rows (turns) it came in:
counting turns would push the policy away from using tools.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

# Rewards closer than this are equal: a constant group must give exactly zero, not rounding noise divided by itself.
CONSTANT = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of n rows, in the order the rewards were given.

    Attributes:
        values: advantage of each row's episode; 0 where `kept` is False.
        kept: False for crashed episodes, for groups with fewer than two survivors, and (`drop_constant`) for groups
            whose survivors all have the same reward.
        metrics: counts and shares, see `group_advantages`.
    """

    values: Float[np.ndarray, " n"]
    kept: Bool[np.ndarray, " n"]
    metrics: dict[str, float]


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    samples: Sequence[Hashable] | None = None,
    *,
    divide_std: bool = True,
    drop_constant: bool = False,
    crashed: Sequence[bool] | None = None,
) -> GroupAdvantages:
    """`(r - mean) / std` inside each group; population standard deviation (ddof 0), 0 for a constant group.

    Partial groups: a crashed episode is left out, mean and deviation are those of the survivors; a group with fewer
    than two survivors is dropped.

    Args:
        rewards: of each row.
        groups: group of each row.
        samples: episode of each row inside its group; None: every row is its own episode. Rows of one episode count
            once and must carry the same reward.
        divide_std: False leaves the deviation out (Dr.GRPO).
        drop_constant: also drop groups without any spread (DAPO's dynamic sampling, arXiv 2503.14476).
        crashed: rows whose episode ended without the policy being to blame.

    Returns:
        Advantages, and the metrics
        `groups`, `episodes`: how many there were; `crashed_episodes`; `dropped_groups`: fewer than two survivors;
        `constant_groups`: share of the surviving groups without spread (high: the rewards teach little);
        `reward_mean`, `reward_std`: mean over surviving episodes, mean deviation inside groups.

    Raises:
        ValueError: lengths differ, a reward is not finite, or one episode has two rewards.
    """
    count = len(rewards)
    samples = range(count) if samples is None else samples
    crashed = [False] * count if crashed is None else crashed
    if not count == len(groups) == len(samples) == len(crashed):
        raise ValueError("rewards, groups, samples and crashed must have one entry per row")

    reward_of: dict[Hashable, dict[Hashable, float]] = {}
    dead: set[tuple[Hashable, Hashable]] = {(g, s) for g, s, c in zip(groups, samples, crashed, strict=True) if c}
    for group, sample, reward in zip(groups, samples, rewards, strict=True):
        members = reward_of.setdefault(group, {})
        if (group, sample) in dead:
            continue
        if not np.isfinite(reward):
            raise ValueError(f"reward of group {group}, sample {sample} is {reward}")
        if members.setdefault(sample, float(reward)) != float(reward):
            raise ValueError(f"group {group}, sample {sample} has two rewards: {members[sample]} and {reward}")

    statistics: dict[Hashable, tuple[float, float]] = {}
    dropped = constant = 0
    for group, members in reward_of.items():
        if len(members) < 2:
            dropped += 1
            continue
        # sorted: the sum must not depend on the order in which episodes arrived
        values = np.sort(np.array(list(members.values()), np.float64))
        flat = bool(values[-1] - values[0] <= CONSTANT)
        constant += flat
        if flat and drop_constant:
            continue
        statistics[group] = (float(values.mean()), 0.0 if flat else float(values.std()))

    values = np.zeros(count, np.float64)
    kept = np.zeros(count, bool)
    for i, (group, sample) in enumerate(zip(groups, samples, strict=True)):
        if group not in statistics or (group, sample) in dead:
            continue
        mean, std = statistics[group]
        kept[i] = True
        if std > 0.0:
            values[i] = (float(rewards[i]) - mean) / (std if divide_std else 1.0)

    alive = [m for m in reward_of.values() if len(m) >= 2]
    metrics = {
        "groups": float(len(reward_of)),
        "episodes": float(sum(len(m) for m in reward_of.values()) + len(dead)),
        "crashed_episodes": float(len(dead)),
        "dropped_groups": float(dropped),
        "constant_groups": constant / len(alive) if alive else 0.0,
        "reward_mean": float(np.mean([r for m in alive for r in m.values()])) if alive else 0.0,
        "reward_std": float(np.mean([np.std(list(m.values())) for m in alive])) if alive else 0.0,
    }
    return GroupAdvantages(values=values.astype(np.float32), kept=kept, metrics=metrics)
