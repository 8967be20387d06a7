"""Renders one episode: equation (1) of arXiv 2609.10315 for impressions, clicks, orders and money.

    N[t]       ~ Poisson(mu * eta[t] * V[t])
    pi[t]      = normalize(w * R[t])
    N[t, :]    ~ DirichletMultinomial(N[t], alpha * pi[t])
    theta[m]   = base[m, g] * Q[m] * F[m, g, t]

Two exact identities keep it parallel. A multinomial split of a Poisson total is a set of independent Poisson counts
with the split means, so with p ~ Dirichlet(alpha * pi) the cell counts are Poisson(mu eta V p_g). Thinning a Poisson
gives independent Poissons, so unclicked impressions, unordered clicks and orders are drawn separately and added up.

A day ends early when its budget is used up: V is cut to budget over expected spend, give or take the overspend that
platforms allow themselves.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from trace_jax.simulator import draws, identity
from trace_jax.simulator.confounders import Confounding, Context, draw_confounding
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.interventions import Intervention, draw_intervention
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.population import Campaign, draw_campaign, reweighted
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES

Tables = dict[str, Array]
_PRICE_BAND = ATTRIBUTE_NAMES.index("price_band")


def _log_noise(tape: draws.Tape, cv: Float[Array, ""], shape: tuple[int, ...]) -> Float[Array, ...]:
    """Logarithm of multiplicative noise with mean one and coefficient of variation `cv`."""
    variance = jnp.log1p(cv * cv)
    return jnp.sqrt(variance) * tape.normal(shape) - variance / 2


def _thin(
    tape: draws.Tape, mean: Float[Array, ...], ctr: Float[Array, ...], cvr: Float[Array, ...]
) -> tuple[Int[Array, ...], Int[Array, ...], Int[Array, ...]]:
    """Impressions, clicks and orders with Poisson impressions of the given mean; orders <= clicks <= impressions."""
    ctr, cvr = jnp.clip(ctr, 0.0, 1.0), jnp.clip(cvr, 0.0, 1.0)
    clicks = mean * ctr
    # Three calls: on CPUs a stacked one would be evaluated element by element, with everything that leads to it.
    unclicked, unordered, orders = (
        draws.poisson(tape.uniform(mean.shape), m) for m in (mean - clicks, clicks * (1.0 - cvr), clicks * cvr)
    )
    clicks = unordered + orders
    return unclicked + clicks, clicks, orders


def _stock(
    tape: draws.Tape, shape: tuple[int, ...], params: SimulatorParams
) -> tuple[Float[Array, "... T"], Float[Array, "... 1"]]:
    """In-stock fraction of catalogues where nothing is wrong, by day, and its level."""
    level = tape.between(params.stock_normal, (*shape[:-1], 1))
    return level + params.stock_day_sd * tape.normal(shape), level


def _truncation(
    tape: draws.Tape, spend: Float[Array, "... T"], budget: Float[Array, "... T"], params: SimulatorParams
) -> Float[Array, "... T"]:
    """Share of the day's demand that is served before the budget is used up, in (0, 1]."""
    over = jnp.exp(_log_noise(tape, params.overspend_cv, spend.shape))
    rare = tape.uniform(spend.shape) < params.overspend_probability
    over = jnp.where(rare, tape.between(params.overspend, spend.shape), over)
    return jnp.minimum(1.0, budget * over / jnp.maximum(spend, 1e-9))


def _day_log_noise(tape: draws.Tape, shape: tuple[int, ...], params: SimulatorParams) -> Float[Array, "3 ..."]:
    """Daily log noise of CTR, CVR and CPC of a whole campaign, [3, *shape]."""
    cvs = (params.ctr_day_cv, params.cvr_day_cv, params.cpc_day_cv)
    return jnp.stack([_log_noise(tape, cv, shape) for cv in cvs])


