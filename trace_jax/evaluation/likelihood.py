"""What the visible tables of one episode say about log effects, as quadratic log-likelihoods.

A log-likelihood gain of an effect v[t] over the intervention window against no effect is v.score - v.information.v/2.
Levels (a segment's base rate, a slice's share, the campaign's volume) have flat priors and are integrated out exactly;
what a day does to the whole campaign has a Gaussian prior, informed by the siblings, and is integrated out, too.

Axes: T days, W days of the intervention window, G segments, K candidate slices, R rows of a table of directions.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from trace_jax.simulator.confounders import WEEK
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.params import SimulatorParams

RATES = ("ctr", "cvr", "cpc")
_PSEUDO_EVENTS = 8.0  # a segment's base rate is known within about 35 % before any event of its own
_LOGGED_SD, _DECISIVE = 0.03, 150.0  # grid error of a budget path, largest log-likelihood gain it may claim
_LEVEL_VARIANCE = 1.0  # of a level without information, in squared log units
_NO_DATA = 1e4  # variance of a day that tells nothing
_SPENT, _SPENT_CV = 0.95, 0.04  # a day that spent this share of its budget, give or take noise, may have been cut short


@chex.dataclass(frozen=True)
class Quadratic:
    """Log-likelihood gain of effects in R directions, as a function of the effect on each day of the window."""

    score: Float[Array, "R W"]
    information: Float[Array, "R W W"]

    def gain(self, effect: Float[Array, "... W"]) -> Float[Array, "R ..."]:
        """Gain of the same effect path in every row."""
        path = effect.reshape(-1, effect.shape[-1])
        outer = (path[:, :, None] * path[:, None, :]).reshape(len(path), -1)
        flat = self.information.reshape(len(self.information), -1)
        return (self.score @ path.T - 0.5 * flat @ outer.T).reshape(-1, *effect.shape[:-1])

    def gain_by_row(self, effect: Float[Array, "R N W"]) -> Float[Array, "R N"]:
        """Gain of an effect path of its own for every row."""
        linear = jnp.einsum("rw,rnw->rn", self.score, effect)
        return linear - 0.5 * jnp.einsum("rnw,rwu,rnu->rn", effect, self.information, effect)

    def rows(self, which) -> Quadratic:
        return Quadratic(score=self.score[which], information=self.information[which])


@chex.dataclass(frozen=True)
class Evidence:
    """Everything a diagnostician weighs. The first K rows of a rate are the candidate slices, the last the campaign."""

    ctr: Quadratic  # effects as relative changes, exp(log effect) - 1
    cvr: Quadratic
    cpc: Quadratic  # log effects
    mix: Quadratic  # log effects on a slice's weight, K rows
    volume: Quadratic  # log effects, one row
    in_stock: Quadratic  # relative changes, one row
    share: Float[Array, " K"]  # of the baseline's impressions


def _safe(x: Array) -> Array:
    return jnp.maximum(x, 1e-9)


def _alone(x: Float[Array, "T R"], weight: Float[Array, "T R"], half: int) -> Quadratic:
    """Each row by itself: x = level + effect + noise of precision `weight`."""
    total = _safe(weight.sum(0))
    score = weight * (x - (weight * x).sum(0) / total)
    w = weight[half:].T
    eye = jnp.eye(w.shape[1])
    return Quadratic(
        score=score[half:].T, information=w[:, :, None] * eye - w[:, :, None] * w[:, None] / total[:, None, None]
    )


def inverse(a: Float[Array, "T T"]) -> Float[Array, "T T"]:
    """Inverse of a positive definite matrix by the sweep operator.

    The matrices here are small and many: one vector loop over all of them, where LAPACK would be called for each.
    """

    def sweep(k, a):
        row = a[k] / a[k, k]
        swept = a - a[:, k, None] * row[None]
        swept = swept.at[k].set(row).at[:, k].set(-a[:, k] / a[k, k])
        return swept.at[k, k].set(1.0 / a[k, k])

    return jax.lax.fori_loop(0, a.shape[0], sweep, a)


def project(
    x: Float[Array, "T G"],
    weight: Float[Array, "T G"],
    member: Float[Array, "G R"],
    mean: Float[Array, " T"],
    covariance: Float[Array, "T T"],
) -> Quadratic:
    """Directions `member` of the table x[t, g] = level[g] + day[t] + effect[t] member[g] + noise.

    Args:
        weight: precision of the noise, 0 where a cell tells nothing.
        mean, covariance: prior of the day effects.
    """
    half = x.shape[0] // 2
    x = x - mean[:, None]
    total = _safe(weight.sum(0))
    residual = weight * (x - (weight * x).sum(0) / total)
    scaled = weight / total
    # Information between the days of a row, levels integrated out: diag(sum_g w) - sum_g w w' / total.
    between = jnp.eye(x.shape[0])[half:] * (member.T @ weight.T)[:, None, :]
    outer = (scaled.T[:, half:, None] * weight.T[:, None, :]).reshape(len(total), -1)
    between = between - (member.T @ outer).reshape(between.shape)
    days = inverse(covariance) + jnp.diag(weight.sum(1)) - scaled @ weight.T
    solved = inverse(days)
    score = (residual @ member)[half:].T - between @ (solved @ residual.sum(1))
    information = between[:, :, half:] - (between @ solved) @ between.transpose(0, 2, 1)
    return Quadratic(score=score, information=information)


def _step_covariance(days: int) -> Float[Array, "T T"]:
    """Of a step of unit size on a day near the middle, as `confounders._step` draws it."""
    near = jnp.arange(days // 2 - days // 8, days // 2 + days // 8 + 1)
    step = (jnp.arange(days)[None] >= near[:, None]).astype(jnp.float32)
    return step.T @ step / len(near)


def _square(limits: tuple[Array, Array]) -> Array:
    """Mean square of a uniform draw."""
    low, high = limits
    return (low * low + low * high + high * high) / 3.0


def _spans(days: int, probability: Array, size: tuple, length: tuple) -> Float[Array, "T T"]:
    """Covariance of an event on a few consecutive days anywhere in the window."""
    mean = (length[0] + length[1]) / 2.0
    apart = jnp.abs(jnp.arange(days)[:, None] - jnp.arange(days)[None])
    return probability * _square(size) * jnp.maximum(mean - apart, 0.0) / days


def shared_covariance(metric: str, days: int, params: SimulatorParams) -> Float[Array, "T T"]:
    """Prior covariance of what a day does to all campaigns of the advertiser in a metric."""
    p, t = params, jnp.arange(days)
    step = p.market_move_probability * _step_covariance(days)
    if metric == "volume":
        week = (t[:, None] - t[None]) % WEEK == 0
        line = t / days - 0.5
        cov = p.season_day_cv**2 * jnp.eye(days) + 0.35 * _square(p.weekday_amplitude) * week
        cov = cov + _square(p.trend) * line[:, None] * line[None] + step * _square(p.market_move_volume)
        cov = cov + _spans(days, p.promotion_probability, p.promotion_volume, p.promotion_days)
        return cov + _spans(days, p.holiday_probability, p.holiday_volume, p.holiday_days)
    cov = step * _square(p.market_move_rate) / 3.0 + 1e-6 * jnp.eye(days)
    if metric == "cvr":
        cov = cov + _spans(days, p.promotion_probability, p.promotion_cvr, p.promotion_days)
        cov = cov + _spans(days, p.holiday_probability, p.holiday_cvr, p.holiday_days)
        lag = (p.late_conversions_days[0] + p.late_conversions_days[1]) / 2.0
        late = jnp.clip(1.0 - (days - 1 - t) / lag, 0.0, 1.0)
        lost = _square(tuple(1.0 - f for f in p.late_conversions_first))
        cov = cov + p.late_conversions_probability * lost * late[:, None] * late[None]
    return cov


def _informed(
    x: Float[Array, "T S"], weight: Float[Array, "T S"], prior: Float[Array, "T T"], own: Array
) -> tuple[Float[Array, " T"], Float[Array, "T T"]]:
    """Prior of the focal campaign's day effects given the siblings': mean and covariance. `own` is the variance of what
    the focal campaign does not share."""
    days = prior.shape[0]
    if not x.shape[1]:
        return jnp.zeros(days), prior + own * jnp.eye(days)
    centred = x - (weight * x).sum(0) / _safe(weight.sum(0))
    total = weight.sum(1)
    seen = (weight * centred).sum(1) / _safe(total)
    noise = jnp.where(total > 0, 1.0 / _safe(total), _NO_DATA)
    gain = prior @ inverse(prior + jnp.diag(noise) + _LEVEL_VARIANCE)
    return gain @ seen, prior - gain @ prior + own * jnp.eye(days)


def _relative(
    num: Float[Array, "T G"], den: Float[Array, "T G"], variance: Array
) -> tuple[Float[Array, "T G"], Float[Array, "T G"]]:
    """Relative deviation of counts from what baseline rates give, and its precision (counts and extra variance)."""
    half = num.shape[0] // 2
    n1, d1 = num[:half].sum(0), den[:half].sum(0)
    rate = (n1.sum() + 1.0) / _safe(d1.sum() + 1.0)
    rates = (n1 + _PSEUDO_EVENTS) / (d1 + _PSEUDO_EVENTS / rate)
    expected = den * rates
    there = expected > 1e-6
    x = jnp.where(there, num / jnp.where(there, expected, 1.0) - 1.0, 0.0)
    count = (1.0 - jnp.minimum(rates, 0.9)) / _safe(expected)
    return x, jnp.where(there, 1.0 / (count + variance), 0.0)


def _log_ratio(num: Array, den: Array, variance: Array) -> tuple[Array, Array]:
    """Log of num/den where there is some, about its mean, and its precision."""
    there = (num > 0) & (den > 0)
    x = jnp.log(jnp.where(there, num, 1.0) / jnp.where(there, den, 1.0))
    x = x - jnp.where(there, x, 0.0).sum() / jnp.maximum(there.sum(), 1)
    return jnp.where(there, x, 0.0), jnp.where(there, 1.0 / variance, 0.0)


def _stock_factor(in_stock: Array, present: Array, params: SimulatorParams) -> Array:
    """What the visible stock does to CVR, relative to its baseline level; days first."""
    half = in_stock.shape[0] // 2
    level = (in_stock * present)[:half].sum(0) / jnp.maximum(present[:half].sum(0), 1.0)
    ratio = jnp.maximum(in_stock, 1e-3) / jnp.maximum(level, 1e-3)
    return jnp.where(present > 0, ratio**params.stock_elasticity, 1.0)


def _served(spend: Array, clicks: Array, budget: Array) -> Array:
    """Whether a day surely ran to its end: its spend is well below the budget."""
    noise = jnp.sqrt(_SPENT_CV**2 + 1.0 / jnp.maximum(clicks, 1.0))
    return spend < budget * jnp.maximum(_SPENT - 3.0 * noise, 0.5)


def _mix(
    impressions: Float[Array, "T G"], member: Float[Array, "G K"], params: SimulatorParams
) -> tuple[Quadratic, Array]:
    """Logits of every slice's share of impressions. Multiplying a slice's weight by exp(a) moves its logit by a and
    leaves the shares within the slice and within the rest alone, so that each slice is a regression of its own."""
    half = impressions.shape[0] // 2
    total = impressions.sum(1, keepdims=True)
    expected = total[:half] * impressions[:half].sum(0) / _safe(impressions[:half].sum())
    freedom = jnp.maximum(((total[:half] > 0).sum() - 1) * ((expected.sum(0) > 0).sum() - 1), 1)
    scale = ((impressions[:half] - expected) ** 2 / jnp.maximum(expected, 0.5)).sum() / freedom
    alpha = total[:half].mean() / jnp.maximum(scale - 1.0, 1e-3)
    alpha = jnp.clip(alpha, *params.concentration)
    inside = impressions @ member
    y = jnp.log((inside + 0.5) / (total - inside + 0.5))
    before = inside[:half].sum(0) / _safe(total[:half].sum())
    after = inside[half:].sum(0) / _safe(total[half:].sum())
    share = jnp.where(jnp.arange(len(total))[:, None] < half, before, after)
    precision = share * (1.0 - share) / (1.0 / alpha + 1.0 / _safe(total))
    return _alone(y, jnp.where(total > 0, precision, 0.0), half), before


def evidence(episode: EpisodeBatch, member: Float[Array, "G K"], params: SimulatorParams) -> Evidence:
    """The evidence of one episode (no leading axis), from agent-visible fields only.

    Args:
        member: 1 where a segment belongs to a slice.
    """
    impressions, clicks, orders, spend = (
        getattr(episode, name).astype(jnp.float32) for name in ("impressions", "clicks", "orders", "spend")
    )
    si, sc, so, ss, sb, sk = (
        getattr(episode, f"sibling_{name}").astype(jnp.float32).T
        for name in ("impressions", "clicks", "orders", "spend", "budget", "in_stock")
    )
    days, half = impressions.shape[0], impressions.shape[0] // 2
    present = episode.day_mask.astype(jnp.float32)
    rows = jnp.concatenate([member, jnp.ones((len(member), 1))], 1)
    stock = _stock_factor(episode.in_stock, present, params)[:, None]
    sibling_stock = _stock_factor(sk, present[:, None] * jnp.ones_like(sk), params)

    def var(cv):
        return jnp.log1p(cv * cv)

    cells = {
        "ctr": _relative(clicks, impressions, params.ctr_cell_cv**2),
        "cvr": _relative(orders, clicks * stock, params.cvr_cell_cv**2),
        "cpc": _log_ratio(spend, clicks, var(params.cpc_cell_cv)),
    }
    theirs = {
        "ctr": _relative(sc, si, params.ctr_day_cv**2),
        "cvr": _relative(so, sc * sibling_stock, params.cvr_day_cv**2),
        "cpc": _log_ratio(ss, sc, var(params.cpc_day_cv)),
    }
    own = {"ctr": params.ctr_day_cv, "cvr": params.cvr_day_cv, "cpc": params.cpc_day_cv}
    rates = {
        m: project(*cells[m], rows, *_informed(*theirs[m], shared_covariance(m, days, params), var(own[m])))
        for m in RATES
    }

    total = impressions.sum(1)
    own_volume = var(params.volume_day_cv)
    served = _served(spend.sum(1), clicks.sum(1), episode.budget) & (total > 0)
    x, weight = _log_ratio(total[:, None], jnp.ones((days, 1)), 1e-4 + 1.0 / _safe(total[:, None]))
    sx, sw = _log_ratio(si, jnp.ones_like(si), own_volume + 1.0 / jnp.maximum(si, 1.0))
    prior = _informed(
        sx, jnp.where(_served(ss, sc, sb), sw, 0.0), shared_covariance("volume", days, params), own_volume
    )
    volume = project(x, jnp.where(served[:, None], weight, 0.0), jnp.ones((1, 1)), *prior)

    mix, share = _mix(impressions, member, params)
    level = (episode.in_stock * present)[:half].sum() / jnp.maximum(present[:half].sum(), 1.0)
    level = jnp.maximum(level, 1e-3)
    sd = jnp.maximum(params.stock_day_sd, 0.005) / level
    in_stock = _alone((episode.in_stock / level - 1.0)[:, None], (present / sd**2)[:, None], half)
    return Evidence(**rates, mix=mix, volume=volume, in_stock=in_stock, share=share)


def budget_gain(episode: EpisodeBatch, shapes: Float[Array, "P T"], most: Array, params: SimulatorParams) -> Array:
    """Gain of each onset shape as the path of a budget cut, against the benign changes of budget [P].

    The budget is logged without noise, so this decides alone; it is kept within +-`_DECISIVE`.

    Args:
        most: largest log budget over which a cut may leave it (weakest cut, smallest headroom), negative.
    """
    days = shapes.shape[1]
    there = episode.budget > 0
    path = jnp.log(jnp.where(there, episode.budget, 1.0))
    path = jnp.where(there, path - path[jnp.argmax(there)], 0.0)
    near = jnp.arange(days // 2 - days // 8, days // 2 + days // 8 + 1)
    steps = (jnp.arange(days)[None] >= near[:, None]).astype(jnp.float32)

    def misfit(forms, low, high):
        forms = jnp.where(there, forms, 0.0)
        size = jnp.clip(forms @ path / _safe((forms**2).sum(1)), low, high)
        return jnp.where(there, path - size[:, None] * forms, 0.0)

    highest = params.budget_change[1]
    benign = (misfit(steps, -0.3 * highest, highest) ** 2).sum(1).min()
    cut = (misfit(shapes, -jnp.inf, most) ** 2).sum(1)
    return jnp.clip((benign - cut) / (2.0 * _LOGGED_SD**2), -_DECISIVE, _DECISIVE)
