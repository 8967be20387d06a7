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
from trace_jax.simulator.interventions import Intervention, draw_intervention
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.population import Campaign, draw_campaign
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, DRIVER_ATTRIBUTES

WEEK = 7


@chex.dataclass(frozen=True)
class Season:
    """What the advertiser's campaigns share, whatever happens. Axis T days."""

    volume: Float[Array, " T"]  # log eta
    cvr: Float[Array, " T"]  # log effect of promotions on CVR


def draw_season(tape: draws.Tape, start_day: Int[Array, ""], days: int, params: SimulatorParams) -> Season:
    """Weekday cycle, trend, a possible promotion, and daily shocks."""
    day = jnp.arange(days)
    pattern = tape.normal((WEEK,))
    pattern = pattern / jnp.maximum(jnp.abs(pattern).max(), 1e-6) * tape.between(params.weekday_amplitude)
    weekday = pattern[(start_day + day) % WEEK]
    trend = tape.between(params.trend) * (day / days - 0.5)
    has_promotion = tape.uniform() < params.promotion_probability
    first = tape.integer(0, days - 1)
    length = tape.integer(*params.promotion_days)
    promotion = (has_promotion & (day >= first) & (day < first + length)).astype(jnp.float32)
    shock = params.season_day_cv * tape.normal((days,))
    volume = weekday + trend + shock + promotion * tape.between(params.promotion_volume)
    return Season(volume=volume, cvr=promotion * tape.between(params.promotion_cvr))


def draw_drift(
    tape: draws.Tape, campaign: Campaign, change: Intervention, days: int, params: SimulatorParams
) -> Float[Array, "T G 3"]:
    """A weak benign drift of one rate in a slice that does not touch the driver attributes (log effect)."""
    codes = jnp.array([ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES])
    free = ~(codes[:, None] == change.slice_attributes[None, :]).any(-1)
    attribute = codes[jnp.argmax(jnp.where(free, tape.gumbel(free.shape), -jnp.inf))]
    log_weights = jnp.log(campaign.weights + 1e-20)
    segment = jnp.argmax(log_weights + tape.gumbel(log_weights.shape))
    value = campaign.segment_values[segment, attribute]
    inside = campaign.segment_values[:, attribute] == value
    size = jnp.where(tape.uniform() < 0.5, 1.0, -1.0) * tape.between(params.drift)
    metric = jax.nn.one_hot(tape.integer(0, 2), 3)
    half = days // 2
    ramp = jnp.clip((jnp.arange(days) - half + 1) / half, 0.0, 1.0)
    return ramp[:, None, None] * inside[None, :, None] * size * metric


def _thin(
    tape: draws.Tape, mean: Float[Array, ...], ctr: Float[Array, ...], cvr: Float[Array, ...]
) -> tuple[Int[Array, ...], Int[Array, ...], Int[Array, ...]]:
    """Impressions, clicks and orders with Poisson impressions of the given mean; orders <= clicks <= impressions."""
    ctr, cvr = jnp.clip(ctr, 0.0, 1.0), jnp.clip(cvr, 0.0, 1.0)
    means = jnp.stack([mean * (1.0 - ctr), mean * ctr * (1.0 - cvr), mean * ctr * cvr])
    unclicked, unordered, orders = draws.poisson(tape.uniform(means.shape), means)
    clicks = unordered + orders
    return unclicked + clicks, clicks, orders


def _stock(tape: draws.Tape, shape: tuple[int, ...], params: SimulatorParams) -> Float[Array, "... T"]:
    """In-stock fraction of catalogues where nothing is wrong."""
    level = tape.between(params.stock_normal, (*shape[:-1], 1))
    return level + params.stock_day_sd * tape.normal(shape)


def _side_counts(tape: draws.Tape, clicks: Array, impressions: Array) -> tuple[Array, Array]:
    """Page views (with organic visits) and brand searches, both counts a day."""
    means = jnp.stack([1.3 * clicks.astype(jnp.float32), 0.004 * impressions.astype(jnp.float32)])
    views, searches = draws.poisson(tape.uniform(means.shape), means)
    return views, searches


