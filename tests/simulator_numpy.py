"""The campaign world in plain NumPy with exact counts: the reference that the JAX simulator is measured against.

Equation (1) of arXiv 2609.10315 taken literally: a Poisson total a day, a Dirichlet-multinomial split over segments,
binomial thinning to clicks and to orders, all from `numpy.random.Generator`. It shares the magnitudes
(`SimulatorParams`) and the registry of causes with the simulator and no code: vectorised over episodes, float64.
Axes: E episodes, T days, G segments, A attributes, S siblings, K candidate slices.
"""

from __future__ import annotations

import itertools

import numpy as np

from trace_jax.simulator import interventions
from trace_jax.simulator.causes import CAUSES, CHANNELS, FLAT, PRIMARY
from trace_jax.simulator.confounders import CONFOUNDER_NAMES
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES, PROFILES, STRATEGIES, VERTICALS

NAMES = list(ATTRIBUTES)
DRIVERS = [NAMES.index(a) for a in DRIVER_ATTRIBUTES]
CELLS = np.array(list(itertools.product(*[range(len(ATTRIBUTES[a])) for a in DRIVER_ATTRIBUTES])))


def _slices():
    """Attribute-value pairs of each candidate slice: all single values, then all pairs over two attributes."""
    single = [(NAMES.index(a), v) for a in DRIVER_ATTRIBUTES for v in range(len(ATTRIBUTES[a]))]
    return [(s,) for s in single] + [p for p in itertools.combinations(single, 2) if p[0][0] != p[1][0]]


SLICES = _slices()
SLICE_CODES = np.array([[(*s, (-1, -1))[i] for i in range(2)] for s in SLICES])  # [K, 2, (attribute, value)]


def _allowed(cause, pairs):
    return any(
        NAMES[a] in cause.drivers and (not cause.values or ATTRIBUTES[NAMES[a]][v] in cause.values) for a, v in pairs
    )


ALLOWED = np.array([[_allowed(c, s) for s in SLICES] for c in CAUSES])


class _Draw:
    """Generator with the few distributions of the model."""

    def __init__(self, rng):
        self.rng = rng

    def between(self, limits, *shape):
        return self.rng.uniform(limits[0], limits[1], shape)

    def integer(self, low, high, *shape):
        return self.rng.integers(int(low), int(high) + 1, shape)

    def happens(self, probability, *shape):
        return self.rng.random(shape) < probability

    def sign(self, *shape):
        return self.rng.choice([-1.0, 1.0], shape)

    def normal(self, *shape):
        return self.rng.standard_normal(shape)

    def log_noise(self, cv, *shape):
        """Logarithm of a log-normal factor of mean one and coefficient of variation `cv`."""
        sigma2 = np.log1p(np.square(cv))
        return self.rng.normal(-sigma2 / 2, np.sqrt(sigma2), shape)

    def choice(self, log_weights):
        """One index along the last axis, in proportion to exp(log_weights)."""
        return np.argmax(log_weights + self.rng.gumbel(size=log_weights.shape), -1)


def _only_what_is_sold(values):
    """Display ads only on product pages and by product; automatic targeting for sponsored products only; match types
    for keywords only. Codes as in the vocabulary."""
    product, target, match, placement = (
        NAMES.index(n) for n in ("ad_product", "targeting_type", "match_type", "placement")
    )
    values[..., product][(values[..., product] == 2) & (values[..., placement] < 2)] = 1
    values[..., target][values[..., product] == 2] = 1
    values[..., target][(values[..., product] == 1) & (values[..., target] == 2)] = 0
    values[..., match][values[..., target] > 0] = 2


