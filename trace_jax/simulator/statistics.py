"""What the oracle reads from the visible data: quasi-likelihood z-scores of campaign and slices between the halves.

Changes of the whole campaign are taken against its siblings (difference in differences): what market, season or a late
attribution does to all of them at once is no evidence. Changes of a slice are means over its segments' own log changes,
weighted by their precision, against those of the rest of the campaign: a slice whose segments merely changed their
shares has not changed its rate (Simpson's paradox, case 2 of the data cases). Noise beyond the counts comes from the
baseline's own day-to-day residuals, so overdispersion is paid for.
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trace_jax.simulator import slices
from trace_jax.simulator.causes import CAUSES, COMPANION, FLAT, PRIMARY
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.vocabulary import DRIVER_ATTRIBUTES

SLICE_FEATURES = ("ctr", "cvr", "cpc", "share")  # of a slice; a segment cause's signature speaks of these
MIXES = tuple(f"mix_{a}" for a in DRIVER_ATTRIBUTES)
# Of the campaign; "local": the strongest change of a slice that a segment cause's primary could be.
FEATURES = ("volume", "ctr", "cvr", "cpc", "in_stock", "local", *MIXES)
MIN_STOCK_SD = 0.005
_PRIOR = 0.5  # added to what a segment counts (or spends) in a half, so that nothing there has a logarithm


def _check_registry() -> None:
    """A slip in a registry entry is found when the module is loaded, not in a label."""
    for cause in CAUSES:
        known = SLICE_FEATURES if cause.level == "segment" else FEATURES
        for feature, want in cause.signature.items():
            if feature not in known or want not in (*PRIMARY, *COMPANION, FLAT):
                raise ValueError(f"cause {cause.name}: signature {feature}={want} is not one of {known}")
        if cause.level == "segment" and sum(w in PRIMARY for w in cause.signature.values()) != 1:
            raise ValueError(f"cause {cause.name}: a segment cause has exactly one primary feature")


_check_registry()


def _primaries() -> tuple[tuple[int, int], ...]:
    """Distinct (slice feature, sign) in which a segment cause shows first."""
    found = []
    for cause in CAUSES:
        if cause.level == "segment":
            found += [(SLICE_FEATURES.index(f), PRIMARY[w]) for f, w in cause.signature.items() if w in PRIMARY]
    return tuple(dict.fromkeys(found))


PRIMARIES = _primaries()


@chex.dataclass(frozen=True)
class Statistics:
    """What the oracle sees of one episode. F campaign features, K candidate slices."""

    campaign: Float[Array, " F"]  # z by FEATURES
    campaign_change: Float[Array, " 5"]  # log change of volume, CTR, CVR, CPC (against siblings), in-stock
    slices: Float[Array, "4 K"]  # z of slice against rest by SLICE_FEATURES; share: of its share of impressions
    change: Float[Array, "4 K"]  # log change inside the slice minus that of the rest, same order
    testable: Bool[Array, " K"]  # enough events inside and outside


def _change(num: Float[Array, "T ..."], den: Float[Array, "T ..."]) -> tuple[Array, Array]:
    """Log change of sum(num)/sum(den) between the halves, and its variance from the baseline's daily residuals. A day
    that is missing has zeros and counts for nothing."""
    half = num.shape[0] // 2
    n1, n2, d1, d2 = num[:half].sum(0), num[half:].sum(0), den[:half].sum(0), den[half:].sum(0)
    days = (den[:half] > 0).sum(0)
    expected = den[:half] * (n1 / jnp.maximum(d1, 1e-9))[None]
    residual = ((num[:half] - expected) ** 2).sum(0) * days / jnp.maximum(days - 1, 1)
    safe1, safe2 = jnp.maximum(n1, 0.5), jnp.maximum(n2, 0.5)
    change = jnp.log(safe2 / safe1) - jnp.log(jnp.maximum(d2, 0.5) / jnp.maximum(d1, 0.5))
    return change, residual / safe1**2 + residual / (safe1 * safe2) + 1e-8


@chex.dataclass(frozen=True)
class _Segments:
    """Log change of one figure of every segment between the halves, and the precision (inverse variance) of each."""

    change: Float[Array, " G"]
    precision: Float[Array, " G"]


def _rate(num: Float[Array, "T G"], den: Float[Array, "T G"], days: tuple[Array, Array], counts: bool) -> _Segments:
    """Change of num/den by segment. Its variance is that of the counts (if `num` counts) plus what the baseline's daily
    residuals show beyond them, pooled over all segments as one squared coefficient of variation."""
    half = num.shape[0] // 2
    n1, n2, d1, d2 = num[:half].sum(0), num[half:].sum(0), den[:half].sum(0), den[half:].sum(0)
    expected = den[:half] * (n1 / jnp.maximum(d1, 1e-9))[None]
    squares = ((num[:half] - expected) ** 2).sum() * (days[0] / jnp.maximum(days[0] - 1, 1.0))
    beyond = jnp.maximum(squares - (expected.sum() if counts else 0.0), 0.0)
    square = (expected**2).sum()
    variation = jnp.where(square > 0, beyond / jnp.maximum(square, 1e-9), _PRIOR)
    variance = variation * (1.0 / days[0] + 1.0 / days[1]) + 1e-8
    if counts:  # expected under no change, so that the weight of a segment does not depend on its change
        pooled = (n1 + n2) / jnp.maximum(d1 + d2, 1e-9)
        variance = variance + 1.0 / (pooled * d1 + _PRIOR) + 1.0 / (pooled * d2 + _PRIOR)
    change = jnp.log((n2 + _PRIOR) / jnp.maximum(d2, 1e-9)) - jnp.log((n1 + _PRIOR) / jnp.maximum(d1, 1e-9))
    seen = (d1 > 0) & (d2 > 0) & (n1 + n2 > 0)
    return _Segments(change=jnp.where(seen, change, 0.0), precision=jnp.where(seen, 1.0 / variance, 0.0))


def _share(impressions: Float[Array, "T G"], days: tuple[Array, Array]) -> _Segments:
    """Change of every segment's share of the impressions. The variance of a day's impressions is proportional to their
    expectation (Poisson and Dirichlet-multinomial alike), by a factor from the baseline's residuals."""
    half = impressions.shape[0] // 2
    n1, n2 = impressions[:half].sum(0), impressions[half:].sum(0)
    t1, t2 = n1.sum(), n2.sum()
    expected = impressions[:half].sum(-1)[:, None] * (n1 / jnp.maximum(t1, 1.0))[None]  # adds up to t1
    squares = ((impressions[:half] - expected) ** 2).sum() * (days[0] / jnp.maximum(days[0] - 1, 1.0))
    factor = jnp.maximum(squares / jnp.maximum(t1, 1.0), 1.0)
    # In this form the compiler rounds alike on one device and on many (tests/test_simulator_devices.py).
    share = t1 / jnp.maximum(t1 + t2, 1.0)
    variance = factor * (1.0 / ((n1 + n2) * share + _PRIOR) + 1.0 / ((n1 + n2) * (1.0 - share) + _PRIOR))
    change = jnp.log(n2 + _PRIOR) - jnp.log(n1 + _PRIOR) - jnp.log(jnp.maximum(t2, 1.0) / jnp.maximum(t1, 1.0))
    seen = n1 + n2 > 0
    return _Segments(change=jnp.where(seen, change, 0.0), precision=jnp.where(seen, 1.0 / variance, 0.0))


