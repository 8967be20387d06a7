"""The oracle verifier: knows the label, reads only what the agent sees (arXiv 2609.10315, oracle verifier).

Every cause of the registry has a signature: which z-scores of `simulator.statistics` must be strong, which must agree,
which must stay flat. An episode is accepted when its label's signature is there, stands out from everything the label
does not explain, every other cause's signature fails, and the label's slice explains the data better than any other.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from trace_jax.simulator import slices
from trace_jax.simulator.causes import CAUSES, COMPANION, FLAT, PRIMARY, Cause
from trace_jax.simulator.episode import NOT_COMPARED, EpisodeBatch, Verdict
from trace_jax.simulator.statistics import FEATURES, SLICE_FEATURES, Statistics, statistics, used_features


@chex.dataclass(frozen=True)
class OracleParams:
    """Thresholds, in standard errors unless said otherwise."""

    detect: float = 4.0  # a required signature must be at least this strong
    companion: float = 2.5  # a required companion signature must be at least this strong
    flat: float = 3.0  # a rate that must not move stays below this ...
    flat_fraction: float = 0.45  # ... or below this fraction of the primary signature (campaign level)
    flat_fraction_local: float = 0.25  # the same inside a slice, where nothing leaks between metrics
    quiet: float = 3.5  # NO_SIGNAL: every signature below this
    slice_gap: float = 2.5  # log-likelihood units between the label's slice and the best rival slice
    min_events: float = 20.0  # clicks a slice needs in the baseline to be testable (case 3)


_SEGMENT = np.array([c.level == "segment" for c in CAUSES])
_MIX = np.array([c.level == "mix" for c in CAUSES])
_NO_SIGNAL = len(CAUSES) - 1
_CODES = np.arange(len(CAUSES))


def _slice_primary() -> np.ndarray:
    """Signed one-hot [causes, SLICE_FEATURES]: in which statistic of its slice a cause shows first."""
    table = np.zeros((len(CAUSES), len(SLICE_FEATURES)), np.float32)
    for c, cause in enumerate(CAUSES):
        for feature, want in cause.signature.items():
            if cause.level == "segment" and want in PRIMARY:
                table[c, SLICE_FEATURES.index(feature)] = PRIMARY[want]
    table[_MIX, SLICE_FEATURES.index("share")] = 1.0  # mix causes raise the share of the slice they name
    return table


_SLICE_PRIMARY = _slice_primary()


def _unexplained() -> np.ndarray:
    """Campaign features that a cause's signature says are flat: what may compete with it."""
    return np.array([[c.signature.get(f) == FLAT for f in FEATURES] for c in CAUSES])


def _primary_features() -> np.ndarray:
    return np.array([[c.signature.get(f) in PRIMARY for f in FEATURES] for c in CAUSES])


_UNEXPLAINED, _PRIMARY = _unexplained(), _primary_features()


def _margin(z: dict[str, Array], cause: Cause, fraction: float, params: OracleParams) -> Float[Array, ""]:
    """Smallest margin over the entries of a signature; positive when all of them hold."""
    wants = cause.signature
    strongest = jnp.stack([jnp.abs(z[f]) for f, want in wants.items() if want in PRIMARY]).min()
    flat_limit = jnp.maximum(params.flat, fraction * strongest)
    margins = []
    for feature, want in wants.items():
        if want == FLAT:
            margins.append(flat_limit - jnp.abs(z[feature]))
        elif want in PRIMARY:
            margins.append(PRIMARY[want] * z[feature] - params.detect)
        else:
            margins.append(COMPANION[want] * z[feature] - params.companion)
    return jnp.stack(margins).min()