def _population(draw, count, segments, params):
    """Campaigns before anything happens, as a dictionary of arrays."""
    vertical = draw.integer(0, len(VERTICALS) - 1, count)
    strategy = draw.integer(0, len(STRATEGIES) - 1, count)
    log_popularity = params.popularity[None] + params.strategy_tilt[strategy]  # [E, A, W]
    by_cell = sum(log_popularity[:, a, CELLS[:, d]] for d, a in enumerate(DRIVERS))  # [E, cells]
    keys = 0.7 * by_cell + draw.rng.gumbel(size=by_cell.shape)
    chosen = np.argsort(-keys, axis=1)[:, :segments]
    values = draw.choice(np.broadcast_to(log_popularity[:, None], (count, segments, *log_popularity.shape[1:])))
    values[:, :, DRIVERS] = CELLS[chosen]
    _only_what_is_sold(values)
    mask = np.arange(segments) < draw.integer(*params.segments_active, count)[:, None]

    log_weight = 0.6 * np.take_along_axis(by_cell, chosen, 1)
    log_weight += params.segment_weight_log_sd * draw.normal(count, segments)
    weights = np.where(mask, np.exp(log_weight), 0.0)
    weights /= weights.sum(1, keepdims=True)

    log_rates = np.log(params.vertical_rates)[vertical][:, None, :] + params.quality_log_sd * draw.normal(count, 1, 3)
    log_rates = log_rates + params.segment_rate_log_sd * draw.normal(count, segments, 3)
    for a in range(len(NAMES)):
        log_rates += params.rate_multipliers[a, values[:, :, a]]
    rates = np.minimum(np.exp(log_rates), [0.5, 0.9, 1e3])
    size = draw.rng.normal(params.impressions_log_mean, params.impressions_log_sd, count)
    return {
        "vertical": vertical,
        "strategy": strategy,
        "values": values,
        "mask": mask,
        "weights": weights,
        "rates": rates,  # [E, G, 3]
        "volume": np.exp(np.clip(size, *params.impressions_log_clip)),
        "alpha": draw.between(params.concentration, count),
        "order_value": params.vertical_order_value[vertical] * draw.between(params.order_value, count),
        "headroom": draw.between(params.budget_headroom, count),
    }


def _basket(draw, campaign, days, params):
    """Sales per order [E, T, G]."""
    band = np.array(params.price_band_order_value)[campaign["values"][:, :, NAMES.index("price_band")]]
    noise = np.exp(draw.log_noise(params.order_value_day_cv, len(band), days, 1))
    return campaign["order_value"][:, None, None] * band[:, None, :] * noise


def _event(draw, count, days, length, probability):
    """Days [E, T] of an event that may take place anywhere."""
    first, day = draw.integer(0, days - 1, count, 1), np.arange(days)
    return draw.happens(probability, count, 1) & (day >= first) & (day < first + draw.integer(*length, count, 1))


def _step(draw, count, days):
    return np.arange(days) >= days // 2 + draw.integer(-(days // 8), days // 8, count, 1)