def _contrast(
    segments: list[_Segments], weight: Float[Array, "G K"]
) -> tuple[Float[Array, "M K"], Float[Array, "M K"]]:
    """z of the change inside each slice against the rest of the campaign, and that difference itself (log). Half the
    square of z is the log-likelihood that a change confined to the slice gains over one that all segments share."""
    precision = jnp.stack([s.precision for s in segments])
    moved = jnp.stack([s.precision * s.change for s in segments])
    sums = jnp.concatenate([precision, moved]) @ weight
    inside, inside_moved = jnp.split(sums, 2)
    outside, outside_moved = precision.sum(-1)[:, None] - inside, moved.sum(-1)[:, None] - inside_moved
    gap = inside_moved / jnp.maximum(inside, 1e-9) - outside_moved / jnp.maximum(outside, 1e-9)
    information = inside * outside / jnp.maximum(inside + outside, 1e-9)
    known = (inside > 1e-6) & (outside > 1e-6)
    gap = jnp.where(known, gap, 0.0)
    return gap * jnp.sqrt(jnp.maximum(information, 0.0)), gap


def _against(inside: tuple[Array, Array], outside: tuple[Array, Array]) -> Array:
    return (inside[0] - outside[0]) / jnp.sqrt(inside[1] + outside[1])


