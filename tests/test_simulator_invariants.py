"""What holds in every episode, whatever the seed, the causes and the magnitudes: in the arrays and in every table."""

import dataclasses
import datetime

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trace_jax.config import SimulatorConfig
from trace_jax.simulator import difficulty
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSE_NAMES
from trace_jax.simulator.episode import NOT_COMPARED
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import paper_composition, simulate_rows, stream_key
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, PROFILES, VERTICALS
from trace_jax.warehouse.materialize import EPOCH, advertiser_name, campaign_name, visible_tables
from trace_jax.warehouse.schema import COLUMNS, VISIBLE_TABLES

STRATA = list(paper_composition(1000))
SHAPES = {  # magnitudes vary, shapes do not: one compilation each
    "default": SimulatorConfig(batch=192),
    "odd": SimulatorConfig(batch=64, days=11, segments=30, siblings=1),
}
COUNTS, MONEY = ("impressions", "clicks", "orders"), ("spend", "sales")


@st.composite
def worlds(draw):
    """A preset with knobs, any size of campaign from a few impressions to hundreds of millions a day, and rates that
    noise may carry beyond one."""
    knobs = {k: draw(st.floats(0.0, 3.0)) for k in difficulty.KNOBS}
    preset = draw(st.sampled_from(sorted(difficulty.PRESETS)))
    params = difficulty.params_of(SimulatorConfig(difficulty=preset, **knobs))
    middle = draw(st.floats(0.0, 19.0))
    return params.replace(
        impressions_log_mean=middle,
        impressions_log_clip=(0.0, 20.0),
        vertical_rates=params.vertical_rates * np.float32(draw(st.sampled_from([0.1, 1.0, 40.0]))),
        missing_days_probability=draw(st.sampled_from([0.0, 0.7])),
        late_conversions_probability=draw(st.sampled_from([0.0, 0.7])),
        concentration=draw(st.sampled_from([(400.0, 1600.0), (1.0, 20.0)])),
        budget_headroom=draw(st.sampled_from([(1.5, 2.6), (0.01, 0.5)])),
    )


def _proposals(config, seed, params):
    """One compiled batch over all strata, host arrays."""
    chosen = np.random.default_rng(seed).integers(0, len(STRATA), config.batch)
    causes = np.array([CAUSE_INDEX[STRATA[i][0]] for i in chosen])
    dimensions = np.array([STRATA[i][1] for i in chosen])
    return simulate_rows(config, stream_key(seed, "invariants"), causes, dimensions, np.arange(config.batch), params)


