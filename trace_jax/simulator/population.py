"""Campaign universe: vertical, bidding strategy, size, active segments and their baseline weights and rates."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from trace_jax.simulator import draws
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, DRIVER_ATTRIBUTES, STRATEGIES, VERTICALS

_A = len(ATTRIBUTE_NAMES)
_DRIVER_CODES = np.array([ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES])
_DRIVER_SIZES = tuple(len(ATTRIBUTES[a]) for a in DRIVER_ATTRIBUTES)
# Every combination of driver values: [combinations, drivers].
_COMBINATIONS = np.stack(np.meshgrid(*[np.arange(n) for n in _DRIVER_SIZES], indexing="ij"), -1).reshape(
    -1, len(_DRIVER_SIZES)
)
_FREE_CODES = np.array([i for i in range(_A) if i not in _DRIVER_CODES])
_FREE_WIDTH = max(len(ATTRIBUTES[ATTRIBUTE_NAMES[i]]) for i in _FREE_CODES)
_ORDER = np.argsort(np.concatenate([_FREE_CODES, _DRIVER_CODES]))
_HIGHEST_RATES = np.array([0.5, 0.9, 1e3], np.float32)


@chex.dataclass(frozen=True)
class Campaign:
    """One campaign before anything happens. Axes: G segments, A attributes, 3 metrics (CTR, CVR, CPC)."""

    vertical: Int[Array, ""]
    strategy: Int[Array, ""]
    segment_values: Int[Array, "G A"]
    segment_mask: Bool[Array, " G"]
    volume: Float[Array, ""]  # mu: expected impressions a day
    weights: Float[Array, " G"]  # w: baseline share of impressions, sums to one
    rates: Float[Array, "3 G"]  # base * Q
    concentration: Float[Array, ""]  # alpha
    order_value: Float[Array, ""]
    spend: Float[Array, ""]  # expected, account currency a day
    budget: Float[Array, ""]  # account currency a day


def _plausible(values: Int[Array, "G A"]) -> Int[Array, "G A"]:
    """Combinations that no platform sells become the nearest one that is sold: display ads run on product pages and
    have no keywords, automatic targeting belongs to sponsored products, and without keywords there is no match type but
    the broadest."""
    code = {name: {v: i for i, v in enumerate(ATTRIBUTES[name])} for name in ATTRIBUTE_NAMES}
    column = {name: values[:, i] for i, name in enumerate(ATTRIBUTE_NAMES)}
    kinds, targets = code["ad_product"], code["targeting_type"]
    product, target, match = column["ad_product"], column["targeting_type"], column["match_type"]
    on_search = column["placement"] != code["placement"]["PRODUCT_PAGE"]
    product = jnp.where(on_search & (product == kinds["SPONSORED_DISPLAY"]), kinds["SPONSORED_BRANDS"], product)
    display, brands = product == kinds["SPONSORED_DISPLAY"], product == kinds["SPONSORED_BRANDS"]
    target = jnp.where(display, targets["PRODUCT"], target)
    target = jnp.where(brands & (target == targets["AUTO"]), targets["KEYWORD"], target)
    match = jnp.where(target == targets["KEYWORD"], match, code["match_type"]["BROAD"])
    changed = {"ad_product": product, "targeting_type": target, "match_type": match}
    return jnp.stack([changed.get(name, column[name]) for name in ATTRIBUTE_NAMES], -1)


def draw_campaign(tape: draws.Tape, segments: int, params: SimulatorParams) -> Campaign:
    """Draw a campaign with up to `segments` active segments (the driver attributes of two segments always differ)."""
    vertical = tape.integer(0, len(VERTICALS) - 1)
    strategy = tape.integer(0, len(STRATEGIES) - 1)

    # Active driver combinations: a weighted draw without replacement (Gumbel top-k).
    popularity = params.popularity + params.strategy_tilt[strategy]
    combinations = jnp.asarray(_COMBINATIONS)
    score = popularity[_DRIVER_CODES[None, :], combinations].sum(-1)
    _, chosen = jax.lax.top_k(0.7 * score + tape.gumbel(score.shape), segments)
    drivers = combinations[chosen]

    free = popularity[_FREE_CODES, :_FREE_WIDTH]  # the attributes in which nothing is ever localised
    others = jnp.argmax(free + tape.gumbel((segments, *free.shape)), axis=-1)
    values = jnp.concatenate([others, drivers], axis=-1)[:, _ORDER].astype(jnp.int32)
    mask = jnp.arange(segments) < tape.integer(*params.segments_active)
    values = jnp.where(mask[:, None], _plausible(values), 0)

    log_weight = popularity[_DRIVER_CODES[None, :], drivers].sum(-1)
    log_weight = 0.6 * log_weight + params.segment_weight_log_sd * tape.normal((segments,))
    weights = jax.nn.softmax(jnp.where(mask, log_weight, -jnp.inf))

    quality = params.quality_log_sd * tape.normal((3, 1))
    noise = params.segment_rate_log_sd * tape.normal((3, segments))
    effects = params.rate_multipliers[jnp.arange(_A)[None, :], values].sum(1).T
    rates = params.vertical_rates[vertical][:, None] * jnp.exp(effects + quality + noise)
    rates = jnp.minimum(rates, jnp.asarray(_HIGHEST_RATES)[:, None])

    log_volume = params.impressions_log_mean + params.impressions_log_sd * tape.normal()
    volume = jnp.exp(jnp.clip(log_volume, *params.impressions_log_clip))
    spend = volume * (weights * rates[0] * rates[2]).sum()
    return Campaign(
        vertical=vertical,
        strategy=strategy,
        segment_values=values,
        segment_mask=mask,
        volume=volume,
        weights=weights,
        rates=rates,
        concentration=tape.between(params.concentration),
        order_value=params.vertical_order_value[vertical] * tape.between(params.order_value),
        spend=spend,
        budget=spend * tape.between(params.budget_headroom),
    )


def reweighted(campaign: Campaign, log_weights: Float[Array, " G"]) -> Campaign:
    """The campaign with its segment weights multiplied by exp(`log_weights`) and normalised again."""
    weights = campaign.weights * jnp.exp(log_weights)
    weights = weights / weights.sum()
    spend = campaign.volume * (weights * campaign.rates[0] * campaign.rates[2]).sum()
    return campaign.replace(weights=weights, spend=spend, budget=campaign.budget * spend / campaign.spend)