def statistics(episode: EpisodeBatch, min_events: float) -> Statistics:
    """All z-scores of one episode (no leading axis), from agent-visible fields only.

    Args:
        min_events: clicks that a slice and the rest of the campaign need in the baseline to be compared.
    """
    cells = [getattr(episode, name).astype(jnp.float32) for name in ("impressions", "clicks", "orders", "spend")]
    inside = slices.members(episode.segment_values, episode.segment_mask)
    weight = inside.astype(jnp.float32)
    ti, tc, to, ts = (x.sum(-1) for x in cells)
    half = ti.shape[0] // 2
    present = episode.day_mask.astype(jnp.float32)
    days = jnp.maximum(present[:half].sum(), 2.0), jnp.maximum(present[half:].sum(), 1.0)
    impressions, clicks, orders, spend = cells
    segments = [
        _rate(clicks, impressions, days, True),
        _rate(orders, clicks, days, True),
        _rate(spend, clicks, days, False),
        _share(impressions, days),
    ]
    z, change = _contrast(segments, weight)
    c = clicks[:half].sum(0) @ weight
    testable = (jnp.minimum(c, tc[:half].sum() - c) >= min_events) & inside.any(0)

    si, sc, so, ss = (
        getattr(episode, f"sibling_{name}").astype(jnp.float32).sum(0)
        for name in ("impressions", "clicks", "orders", "spend")
    )
    if episode.sibling_impressions.shape[0]:
        volume = _change(ti, si)
        own = [_change(tc, ti), _change(to, tc), _change(ts, tc)]
        theirs = [_change(sc, si), _change(so, sc), _change(ss, sc)]
    else:  # nothing to compare with: the campaign's own change
        volume = _change(ti, episode.day_mask.astype(jnp.float32))
        own = [_change(tc, ti), _change(to, tc), _change(ts, tc)]
        theirs = [(0.0, 0.0)] * 3
    campaign_z = [volume[0] / jnp.sqrt(volume[1]), *(_against(a, b) for a, b in zip(own, theirs, strict=True))]
    campaign_change = [volume[0], *(a[0] - b[0] for a, b in zip(own, theirs, strict=True))]

    days1, days2 = days
    stock1 = (episode.in_stock * present)[:half].sum() / days1
    stock2 = (episode.in_stock * present)[half:].sum() / days2
    variance = (jnp.where(present[:half] > 0, episode.in_stock[:half] - stock1, 0.0) ** 2).sum() / (days1 - 1)
    stock_sd = jnp.maximum(jnp.sqrt(variance), MIN_STOCK_SD)
    stock_z = (stock2 - stock1) / (stock_sd * jnp.sqrt(1.0 / days1 + 1.0 / days2))

    local = jnp.stack([jnp.where(testable, sign * z[f], 0.0).max() for f, sign in PRIMARIES]).max()
    mixes = [
        jnp.where(jnp.asarray(slices.single_of(a)) & testable, jnp.abs(z[3]), 0.0).max() for a in DRIVER_ATTRIBUTES
    ]
    stock_change = jnp.log(jnp.maximum(stock2, 0.005) / jnp.maximum(stock1, 0.005))
    return Statistics(
        campaign=jnp.stack([*campaign_z, stock_z, jnp.maximum(local, 0.0), *mixes]),
        campaign_change=jnp.stack([*campaign_change, stock_change]),
        slices=z,
        change=change,
        testable=testable,
    )


def used_features() -> np.ndarray:
    """Campaign features in which some campaign or mix cause shows, and "local"; what NO_SIGNAL must be quiet in."""
    used = {f for c in CAUSES if c.level != "segment" for f, want in c.signature.items() if want != FLAT}
    return np.array([f in used or f == "local" for f in FEATURES])