def _render_segments(
    tape: draws.Tape, campaign: Campaign, season: Season, change: Intervention, drift: Array, params: SimulatorParams
) -> dict[str, Array]:
    """Segment-by-day tables of the focal campaign."""
    days, segments = change.mix.shape
    day_noise = tape.lognormal(params.volume_day_cv, (days,))
    total = campaign.volume * jnp.exp(season.volume + change.volume) * day_noise
    pi = campaign.weights[None, :] * jnp.exp(change.mix)
    pi = pi / pi.sum(-1, keepdims=True)
    pieces = draws.gamma(tape, campaign.concentration * pi)
    pieces = jnp.where(campaign.segment_mask[None, :], pieces, 0.0)
    mean = total[:, None] * pieces / jnp.maximum(pieces.sum(-1, keepdims=True), 1e-12)

    cell_cv = jnp.stack([params.ctr_cell_cv, params.cvr_cell_cv, params.cpc_cell_cv])
    day_cv = jnp.stack([params.ctr_day_cv, params.cvr_day_cv, params.cpc_day_cv])
    noise = tape.lognormal(cell_cv, (days, segments, 3)) * tape.lognormal(day_cv, (days, 1, 3))
    log_rates = change.rates + drift + jnp.stack([jnp.zeros(days), season.cvr, jnp.zeros(days)], -1)[:, None, :]
    theta = campaign.rates[None] * jnp.exp(log_rates) * noise
    impressions, clicks, orders = _thin(tape, mean, theta[..., 0], theta[..., 1])
    return {
        "impressions": impressions,
        "clicks": clicks,
        "orders": orders,
        "spend": clicks * theta[..., 2],
        "sales": orders * campaign.order_value,
    }


def _render_siblings(
    tape: draws.Tape, count: int, campaign: Campaign, season: Season, params: SimulatorParams
) -> dict[str, Array]:
    """Campaign-by-day tables of siblings: own size and rates, the advertiser's season, no intervention."""
    days = season.volume.shape[0]
    share = campaign.weights * campaign.rates[:, 0]
    focal = jnp.stack([share.sum(), (share * campaign.rates[:, 1]).sum(), (share * campaign.rates[:, 2]).sum()])
    focal = focal / jnp.stack([1.0, focal[0], focal[0]])  # CTR, CVR, CPC of the whole campaign
    rates = focal * jnp.exp(0.25 * tape.normal((count, 3)))
    log_volume = params.impressions_log_mean + params.impressions_log_sd * tape.normal((count, 1))
    volume = jnp.exp(jnp.clip(log_volume, *params.impressions_log_clip))
    mean = volume * jnp.exp(season.volume)[None] * tape.lognormal(params.volume_day_cv, (count, days))
    day_cv = jnp.stack([params.ctr_day_cv, params.cvr_day_cv, params.cpc_day_cv])
    theta = rates[:, None, :] * tape.lognormal(day_cv, (count, days, 3))
    impressions, clicks, orders = _thin(tape, mean, theta[..., 0], theta[..., 1] * jnp.exp(season.cvr))
    views, searches = _side_counts(tape, clicks, impressions)
    expected = volume[:, 0] * rates[:, 0] * rates[:, 2]
    budget = expected * tape.between(params.budget_headroom, (count,))
    return {
        "sibling_id": tape.integer(1, 2**30, (count,)),
        "sibling_impressions": impressions,
        "sibling_clicks": clicks,
        "sibling_orders": orders,
        "sibling_spend": clicks * theta[..., 2],
        "sibling_sales": orders * tape.between(params.order_value, (count, 1)),
        "sibling_budget": jnp.broadcast_to(budget[:, None], (count, days)),
        "sibling_in_stock": jnp.clip(_stock(tape, (count, days), params), 0.0, 1.0),
        "sibling_page_views": views,
        "sibling_brand_searches": searches,
    }


def _tape_size(days: int, segments: int, siblings: int) -> tuple[int, int]:
    """Uniforms and normals that one episode uses, with some room."""
    cells = days * segments
    return 8 * cells + 48 * segments + 16 * days * (siblings + 1) + 512, 7 * cells + 8 * segments + 12 * days * (
        siblings + 1
    ) + 128


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
    params = jax.tree.map(jnp.float32, params)
    id_key, tape_key = jax.random.split(key)
    ids = jax.random.randint(id_key, (2,), 1, 2**31 - 1)
    tape = draws.Tape(tape_key, *_tape_size(days, segments, siblings))
    start_day = tape.integer(0, 999)
    campaign = draw_campaign(tape, segments, params)
    season = draw_season(tape, start_day, days, params)
    change = draw_intervention(tape, campaign, cause, dimensions, days, params)
    drift = draw_drift(tape, campaign, change, days, params)
    tables = _render_segments(tape, campaign, season, change, drift, params)
    views, searches = _side_counts(tape, tables["clicks"].sum(-1), tables["impressions"].sum(-1))
    stock = jnp.clip(_stock(tape, (days,), params) * jnp.exp(change.in_stock), 0.0, 1.0)
    sibling_tables = _render_siblings(tape, siblings, campaign, season, params)
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
