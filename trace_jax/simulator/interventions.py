"""Causes as rows of one coefficient table, acting through V (volume), R (mix) and F (rates) only (arXiv 2609.10315)."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.simulator import draws
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.population import Campaign
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, CAUSES, DRIVER_ATTRIBUTES, PROFILES

# Log effect at full onset, (weakest, strongest); a strength in [0, 1] interpolates.
#                         volume         CTR            CVR            CPC           mix tilt       in-stock
EFFECTS: dict[str, tuple[tuple[float, float], ...]] = {
    "BID_INCREASE":         ((0, 0),      (-.10, -.20),  (0, 0),        (.25, .60),   (0, 0),        (0, 0)),
    "BUDGET_CAP":           ((-.40, -1.), (0, 0),        (0, 0),        (0, 0),       (0, 0),        (0, 0)),
    "PAGE_DEGRADATION":     ((0, 0),      (0, 0),        (-.30, -.80),  (0, 0),       (0, 0),        (0, 0)),
    "OUT_OF_STOCK":         ((0, 0),      (0, 0),        (-.25, -.70),  (0, 0),       (0, 0),        (-.30, -1.)),
    "PLACEMENT_SHIFT":      ((0, 0),      (0, 0),        (0, 0),        (0, 0),       (.45, 1.2),    (0, 0)),
    "TARGETING_BROADENING": ((.30, .70),  (-.15, -.35),  (-.15, -.35),  (0, 0),       (.40, 1.0),    (0, 0)),
    "TARGETING_NARROWING":  ((-.30, -.7), (.15, .35),    (.15, .35),    (0, 0),       (.40, 1.0),    (0, 0)),
    "CREATIVE_FATIGUE":     ((0, 0),      (-.25, -.70),  (0, 0),        (0, 0),       (0, 0),        (0, 0)),
    "COMPETITIVE_PRESSURE": ((0, 0),      (-.22, -.55),  (0, 0),        (.25, .60),   (0, 0),        (0, 0)),
    "AD_QUALITY_DROP":      ((0, 0),      (-.22, -.55),  (0, 0),        (.20, .50),   (-.40, -1.),   (0, 0)),
    "AUDIENCE_SATURATION":  ((0, 0),      (-.25, -.65),  (-.25, -.55),  (0, 0),       (0, 0),        (0, 0)),
    "NO_SIGNAL":            ((0, 0),      (0, 0),        (0, 0),        (0, 0),       (0, 0),        (0, 0)),
}  # fmt: skip
_EFFECTS = np.array([EFFECTS[c.name] for c in CAUSES], np.float32)  # [causes, 6, 2]
_LOCAL = np.array([c.level == "segment" for c in CAUSES])  # rates change inside the slice only
_HAS_SLICE = np.array([bool(c.drivers) for c in CAUSES])
# A lost auction in one slice is not won elsewhere: total volume falls by what the slice loses.
_COMPENSATED = np.array([c.name == "AD_QUALITY_DROP" for c in CAUSES])
# Fatigue and saturation build up; the other causes may start at once.
_GRADUAL = np.array([c.name in ("CREATIVE_FATIGUE", "AUDIENCE_SATURATION") for c in CAUSES])
_BUDGET_CAP = np.array([c.name == "BUDGET_CAP" for c in CAUSES])

_DRIVER_CODES = np.array([ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES])
_ALLOWED = np.array([[a in c.drivers for a in DRIVER_ATTRIBUTES] for c in CAUSES])
_AUDIENCE = ATTRIBUTE_NAMES.index("audience")
_PROSPECTING = ATTRIBUTES["audience"].index("PROSPECTING")
_BROADENING = [c.name for c in CAUSES].index("TARGETING_BROADENING")
_NARROWING = [c.name for c in CAUSES].index("TARGETING_NARROWING")


@chex.dataclass(frozen=True)
class Intervention:
    """The hidden change of one episode. Axes: T days, G segments."""

    cause: Int[Array, ""]
    slice_attributes: Int[Array, " 2"]
    slice_values: Int[Array, " 2"]
    inside: Bool[Array, " G"]  # segments of the driver slice; false everywhere when the cause has none
    strength: Float[Array, ""]
    profile: Int[Array, ""]
    onset: Int[Array, ""]  # first affected day
    volume: Float[Array, " T"]  # log V
    mix: Float[Array, "T G"]  # log R
    rates: Float[Array, "T G 3"]  # log F of CTR, CVR, CPC
    in_stock: Float[Array, " T"]  # log multiplier of the in-stock share
    budget: Float[Array, " T"]  # log multiplier of the daily budget


def slice_members(
    values: Int[Array, "G A"], attributes: Int[Array, " 2"], wanted: Int[Array, " 2"]
) -> Bool[Array, " G"]:
    """Segments that carry every used (attribute, value) pair; none when no attribute is used."""
    hit = values[:, jnp.maximum(attributes, 0)] == wanted[None, :]
    used = attributes >= 0
    return jnp.where(used[None, :], hit, True).all(-1) & used.any()


def onset_shape(
    tape: draws.Tape, days: int, gradual: Bool[Array, ""], params: SimulatorParams
) -> tuple[Float[Array, " T"], Int[Array, ""], Int[Array, ""]]:
    """Share of the full effect by day, profile code and first affected day; zero over the whole baseline."""
    half = days // 2
    profile = tape.integer(0, len(PROFILES) - 1)
    profile = jnp.where(gradual & (profile == 0), PROFILES.index("ramp"), profile)
    delay = jnp.round(tape.between(params.delay) * (days - half)).astype(jnp.int32)
    onset = half + jnp.where(profile == PROFILES.index("delayed"), delay, 0)
    day = jnp.arange(days)
    length = jnp.where(profile == PROFILES.index("ramp"), tape.between(params.ramp) * (days - half), 1.0)
    return jnp.clip((day - onset + 1) / length, 0.0, 1.0), profile, onset


def draw_intervention(
    tape: draws.Tape,
    campaign: Campaign,
    cause: Int[Array, ""],
    dimensions: Int[Array, ""],
    days: int,
    params: SimulatorParams,
) -> Intervention:
    """Draw slice, strength and onset for `cause`; `dimensions` (0, 1 or 2) is the number of attributes in the slice."""
    # The slice is read off a random active segment, so it is never empty; big segments are likelier.
    log_weights = jnp.log(campaign.weights + 1e-20)
    segment = jnp.argmax(0.7 * log_weights + tape.gumbel(log_weights.shape))
    allowed = jnp.asarray(_ALLOWED)[cause]
    gumbel = tape.gumbel((2, len(DRIVER_ATTRIBUTES)))
    first = jnp.argmax(jnp.where(allowed, gumbel[0], -jnp.inf))
    second = jnp.argmax(jnp.where(jnp.arange(len(DRIVER_ATTRIBUTES)) != first, gumbel[1], -jnp.inf))
    attributes = jnp.asarray(_DRIVER_CODES)[jnp.stack([first, second])]
    attributes = jnp.where(jnp.arange(2) < dimensions, attributes, -1)
    values = campaign.segment_values[segment][jnp.maximum(attributes, 0)]
    # Broadening floods the prospecting audience; narrowing concentrates on one of the others.
    other = tape.integer(1, len(ATTRIBUTES["audience"]) - 1)
    values = values.at[0].set(
        jnp.where(cause == _BROADENING, _PROSPECTING, jnp.where(cause == _NARROWING, other, values[0]))
    )
    values = jnp.where(attributes >= 0, values, -1)
    inside = slice_members(campaign.segment_values, attributes, values) & campaign.segment_mask

    shape, profile, onset = onset_shape(tape, days, jnp.asarray(_GRADUAL)[cause], params)
    strength = tape.uniform()
    low, high = jnp.moveaxis(jnp.asarray(_EFFECTS)[cause], -1, 0)
    volume, ctr, cvr, cpc, tilt, stock = low + strength * (high - low)

    where_rates = jnp.where(jnp.asarray(_LOCAL)[cause], inside, True)
    rates = shape[:, None, None] * where_rates[None, :, None] * jnp.stack([ctr, cvr, cpc])
    mix = shape[:, None] * jnp.where(inside, tilt, 0.0)[None, :]
    share_left = (campaign.weights[None, :] * jnp.exp(mix)).sum(-1)
    log_volume = shape * volume + jnp.where(jnp.asarray(_COMPENSATED)[cause], jnp.log(share_left), 0.0)
    # A capped campaign's budget falls to what it can still spend.
    expected = campaign.volume * (campaign.weights * campaign.rates[:, 0] * campaign.rates[:, 2]).sum()
    capped = jnp.log(expected / campaign.budget) + shape * volume
    budget = jnp.where(jnp.asarray(_BUDGET_CAP)[cause] & (shape > 0), capped, 0.0)
    return Intervention(
        cause=cause,
        slice_attributes=attributes.astype(jnp.int32),
        slice_values=values.astype(jnp.int32),
        inside=inside,
        strength=strength,
        profile=profile,
        onset=onset,
        volume=log_volume,
        mix=mix,
        rates=rates,
        in_stock=shape * stock,
        budget=budget,
    )
