"""Every magnitude of the campaign world, as one pytree of floats so that a single compiled program serves all settings.

Ranges `(low, high)` are drawn uniformly unless a field says otherwise. Log effects are natural logarithms of
multipliers. Where the numbers come from: docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import field

import chex
import numpy as np
from jaxtyping import Array, Float

from trace_jax.simulator.causes import CAUSES, CHANNELS
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTE_SIZES, ATTRIBUTES, STRATEGIES, VERTICALS

# CTR, CVR, CPC by vertical before placement and audience (retail media: CTR 0.3-3 %, CVR 7-14 %, CPC about 1).
_VERTICAL_RATES = {
    "ELECTRONICS": (0.0085, 0.080, 1.25),
    "FASHION": (0.0115, 0.075, 0.85),
    "HOME": (0.0090, 0.100, 1.10),
    "BEAUTY": (0.0120, 0.115, 1.00),
    "GROCERY": (0.0105, 0.135, 0.70),
    "SPORTS": (0.0100, 0.090, 0.95),
}
_VERTICAL_ORDER_VALUE = {
    "ELECTRONICS": 90.0,
    "FASHION": 55.0,
    "HOME": 65.0,
    "BEAUTY": 32.0,
    "GROCERY": 28.0,
    "SPORTS": 60.0,
}
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
# Multipliers of (CTR, CVR, CPC) by attribute value. Top of search has the highest CTR, then rest of search, then
# product pages; mobile converts worse and costs less; display is seen often and clicked seldom.
_RATE_MULTIPLIERS = {
    "ad_product": ((1.15, 1.05, 1.00), (0.95, 0.90, 1.10), (0.55, 0.75, 0.75)),
    "match_type": ((1.15, 1.10, 1.08), (1.00, 1.00, 1.00), (0.88, 0.92, 0.93)),
    "placement": ((2.0, 1.15, 1.20), (0.9, 0.95, 0.95), (0.6, 0.90, 0.85)),
    "price_band": ((1.05, 1.10, 0.92), (1.00, 1.00, 1.00), (0.95, 0.88, 1.10)),
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
_WIDTH = max(ATTRIBUTE_SIZES)


def _by_value(table: dict[str, tuple], default) -> np.ndarray:
    """Logarithms of a table of per-value numbers as a dense array over (attribute, value); padding is `default`."""
    rows = []
    for name, size in zip(ATTRIBUTE_NAMES, ATTRIBUTE_SIZES, strict=True):
        values = list(table.get(name, (default,) * size))
        rows.append(values + [default] * (_WIDTH - size))
    return np.log(np.array(rows, np.float32))


def _vertical_rates() -> np.ndarray:
    return np.array([_VERTICAL_RATES[v] for v in VERTICALS], np.float32)


def _vertical_order_value() -> np.ndarray:
    return np.array([_VERTICAL_ORDER_VALUE[v] for v in VERTICALS], np.float32)


def _strategy_tilt() -> np.ndarray:
    tilt = np.zeros((len(STRATEGIES), len(ATTRIBUTE_NAMES), _WIDTH), np.float32)
    for name, entries in _STRATEGY_TILT.items():
        for attribute, value, factor in entries:
            at = STRATEGIES.index(name), ATTRIBUTE_NAMES.index(attribute), ATTRIBUTES[attribute].index(value)
            tilt[at] = np.log(factor)
    return tilt


def _effects() -> np.ndarray:
    return np.array([[c.effects.get(channel, (0.0, 0.0)) for channel in CHANNELS] for c in CAUSES], np.float32)


def _scaled(value):
    """A field that `difficulty.params_of` multiplies by `value` ("noise" or "confounder_strength")."""
    return {"scaled_by": value}


@chex.dataclass(frozen=True)
class SimulatorParams:
    """Population, causes, noise and confounders. Axes of tables: V verticals, A attributes, W values of an attribute
    (padded), S strategies, C causes, H channels (`causes.CHANNELS`); the last 3 are CTR, CVR, CPC."""

    # population
    impressions_log_mean: float = 12.0  # ln of the median daily impressions of a campaign (about 163,000)
    impressions_log_sd: float = 0.8  # heavy-tailed campaign sizes
    impressions_log_clip: tuple[float, float] = (9.8, 14.5)
    segments_active: tuple[int, int] = (28, 48)  # number of active segments
    quality_log_sd: float = 0.15  # Q of equation (1)
    segment_weight_log_sd: float = 0.5  # heterogeneity of baseline segment weights w
    segment_rate_log_sd: float = 0.12  # heterogeneity of base rates between segments
    concentration: tuple[float, float] = (400.0, 1600.0)  # alpha of the Dirichlet-multinomial
    vertical_order_value: Float[Array, " V"] = field(default_factory=_vertical_order_value)  # account currency
    order_value: tuple[float, float] = (0.6, 1.6)  # of a campaign, times that of its vertical
    price_band_order_value: tuple[float, float, float] = (0.7, 1.0, 1.6)  # LOW, MID, HIGH, times that of the campaign
    order_value_day_cv: float = 0.08
    budget_headroom: tuple[float, float] = (1.5, 2.6)  # daily budget over expected daily spend
    vertical_rates: Float[Array, "V 3"] = field(default_factory=_vertical_rates)  # base CTR, CVR, CPC
    popularity: Float[Array, "A W"] = field(default_factory=lambda: _by_value(_POPULARITY, 1e-9))  # log
    rate_multipliers: Float[Array, "A W 3"] = field(default_factory=lambda: _by_value(_RATE_MULTIPLIERS, (1.0,) * 3))
    strategy_tilt: Float[Array, "S A W"] = field(default_factory=_strategy_tilt)  # log, added to the popularity

    # causes
    effects: Float[Array, "C H 2"] = field(default_factory=_effects)  # log effect, weakest and strongest
    strength: tuple[float, float] = (0.0, 1.0)  # drawn position between weakest and strongest
    onset: tuple[float, float, float] = (1.0, 1.0, 1.0)  # weights of immediate, delayed, ramp
    delay: tuple[float, float] = (0.15, 0.45)  # of a delayed onset, in fractions of the intervention window
    ramp: tuple[float, float] = (0.35, 0.75)  # length of a ramp, in fractions of the intervention window
    stock_elasticity: float = 0.75  # log change of CVR per log change of the in-stock share
    overspend_cv: float = 0.04  # a day that uses up its budget ends near it ...
    overspend_probability: float = 0.06  # ... but for some days,
    overspend: tuple[float, float] = (1.2, 2.0)  # when platforms spend up to twice the average daily budget

    # noise that a binomial model lacks: multiplicative coefficients of variation
    ctr_cell_cv: float = field(default=0.14, metadata=_scaled("noise"))  # per segment and day
    cvr_cell_cv: float = field(default=0.20, metadata=_scaled("noise"))
    cpc_cell_cv: float = field(default=0.12, metadata=_scaled("noise"))
    ctr_day_cv: float = field(default=0.02, metadata=_scaled("noise"))  # per day, whole campaign
    cvr_day_cv: float = field(default=0.03, metadata=_scaled("noise"))
    cpc_day_cv: float = field(default=0.02, metadata=_scaled("noise"))
    volume_day_cv: float = field(default=0.06, metadata=_scaled("noise"))  # per day, own to each campaign
    season_day_cv: float = field(default=0.06, metadata=_scaled("noise"))  # per day, shared by the advertiser
    stock_normal: tuple[float, float] = (0.90, 0.99)
    stock_day_sd: float = field(default=0.015, metadata=_scaled("noise"))

    # confounders: probability of being present, and size (see `confounders.CONFOUNDERS`)
    weekday_amplitude: tuple[float, float] = field(default=(0.05, 0.20), metadata=_scaled("confounder_strength"))
    # Monday to Sunday, log, of retail traffic at large; each advertiser mixes in a cycle of its own.
    weekday_shape: tuple[float, ...] = (0.05, -0.01, 0.05, -0.20, -0.09, 0.10, 0.08)
    weekday_own: float = 0.5  # share of the advertiser's own cycle
    trend: tuple[float, float] = field(default=(-0.15, 0.15), metadata=_scaled("confounder_strength"))  # whole window
    promotion_probability: float = field(default=0.5, metadata=_scaled("confounders"))
    promotion_days: tuple[int, int] = (2, 4)
    promotion_volume: tuple[float, float] = field(default=(0.15, 0.45), metadata=_scaled("confounder_strength"))
    promotion_cvr: tuple[float, float] = field(default=(0.04, 0.12), metadata=_scaled("confounder_strength"))
    holiday_probability: float = field(default=0.25, metadata=_scaled("confounders"))
    holiday_days: tuple[int, int] = (1, 3)
    holiday_volume: tuple[float, float] = field(default=(0.15, 0.40), metadata=_scaled("confounder_strength"))  # fall
    holiday_cvr: tuple[float, float] = field(default=(0.03, 0.10), metadata=_scaled("confounder_strength"))  # fall
    drift_probability: float = field(default=1.0, metadata=_scaled("confounders"))
    drift: tuple[float, float] = field(default=(0.02, 0.06), metadata=_scaled("confounder_strength"))  # either sign
    budget_change_probability: float = field(default=0.3, metadata=_scaled("confounders"))
    budget_change: tuple[float, float] = field(default=(0.10, 0.50), metadata=_scaled("confounder_strength"))
    market_move_probability: float = field(default=0.3, metadata=_scaled("confounders"))
    market_move_volume: tuple[float, float] = field(default=(0.05, 0.25), metadata=_scaled("confounder_strength"))
    market_move_rate: tuple[float, float] = field(default=(0.02, 0.10), metadata=_scaled("confounder_strength"))
    zero_volume_probability: float = field(default=0.4, metadata=_scaled("confounders"))
    zero_volume_share: tuple[float, float] = (0.02, 0.15)  # of the segments have hardly any impressions
    late_conversions_probability: float = field(default=0.0, metadata=_scaled("confounders"))
    late_conversions_days: tuple[int, int] = (3, 7)  # attribution lag
    late_conversions_first: tuple[float, float] = (0.4, 0.9)  # share of its final orders that the last day shows
    missing_days_probability: float = field(default=0.0, metadata=_scaled("confounders"))
    missing_days: tuple[int, int] = (1, 2)
