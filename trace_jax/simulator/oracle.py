"""The oracle verifier: knows the label, reads only what the agent sees (arXiv 2609.10315, oracle verifier).

For every candidate slice (the whole campaign, each value of a driver attribute, each pair of values) it compares the
intervention window with the equally long baseline. All statistics are quasi-likelihood z-scores: the standard error
comes from the baseline's own day-to-day residuals, so overdispersion is paid for. A table of signatures says which
z must be strong, which must stay flat; the label must match its row and every other row must fail.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, CAUSES, DRIVER_ATTRIBUTES


@chex.dataclass(frozen=True)
class OracleParams:
    """Thresholds, in standard errors unless said otherwise."""

    detect: float = 5.0  # a required signature must be at least this strong
    companion: float = 3.0  # a required companion signature must be at least this strong
    flat: float = 3.0  # a rate that must not move stays below this ...
    flat_fraction: float = 0.45  # ... or below this fraction of the primary signature (campaign level)
    flat_fraction_local: float = 0.25  # the same inside a slice, where nothing leaks between metrics
    quiet: float = 4.0  # NO_SIGNAL: every signature below this
    slice_gap: float = 4.0  # log-likelihood units between the label's slice and the best rival slice
    min_events: float = 20.0  # clicks (or orders) a slice needs in the baseline to be testable (case 3)


# --- candidate slices -------------------------------------------------------------------------------------------


def _candidate_slices() -> tuple[np.ndarray, np.ndarray]:
    """Attribute and value codes of all one- and two-attribute slices of the driver attributes: [K, 2] each."""
    single = [(ATTRIBUTE_NAMES.index(a), v) for a in DRIVER_ATTRIBUTES for v in range(len(ATTRIBUTES[a]))]
    rows = [((a, -1), (v, -1)) for a, v in single]
    rows += [((a, b), (v, w)) for i, (a, v) in enumerate(single) for b, w in single[i + 1 :] if a != b]
    attributes, values = zip(*rows, strict=True)
    return np.array(attributes, np.int32), np.array(values, np.int32)


SLICE_ATTRIBUTES, SLICE_VALUES = _candidate_slices()
SLICES = len(SLICE_ATTRIBUTES)
# Cause c may be localised in slice k: the slice uses one of the cause's own driver attributes.
_DRIVER_OK = np.array(
    [[any(ATTRIBUTE_NAMES[a] in c.drivers for a in pair if a >= 0) for pair in SLICE_ATTRIBUTES] for c in CAUSES]
)
_SINGLE = SLICE_ATTRIBUTES[:, 1] < 0


def _single_of(name: str) -> np.ndarray:
    return _SINGLE & (SLICE_ATTRIBUTES[:, 0] == ATTRIBUTE_NAMES.index(name))


_PLACEMENTS, _AUDIENCES = _single_of("placement"), _single_of("audience")

# --- signatures -------------------------------------------------------------------------------------------------

FEATURES = ("volume", "ctr", "cvr", "cpc", "in_stock", "local", "placement_mix", "audience_mix")
# Campaign-level causes. +1/-1: primary, must move that way; +2/-2: companion, must move that way (weaker threshold);
# 0: must stay flat; None: free.
#                           volume  ctr   cvr   cpc  stock local  placement audience
CAMPAIGN_SIGNATURES = {
    "BID_INCREASE":         (None,  -2,   None, 1,   0,    0,     0,     0),
    "BUDGET_CAP":           (-1,    0,    None, 0,   0,    0,     0,     0),
    "PAGE_DEGRADATION":     (None,  0,    -1,   0,   0,    0,     0,     0),
    "OUT_OF_STOCK":         (None,  0,    -1,   0,   -1,   0,     0,     0),
    "PLACEMENT_SHIFT":      (0,     None, None, None, 0,   0,     1,     0),
    "TARGETING_BROADENING": (2,     -2,   -2,   None, 0,   0,     0,     1),
    "TARGETING_NARROWING":  (-2,    2,    2,    None, 0,   0,     0,     1),
}  # fmt: skip
# Causes in a slice: CTR is primary; CPC, share and CVR of the slice against the rest of the campaign decide.
#                           ctr  cvr  cpc  share
SEGMENT_SIGNATURES = {
    "CREATIVE_FATIGUE":     (-1,  0,   0,   0),
    "COMPETITIVE_PRESSURE": (-1,  None, 2,  0),
    "AD_QUALITY_DROP":      (-1,  None, 2,  -2),
    "AUDIENCE_SATURATION":  (-1,  -2,  0,   0),
}  # fmt: skip
_CAMPAIGN_CODES = [i for i, c in enumerate(CAUSES) if c.name in CAMPAIGN_SIGNATURES]
_SEGMENT_CODES = [i for i, c in enumerate(CAUSES) if c.name in SEGMENT_SIGNATURES]
_NO_SIGNAL = len(CAUSES) - 1


def _margin(z: Float[Array, " F"], signature: tuple, fraction: float, params: OracleParams) -> Float[Array, ""]:
    """Smallest margin over the entries of a signature row; positive when all of them hold."""
    primaries = [jnp.abs(z[i]) for i, want in enumerate(signature) if want in (1, -1)]
    strongest = jnp.stack(primaries or [jnp.abs(z[0])]).min()
    flat_limit = jnp.maximum(params.flat, fraction * strongest)
    margins = []
    for i, want in enumerate(signature):
        if want is None:
            continue
        if want == 0:
            margins.append(flat_limit - jnp.abs(z[i]))
        else:
            threshold = params.detect if abs(want) == 1 else params.companion
            margins.append(np.sign(want) * z[i] - threshold)
    return jnp.stack(margins).min()


# --- statistics -------------------------------------------------------------------------------------------------


def _safe_log_ratio(a: Array, b: Array) -> Array:
    return jnp.log(jnp.maximum(a, 0.5)) - jnp.log(jnp.maximum(b, 0.5))


def _change(num: Float[Array, "T ..."], den: Float[Array, "T ..."]) -> tuple[Array, Array]:
    """Log change of sum(num)/sum(den) between the halves, and its variance from the baseline's daily residuals."""
    half = num.shape[0] // 2
    n1, n2, d1, d2 = num[:half].sum(0), num[half:].sum(0), den[:half].sum(0), den[half:].sum(0)
    expected = den[:half] * (n1 / jnp.maximum(d1, 1e-9))[None]
    residual = ((num[:half] - expected) ** 2).sum(0) * half / (half - 1)
    safe1, safe2 = jnp.maximum(n1, 0.5), jnp.maximum(n2, 0.5)
    change = _safe_log_ratio(n2, n1) - (jnp.log(jnp.maximum(d2, 0.5)) - jnp.log(jnp.maximum(d1, 0.5)))
    return change, residual / safe1**2 + residual / (safe1 * safe2) + 1e-8