def _confounding(draw, count, start_day, campaign, days, params):
    """What moves without a root cause: a dictionary of log effects, and the signed sizes by name."""
    day, sizes, rows = np.arange(days), {}, np.arange(count)
    rates = np.zeros((count, days, 3))

    own, usual = draw.normal(count, 7), np.array(params.weekday_shape)
    sizes["weekday"] = draw.between(params.weekday_amplitude, count)
    pattern = params.weekday_own * own / np.abs(own).max(1, keepdims=True)
    pattern = pattern + (1 - params.weekday_own) * usual / np.abs(usual).max()
    pattern *= (sizes["weekday"] / np.abs(pattern).max(1))[:, None]
    volume = np.take_along_axis(pattern, (start_day[:, None] + day) % 7, 1)
    volume += params.season_day_cv * draw.normal(count, days)
    sizes["trend"] = draw.between(params.trend, count)
    volume += sizes["trend"][:, None] * (day / days - 0.5)
    for name, sign in (("promotion", 1.0), ("holiday", -1.0)):
        length, chance = getattr(params, f"{name}_days"), getattr(params, f"{name}_probability")
        event = sign * _event(draw, count, days, length, chance)
        size = draw.between(getattr(params, f"{name}_volume"), count)
        volume += event * size[:, None]
        rates[:, :, 1] += event * draw.between(getattr(params, f"{name}_cvr"), count, 1)
        sizes[name] = sign * size * event.any(1)

    # one rate of the segments of one attribute value drifts over the second half
    attribute = np.array(DRIVERS)[draw.integer(0, len(DRIVERS) - 1, count)]
    with np.errstate(divide="ignore"):
        segment = draw.choice(np.log(campaign["weights"]))
    of_attribute = campaign["values"][rows, :, attribute]
    drifting = of_attribute == of_attribute[rows, segment][:, None]
    size = draw.happens(params.drift_probability, count) * draw.sign(count) * draw.between(params.drift, count)
    sizes["drift"] = size
    drift = np.zeros((count, days, 3))
    half = days // 2
    drift[rows, :, draw.integer(0, 2, count)] = size[:, None] * np.clip((day - half + 1) / half, 0, 1)

    up = draw.happens(0.6, count)
    size = np.where(up, draw.between(params.budget_change, count), -0.3 * draw.between(params.budget_change, count))
    sizes["budget_change"] = size * draw.happens(params.budget_change_probability, count)
    budget = sizes["budget_change"][:, None] * _step(draw, count, days)

    present, step = draw.happens(params.market_move_probability, count), _step(draw, count, days)
    sizes["market_move"] = present * draw.sign(count) * draw.between(params.market_move_volume, count)
    volume += sizes["market_move"][:, None] * step
    moved = present * draw.sign(count) * draw.between(params.market_move_rate, count)
    rates[rows, :, draw.integer(0, 2, count)] += moved[:, None] * step

    late = draw.happens(params.late_conversions_probability, count)
    first = draw.between(params.late_conversions_first, count)
    lag = draw.integer(*params.late_conversions_days, count, 1)
    known = np.minimum(first[:, None] + (1 - first[:, None]) * (days - 1 - day) / lag, 1.0)
    sizes["late_conversions"] = late * np.log(first)

    gone = draw.happens(params.missing_days_probability, count)
    length, begin = draw.integer(*params.missing_days, count), draw.integer(1, days - 3, count, 1)
    missing = gone[:, None] & (day >= begin) & (day < begin + length[:, None]) & (day < days - 1)
    sizes["missing_days"] = -1.0 * gone * length

    share = draw.happens(params.zero_volume_probability, count) * draw.between(params.zero_volume_share, count)
    sizes["zero_volume"] = share
    return {
        "volume": volume,
        "rates": rates,
        "drift": drift,
        "drifting": drifting,
        "budget": budget,
        "known": np.where(late[:, None], known, 1.0),
        "present": ~missing,
        "empty": draw.rng.random(campaign["weights"].shape) < share[:, None],
        "sizes": np.stack([sizes[name] for name in CONFOUNDER_NAMES], 1),
    }


def _needed(cause, metric):
    """z that a slice must promise in a metric for this cause (see `interventions`)."""
    want = cause.signature.get(metric, FLAT)
    if cause.level != "segment" or want == FLAT:
        return 0.0
    return interventions.MIN_PRIMARY_Z if want in PRIMARY else interventions.MIN_COMPANION_Z


NEEDED = np.array([[_needed(c, m) for m in ("ctr", "cvr")] for c in CAUSES])


