"""The simulator's distributions against closed forms and against the NumPy reference with exact counts.

Thresholds come from sampling errors: five standard errors of a mean, Kolmogorov-Smirnov at a level of 1e-4.
"""

import numpy as np
import pytest
from simulator_worlds import (
    CPC,
    CTR,
    CVR,
    NO_SIGNAL,
    SHAPE,
    SOURCES,
    distance,
    no_signal,
    other_reference,
    ours,
    reference,
    uniform,
    z_of_mean,
)

from trace_jax.simulator.confounders import CONFOUNDER_NAMES

VOLUMES = {"small": 4.8, "medium": 8.0, "large": 13.0}  # ln of impressions a day: 2.5, 62 and 9,216 a cell
CELLS = SHAPE["segments"]


@pytest.fixture(scope="module")
def uniform_worlds():
    """192 episodes of alike segments without noise, by source, volume and concentration."""
    return {
        (source, volume, alpha): make(3, NO_SIGNAL, 0, 192, uniform(VOLUMES[volume], alpha))
        for source, make in SOURCES.items()
        for volume in VOLUMES
        for alpha in ((400.0, 1600.0) if volume == "large" else (800.0,))
    }


def _worlds(test):
    cases = [(s, v, a) for s in SOURCES for v, a in (("small", 800.0), ("medium", 800.0), ("large", 400.0))]
    return pytest.mark.parametrize("world", [*cases, ("simulator", "large", 1600.0)], ids=str)(test)


@_worlds
def test_counts_have_the_moments_of_the_equation(uniform_worlds, world):
    """Equation (1) with equal weights 1/G: with p ~ Dirichlet(alpha/G), a cell has mean mu/G and variance
    mu/G + mu^2 p (1 - p)/(alpha + 1); two cells of a day have covariance -mu^2 p^2/(alpha + 1); a day is Poisson."""
    batch, mu, alpha, p = uniform_worlds[world], np.exp(VOLUMES[world[1]]), world[2], 1 / CELLS
    cells = batch.impressions.reshape(-1, CELLS).astype(float)
    for rate, counts in ((1.0, cells), (CTR, batch.clicks), (CTR * CVR, batch.orders)):
        counts = np.reshape(counts, (-1, CELLS)).astype(float)
        mean, spread = rate * mu * p, (rate * mu) ** 2 * p / (alpha + 1)
        day = counts.sum(1)
        assert z_of_mean(counts.mean(1), mean) < 5
        assert z_of_mean(((counts - mean) ** 2).mean(1), mean + spread * (1 - p)) < 5
        assert z_of_mean((day - rate * mu) ** 2, rate * mu) < 5
        # sum of all covariances of a day: Var(sum) - sum of Var
        between = (day - rate * mu) ** 2 - ((counts - mean) ** 2).sum(1)
        assert z_of_mean(between, -spread * p * CELLS * (CELLS - 1)) < 5
    third = ((cells - mu * p) ** 3).mean(1)
    if world[1] == "small":  # a Poisson mixed over p: E (p - Ep)^3 of a beta, plus 3 Var(p) mu^2, plus the mean
        a, b = alpha * p, alpha * (1 - p)
        variance = a * b / (alpha**2 * (alpha + 1))
        skew = 2 * (b - a) * np.sqrt(alpha + 1) / ((alpha + 2) * np.sqrt(a * b))
        assert z_of_mean(third, mu**3 * skew * variance**1.5 + 3 * mu**2 * variance + mu * p) < 5


@pytest.mark.parametrize("source", SOURCES)
def test_shares_concentrate_with_alpha(uniform_worlds, source):
    """Variance of a segment's share is p (1 - p)/(alpha + 1) beyond counting noise: four times alpha, a quarter."""
    found = {}
    for alpha in (400.0, 1600.0):
        counts = uniform_worlds[source, "large", alpha].impressions.astype(float)
        total = counts.sum(-1, keepdims=True)
        share, p = counts / total, 1 / CELLS
        excess = ((share - p) ** 2 - p * (1 - p) / total).mean(-1)
        assert z_of_mean(excess, p * (1 - p) / (alpha + 1) * (1 - 1 / np.exp(VOLUMES["large"]))) < 5
        found[alpha] = excess.mean()
    assert found[400.0] / found[1600.0] == pytest.approx(1601 / 401, rel=0.05)