def _contrast(
    num: Float[Array, "T K"], den: Float[Array, "T K"], total_num: Array, total_den: Array
) -> tuple[Array, Array]:
    """z of the log change inside each slice against the rest of the campaign, and the log change inside."""
    inside, inside_var = _change(num, den)
    outside, outside_var = _change(total_num[:, None] - num, total_den[:, None] - den)
    return (inside - outside) / jnp.sqrt(inside_var + outside_var), inside


@chex.dataclass(frozen=True)
class Statistics:
    """What the oracle sees of one episode. K candidate slices."""

    campaign: Float[Array, " F"]  # z by FEATURES
    campaign_change: Float[Array, " 5"]  # log change of volume, CTR, CVR, CPC, in-stock
    ctr: Float[Array, " K"]  # z of slice against rest
    cvr: Float[Array, " K"]
    cpc: Float[Array, " K"]
    share: Float[Array, " K"]
    change: Float[Array, "K 4"]  # log change inside the slice of share of impressions, CTR, CVR, CPC
    testable: Bool[Array, " K"]  # enough events inside and outside


def statistics(episode: EpisodeBatch, params: OracleParams) -> Statistics:
    """All z-scores of one episode (no leading axis), from agent-visible fields only."""
    impressions, clicks, orders, spend = (
        getattr(episode, name).astype(jnp.float32) for name in ("impressions", "clicks", "orders", "spend")
    )
    values, mask = episode.segment_values, episode.segment_mask
    attributes = jnp.asarray(SLICE_ATTRIBUTES)
    hit = values[:, jnp.maximum(attributes, 0)] == jnp.asarray(SLICE_VALUES)[None]
    members = jnp.where(attributes[None] >= 0, hit, True).all(-1) & mask[:, None]  # [G, K]
    weight = members.astype(jnp.float32)
    by_slice = [x @ weight for x in (impressions, clicks, orders, spend)]
    totals = [x.sum(-1) for x in (impressions, clicks, orders, spend)]
    half = impressions.shape[0] // 2

    ctr, ctr_change = _contrast(by_slice[1], by_slice[0], totals[1], totals[0])
    cvr, cvr_change = _contrast(by_slice[2], by_slice[1], totals[2], totals[1])
    cpc, cpc_change = _contrast(by_slice[3], by_slice[1], totals[3], totals[1])
    all_days = jnp.broadcast_to(totals[0][:, None], by_slice[0].shape)
    change, variance = _change(by_slice[0], all_days)
    share = change / jnp.sqrt(variance)
    baseline_clicks, rest_clicks = by_slice[1][:half].sum(0), totals[1][:half].sum() - by_slice[1][:half].sum(0)
    testable = (jnp.minimum(baseline_clicks, rest_clicks) >= params.min_events) & members.any(0)

    siblings = episode.sibling_impressions.astype(jnp.float32).sum(0)
    pairs = ((totals[0], siblings), (totals[1], totals[0]), (totals[2], totals[1]), (totals[3], totals[1]))
    changes, variances = zip(*[_change(a, b) for a, b in pairs], strict=True)
    stock = episode.in_stock
    stock_sd = jnp.maximum(stock[:half].std(ddof=1), 0.005)
    stock_z = (stock[half:].mean() - stock[:half].mean()) / (stock_sd * jnp.sqrt(2.0 / half))
    z = [c / jnp.sqrt(v) for c, v in zip(changes, variances, strict=True)]

    def strongest(z_slices: Array, where: Array) -> Array:
        return jnp.where(where & testable, jnp.abs(z_slices), 0.0).max()

    local = strongest(jnp.where(ctr < 0, ctr, 0.0), jnp.ones(SLICES, bool))
    features = [*z, stock_z, local, strongest(share, _PLACEMENTS), strongest(share, _AUDIENCES)]
    stock_change = _safe_log_ratio(100 * stock[half:].mean(), 100 * stock[:half].mean())
    return Statistics(
        campaign=jnp.stack(features),
        campaign_change=jnp.stack([*changes, stock_change]),
        ctr=ctr,
        cvr=cvr,
        cpc=cpc,
        share=share,
        change=jnp.stack([change, ctr_change, cvr_change, cpc_change], -1),
        testable=testable,
    )