def cause_margins(stats: Statistics, params: OracleParams) -> Float[Array, " causes"]:
    """Margin of each cause's signature on this data (positive: the data look like that cause); NO_SIGNAL is last."""
    campaign = dict(zip(FEATURES, stats.campaign, strict=True))
    margins = []
    for c, cause in enumerate(CAUSES[:-1]):
        if cause.level != "segment":
            margins.append(_margin(campaign, cause, params.flat_fraction, params))
            continue
        # The cause is looked for where its primary statistic is strongest, and must be allowed to sit there.
        score = jnp.asarray(_SLICE_PRIMARY)[c] @ stats.slices
        top = jnp.argmax(jnp.where(stats.testable, score, -jnp.inf))
        local = dict(zip(SLICE_FEATURES, stats.slices[:, top], strict=True))
        margin = _margin(local, cause, params.flat_fraction_local, params)
        margins.append(jnp.where(jnp.asarray(slices.MAY_SIT)[c, top], margin, jnp.minimum(margin, -params.detect)))
    loudest = jnp.where(jnp.asarray(used_features()), jnp.abs(stats.campaign), 0.0).max()
    return jnp.stack([*margins, params.quiet - loudest])


def verify_one(episode: EpisodeBatch, params: OracleParams) -> Verdict:
    """Verdict on one episode (no leading axis). The label is read from the hidden fields; the evidence is visible."""
    stats = statistics(episode, params.min_events)
    cause = episode.cause
    margins = cause_margins(stats, params)
    own = margins[cause]
    eliminated = jnp.where(jnp.asarray(_CODES) == cause, NOT_COMPARED, -margins)

    segment, mix = jnp.asarray(_SEGMENT)[cause], jnp.asarray(_MIX)[cause]
    label = slices.named(episode.slice_attributes, episode.slice_values)
    k = jnp.argmax(label)
    # z of every slice in the statistic in which the cause shows first, in its direction.
    score = jnp.where(stats.testable, jnp.asarray(_SLICE_PRIMARY)[cause] @ stats.slices, 0.0)
    gain = 0.5 * jnp.maximum(score, 0.0) ** 2
    behind = jnp.where(stats.testable & ~label, gain[k] - gain - params.slice_gap, NOT_COMPARED)
    named = label.any() & stats.testable[k]
    slice_margins = jnp.where(segment, jnp.where(named, behind, -NOT_COMPARED), NOT_COMPARED)
    rival_slice = jnp.where(segment, slice_margins.min(), 0.0)

    # What the label does not explain. Segment causes: slices that share no segment with the label's; campaign and mix
    # causes: features that should have stayed flat, and for mix causes the other values of the same attribute.
    inside = slices.members(episode.segment_values, episode.segment_mask).astype(jnp.float32)
    disjoint = (inside.T @ inside[:, k] == 0) & stats.testable
    elsewhere = jnp.where(disjoint, score, 0.0).max()
    flat = jnp.where(jnp.asarray(_UNEXPLAINED)[cause], jnp.abs(stats.campaign), 0.0).max()
    primary = jnp.where(jnp.asarray(_PRIMARY)[cause], jnp.abs(stats.campaign), jnp.inf).min()
    of_mix = score[k] - jnp.maximum(elsewhere, flat)
    confounder = jnp.where(segment, score[k] - elsewhere, jnp.where(mix, of_mix, primary - flat))
    confounder = jnp.where(cause == _NO_SIGNAL, own, confounder)
    mix_named = ~mix | (named & (score[k] >= params.detect))

    local_z = jnp.append(jnp.roll(stats.slices[:, k], 1), stats.campaign[4])  # share, CTR, CVR, CPC, in-stock
    local_change = jnp.append(jnp.roll(stats.change[:, k], 1), stats.campaign_change[4])
    finite = jnp.isfinite(stats.campaign).all() & jnp.isfinite(stats.slices).all()
    accept = finite & (own > 0) & (eliminated.min() > 0) & (confounder > 0) & mix_named & (~segment | (rival_slice > 0))
    return Verdict(
        accept=accept,
        detectability=own,
        confounder=confounder,
        rival_cause=eliminated.min(),
        rival_slice=jnp.maximum(rival_slice, -NOT_COMPARED),
        cause_margins=eliminated,
        slice_margins=slice_margins,
        evidence_z=jnp.where(segment, local_z, stats.campaign[:5]),
        evidence_change=jnp.where(segment, local_change, stats.campaign_change),
    )


@jax.jit
def verify(batch: EpisodeBatch, params: OracleParams) -> Verdict:
    """Verdicts on a batch: vmapped `verify_one`."""
    return jax.vmap(verify_one, in_axes=(0, None))(batch, params)
