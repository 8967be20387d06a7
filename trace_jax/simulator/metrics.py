"""Renders one episode: confounders, then equation (1) of arXiv 2609.10315 for impressions, clicks, orders and money.

    N[t]       ~ Poisson(mu * eta[t] * V[t])
    pi[t]      = normalize(w * R[t])
    N[t, :]    ~ DirichletMultinomial(N[t], alpha * pi[t])
    theta[m]   = base[m, g] * Q[m] * F[m, g, t]

Two exact identities keep it parallel. A multinomial split of a Poisson total is a set of independent Poisson counts
with the split means, so with p ~ Dirichlet(alpha * pi) the cell counts are Poisson(mu eta V p_g). Thinning a Poisson
gives independent Poissons, so unclicked impressions, unordered clicks and orders are drawn separately and added up.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from trace_jax.simulator import draws
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.interventions import Intervention, draw_intervention, slice_members
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.population import Campaign, draw_campaign
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, DRIVER_ATTRIBUTES

WEEK = 7


@chex.dataclass(frozen=True)
class Season:
    """What the advertiser's campaigns share, whatever happens. Axis T days."""

    volume: Float[Array, " T"]  # log eta
    cvr: Float[Array, " T"]  # log effect of promotions on CVR


def draw_season(key: PRNGKeyArray, start_day: Int[Array, ""], days: int, params: SimulatorParams) -> Season:
    """Weekday cycle, trend, a possible promotion, and daily shocks."""
    keys = iter(jax.random.split(key, 9))
    day = jnp.arange(days)
    pattern = jax.random.normal(next(keys), (WEEK,), jnp.float32)
    pattern = pattern / jnp.maximum(jnp.abs(pattern).max(), 1e-6) * draws.between(next(keys), params.weekday_amplitude)
    weekday = pattern[(start_day + day) % WEEK]
    trend = draws.between(next(keys), params.trend) * (day / days - 0.5)
    has_promotion = jax.random.uniform(next(keys)) < params.promotion_probability
    first = jax.random.randint(next(keys), (), 0, days)
    length = draws.integer_between(next(keys), params.promotion_days)
    promotion = (has_promotion & (day >= first) & (day < first + length)).astype(jnp.float32)
    shock = params.season_day_cv * jax.random.normal(next(keys), (days,), jnp.float32)
    volume = weekday + trend + shock + promotion * draws.between(next(keys), params.promotion_volume)
    return Season(volume=volume, cvr=promotion * draws.between(next(keys), params.promotion_cvr))


def draw_drift(
    key: PRNGKeyArray, campaign: Campaign, change: Intervention, days: int, params: SimulatorParams
) -> Float[Array, "T G 3"]:
    """A weak benign drift of one rate in a slice that does not touch the driver attributes (log effect)."""
    keys = iter(jax.random.split(key, 5))
    codes = jnp.array([ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES])
    free = ~(codes[:, None] == change.slice_attributes[None, :]).any(-1)
    attribute = codes[jax.random.categorical(next(keys), jnp.where(free, 0.0, -jnp.inf))]
    segment = jax.random.categorical(next(keys), jnp.log(campaign.weights + 1e-20))
    value = campaign.segment_values[segment, attribute]
    inside = slice_members(
        campaign.segment_values, jnp.stack([attribute, jnp.array(-1)]), jnp.stack([value, jnp.array(-1)])
    )
    sign = jnp.where(jax.random.bernoulli(next(keys)), 1.0, -1.0)
    size = sign * draws.between(next(keys), params.drift)
    metric = jax.nn.one_hot(jax.random.randint(next(keys), (), 0, 3), 3)
    half = days // 2
    ramp = jnp.clip((jnp.arange(days) - half + 1) / half, 0.0, 1.0)
    return ramp[:, None, None] * inside[None, :, None] * size * metric


def _thin(
    key: PRNGKeyArray, mean: Float[Array, ...], ctr: Float[Array, ...], cvr: Float[Array, ...]
) -> tuple[Int[Array, ...], Int[Array, ...], Int[Array, ...]]:
    """Impressions, clicks and orders with Poisson impressions of the given mean; orders <= clicks <= impressions."""
    ctr, cvr = jnp.clip(ctr, 0.0, 1.0), jnp.clip(cvr, 0.0, 1.0)
    seen_key, click_key, order_key = jax.random.split(key, 3)
    unclicked = draws.poisson(seen_key, mean * (1.0 - ctr))
    unordered = draws.poisson(click_key, mean * ctr * (1.0 - cvr))
    orders = draws.poisson(order_key, mean * ctr * cvr)
    clicks = unordered + orders
    return unclicked + clicks, clicks, orders


def _stock(key: PRNGKeyArray, days: int, params: SimulatorParams) -> Float[Array, " T"]:
    """In-stock fraction of a catalogue where nothing is wrong."""
    level_key, day_key = jax.random.split(key)
    level = draws.between(level_key, params.stock_normal)
    return level + params.stock_day_sd * jax.random.normal(day_key, (days,), jnp.float32)


def _side_counts(key: PRNGKeyArray, clicks: Array, impressions: Array) -> tuple[Array, Array]:
    """Page views (with organic visits) and brand searches, both counts a day."""
    view_key, search_key = jax.random.split(key)
    views = draws.poisson(view_key, 1.3 * clicks.astype(jnp.float32))
    searches = draws.poisson(search_key, 0.004 * impressions.astype(jnp.float32))
    return views, searches