def _driver_slice(draw, campaign, cause, dimensions, effects, days):
    """Slice [E] (position in SLICES, -1: none) and its segments [E, G]."""
    values, mask = campaign["values"], campaign["mask"]
    hit = np.stack([np.logical_and.reduce([values[:, :, a] == v for a, v in s]) for s in SLICES], 2) & mask[:, :, None]
    clicks = campaign["weights"] * campaign["rates"][:, :, 0]
    total = clicks.sum(1, keepdims=True)
    part, member = clicks / total, hit.astype(float)
    share, orders = np.moveaxis(np.stack([part, part * campaign["rates"][:, :, 1]], 1) @ member, 1, 0)
    events = np.stack([share, orders], 2) * (campaign["volume"][:, None] * total * (days // 2))[:, :, None]
    move = np.abs(effects[:, [CHANNELS.index("ctr"), CHANNELS.index("cvr")]])
    z = interventions.ONSET_SHARE * move[:, None, :] * np.sqrt(events / 2)
    both = (member * part[:, :, None]).transpose(0, 2, 1) @ member
    jaccard = both / np.maximum(share[:, :, None] + share[:, None, :] - both, 1e-9)
    jaccard[:, np.arange(len(SLICES)), np.arange(len(SLICES))] = 0.0
    findable = (z >= NEEDED[cause][:, None, :]).all(2) & (jaccard.max(2) < interventions.MAX_OVERLAP)
    findable &= (share > interventions.MIN_SHARE) & (share < interventions.MAX_SHARE)
    size = np.array([len(s) for s in SLICES])
    possible = ALLOWED[cause] & (size == dimensions[:, None]) & hit.any(1)
    log_weight = 0.7 * np.log(share + 1e-9) - 1e3 * ~findable - 1e6 * ~possible
    k = np.where(dimensions > 0, draw.choice(log_weight), -1)
    inside = hit[np.arange(len(k)), :, k] & (k >= 0)[:, None]
    return k, inside


def _onset(draw, cause, days, params):
    """Share of the full effect [E, T], profile and first day."""
    count, half = len(cause), days // 2
    with np.errstate(divide="ignore"):
        profile = draw.choice(np.broadcast_to(np.log(params.onset), (count, len(PROFILES))))
    gradual = np.array([c.gradual for c in CAUSES])[cause]
    profile = np.where(gradual & (profile == PROFILES.index("immediate")), PROFILES.index("ramp"), profile)
    wait = np.rint(draw.between(params.delay, count) * (days - half)).astype(int)
    onset = half + wait * (profile == PROFILES.index("delayed"))
    length = np.where(profile == PROFILES.index("ramp"), draw.between(params.ramp, count) * (days - half), 1.0)
    shape = np.clip((np.arange(days) - onset[:, None] + 1) / length[:, None], 0, 1)
    return shape, profile, onset


def _stock(draw, params, *shape):
    level = draw.between(params.stock_normal, *shape[:-1], 1)
    return level + params.stock_day_sd * draw.normal(*shape), level


def _stock_cvr(stock, level, params):
    return params.stock_elasticity * np.log(np.maximum(stock, 1e-3) / level)


def _served(draw, spend, budget, params):
    """Share of a day's demand that is met before the budget ends."""
    over = np.exp(draw.log_noise(params.overspend_cv, *spend.shape))
    rare = draw.happens(params.overspend_probability, *spend.shape)
    over = np.where(rare, draw.between(params.overspend, *spend.shape), over)
    return np.minimum(1.0, budget * over / np.maximum(spend, 1e-9))


def _day_noise(draw, params, *shape):
    cvs = (params.ctr_day_cv, params.cvr_day_cv, params.cpc_day_cv)
    return np.stack([draw.log_noise(cv, *shape) for cv in cvs], -1)


def _counts(draw, demand, split, ctr, cvr, literal):
    """Impressions, clicks and orders [E, T, G] for `demand` impressions a day [E, T]."""
    ctr, cvr = np.clip(ctr, 0, 1), np.clip(cvr, 0, 1)
    if literal:
        impressions = draw.rng.multinomial(draw.rng.poisson(demand), split)
        clicks = draw.rng.binomial(impressions, ctr)
        return impressions, clicks, draw.rng.binomial(clicks, cvr)
    mean = demand[:, :, None] * split
    clicked = mean * ctr
    orders = draw.rng.poisson(clicked * cvr)
    clicks = orders + draw.rng.poisson(clicked * (1 - cvr))
    return clicks + draw.rng.poisson(mean - clicked), clicks, orders


def _extras(draw, clicks, impressions):
    return draw.rng.poisson(1.3 * clicks), draw.rng.poisson(0.004 * impressions)


def _siblings(draw, campaign, benign, siblings, days, params):
    count = len(campaign["volume"])
    share = campaign["weights"] * campaign["rates"][:, :, 0]
    ctr = share.sum(1)
    focal = np.stack([ctr] + [(share * campaign["rates"][:, :, m]).sum(1) / ctr for m in (1, 2)], 1)
    own = focal[:, None, :] * np.exp(0.25 * draw.normal(count, siblings, 3))
    size = draw.rng.normal(params.impressions_log_mean, params.impressions_log_sd, (count, siblings))
    volume = np.exp(np.clip(size, *params.impressions_log_clip))
    stock, level = _stock(draw, params, count, siblings, days)
    log_rates = _day_noise(draw, params, count, siblings, days) + benign["rates"][:, None]
    log_rates[..., 1] += _stock_cvr(stock, level, params)
    rates = own[:, :, None, :] * np.exp(log_rates)
    budget = volume * own[..., 0] * own[..., 2] * draw.between(params.budget_headroom, count, siblings)
    noise = draw.log_noise(params.volume_day_cv, count, siblings, days)
    mean = volume[:, :, None] * np.exp(benign["volume"][:, None] + noise)
    mean = mean * _served(draw, mean * rates[..., 0] * rates[..., 2], budget[:, :, None], params)
    present = benign["present"][:, None]
    impressions = draw.rng.poisson(mean * present)
    clicks = draw.rng.binomial(impressions, np.clip(rates[..., 0], 0, 1))
    orders = draw.rng.binomial(clicks, np.clip(rates[..., 1] * benign["known"][:, None], 0, 1))
    views, searches = _extras(draw, clicks, impressions)
    return {
        "sibling_id": draw.rng.choice(2**30 - 256, (count, siblings), replace=False) + 2**30 + 1,
        "sibling_impressions": impressions,
        "sibling_clicks": clicks,
        "sibling_orders": orders,
        "sibling_spend": clicks * rates[..., 2],
        "sibling_sales": orders
        * params.vertical_order_value[campaign["vertical"]][:, None, None]
        * draw.between(params.order_value, count, siblings, 1)
        * np.exp(draw.log_noise(params.order_value_day_cv, count, siblings, days)),
        "sibling_budget": budget[:, :, None] * present,
        "sibling_in_stock": np.clip(stock, 0, 1) * present,
        "sibling_page_views": views,
        "sibling_brand_searches": searches,
    }


def simulate(
    rng: np.random.Generator,
    cause: int | np.ndarray,
    dimensions: int | np.ndarray,
    count: int,
    params: SimulatorParams | None = None,
    *,
    days: int = 28,
    segments: int = 48,
    siblings: int = 2,
    literal: bool = True,
) -> EpisodeBatch:
    """`count` episodes with the fields of `EpisodeBatch` (NumPy arrays).

    Args:
        cause: code into CAUSES, one for all or one each; dimensions likewise (attributes of the driver slice).
        literal: multinomial splits and binomial thinning of the segments' counts; else independent Poisson counts,
            which have the same distribution and cost NumPy less.
    """
    draw, params = _Draw(rng), params or SimulatorParams()
    cause, dimensions = (np.broadcast_to(np.asarray(x), (count,)) for x in (cause, dimensions))
    start_day = draw.integer(0, 999, count)
    campaign = _population(draw, count, segments, params)
    benign = _confounding(draw, count, start_day, campaign, days, params)
    weights = campaign["weights"] * np.exp(-8.0 * benign["empty"])
    campaign["weights"] = weights / weights.sum(1, keepdims=True)
    per_impression = (campaign["weights"] * campaign["rates"][:, :, 0] * campaign["rates"][:, :, 2]).sum(1)
    spend = campaign["volume"] * per_impression

    shape, profile, onset = _onset(draw, cause, days, params)
    strength = draw.between(params.strength, count)
    weakest, strongest = params.effects[cause, :, 0], params.effects[cause, :, 1]
    effects = weakest + strength[:, None] * (strongest - weakest)
    effect = {name: effects[:, h] for h, name in enumerate(CHANNELS)}
    k, inside = _driver_slice(draw, campaign, cause, dimensions, effects, days)

    grow = np.exp(shape[:, :, None] * (effect["mix"][:, None] * inside)[:, None, :])
    pi = campaign["weights"][:, None, :] * grow
    left = pi.sum(2)
    compensated = np.array([c.compensated for c in CAUSES])[cause]
    log_volume = benign["volume"] + shape * effect["volume"][:, None] + np.where(compensated[:, None], np.log(left), 0)
    log_volume += draw.log_noise(params.volume_day_cv, count, days)
    stock, level = _stock(draw, params, count, days)
    stock = stock * np.exp(shape * effect["in_stock"][:, None])
    caps = np.array(["budget" in c.effects for c in CAUSES])[cause]
    to_cap = np.where(caps, effect["budget"] - np.log(campaign["headroom"]), 0.0)
    budget = (spend * campaign["headroom"])[:, None] * np.exp(benign["budget"] + shape * to_cap[:, None])

    pieces = rng.standard_gamma(np.maximum(campaign["alpha"][:, None, None] * pi / left[:, :, None], 1e-3))
    pieces *= campaign["mask"][:, None, :]
    split = pieces / pieces.sum(2, keepdims=True)
    by_day = benign["rates"] + _day_noise(draw, params, count, days)
    by_day[:, :, 1] += _stock_cvr(stock, level, params)
    local = np.array([c.level == "segment" for c in CAUSES])[cause]
    where = np.where(local[:, None], inside, True)
    drifting = benign["drifting"] & ~inside
    rates = []
    for m, (name, cv) in enumerate(
        (("ctr", params.ctr_cell_cv), ("cvr", params.cvr_cell_cv), ("cpc", params.cpc_cell_cv))
    ):
        log_rate = draw.log_noise(cv, count, days, segments)
        log_rate += by_day[:, :, None, m]
        log_rate += benign["drift"][:, :, None, m] * drifting[:, None, :]
        log_rate += (shape * effect[name][:, None])[:, :, None] * where[:, None, :]
        rates.append(campaign["rates"][:, None, :, m] * np.exp(log_rate))
    ctr, cvr, cpc = rates

    demand = campaign["volume"][:, None] * np.exp(log_volume)
    demand *= _served(draw, demand * (split * ctr * cpc).sum(2), budget, params)
    cvr = cvr * benign["known"][:, :, None]
    impressions, clicks, orders = _counts(draw, demand * benign["present"], split, ctr, cvr, literal)
    views, searches = _extras(draw, clicks.sum(2), impressions.sum(2))
    ids = rng.choice(2**30, 2 * count, replace=False) + 1
    code = np.where((k >= 0)[:, None, None], SLICE_CODES[k], -1)
    return EpisodeBatch(
        index=np.arange(count),
        campaign_id=ids[:count],
        advertiser_id=ids[count:],
        start_day=start_day,
        vertical=campaign["vertical"],
        strategy=campaign["strategy"],
        segment_values=campaign["values"] * campaign["mask"][:, :, None],
        segment_mask=campaign["mask"],
        impressions=impressions,
        clicks=clicks,
        orders=orders,
        spend=clicks * cpc,
        sales=orders * _basket(draw, campaign, days, params),
        day_mask=benign["present"],
        budget=budget * benign["present"],
        in_stock=np.clip(stock, 0, 1) * benign["present"],
        page_views=views,
        brand_searches=searches,
        cause=cause,
        slice_attributes=code[:, :, 0],
        slice_values=code[:, :, 1],
        strength=strength,
        profile=profile,
        onset=onset,
        effects=effects,
        confounders=benign["sizes"],
        **_siblings(draw, campaign, benign, siblings, days, params),
    )