# --- verdict ----------------------------------------------------------------------------------------------------


def _best(score: Float[Array, " K"], where: Bool[Array, " K"]) -> Array:
    return jnp.argmax(jnp.where(where, score, -jnp.inf))


def cause_margins(stats: Statistics, params: OracleParams) -> Float[Array, " causes"]:
    """Margin of each cause's signature on this data (positive: the data look like that cause); NO_SIGNAL is last."""
    margins = [jnp.float32(0)] * len(CAUSES)
    for code in _CAMPAIGN_CODES:
        margins[code] = _margin(stats.campaign, CAMPAIGN_SIGNATURES[CAUSES[code].name], params.flat_fraction, params)
    top = _best(-stats.ctr, stats.testable)
    local = jnp.stack([stats.ctr[top], stats.cvr[top], stats.cpc[top], stats.share[top]])
    for code in _SEGMENT_CODES:
        margin = _margin(local, SEGMENT_SIGNATURES[CAUSES[code].name], params.flat_fraction_local, params)
        margins[code] = jnp.where(jnp.asarray(_DRIVER_OK)[code, top], margin, jnp.minimum(margin, -params.detect))
    # CVR carries promotions and is the noisiest; only its fall is a signature.
    volume, ctr, cvr, cpc, stock, slice_z, placement, audience = stats.campaign
    loudest = jnp.stack([jnp.abs(volume), jnp.abs(ctr), -cvr, jnp.abs(cpc), -stock, slice_z, placement, audience])
    margins[_NO_SIGNAL] = params.quiet - loudest.max()
    return jnp.stack(margins)