def _render_segments(
    key: PRNGKeyArray, campaign: Campaign, season: Season, change: Intervention, drift: Array, params: SimulatorParams
) -> dict[str, Array]:
    """Segment-by-day tables of the focal campaign."""
    keys = iter(jax.random.split(key, 10))
    days, segments = change.mix.shape
    day_noise = draws.lognormal(next(keys), params.volume_day_cv, (days,))
    total = campaign.volume * jnp.exp(season.volume + change.volume) * day_noise
    pi = campaign.weights[None, :] * jnp.exp(change.mix)
    pi = pi / pi.sum(-1, keepdims=True)
    pieces = draws.gamma(next(keys), campaign.concentration * pi)
    pieces = jnp.where(campaign.segment_mask[None, :], pieces, 0.0)
    mean = total[:, None] * pieces / jnp.maximum(pieces.sum(-1, keepdims=True), 1e-12)

    cell_cv = (params.ctr_cell_cv, params.cvr_cell_cv, params.cpc_cell_cv)
    day_cv = (params.ctr_day_cv, params.cvr_day_cv, params.cpc_day_cv)
    noise = jnp.stack(
        [
            draws.lognormal(next(keys), cell, (days, segments)) * draws.lognormal(next(keys), day, (days, 1))
            for cell, day in zip(cell_cv, day_cv, strict=True)
        ],
        -1,
    )
    log_rates = change.rates + drift + jnp.stack([jnp.zeros(days), season.cvr, jnp.zeros(days)], -1)[:, None, :]
    theta = campaign.rates[None] * jnp.exp(log_rates) * noise
    impressions, clicks, orders = _thin(next(keys), mean, theta[..., 0], theta[..., 1])
    return {
        "impressions": impressions,
        "clicks": clicks,
        "orders": orders,
        "spend": clicks * theta[..., 2],
        "sales": orders * campaign.order_value,
    }


def _render_sibling(
    key: PRNGKeyArray, segments: int, season: Season, advertiser_days: int, params: SimulatorParams
) -> dict[str, Array]:
    """Campaign-by-day tables of a sibling: its own size and rates, the advertiser's season, no intervention."""
    keys = iter(jax.random.split(key, 12))
    campaign = draw_campaign(next(keys), segments, params)
    days = advertiser_days
    noise = draws.lognormal(next(keys), params.volume_day_cv, (days,))
    mean = campaign.volume * jnp.exp(season.volume) * noise
    ctr_mean = (campaign.weights * campaign.rates[:, 0]).sum()
    cvr_mean = (campaign.weights * campaign.rates[:, 0] * campaign.rates[:, 1]).sum() / ctr_mean
    cpc_mean = (campaign.weights * campaign.rates[:, 0] * campaign.rates[:, 2]).sum() / ctr_mean
    ctr = ctr_mean * draws.lognormal(next(keys), params.ctr_day_cv, (days,))
    cvr = cvr_mean * jnp.exp(season.cvr) * draws.lognormal(next(keys), params.cvr_day_cv, (days,))
    cpc = cpc_mean * draws.lognormal(next(keys), params.cpc_day_cv, (days,))
    impressions, clicks, orders = _thin(next(keys), mean, ctr, cvr)
    views, searches = _side_counts(next(keys), clicks, impressions)
    return {
        "sibling_id": jax.random.randint(next(keys), (), 1, 2**31 - 1),
        "sibling_impressions": impressions,
        "sibling_clicks": clicks,
        "sibling_orders": orders,
        "sibling_spend": clicks * cpc,
        "sibling_sales": orders * campaign.order_value,
        "sibling_budget": jnp.broadcast_to(campaign.budget, (days,)),
        "sibling_in_stock": jnp.clip(_stock(next(keys), days, params), 0.0, 1.0),
        "sibling_page_views": views,
        "sibling_brand_searches": searches,
    }


def simulate_one(
    key: PRNGKeyArray,
    index: Int[Array, ""],
    cause: Int[Array, ""],
    dimensions: Int[Array, ""],
    *,
    days: int,
    segments: int,
    siblings: int,
    params: SimulatorParams,
) -> EpisodeBatch:
    """One episode (the returned pytree has no leading E axis); a pure function of `key` and the arguments."""
    keys = iter(jax.random.split(key, 9))
    id_key, start_key = jax.random.split(next(keys))
    ids = jax.random.randint(id_key, (2,), 1, 2**31 - 1)
    start_day = jax.random.randint(start_key, (), 0, 1000)
    campaign = draw_campaign(next(keys), segments, params)
    season = draw_season(next(keys), start_day, days, params)
    change = draw_intervention(next(keys), campaign, cause, dimensions, days, params)
    drift = draw_drift(next(keys), campaign, change, days, params)
    tables = _render_segments(next(keys), campaign, season, change, drift, params)
    views, searches = _side_counts(next(keys), tables["clicks"].sum(-1), tables["impressions"].sum(-1))
    stock = jnp.clip(_stock(next(keys), days, params) * jnp.exp(change.in_stock), 0.0, 1.0)
    sibling_keys = jax.random.split(next(keys), siblings)
    sibling_tables = jax.vmap(lambda k: _render_sibling(k, segments, season, days, params))(sibling_keys)
    return EpisodeBatch(
        index=index.astype(jnp.int32),
        campaign_id=ids[0],
        advertiser_id=ids[1],
        start_day=start_day,
        vertical=campaign.vertical,
        strategy=campaign.strategy,
        segment_values=jnp.where(campaign.segment_mask[:, None], campaign.segment_values, 0),
        segment_mask=campaign.segment_mask,
        budget=campaign.budget * jnp.exp(change.budget),
        in_stock=stock,
        page_views=views,
        brand_searches=searches,
        cause=cause.astype(jnp.int32),
        slice_attributes=change.slice_attributes,
        slice_values=change.slice_values,
        strength=change.strength,
        profile=change.profile,
        onset=change.onset,
        **tables,
        **sibling_tables,
    )