def _render_segments(
    tape: draws.Tape,
    campaign: Campaign,
    benign: Confounding,
    change: Intervention,
    stock_cvr: Float[Array, " T"],
    budget: Float[Array, " T"],
    params: SimulatorParams,
) -> Tables:
    """Segment-by-day tables of the focal campaign, [T, G]."""
    days, segments = change.mix.shape
    pi = campaign.weights[None, :] * jnp.exp(change.mix)
    pi = pi / pi.sum(-1, keepdims=True)
    pieces = draws.gamma(tape, campaign.concentration * pi)
    pieces = jnp.where(campaign.segment_mask[None, :], pieces, 0.0)
    split = pieces / jnp.maximum(pieces.sum(-1, keepdims=True), 1e-12)

    by_day = _day_log_noise(tape, (days,), params) + benign.rates
    by_day = by_day.at[1].add(stock_cvr)
    drifting = benign.slice_inside & ~change.inside
    cvs = (params.ctr_cell_cv, params.cvr_cell_cv, params.cpc_cell_cv)
    ctr, cvr, cpc = (
        jnp.exp(
            jnp.log(campaign.rates[m])[None, :]
            + by_day[m][:, None]
            + jnp.where(drifting[None, :], benign.slice_rates[m][:, None], 0.0)
            + jnp.where(change.where[None, :], change.rates[m] * change.shape[:, None], 0.0)
            + _log_noise(tape, cvs[m], (days, segments))
        )
        for m in range(3)
    )
    total = campaign.volume * jnp.exp(benign.volume + change.volume + _log_noise(tape, params.volume_day_cv, (days,)))
    total = total * _truncation(tape, total * (split * ctr * cpc).sum(-1), budget, params)
    mean = jnp.where(benign.day_mask, total, 0.0)[:, None] * split
    impressions, clicks, orders = _thin(tape, mean, ctr, cvr * benign.completeness[:, None])
    band = jnp.stack(params.price_band_order_value)[campaign.segment_values[:, _PRICE_BAND]]
    return {
        "impressions": impressions,
        "clicks": clicks,
        "orders": orders,
        "spend": clicks * cpc,
        "sales": orders * campaign.order_value * band[None, :],
    }


def _side_counts(tape: draws.Tape, clicks: Array, impressions: Array) -> tuple[Array, Array]:
    """Page views (with organic visits) and brand searches, both counts a day."""
    views = draws.poisson(tape.uniform(clicks.shape), 1.3 * clicks.astype(jnp.float32))
    return views, draws.poisson(tape.uniform(clicks.shape), 0.004 * impressions.astype(jnp.float32))


def _render_siblings(
    tape: draws.Tape, count: int, campaign: Campaign, benign: Confounding, params: SimulatorParams
) -> Tables:
    """Campaign-by-day tables of siblings: own size, rates and stock, the advertiser's season, no intervention."""
    days = benign.volume.shape[0]
    share = campaign.weights * campaign.rates[0]
    focal = jnp.stack([share.sum(), (share * campaign.rates[1]).sum(), (share * campaign.rates[2]).sum()])
    focal = focal / jnp.stack([1.0, focal[0], focal[0]])  # CTR, CVR, CPC of the whole campaign
    own = focal[:, None] * jnp.exp(0.25 * tape.normal((3, count)))
    log_volume = params.impressions_log_mean + params.impressions_log_sd * tape.normal((count,))
    volume = jnp.exp(jnp.clip(log_volume, *params.impressions_log_clip))
    stock, level = _stock(tape, (count, days), params)
    rates = _day_log_noise(tape, (count, days), params) + benign.rates[:, None, :]
    rates = rates.at[1].add(params.stock_elasticity * jnp.log(jnp.maximum(stock, 1e-3) / level))
    ctr, cvr, cpc = own[:, :, None] * jnp.exp(rates)
    expected = volume * own[0] * own[2]
    budget = jnp.broadcast_to((expected * tape.between(params.budget_headroom, (count,)))[:, None], (count, days))
    mean = volume[:, None] * jnp.exp(benign.volume[None] + _log_noise(tape, params.volume_day_cv, (count, days)))
    mean = mean * _truncation(tape, mean * ctr * cpc, budget, params)
    present = benign.day_mask[None]
    impressions, clicks, orders = _thin(tape, jnp.where(present, mean, 0.0), ctr, cvr * benign.completeness[None])
    views, searches = _side_counts(tape, clicks, impressions)
    return {
        "sibling_impressions": impressions,
        "sibling_clicks": clicks,
        "sibling_orders": orders,
        "sibling_spend": clicks * cpc,
        "sibling_sales": orders
        * params.vertical_order_value[campaign.vertical]
        * tape.between(params.order_value, (count, 1))
        * jnp.exp(_log_noise(tape, params.order_value_day_cv, (count, days))),
        "sibling_budget": jnp.where(present, budget, 0.0),
        "sibling_in_stock": jnp.where(present, jnp.clip(stock, 0.0, 1.0), 0.0),
        "sibling_page_views": views,
        "sibling_brand_searches": searches,
    }


