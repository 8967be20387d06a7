"""Outcome advantages of GRPO groups (arXiv 2402.03300; without the standard deviation: Dr.GRPO, arXiv 2503.20783).

A group is all samples of one task. The baseline counts every *episode* once, however many rows (turns) it came in:
counting turns would push the policy away from using tools.
"""

from __future__ import annotations

from collections import Counter
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
        kept: False for lost episodes, for dropped groups, and (`drop_constant`) for groups whose survivors all have the
            same reward.
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
    baseline: str = "mean",
    drop_constant: bool = False,
    lost_members: str = "survivors",
    members: int | None = None,
    crashed: Sequence[bool] | None = None,
) -> GroupAdvantages:
    """`(r - baseline) / std` inside each group; exactly 0 in a constant group (spread up to 1e-6).

    The deviation is that of the population (ddof 0) over all survivors, the episode itself included, with either
    baseline. As `r - mean of the others` is `n / (n - 1) (r - mean)`, leave-one-out (RLOO, arXiv 2402.14740) scales the
    advantages of n survivors by that factor; without the deviation it makes the gradient unbiased.

    Args:
        rewards: of each row.
        groups: group of each row.
        samples: episode of each row inside its group; None: every row is its own episode. Rows of one episode count
            once and must carry the same reward.
        divide_std: False leaves the deviation out (Dr.GRPO).
        baseline: "mean" of the survivors' rewards | "leave_one_out": mean of the other survivors' rewards.
        drop_constant: also drop groups without any spread (DAPO's dynamic sampling, arXiv 2503.14476).
        lost_members: what becomes of a group that lost a member: "survivors": baseline and deviation are theirs |
            "drop_group": all of it is dropped. With fewer than two survivors it is dropped in any case.
        members: episodes that a group should have; those that never arrived are lost, too. None: as many as arrived.
        crashed: rows whose episode was lost: it ended without the policy being to blame.

    Returns:
        Advantages, and the metrics
        `groups`, `episodes`: how many there were; `crashed_episodes`, `missing_episodes`: members that crashed or never
        arrived; `dropped_groups`: fewer than two survivors, or a lost member under "drop_group";
        `constant_groups`: share of the other groups without spread (high: the rewards teach little);
        `reward_mean`, `reward_std`: of the survivors of these groups: mean over episodes, mean deviation inside groups.

    Raises:
        ValueError: lengths differ, a reward is not finite, one episode has two rewards, a group has more episodes than
            `members`, or an unknown `baseline` or `lost_members`.
    """
    if baseline not in ("mean", "leave_one_out") or lost_members not in ("survivors", "drop_group"):
        raise ValueError(f"unknown baseline `{baseline}` or lost_members `{lost_members}`")
    count = len(rewards)
    samples = range(count) if samples is None else samples
    crashed = [False] * count if crashed is None else crashed
    if not count == len(groups) == len(samples) == len(crashed):
        raise ValueError("rewards, groups, samples and crashed must have one entry per row")

    reward_of: dict[Hashable, dict[Hashable, float]] = {}
    dead: set[tuple[Hashable, Hashable]] = {(g, s) for g, s, c in zip(groups, samples, crashed, strict=True) if c}
    for group, sample, reward in zip(groups, samples, rewards, strict=True):
        survivors = reward_of.setdefault(group, {})
        if (group, sample) in dead:
            continue
        if not np.isfinite(reward):
            raise ValueError(f"reward of group {group}, sample {sample} is {reward}")
        if survivors.setdefault(sample, float(reward)) != float(reward):
            raise ValueError(f"group {group}, sample {sample} has two rewards: {survivors[sample]} and {reward}")
    died = Counter(group for group, _ in dead)
    arrived = {g: len(s) + died[g] for g, s in reward_of.items()}
    if members is not None and max(arrived.values(), default=0) > members:
        raise ValueError(f"a group has {max(arrived.values())} episodes instead of {members}")
    missing = {g: 0 if members is None else members - n for g, n in arrived.items()}

    alive = {
        g: s
        for g, s in reward_of.items()
        if len(s) >= 2 and not (lost_members == "drop_group" and died[g] + missing[g])
    }
    center: dict[Hashable, float] = {}
    divisor: dict[Hashable, float] = {}  # 0 for a constant group
    spread: list[float] = []
    for group, survivors in alive.items():
        # sorted: the sum must not depend on the order in which episodes arrived
        values = np.sort(np.array(list(survivors.values()), np.float64))
        flat = bool(values[-1] - values[0] <= CONSTANT)
        spread.append(0.0 if flat else float(values.std()))
        if flat and drop_constant:
            continue
        center[group] = float(values.mean())
        others = (len(values) - 1) / len(values) if baseline == "leave_one_out" else 1.0
        divisor[group] = 0.0 if flat else others * (spread[-1] if divide_std else 1.0)

    kept = np.array([g in center and (g, s) not in dead for g, s in zip(groups, samples, strict=True)], bool)
    values = np.zeros(count, np.float64)
    for i in np.flatnonzero(kept):
        if divisor[groups[i]]:
            values[i] = (float(rewards[i]) - center[groups[i]]) / divisor[groups[i]]

    metrics = {
        "groups": float(len(reward_of)),
        "episodes": float(sum(arrived.values())),
        "crashed_episodes": float(len(dead)),
        "missing_episodes": float(sum(missing.values())),
        "dropped_groups": float(len(reward_of) - len(alive)),
        "constant_groups": spread.count(0.0) / len(alive) if alive else 0.0,
        "reward_mean": float(np.mean([r for s in alive.values() for r in s.values()])) if alive else 0.0,
        "reward_std": float(np.mean(spread)) if alive else 0.0,
    }
    return GroupAdvantages(values=values.astype(np.float32), kept=kept, metrics=metrics)