def _check_arrays(batch, verdict):
    for owner in ("", "sibling_"):
        i, c, o = (getattr(batch, owner + name) for name in COUNTS)
        assert all(np.issubdtype(x.dtype, np.integer) for x in (i, c, o))
        assert (o >= 0).all() and (o <= c).all() and (c <= i).all()
        for name in (*MONEY, "budget", "in_stock"):
            x = getattr(batch, owner + name)
            assert np.isfinite(x).all() and (x >= 0).all(), name
        assert (getattr(batch, owner + "page_views") >= 0).all() and (getattr(batch, owner + "in_stock") <= 1).all()
    assert (batch.spend[batch.clicks == 0] == 0).all() and (batch.sales[batch.orders == 0] == 0).all()
    ids = np.concatenate([batch.campaign_id, batch.sibling_id.ravel()])
    assert (ids > 0).all() and len(set(batch.campaign_id.tolist())) == len(batch.campaign_id)
    assert not np.isin(batch.sibling_id, batch.campaign_id).any()
    assert all(len(set(row.tolist())) == len(row) for row in batch.sibling_id)
    assert (batch.advertiser_id > 0).all()
    # what is missing or padded is empty
    assert (batch.impressions[~np.broadcast_to(batch.segment_mask[:, None], batch.impressions.shape)] == 0).all()
    assert (batch.impressions[~batch.day_mask] == 0).all() and (batch.budget[~batch.day_mask] == 0).all()
    assert batch.day_mask[:, 0].all() and batch.day_mask[:, -1].all()
    # the label names segments that are there, and the second half
    used = batch.slice_attributes >= 0
    value = np.take_along_axis(batch.segment_values, batch.slice_attributes.clip(0)[:, None, :], 2)
    inside = ((value == batch.slice_values[:, None]) | ~used[:, None]).all(-1) & batch.segment_mask
    assert inside.any(1).all()
    days = batch.day_mask.shape[1]
    assert (batch.onset >= days // 2).all() and (batch.onset < days).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(verdict))
    assert (np.abs(verdict.cause_margins) <= NOT_COMPARED).all()


def _check_tables(batch, i):
    tables = visible_tables(batch, i)
    assert set(tables) == set(VISIBLE_TABLES)
    own, days = campaign_name(batch.campaign_id[i]), batch.day_mask.shape[1]
    first = EPOCH + datetime.timedelta(days=int(batch.start_day[i]))
    dates = [
        first + datetime.timedelta(days=t) for t in range(days) if batch.day_mask[i, t]
    ]  # contiguous but for these
    campaigns = {own, *map(campaign_name, batch.sibling_id[i])}
    words = {
        *campaigns,
        advertiser_name(batch.advertiser_id[i]),
        *VERTICALS,
        *(v for vs in ATTRIBUTES.values() for v in vs),
    }
    for name, table in tables.items():
        columns = table.to_pydict()
        assert list(columns) == list(COLUMNS[name])
        expected = {own} if name == "segment_daily" else campaigns
        for campaign in expected:
            seen = [d for d, c in zip(columns["ds"], columns["campaign_id"], strict=True) if c == campaign]
            assert sorted(set(seen)) == dates and (name == "segment_daily" or len(seen) == len(dates))
        assert set(columns["campaign_id"]) == expected
        for column, values in columns.items():
            assert None not in values
            if isinstance(values[0], str):  # nothing but the vocabulary: no cause, no profile, no label
                assert set(values) <= words, (name, column)
                assert not {*CAUSE_NAMES, *PROFILES} & set(values)
            elif isinstance(values[0], float):
                assert np.isfinite(values).all() and min(values) >= 0, (name, column)
    # sums over segments are the campaign's totals: counts exactly, money to the cent
    segment, daily = tables["segment_daily"].to_pydict(), tables["daily_campaign"].to_pydict()
    for column in (*COUNTS, *MONEY):
        unit = 1 if column in COUNTS else 100
        totals = dict.fromkeys(dates, 0)
        for day, value in zip(segment["ds"], segment[column], strict=True):
            totals[day] += round(value * unit)
        for day, campaign, value in zip(daily["ds"], daily["campaign_id"], daily[column], strict=True):
            assert campaign != own or round(value * unit) == totals[day], (column, day)
    keys = list(zip(*(segment[a] for a in ("ds", *ATTRIBUTE_NAMES)), strict=True))
    assert len(set(keys)) == len(keys) == len(dates) * batch.segment_mask[i].sum()  # case 16 of data: keys are unique
    both = [(c, d) for c, d in zip(daily["campaign_id"], daily["ds"], strict=True)]
    for name in ("budget_log", "inventory"):
        other = tables[name].to_pydict()
        assert sorted(zip(other["campaign_id"], other["ds"], strict=True)) == sorted(both)


@pytest.mark.parametrize("shape", ["default", pytest.param("odd", marks=pytest.mark.slow)])
def test_invariants(shape):
    config = SHAPES[shape]

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(seed=st.integers(0, 2**31 - 1), params=worlds(), rows=st.lists(st.integers(0, 63), min_size=2, max_size=2))
    def check(seed, params, rows):
        batch, verdict = _proposals(config, seed, params)
        _check_arrays(batch, verdict)
        for i in rows:
            _check_tables(batch, i)

    check()


def test_a_million_cells_are_counts():
    """Cases 19 and 20 of data: means from nothing to 10^9, CTR and CVR pushed beyond one by noise."""
    params = SimulatorParams().replace(ctr_cell_cv=3.0, cvr_cell_cv=3.0, effects=SimulatorParams().effects * 3)
    cells, clipped = 0, 0
    for middle, rates in ((2.0, 60.0), (9.0, 60.0), (14.0, 1.0), (20.5, 60.0)):
        world = params.replace(
            impressions_log_mean=middle,
            impressions_log_sd=2.0,
            impressions_log_clip=(-12.0, 20.5),
            vertical_rates=params.vertical_rates * np.float32(rates),
        )
        batch, verdict = _proposals(SHAPES["default"], 5, world)
        _check_arrays(batch, verdict)
        cells += batch.impressions.size
        clipped += ((batch.clicks == batch.impressions) & (batch.impressions > 100)).sum()
    assert cells > 1_000_000 and clipped > 10_000


def test_a_nonsense_mean_is_no_count():
    """Case 19 of data: whatever a wild parameter does to a mean, no table has a negative or absent count."""
    for field, value in (("impressions_log_mean", float("nan")), ("trend", (50.0, 90.0)), ("trend", (-300.0, -200.0))):
        params = dataclasses.replace(SimulatorParams(), **{field: value})
        batch, _ = _proposals(SHAPES["default"], 6, params)
        assert all((getattr(batch, owner + name) >= 0).all() for name in COUNTS for owner in ("", "sibling_"))
        assert (batch.clicks <= batch.impressions).all()