def test_cells_agree_with_the_reference_in_distribution(uniform_worlds):
    for volume, alpha in (("small", 800.0), ("medium", 800.0), ("large", 400.0)):
        a, b = uniform_worlds["simulator", volume, alpha], uniform_worlds["reference", volume, alpha]
        for field in ("impressions", "clicks", "orders"):
            assert distance(getattr(a, field), getattr(b, field)) < 1, (volume, field)
        for t, u in ((a, b), (a, a)):  # days and weeks, too
            assert distance(t.impressions[:, ::2].sum(-1), u.impressions[:, 1::2].sum(-1)) < 1


def test_both_references_have_one_distribution(uniform_worlds):
    """Poisson splitting and thinning is the multinomial and binomial chain."""
    again = other_reference(4, NO_SIGNAL, 0, 192, uniform(VOLUMES["medium"]))
    for field in ("impressions", "clicks", "orders"):
        literal = getattr(uniform_worlds["reference", "medium", 800.0], field)
        assert distance(literal, getattr(again, field)) < 1


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("volume", VOLUMES)
def test_overdispersion_is_that_of_the_noise(source, volume):
    """A rate with coefficient of variation v over the cells gives n rate (1 - rate) + n^2 rate^2 v^2 - n rate^2 v^2;
    over the binomial variance that is the Pearson dispersion, about one at small counts and far above at large ones."""
    cv, cv_cpc = 0.3, 0.25
    params = uniform(VOLUMES[volume], ctr_cell_cv=cv, cvr_cell_cv=cv, cpc_cell_cv=cv_cpc)
    batch = SOURCES[source](5, NO_SIGNAL, 0, 192, params)
    for num, den, rate in ((batch.clicks, batch.impressions, CTR), (batch.orders, batch.clicks, CVR)):
        n, x = den.astype(float), num.astype(float)
        squares = (x - n * rate) ** 2
        expected = n * rate * (1 - rate) + n * (n - 1) * (rate * cv) ** 2
        assert z_of_mean((squares - expected).mean((1, 2)), 0) < 5
        dispersion = squares.sum() / (n * rate * (1 - rate)).sum()
        low, high = (2.5, np.inf) if volume == "large" else (0.9, 1.3)
        assert low < dispersion < high
    clicked = batch.clicks > 0
    price = batch.spend[clicked] / batch.clicks[clicked]
    assert z_of_mean(price, CPC) < 5
    assert z_of_mean((price - CPC) ** 2, (CPC * cv_cpc) ** 2) < 5


@pytest.mark.parametrize("source", SOURCES)
def test_days_move_together_as_told(source):
    """Daily noise has the stated coefficient of variation in volume, CTR, CVR and CPC of the whole campaign."""
    cvs = {"volume_day_cv": 0.08, "ctr_day_cv": 0.05, "cvr_day_cv": 0.06, "cpc_day_cv": 0.04}
    batch = SOURCES[source](6, NO_SIGNAL, 0, 192, uniform(VOLUMES["large"], **cvs))
    i, c, o, s = (getattr(batch, f).sum(-1).astype(float) for f in ("impressions", "clicks", "orders", "spend"))
    mu = np.exp(VOLUMES["large"])
    series = {"volume_day_cv": i / mu, "ctr_day_cv": c / i / CTR, "cvr_day_cv": o / c / CVR, "cpc_day_cv": s / c / CPC}
    counted = {"volume_day_cv": 1 / mu, "ctr_day_cv": 1 / (mu * CTR), "cvr_day_cv": 1 / (mu * CTR * CVR)}
    for name, x in series.items():
        assert z_of_mean(x, 1.0) < 5, name
        assert z_of_mean((x - 1) ** 2, cvs[name] ** 2 + counted.get(name, 0.0)) < 5, name
    again = ours(6, NO_SIGNAL, 0, 192, uniform(VOLUMES["large"], **cvs))
    assert distance(batch.clicks[:, :, 0], again.clicks[:, :, 1]) < 1


@pytest.mark.parametrize("source", SOURCES)
def test_siblings_share_the_season(source):
    """Daily shocks of the season are the same for all campaigns of an advertiser; their own shocks are not."""
    shared, own = 0.10, 0.05
    batch = SOURCES[source](9, NO_SIGNAL, 0, 192, uniform(VOLUMES["large"], season_day_cv=shared, volume_day_cv=own))
    focal = np.log(batch.impressions.sum(-1))
    other = np.log(batch.sibling_impressions[:, 0])
    focal, other = (x - x.mean() for x in (focal, other))
    assert z_of_mean(focal * other, shared**2) < 5
    assert z_of_mean(focal**2, shared**2 + np.log1p(own**2)) < 5


def _ratio(a, b):
    return np.where(b > 0, a / np.maximum(b, 1e-9), 0.0)