def _episode(
    tape: draws.Tape,
    ids: tuple[Array, Array, Int[Array, " S"]],
    index: Int[Array, ""],
    cause: Int[Array, ""],
    dimensions: Int[Array, ""],
    days: int,
    segments: int,
    params: SimulatorParams,
) -> EpisodeBatch:
    start_day = tape.integer(0, 999)
    campaign = draw_campaign(tape, segments, params)
    context = Context(
        start_day=start_day,
        day=jnp.arange(days),
        segment_values=campaign.segment_values,
        weights=campaign.weights,
    )
    benign = draw_confounding(tape, context, params)
    campaign = reweighted(campaign, benign.weights)
    change = draw_intervention(tape, campaign, cause, dimensions, days, params)
    stock, level = _stock(tape, (days,), params)
    stock = stock * jnp.exp(change.in_stock)
    stock_cvr = params.stock_elasticity * jnp.log(jnp.maximum(stock, 1e-3) / level)
    budget = campaign.budget * jnp.exp(benign.budget + change.budget)
    tables = _render_segments(tape, campaign, benign, change, stock_cvr, budget, params)
    views, searches = _side_counts(tape, tables["clicks"].sum(-1), tables["impressions"].sum(-1))
    theirs = _render_siblings(tape, len(ids[2]), campaign, benign, params)
    basket = jnp.exp(_log_noise(tape, params.order_value_day_cv, (days,)))
    tables["sales"] = tables["sales"] * basket[:, None]
    return EpisodeBatch(
        index=index.astype(jnp.int32),
        campaign_id=ids[0],
        advertiser_id=ids[1],
        sibling_id=ids[2],
        start_day=start_day,
        vertical=campaign.vertical,
        strategy=campaign.strategy,
        segment_values=campaign.segment_values,
        segment_mask=campaign.segment_mask,
        day_mask=benign.day_mask,
        budget=jnp.where(benign.day_mask, budget, 0.0),
        in_stock=jnp.where(benign.day_mask, jnp.clip(stock, 0.0, 1.0), 0.0),
        page_views=views,
        brand_searches=searches,
        cause=cause.astype(jnp.int32),
        slice_attributes=change.slice_attributes,
        slice_values=change.slice_values,
        strength=change.strength,
        profile=change.profile,
        onset=change.onset,
        effects=change.effects,
        confounders=benign.sizes,
        **tables,
        **theirs,
    )


class _Counter(draws.Tape):
    """Counts what an episode draws, so that its tape is exactly as long."""

    def __init__(self):
        self.used = {"uniform": 0, "normal": 0}

    def uniform(self, shape: tuple[int, ...] = ()) -> Float[Array, ...]:
        self.used["uniform"] += jnp.zeros(shape).size
        return jnp.full(shape, 0.5)

    def normal(self, shape: tuple[int, ...] = ()) -> Float[Array, ...]:
        self.used["normal"] += jnp.zeros(shape).size
        return jnp.zeros(shape)


@functools.cache
def tape_size(days: int, segments: int, siblings: int) -> tuple[int, int]:
    """Uniform and normal numbers that one episode uses."""
    counter, zero = _Counter(), jnp.int32(0)
    params = jax.tree.map(jnp.float32, SimulatorParams())
    ids = (zero, zero, jnp.zeros(siblings, jnp.int32))
    jax.eval_shape(lambda: _episode(counter, ids, zero, zero, zero, days, segments, params))
    return counter.used["uniform"], counter.used["normal"]


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
    rng: str = draws.RNGS[0],
) -> EpisodeBatch:
    """Proposal `index` of the stream `key` (the returned pytree has no leading E axis).

    Args:
        key: of the stream; threefry.
        cause: code into CAUSES.
        dimensions: number of attributes in the driver slice, 0 to 2.
        params: every magnitude; traced, so other settings need no other program.
        rng: generator of the tape, one of `draws.RNGS`.
    """
    params = jax.tree.map(jnp.float32, params)
    stratum = cause * 4 + dimensions
    data = jax.random.key_data(key)
    own_ids = (identity.unique_id(data, stratum, index, kind) for kind in (0, 1))
    theirs = identity.sibling_ids(data, stratum, index, siblings) if siblings else jnp.zeros(0, jnp.int32)
    own = jax.random.fold_in(jax.random.fold_in(key, stratum), index)
    tape = draws.Tape(own, *tape_size(days, segments, siblings), rng)
    return _episode(tape, (*own_ids, theirs), index, cause, dimensions, days, segments, params)
