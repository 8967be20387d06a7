"""Why a ratio moved: the change of CTR, CVR or CPC between two windows, split into mix and rate parts by segment.

A ratio of sums is R = sum_g s_g r_g with shares s of the denominator and rates r of the segments. Its change is

    R2 - R1 = sum_g (s2 - s1) ((r1 + r2)/2 - (R1 + R2)/2)  +  sum_g (s1 + s2)/2 (r2 - r1)
              mix: traffic went to better or worse segments   rate: segments themselves became better or worse

the Shapley value of the two-player game {shares, rates}: exact, symmetric in the windows, without an interaction term.
The constant (R1 + R2)/2 moves nothing in total, as shares sum to one; with it a segment's mix part says what its own
gain or loss of traffic did. Ratios of sums compare windows of any length; counts are compared by day (`per_day`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

# Numerator and denominator of each ratio, as columns of the tables.
RATIOS: dict[str, tuple[str, str]] = {
    "ctr": ("clicks", "impressions"),
    "cvr": ("orders", "clicks"),
    "cpc": ("spend", "clicks"),
}
_ZERO = 1e-12  # a total this small against its parts is rounding


@dataclass(frozen=True)
class Decomposition:
    """Parts in the unit of the metric (CTR: clicks per impression), not as shares of a total that may be zero.

    Attributes:
        before, after: the metric in either window; None if its denominator is zero there.
        mix, rate: by segment; all of them add up to `total`.
        warning: why the parts need care in reading, empty if they do not.
    """

    before: float | None
    after: float | None
    total: float
    mix: Float[np.ndarray, " G"]
    rate: Float[np.ndarray, " G"]
    warning: str = ""

    @property
    def mix_share(self) -> float | None:
        """Part of the total change that the mix made; None when there is no total change to divide."""
        parts = float(np.abs(self.mix).sum() + np.abs(self.rate).sum())
        return None if abs(self.total) <= _ZERO * parts or parts == 0 else float(self.mix.sum()) / self.total


def windows(days: int, onset: int) -> tuple[Bool[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Days before the onset, and from the onset on: every day is in exactly one of them."""
    after = np.arange(days) >= onset
    return ~after, after


def per_day(
    values: Float[np.ndarray, T * G], window: Bool[np.ndarray, " T"], present: Bool[np.ndarray, " T"] | None = None
) -> Float[np.ndarray, "*G"]:
    """Mean by day of the window, so that 30 days compare with 7. Days that are missing do not count; 0 without any."""
    used = window if present is None else window & present
    return np.asarray(values, np.float64)[used].sum(0) / max(int(used.sum()), 1)


def decompose(numerator: tuple[np.ndarray, np.ndarray], denominator: tuple[np.ndarray, np.ndarray]) -> Decomposition:
    """Split the change of sum(numerator)/sum(denominator).

    A segment that is empty in one window has no rate there: all it did is mix. Empty in both, it did nothing.

    Args:
        numerator, denominator: sums [G] over the window before and the one after, for example clicks and impressions.
    Raises:
        ValueError: a negative or non-finite sum.
    """
    (n1, n2), (d1, d2) = (tuple(np.asarray(x, np.float64) for x in pair) for pair in (numerator, denominator))
    for values in (n1, n2, d1, d2):
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError("decompose: sums must be finite and not negative")
    totals = d1.sum(), d2.sum()
    before, after = (float(n.sum() / d) if d > 0 else None for n, d in zip((n1, n2), totals, strict=True))
    if before is None or after is None:
        nothing = np.zeros(len(d1))
        where = "before" if before is None else "after"
        return Decomposition(before, after, 0.0, nothing, nothing, f"nothing to divide by in the window {where}")
    s1, s2 = d1 / totals[0], d2 / totals[1]
    both = (d1 > 0) & (d2 > 0)
    r1, r2 = (n / np.where(both, d, 1.0) for n, d in ((n1, d1), (n2, d2)))
    rate = np.where(both, (s1 + s2) / 2 * (r2 - r1), 0.0)
    # What is not rate is mix: the same as the formula above, and exact for segments without a rate of their own.
    mix = n2 / totals[1] - n1 / totals[0] - rate - (s2 - s1) * (before + after) / 2
    total, parts = after - before, float(np.abs(mix).sum() + np.abs(rate).sum())
    warning = ""
    if ((n1 > 0) & (d1 == 0)).any() or ((n2 > 0) & (d2 == 0)).any():
        warning = "a segment has a numerator without a denominator; it counts as mix"
    elif abs(total) <= _ZERO * max(parts, before):
        warning = "the total did not change: parts cancel each other, read them in absolute units"
    return Decomposition(before, after, total, mix, rate, warning)


def contributions(
    before: Float[np.ndarray, " G"], after: Float[np.ndarray, " G"]
) -> tuple[Float[np.ndarray, " G"], str]:
    """What each segment adds to the change of a count or an amount (means by day, see `per_day`), in its own unit, and
    a warning if the total did not change (shares of it would be infinite)."""
    change = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    cancel = abs(change.sum()) <= _ZERO * np.abs(change).sum()
    return change, "the total did not change: parts cancel each other" if cancel else ""


def deviation(real: Float[np.ndarray, " G"], expected: Float[np.ndarray, " G"]) -> Float[np.ndarray, " G"]:
    """(real - expected) / (real + expected), in [-1, 1]: finite when either is zero, 0 when both are.

    Raises:
        ValueError: a negative or non-finite value, such as an extrapolated trend gives.
    """
    real, expected = np.asarray(real, np.float64), np.asarray(expected, np.float64)
    for name, values in (("real", real), ("expected", expected)):
        if not np.isfinite(values).all() or (values < 0).any():
            raise ValueError(f"deviation: {name} values must be finite and not negative")
    both = real + expected
    return (real - expected) / np.where(both > 0, both, 1.0)
