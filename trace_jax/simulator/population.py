"""Campaign universe: vertical, bidding strategy, size, active segments and their baseline weights and rates."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.simulator import draws
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import (
    ATTRIBUTE_NAMES,
    ATTRIBUTE_SIZES,
    ATTRIBUTES,
    DRIVER_ATTRIBUTES,
    STRATEGIES,
    VERTICALS,
)

# Base CTR, CVR and CPC by vertical (retail media: CTR 0.3-3 %, CVR 7-14 %, CPC about 1).
_VERTICAL_RATES = np.array(
    [
        [0.011, 0.080, 1.25],  # ELECTRONICS
        [0.015, 0.075, 0.85],  # FASHION
        [0.012, 0.100, 1.10],  # HOME
        [0.016, 0.115, 1.00],  # BEAUTY
        [0.014, 0.135, 0.70],  # GROCERY
        [0.013, 0.090, 0.95],  # SPORTS
    ],
    np.float32,
)
# Popularity of each attribute value, and its multipliers on (CTR, CVR, CPC).
_POPULARITY = {
    "ad_product": (0.60, 0.25, 0.15),
    "targeting_type": (0.50, 0.25, 0.25),
    "match_type": (0.40, 0.30, 0.30),
    "placement": (0.34, 0.36, 0.30),
    "price_band": (0.35, 0.40, 0.25),
    "audience": (0.45, 0.30, 0.25),
    "device": (0.48, 0.37, 0.15),
    "geo": (0.36, 0.24, 0.22, 0.18),
}
_RATE_MULTIPLIERS = {
    "placement": ((2.0, 1.15, 1.20), (0.9, 0.95, 0.95), (0.6, 0.90, 0.85)),
    "audience": ((0.8, 0.70, 1.05), (1.2, 1.20, 1.00), (1.3, 1.50, 0.90)),
    "device": ((1.05, 0.75, 0.80), (1.0, 1.30, 1.15), (0.9, 1.00, 1.00)),
    "geo": ((1.0, 1.05, 1.15), (1.05, 1.0, 1.0), (0.95, 1.05, 0.95), (0.95, 0.9, 0.85)),
}
# Strategies tilt the baseline weights: (attribute, value, multiplier).
_STRATEGY_TILT = {
    "SEARCH_HEAVY": (("placement", "TOP_OF_SEARCH", 1.8),),
    "ACQUISITION": (("audience", "PROSPECTING", 1.8),),
    "LOYALTY": (("audience", "LOYAL", 1.8),),
}

_A = len(ATTRIBUTE_NAMES)
_DRIVER_CODES = np.array([ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES])
_DRIVER_SIZES = tuple(len(ATTRIBUTES[a]) for a in DRIVER_ATTRIBUTES)
# Every combination of driver values: [combinations, drivers].
_COMBINATIONS = np.stack(np.meshgrid(*[np.arange(n) for n in _DRIVER_SIZES], indexing="ij"), -1).reshape(
    -1, len(_DRIVER_SIZES)
)


def _padded(table: dict[str, tuple], default) -> np.ndarray:
    """A table of per-value numbers as a dense array over (attribute, value)."""
    width = max(ATTRIBUTE_SIZES)
    rows = []
    for name, size in zip(ATTRIBUTE_NAMES, ATTRIBUTE_SIZES, strict=True):
        values = list(table.get(name, (default,) * size))
        rows.append(values + [default] * (width - size))
    return np.array(rows, np.float32)


_LOG_POPULARITY = np.log(np.maximum(_padded(_POPULARITY, 1e-9), 1e-9))
_LOG_RATES = np.log(_padded(_RATE_MULTIPLIERS, (1.0, 1.0, 1.0)))


def _strategy_tilt() -> np.ndarray:
    """Log tilt [strategies, attributes, values]."""
    tilt = np.zeros((len(STRATEGIES), _A, max(ATTRIBUTE_SIZES)), np.float32)
    for name, entries in _STRATEGY_TILT.items():
        for attribute, value, factor in entries:
            tilt[STRATEGIES.index(name), ATTRIBUTE_NAMES.index(attribute), ATTRIBUTES[attribute].index(value)] = np.log(
                factor
            )
    return tilt


_LOG_STRATEGY = _strategy_tilt()


@chex.dataclass(frozen=True)
class Campaign:
    """One campaign before anything happens. Axes: G segments, A attributes, 3 metrics (CTR, CVR, CPC)."""

    vertical: Int[Array, ""]
    strategy: Int[Array, ""]
    segment_values: Int[Array, "G A"]
    segment_mask: Bool[Array, " G"]
    volume: Float[Array, ""]  # mu: expected impressions a day
    weights: Float[Array, " G"]  # w: baseline share of impressions, sums to one
    rates: Float[Array, "G 3"]  # base * Q
    concentration: Float[Array, ""]  # alpha
    order_value: Float[Array, ""]
    budget: Float[Array, ""]  # account currency a day


def draw_campaign(tape: draws.Tape, segments: int, params: SimulatorParams) -> Campaign:
    """Draw a campaign with up to `segments` active segments (the driver attributes of two segments always differ)."""
    vertical = tape.integer(0, len(VERTICALS) - 1)
    strategy = tape.integer(0, len(STRATEGIES) - 1)

    # Active driver combinations: a weighted draw without replacement (Gumbel top-k).
    popularity = jnp.asarray(_LOG_POPULARITY) + jnp.asarray(_LOG_STRATEGY)[strategy]
    combinations = jnp.asarray(_COMBINATIONS)
    score = popularity[_DRIVER_CODES[None, :], combinations].sum(-1)
    _, chosen = jax.lax.top_k(0.7 * score + tape.gumbel(score.shape), segments)
    drivers = combinations[chosen]

    others = jnp.argmax(popularity + tape.gumbel((segments, *popularity.shape)), axis=-1)
    values = others.at[:, _DRIVER_CODES].set(drivers).astype(jnp.int32)
    mask = jnp.arange(segments) < tape.integer(*params.segments_active)

    log_weight = popularity[_DRIVER_CODES[None, :], drivers].sum(-1)
    log_weight = 0.6 * log_weight + params.segment_weight_log_sd * tape.normal((segments,))
    weights = jax.nn.softmax(jnp.where(mask, log_weight, -jnp.inf))

    quality = params.quality_log_sd * tape.normal((3,))
    noise = params.segment_rate_log_sd * tape.normal((segments, 3))
    effects = jnp.asarray(_LOG_RATES)[jnp.arange(_A)[None, :], values].sum(1)
    rates = jnp.asarray(_VERTICAL_RATES)[vertical] * jnp.exp(effects + quality + noise)
    rates = jnp.minimum(rates, jnp.array([0.5, 0.9, 1e3]))

    log_volume = params.impressions_log_mean + params.impressions_log_sd * tape.normal()
    volume = jnp.exp(jnp.clip(log_volume, *params.impressions_log_clip))
    spend = volume * (weights * rates[:, 0] * rates[:, 2]).sum()
    return Campaign(
        vertical=vertical,
        strategy=strategy,
        segment_values=values,
        segment_mask=mask,
        volume=volume,
        weights=weights,
        rates=rates,
        concentration=tape.between(params.concentration),
        order_value=tape.between(params.order_value),
        budget=spend * tape.between(params.budget_headroom),
    )
