"""Every magnitude of the campaign world, as one pytree of floats so that a single compiled program serves all settings.

Ranges `(low, high)` are drawn uniformly unless a field says otherwise. Sources: public advertising benchmarks and
measurements on public exports, see docs/simulator.md.
"""

from __future__ import annotations

import chex


@chex.dataclass(frozen=True)
class SimulatorParams:
    """Population, noise and confounder magnitudes. Log effects are natural logarithms of multipliers."""

    # population
    impressions_log_mean: float = 11.5  # ln of the median daily impressions of a campaign (about 99,000)
    impressions_log_sd: float = 0.8  # heavy-tailed campaign sizes
    impressions_log_clip: tuple[float, float] = (9.3, 14.0)
    segments_active: tuple[int, int] = (28, 48)  # number of active segments
    quality_log_sd: float = 0.15  # Q of equation (1)
    segment_weight_log_sd: float = 0.5  # heterogeneity of baseline segment weights w
    segment_rate_log_sd: float = 0.12  # heterogeneity of base rates between segments
    concentration: tuple[float, float] = (400.0, 1600.0)  # alpha of the Dirichlet-multinomial
    order_value: tuple[float, float] = (18.0, 90.0)  # account currency
    budget_headroom: tuple[float, float] = (1.15, 1.6)  # daily budget over expected daily spend

    # noise that a binomial model lacks: multiplicative coefficients of variation
    ctr_cell_cv: float = 0.13  # per segment and day
    cvr_cell_cv: float = 0.18
    cpc_cell_cv: float = 0.12
    ctr_day_cv: float = 0.02  # per day, whole campaign
    cvr_day_cv: float = 0.03
    cpc_day_cv: float = 0.02
    volume_day_cv: float = 0.06  # per day, own to each campaign
    season_day_cv: float = 0.06  # per day, shared by the advertiser's campaigns

    # confounders, present in every episode whether or not something is wrong
    weekday_amplitude: tuple[float, float] = (0.05, 0.20)
    trend: tuple[float, float] = (-0.15, 0.15)  # log change of volume over the whole window
    promotion_probability: float = 0.5
    promotion_days: tuple[int, int] = (2, 4)
    promotion_volume: tuple[float, float] = (0.15, 0.45)  # log effect
    promotion_cvr: tuple[float, float] = (0.04, 0.12)  # log effect
    drift: tuple[float, float] = (0.02, 0.06)  # log effect of the benign drift in an unrelated slice, either sign
    stock_normal: tuple[float, float] = (0.90, 0.99)
    stock_day_sd: float = 0.02

    # timing of an intervention, in fractions of the intervention window
    delay: tuple[float, float] = (0.15, 0.45)
    ramp: tuple[float, float] = (0.35, 0.75)