def verify_one(episode: EpisodeBatch, params: OracleParams) -> Verdict:
    """Verdict on one episode (no leading axis). The label is read from the hidden fields; the evidence is visible."""
    stats = statistics(episode, params)
    cause = episode.cause
    margins = cause_margins(stats, params)
    own = margins[cause]
    rivals = jnp.where(jnp.arange(len(CAUSES)) == cause, -jnp.inf, margins)
    rival_cause = -rivals.max()

    segment = jnp.isin(cause, jnp.array(_SEGMENT_CODES))
    label = (
        (
            (jnp.asarray(SLICE_ATTRIBUTES)[:, :, None] == episode.slice_attributes[None, None, :])
            & (jnp.asarray(SLICE_VALUES)[:, :, None] == episode.slice_values[None, None, :])
        )
        .any(-1)
        .all(-1)
    )
    label &= (jnp.asarray(SLICE_ATTRIBUTES) >= 0).sum(-1) == (episode.slice_attributes >= 0).sum()
    k = jnp.argmax(label)
    gain = jnp.where(stats.testable & (stats.ctr < 0), 0.5 * stats.ctr**2, 0.0)
    rival = jnp.where(label, 0.0, gain).max()
    rival_slice = jnp.where(segment, gain[k] - rival - params.slice_gap, jnp.inf)
    rival_slice = jnp.where(segment & ~stats.testable[k], -jnp.inf, rival_slice)

    local_z = jnp.stack([stats.share[k], stats.ctr[k], stats.cvr[k], stats.cpc[k], stats.campaign[4]])
    evidence = jnp.where(segment, local_z, stats.campaign[:5])
    local_change = jnp.append(stats.change[k], stats.campaign_change[4])
    # Mix causes must show in the slice the label names.
    mix = jnp.array([c.level == "mix" for c in CAUSES])[cause]
    named = jnp.where(label, stats.share, 0.0).sum()
    same_kind = jnp.where(jnp.asarray(_PLACEMENTS) == jnp.asarray(_PLACEMENTS)[k], stats.share, -jnp.inf)
    same_kind = jnp.where(jnp.asarray(_SINGLE) & (_PLACEMENTS | _AUDIENCES), same_kind, -jnp.inf)
    mix_ok = ~mix | ((named >= params.detect) & (named >= same_kind.max() - 1e-6))
    finite = jnp.isfinite(stats.campaign).all() & jnp.isfinite(stats.ctr).all()
    confounder = jnp.where(segment, jnp.abs(stats.ctr[k]) - jnp.sqrt(2.0 * rival), own)
    accept = finite & (own > 0) & (rival_cause > 0) & (rival_slice > 0) & mix_ok
    return Verdict(
        accept=accept,
        detectability=own,
        confounder=confounder,
        rival_cause=rival_cause,
        rival_slice=jnp.where(jnp.isfinite(rival_slice), rival_slice, jnp.where(segment, -1e6, 0.0)),
        evidence_z=evidence,
        evidence_change=jnp.where(segment, local_change, stats.campaign_change),
    )


@jax.jit
def verify(batch: EpisodeBatch, params: OracleParams) -> Verdict:
    """Verdicts on a batch: vmapped `verify_one`."""
    return jax.vmap(verify_one, in_axes=(0, None))(batch, params)
