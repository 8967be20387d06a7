"""Draws the hidden change: cause, slice, strength, onset. It acts through the channels of its cause only
(arXiv 2609.10315); the magnitudes are `SimulatorParams.effects`, rows of one table."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.simulator import draws, slices
from trace_jax.simulator.causes import CAUSES, CHANNELS, FLAT, PRIMARY
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.population import Campaign
from trace_jax.simulator.vocabulary import PROFILES

_LOCAL = np.array([c.level == "segment" for c in CAUSES])  # rates change inside the slice only
_COMPENSATED = np.array([c.compensated for c in CAUSES])
_GRADUAL = np.array([c.gradual for c in CAUSES])
_CAPS = np.array(["budget" in c.effects for c in CAUSES])

# A slice in which something happens is big enough to be seen and cannot be mistaken for another one, whatever is done
# there: proposals that no verifier could accept are not rendered at all.
MIN_SHARE = 0.03  # of the campaign's clicks
MIN_PRIMARY_Z, MIN_COMPANION_Z = 6.0, 4.0  # expected from counting noise alone, see `_expected_z`
ONSET_SHARE = 0.7  # of the full effect that a window shows on average
MAX_SHARE = 0.75
MAX_OVERLAP = 0.8  # Jaccard index, by clicks, with any other candidate slice


@chex.dataclass(frozen=True)
class Intervention:
    """The hidden change of one episode. Axes: T days, G segments, H channels."""

    cause: Int[Array, ""]
    slice_attributes: Int[Array, " 2"]  # attribute codes of the driver slice, -1 unused
    slice_values: Int[Array, " 2"]
    inside: Bool[Array, " G"]  # segments of the driver slice; false everywhere when the cause has none
    strength: Float[Array, ""]
    profile: Int[Array, ""]
    onset: Int[Array, ""]  # first affected day
    effects: Float[Array, " H"]  # log effect at full onset
    shape: Float[Array, " T"]  # share of the full effect by day
    volume: Float[Array, " T"]  # log V
    mix: Float[Array, "T G"]  # log R
    rates: Float[Array, " 3"]  # log F of CTR, CVR, CPC at full onset
    where: Bool[Array, " G"]  # segments whose rates change
    in_stock: Float[Array, " T"]  # log multiplier of the in-stock share
    budget: Float[Array, " T"]  # log multiplier of the daily budget


def onset_shape(
    tape: draws.Tape, days: int, gradual: Bool[Array, ""], params: SimulatorParams
) -> tuple[Float[Array, " T"], Int[Array, ""], Int[Array, ""]]:
    """Share of the full effect by day, profile code and first affected day; zero over the whole baseline."""
    half = days // 2
    ramp, delayed = PROFILES.index("ramp"), PROFILES.index("delayed")
    weights = jnp.stack(params.onset)
    weights = weights / jnp.maximum(weights.max(), 1e-30)
    profile = jnp.argmax(jnp.log(jnp.maximum(weights, 1e-9)) + tape.gumbel((len(PROFILES),)))
    profile = jnp.where(gradual & (profile == PROFILES.index("immediate")), ramp, profile).astype(jnp.int32)
    delay = jnp.round(tape.between(params.delay) * (days - half)).astype(jnp.int32)
    onset = half + jnp.where(profile == delayed, delay, 0)
    length = jnp.where(profile == ramp, tape.between(params.ramp) * (days - half), 1.0)
    return jnp.clip((jnp.arange(days) - onset + 1) / length, 0.0, 1.0), profile, onset


def _thresholds() -> np.ndarray:
    """z that a cause needs in CTR and CVR of its slice by its signature [causes, 2], 0 if none."""
    needs = [
        {f: MIN_PRIMARY_Z if w in PRIMARY else MIN_COMPANION_Z for f, w in c.signature.items() if w != FLAT}
        for c in CAUSES
    ]
    return np.array(
        [
            [n.get(m, 0.0) if c.level == "segment" else 0.0 for m in ("ctr", "cvr")]
            for c, n in zip(CAUSES, needs, strict=True)
        ]
    )


_NEEDED_Z = _thresholds()


def _draw_slice(
    tape: draws.Tape,
    campaign: Campaign,
    cause: Array,
    dimensions: Array,
    effects: Float[Array, " H"],
    half: int,
) -> tuple[Array, Array, Array]:
    """Attributes, values and segments of the driver slice, among the slices that could be found at all."""
    inside = slices.members(campaign.segment_values, campaign.segment_mask)
    clicks = campaign.weights * campaign.rates[0]
    total = clicks.sum()
    clicks = clicks / total
    member = inside.astype(jnp.float32)
    share, nearest = slices.overlaps(clicks, member)
    # Expected z of the change of a rate inside the slice if counting noise were all the noise there is.
    events = campaign.volume * total * half * jnp.stack([share, (clicks * campaign.rates[1]) @ member])
    by_metric = jnp.abs(jnp.stack([effects[CHANNELS.index("ctr")], effects[CHANNELS.index("cvr")]]))
    z = ONSET_SHARE * by_metric[:, None] * jnp.sqrt(events / 2)
    strong = (z >= jnp.asarray(_NEEDED_Z, jnp.float32)[cause][:, None]).all(0)
    possible = jnp.asarray(slices.MAY_SIT)[cause] & (jnp.asarray(slices.DIMENSIONS) == dimensions) & inside.any(0)
    findable = strong & (share > MIN_SHARE) & (share < MAX_SHARE) & (nearest < MAX_OVERLAP)
    score = 0.7 * jnp.log(share + 1e-9) + tape.gumbel((slices.SLICES,))
    # Findable ones first, then any active one, then (no active segment has an allowed value) any possible one.
    score = score + jnp.where(findable, 0.0, -1e3) + jnp.where(possible, 0.0, -1e6)
    k = jnp.argmax(score)
    has_slice = dimensions > 0
    attributes = jnp.where(has_slice, jnp.asarray(slices.SLICE_ATTRIBUTES)[k], -1)
    values = jnp.where(has_slice, jnp.asarray(slices.SLICE_VALUES)[k], -1)
    return attributes, values, inside[:, k] & has_slice


def draw_intervention(
    tape: draws.Tape,
    campaign: Campaign,
    cause: Int[Array, ""],
    dimensions: Int[Array, ""],
    days: int,
    params: SimulatorParams,
) -> Intervention:
    """Draw slice, strength and onset for `cause`; `dimensions` (0, 1 or 2) is the number of attributes in the slice."""
    shape, profile, onset = onset_shape(tape, days, jnp.asarray(_GRADUAL)[cause], params)
    strength = tape.between(params.strength)
    low, high = params.effects[cause, :, 0], params.effects[cause, :, 1]
    effects = low + strength * (high - low)
    attributes, values, inside = _draw_slice(tape, campaign, cause, dimensions, effects, days // 2)
    effect = dict(zip(CHANNELS, effects, strict=True))

    mix = shape[:, None] * jnp.where(inside, effect["mix"], 0.0)[None, :]
    share_left = (campaign.weights[None, :] * jnp.exp(mix)).sum(-1)
    volume = shape * effect["volume"] + jnp.where(jnp.asarray(_COMPENSATED)[cause], jnp.log(share_left), 0.0)
    # The channel gives the capped budget relative to expected spend; campaign.budget stands above it by its headroom.
    capped = shape * (effect["budget"] + jnp.log(campaign.spend / campaign.budget))
    return Intervention(
        cause=cause,
        slice_attributes=attributes.astype(jnp.int32),
        slice_values=values.astype(jnp.int32),
        inside=inside,
        strength=strength,
        profile=profile,
        onset=onset,
        effects=effects,
        shape=shape,
        volume=volume,
        mix=mix,
        rates=jnp.stack([effect["ctr"], effect["cvr"], effect["cpc"]]),
        where=jnp.where(jnp.asarray(_LOCAL)[cause], inside, True),
        in_stock=shape * effect["in_stock"],
        budget=jnp.where(jnp.asarray(_CAPS)[cause], capped, 0.0),
    )
