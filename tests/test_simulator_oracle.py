"""The oracle on hand-made episodes with known truth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import SimulatorConfig
from trace_jax.simulator import oracle, slices
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSE_NAMES
from trace_jax.simulator.statistics import statistics
from trace_jax.simulator.stream import propose
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, DRIVER_ATTRIBUTES

PARAMS = oracle.OracleParams()
PLACEMENT, AUDIENCE, DEVICE, GEO = (ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES)
_VERIFY = jax.jit(oracle.verify_one)
_STATISTICS = jax.jit(lambda e: statistics(e, PARAMS.min_events))
_MARGINS = jax.jit(lambda e: oracle.cause_margins(statistics(e, PARAMS.min_events), PARAMS))


@pytest.fixture(scope="module")
def template():
    """A proposal with nothing wrong, as a single episode of host arrays."""
    batch, _ = propose(SimulatorConfig(batch=64), 3, "oracle", "NO_SIGNAL", 0, np.arange(1))
    return jax.tree.map(lambda x: x[0], batch)


def grid(template, rng, *, per_cell=20_000, noise=0.02, share=None, ctr=None, cvr=None, cpc=None, days=28):
    """An episode over all placements x audiences x devices (27 segments), with log effects in the second half.

    share, ctr, cvr, cpc: functions (placement, audience, device) -> log effect.
    """
    values = np.zeros((48, len(ATTRIBUTE_NAMES)), np.int32)
    combos = [(p, a, d) for p in range(3) for a in range(3) for d in range(3)]
    values[:27, [PLACEMENT, AUDIENCE, DEVICE]] = combos
    values[:27, GEO] = np.arange(27) % len(ATTRIBUTES["geo"])
    mask = np.arange(48) < 27
    after = np.arange(days) >= days // 2

    def effect(f):
        rows = np.array([f(*c) if f else 0.0 for c in combos])
        return np.exp(after[:, None] * rows[None])

    jitter = lambda: np.exp(noise * rng.standard_normal((days, 27)))  # noqa: E731
    pi = np.ones((1, 27)) / 27 * effect(share)
    pi = pi / pi.sum(1, keepdims=True)
    n = np.round(per_cell * 27 * pi * jitter())
    c = np.round(n * 0.05 * effect(ctr) * jitter())
    o = np.round(c * 0.2 * effect(cvr) * jitter())
    s = c * 1.0 * effect(cpc) * jitter()
    pad = lambda x: np.pad(x, ((0, 0), (0, 48 - 27)))  # noqa: E731
    return dataclasses.replace(
        template,
        segment_values=values,
        segment_mask=mask,
        impressions=pad(n).astype(np.int32),
        clicks=pad(c).astype(np.int32),
        orders=pad(o).astype(np.int32),
        spend=pad(s).astype(np.float32),
        in_stock=np.full(days, 0.95, np.float32) + 0.01 * rng.standard_normal(days).astype(np.float32),
        sibling_impressions=np.full((2, days), 500_000, np.int32)
        + rng.integers(-9000, 9000, (2, days)).astype(np.int32),
    )


def labelled(episode, cause, *pairs):
    attributes, values = np.full(2, -1, np.int32), np.full(2, -1, np.int32)
    for i, (a, v) in enumerate(pairs):
        attributes[i], values[i] = a, v
    return dataclasses.replace(
        episode, cause=np.int32(CAUSE_INDEX[cause]), slice_attributes=attributes, slice_values=values
    )


def causes_that_fit(episode):
    margins = np.asarray(_MARGINS(episode))
    return {name for name, m in zip(CAUSE_NAMES, margins, strict=True) if m > 0}


def top_only(effect):
    return lambda p, a, d: effect if p == 0 else 0.0


def test_mix_versus_rate(template):
    """Case 1 of data: shares move, rates stay: a mix cause and never CREATIVE_FATIGUE; and the mirror image."""
    rng = np.random.default_rng(0)
    shifted = grid(template, rng, share=top_only(0.8))
    assert causes_that_fit(shifted) == {"PLACEMENT_SHIFT"}
    tired = grid(template, rng, ctr=top_only(-0.5))
    assert causes_that_fit(tired) == {"CREATIVE_FATIGUE"}


def test_simpson_reversal(template):
    """Case 2 of data: every segment's CTR rises, the campaign's falls through the mix; a rate cause gets no credit."""
    rng = np.random.default_rng(1)
    episode = grid(template, rng, share=top_only(2.0), ctr=lambda p, a, d: 0.1)
    # Give the growing placement a quarter of the others' CTR, in both halves.
    low = episode.segment_values[:, PLACEMENT] == 0
    clicks = np.where(low[None], episode.clicks // 4, episode.clicks)
    episode = dataclasses.replace(
        episode, clicks=clicks, orders=np.minimum(episode.orders, clicks), spend=clicks * np.float32(1)
    )
    half = episode.clicks.shape[0] // 2
    rates = episode.clicks.sum(1) / episode.impressions.sum(1)
    assert rates[half:].mean() < 0.8 * rates[:half].mean()
    assert not {"CREATIVE_FATIGUE", "AUDIENCE_SATURATION", "COMPETITIVE_PRESSURE"} & causes_that_fit(episode)


def test_low_volume_segment_is_not_a_driver(template):
    """Case 3 of data: 2 of 6 clicks before, 0 of 4 after, is nothing."""
    episode = grid(template, np.random.default_rng(2))
    n, c = episode.impressions.copy(), episode.clicks.copy()
    tiny = np.flatnonzero((episode.segment_values[:, PLACEMENT] == 1) & episode.segment_mask)
    n[:, tiny], c[:, tiny] = 0, 0
    n[3, tiny[0]], c[3, tiny[0]], n[20, tiny[0]] = 6, 2, 4
    episode = dataclasses.replace(episode, impressions=n, clicks=c, orders=np.minimum(episode.orders, c))
    stats = _STATISTICS(episode)
    (k,) = [i for i in range(slices.SLICES) if slices.slice_name(i) == "placement=REST_OF_SEARCH"]
    assert not bool(stats.testable[k])
    assert not bool(_VERIFY(labelled(episode, "CREATIVE_FATIGUE", (PLACEMENT, 1)), PARAMS).accept)


def test_children_parents_and_siblings(template):
    """Case 9 of data: the true intersection beats its parents; when all of the parent moved, the parent wins."""
    rng = np.random.default_rng(3)
    both = grid(template, rng, ctr=lambda p, a, d: -0.5 * (p == 0 and d == 1))
    exact = _VERIFY(labelled(both, "CREATIVE_FATIGUE", (PLACEMENT, 0), (DEVICE, 1)), PARAMS)
    assert bool(exact.accept)
    for wrong in ([(PLACEMENT, 0)], [(DEVICE, 1)], [(PLACEMENT, 0), (AUDIENCE, 1)], [(PLACEMENT, 1)]):
        assert not bool(_VERIFY(labelled(both, "CREATIVE_FATIGUE", *wrong), PARAMS).accept)
    parent = grid(template, rng, ctr=top_only(-0.5))
    assert bool(_VERIFY(labelled(parent, "CREATIVE_FATIGUE", (PLACEMENT, 0)), PARAMS).accept)
    for child in range(3):
        wrong = labelled(parent, "CREATIVE_FATIGUE", (PLACEMENT, 0), (DEVICE, child))
        assert not bool(_VERIFY(wrong, PARAMS).accept)


def test_collinear_slices_are_rejected(template):
    """A slice that consists of the same segments as another cannot be told from it."""
    episode = grid(template, np.random.default_rng(4), ctr=top_only(-0.5))
    values = episode.segment_values.copy()
    values[:27, GEO] = np.where(values[:27, PLACEMENT] == 0, 2, values[:27, GEO] % 2)
    episode = dataclasses.replace(episode, segment_values=values)
    assert not bool(_VERIFY(labelled(episode, "CREATIVE_FATIGUE", (PLACEMENT, 0)), PARAMS).accept)


def test_broken_numbers_are_rejected_not_nan(template):
    """Case 7 of data: a NaN in the visible data is a rejection."""
    episode = labelled(grid(template, np.random.default_rng(5), ctr=top_only(-0.5)), "CREATIVE_FATIGUE", (PLACEMENT, 0))
    assert bool(_VERIFY(episode, PARAMS).accept)
    spend = episode.spend.copy()
    spend[2, 3] = np.nan
    assert not bool(_VERIFY(dataclasses.replace(episode, spend=spend), PARAMS).accept)


def test_overspent_day_is_still_a_budget_cap():
    """Case 18 of data: a day at 1.8 times the budget does not change the verdict."""
    batch, verdict = propose(SimulatorConfig(batch=64), 3, "oracle", "BUDGET_CAP", 0, np.arange(64))
    i = int(np.flatnonzero(verdict.accept)[0])
    episode = jax.tree.map(lambda x: x[i], batch)
    day = 22
    factor = 1.8 * episode.budget[day] / episode.spend[day].sum()
    grown = {}
    for name in ("impressions", "clicks", "orders", "spend"):
        x = getattr(episode, name).copy()
        x[day] = (x[day] * factor).astype(x.dtype)
        grown[name] = x
    episode = dataclasses.replace(episode, **grown)
    assert episode.spend[day].sum() > 1.7 * episode.budget[day]
    assert bool(_VERIFY(episode, PARAMS).accept)


def test_empty_segments_do_not_matter(template):
    """Case 6 of data: adding all-zero leaves changes nothing, and no statistic is lost or infinite."""
    episode = grid(template, np.random.default_rng(6), ctr=top_only(-0.3))
    more = dataclasses.replace(episode, segment_mask=np.arange(48) < 40)
    a, b = (_STATISTICS(e) for e in (episode, more))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_evidence_reads_only_visible_fields():
    """Changing every hidden field leaves the statistics as they are."""
    batch, _ = propose(SimulatorConfig(batch=64), 3, "oracle", "AD_QUALITY_DROP", 1, np.arange(8))
    hidden = ("cause", "slice_attributes", "slice_values", "strength", "profile", "onset", "effects", "confounders")
    other = dataclasses.replace(batch, **{name: np.zeros_like(getattr(batch, name)) for name in hidden})
    f = jax.jit(jax.vmap(_STATISTICS))
    for x, y in zip(jax.tree.leaves(f(batch)), jax.tree.leaves(f(other)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_signal_still_has_confounders():
    """Case 10 of data: weekday cycle, trend and promotions are there when nothing is wrong, and no cause fits."""
    batch, verdict = propose(SimulatorConfig(batch=64), 3, "oracle", "NO_SIGNAL", 0, np.arange(64))
    daily = batch.impressions.sum(-1).astype(float)
    spread = daily.std(1) / daily.mean(1)
    assert np.median(spread) > 0.1
    # Siblings share the season: daily volumes of focal and sibling campaigns move together.
    siblings = batch.sibling_impressions.sum(1).astype(float)
    correlation = [np.corrcoef(np.log(a), np.log(b))[0, 1] for a, b in zip(daily, siblings, strict=True)]
    assert np.median(correlation) > 0.6
    assert verdict.accept.mean() > 0.8
    margins = jax.jit(jax.vmap(_MARGINS))(jax.tree.map(jnp.asarray, batch))
    named = np.asarray(margins)[verdict.accept][:, :-1]
    assert (named <= 0).all()