def _marginals(batch):
    """One independent number an episode: a cell, a day, the campaign, a sibling, and what else the tables show."""
    i, c, o, s, v = (
        np.asarray(getattr(batch, f), float) for f in ("impressions", "clicks", "orders", "spend", "sales")
    )
    found = {}
    for name, at in (
        ("cell", lambda x: x[:, 5, 0]),
        ("last cell", lambda x: x[:, 27, 20]),
        ("first day", lambda x: x[:, 0].sum(-1)),
        ("late day", lambda x: x[:, 26].sum(-1)),
        ("campaign", lambda x: x.sum((1, 2))),
    ):
        I, C, O, S, V = (at(x) for x in (i, c, o, s, v))  # noqa: E741
        rates = {"ctr": _ratio(C, I), "cvr": _ratio(O, C), "cpc": _ratio(S, C), "aov": _ratio(V, O)}
        counts = {"impressions": I, "clicks": C, "orders": O, "spend": S, "sales": V}
        found |= {f"{k} of a {name}": x for k, x in (counts | rates).items()}
    for field in (f for f in batch.__dataclass_fields__ if f.startswith("sibling_") and f != "sibling_id"):
        x = np.asarray(getattr(batch, field), float)
        found |= {field: x[:, 1, 9], f"{field} in all": x.sum((1, 2))}
    for field in ("budget", "in_stock", "page_views", "brand_searches"):
        found |= {field: getattr(batch, field)[:, 11], f"last {field}": getattr(batch, field)[:, -1]}
    spend = s.sum(-1)
    found["spend over budget"] = _ratio(spend, batch.budget).max(1)
    found["day to day"] = np.abs(np.diff(np.log(i.sum(-1) + 1.0), axis=1)).mean(1)
    found["segments"] = batch.segment_mask.sum(1)
    found["empty segments"] = ((i.sum(1) == 0) & batch.segment_mask).sum(1)
    found["largest share"] = (i.sum(1) / np.maximum(i.sum((1, 2)), 1)[:, None]).max(1)
    found["days"] = batch.day_mask.sum(1)
    found |= {f: getattr(batch, f) for f in ("start_day", "vertical", "strategy", "strength", "profile", "onset")}
    found |= {f"value {a}": batch.segment_values[:, 1, a] for a in range(8)}
    found |= {name: batch.confounders[:, i] for i, name in enumerate(CONFOUNDER_NAMES)}
    return found


@pytest.mark.parametrize("size", ["small", "large"])
def test_marginals_of_the_full_model_agree_with_the_reference(size):
    """Kolmogorov-Smirnov on every quantity that a table shows, for campaigns of hundreds and of 100,000 a day."""
    a, b = (_marginals(no_signal(size, source)) for source in SOURCES)
    far = {name: distance(a[name], b[name]) for name in a if distance(a[name], b[name]) >= 1}
    assert not far and len(a) > 90
    assert all(np.isfinite(x).all() for x in a.values())


def test_the_comparison_would_notice():
    """A tenth more noise or concentration, and the distributions no longer agree."""
    base = uniform(VOLUMES["large"], ctr_cell_cv=0.14)
    want = reference(8, NO_SIGNAL, 0, 192, base)
    noisier = ours(8, NO_SIGNAL, 0, 192, base.replace(ctr_cell_cv=0.154))
    assert distance(want.clicks / want.impressions, noisier.clicks / noisier.impressions) > 1.5
    narrower = ours(8, NO_SIGNAL, 0, 192, base.replace(concentration=(880.0, 880.0)))
    assert distance(want.impressions, narrower.impressions) > 1.5


@pytest.mark.parametrize("source", SOURCES)
def test_confounders_come_as_often_as_told(source):
    """Presence is a coin of the stated probability; sizes lie in the stated ranges."""
    batch = no_signal("small", source)
    sizes = dict(zip(CONFOUNDER_NAMES, np.asarray(batch.confounders, float).T, strict=True))
    for name, probability in {
        "budget_change": 0.3,
        "market_move": 0.3,
        "late_conversions": 0.3,
        "missing_days": 0.3,
        "zero_volume": 0.4,
        "drift": 1.0,
        "weekday": 1.0,
    }.items():
        assert abs((sizes[name] != 0).mean() - probability) <= 5 * np.sqrt(probability * (1 - probability) / 2304), name
    for name, low, high in (("promotion", 0.15, 0.45), ("holiday", 0.15, 0.40), ("market_move", 0.05, 0.25)):
        there = np.abs(sizes[name][sizes[name] != 0])
        assert low <= there.min() and there.max() <= high + 1e-6
        assert z_of_mean(there, (low + high) / 2) < 5
    assert (sizes["promotion"] >= 0).all() and (sizes["holiday"] <= 0).all()
