"""Is a world neither too easy nor too hard to learn in, and if not, which difficulty is tried next (arXiv 2604.05336).

A policy's attempts decide: rewards and successes [seeds, rollouts] of one level of difficulty. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from trace_jax.config_rules import LEVELS

SEEDS, ROLLOUTS, TRIES = 100, 16, 5
STEP = 2.0  # levels to the first neighbour that is tried


@dataclass(frozen=True)
class Window:
    """What a world must show to be accepted."""

    low: float = 0.2  # of mean reward and success rate
    high: float = 0.6
    std: float = 0.05  # least standard deviation of the rewards
    all_success: float = 0.2  # most groups in which every rollout succeeds
    all_zero: float = 0.2  # most groups in which every reward is zero


@dataclass(frozen=True)
class Statistics:
    """Of one level: `reward`, `success`: means; `std`: of rewards, over all rollouts; `all_success`, `all_zero`: shares
    of groups."""

    reward: float
    success: float
    std: float
    all_success: float
    all_zero: float

    @staticmethod
    def of(rewards: Float[np.ndarray, "S K"], successes: Bool[np.ndarray, "S K"]) -> Statistics:
        """Of K rollouts in each of S seeds; both at least 1."""
        return Statistics(
            reward=float(rewards.mean()),
            success=float(successes.mean()),
            std=float(rewards.std()),
            all_success=float(successes.all(1).mean()),
            all_zero=float((rewards == 0).all(1).mean()),
        )

    def faults(self, window: Window) -> list[str]:
        """What keeps a world with these statistics out of the window, one line each; empty: it is accepted."""
        found = []
        for name in ("reward", "success"):
            value = getattr(self, name)
            if value < window.low:
                found.append(f"{name} {value:.2f} below {window.low:g}")
            if value > window.high:
                found.append(f"{name} {value:.2f} above {window.high:g}")
        if self.std < window.std:
            found.append(f"std {self.std:.3f} below {window.std:g}")
        if self.all_success > window.all_success:
            found.append(f"{self.all_success:.0%} of groups all succeed")
        if self.all_zero > window.all_zero:
            found.append(f"{self.all_zero:.0%} of groups earn nothing")
        return found

    def direction(self, window: Window) -> int:
        """1: make it harder; -1: make it easier; 0: no difficulty mends what is wrong, or nothing is."""
        easy = max(self.reward, self.success) > window.high or self.all_success > window.all_success
        hard = min(self.reward, self.success) < window.low or self.all_zero > window.all_zero
        return int(easy) - int(hard)


@dataclass(frozen=True)
class Try:
    """One level of difficulty: what it gave, or (`statistics` None) why no episodes could be made there."""

    level: float
    statistics: Statistics | None
    refused: str = ""

    def direction(self, window: Window) -> int:
        """See `Statistics.direction`. Where the simulator finds too few episodes, effects are too small: easier."""
        return -1 if self.statistics is None else self.statistics.direction(window)

    def accepted(self, window: Window) -> bool:
        """Whether the window holds."""
        return self.statistics is not None and not self.statistics.faults(window)

    def as_json(self, window: Window) -> dict[str, Any]:
        """For the report."""
        known = {} if self.statistics is None else asdict(self.statistics)
        faults = [self.refused] if self.statistics is None else self.statistics.faults(window)
        return {"level": self.level, **known, "accepted": self.accepted(window), "faults": faults}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Try:
        """The inverse of `as_json`."""
        if "reward" not in found:
            return Try(found["level"], None, found["faults"][0])
        return Try(found["level"], Statistics(**{k: found[k] for k in Statistics.__dataclass_fields__}))


def next_level(tried: Sequence[Try], window: Window, tries: int = TRIES) -> float | None:
    """The level to try next: the middle of the nearest one that is too easy and the nearest that is too hard, or `STEP`
    further in the direction that is left. None: one was accepted, or there is nothing more to try."""
    if not tried:
        return 0.0
    if len(tried) >= tries or any(t.accepted(window) for t in tried):
        return None
    last = tried[-1].direction(window)
    if last == 0:
        return None
    below = max((t.level for t in tried if t.direction(window) > 0), default=None)  # too easy
    above = min((t.level for t in tried if t.direction(window) < 0), default=None)  # too hard
    if below is not None and above is not None:
        # attempts are noisy: levels may come out in the wrong order
        return None if below >= above else (below + above) / 2
    found = tried[-1].level + last * STEP
    return found if abs(found) <= LEVELS else None
