"""Confounders one at a time, against what they are said to do; and the budget that ends a day early."""

import numpy as np
import pytest

from trace_jax.config import SimulatorConfig
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.confounders import CONFOUNDER_NAMES, CONFOUNDERS
from trace_jax.simulator.difficulty import params_of
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import propose

CONFIG = SimulatorConfig(batch=128)
COUNT = 128
HALF = CONFIG.days // 2
# Probability fields of the confounders that may be absent, and what silences the others.
OFF = {
    "promotion_probability": 0.0,
    "holiday_probability": 0.0,
    "drift_probability": 0.0,
    "budget_change_probability": 0.0,
    "market_move_probability": 0.0,
    "zero_volume_probability": 0.0,
    "late_conversions_probability": 0.0,
    "missing_days_probability": 0.0,
    "weekday_amplitude": (0.0, 0.0),
    "trend": (0.0, 0.0),
}


def only(cause="NO_SIGNAL", dimensions=0, **on):
    """Proposals of one cause with no confounder but the given fields."""
    params = SimulatorParams().replace(**{**OFF, **on})
    return propose(CONFIG, 5, "confounders", cause, dimensions, np.arange(COUNT), params)


def size(batch, name):
    return batch.confounders[:, CONFOUNDER_NAMES.index(name)]


@pytest.fixture(scope="module")
def calm():
    return only()


def daily(batch, metric):
    """Focal campaign's daily totals [E, T] and the siblings' sum."""
    return getattr(batch, metric).sum(-1).astype(float), getattr(batch, f"sibling_{metric}").sum(1).astype(float)


def test_names_are_unique_and_described():
    assert len(set(CONFOUNDER_NAMES)) == len(CONFOUNDERS)
    assert all(c.description for c in CONFOUNDERS)


def test_nothing_is_left_when_all_are_off(calm):
    batch, _ = calm
    assert (batch.confounders == 0).all()
    assert batch.day_mask.all()
    shares = daily(batch, "impressions")[0]
    # What remains is noise of days: sd of log volume near its two sources.
    params = SimulatorParams()
    want = np.hypot(params.volume_day_cv, params.season_day_cv)
    assert np.median(np.log(shares).std(1)) == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize(
    ("name", "fields", "sign"),
    [
        ("promotion", {"promotion_probability": 1.0, "promotion_volume": (0.6, 0.6)}, 1),
        ("holiday", {"holiday_probability": 1.0, "holiday_volume": (0.6, 0.6)}, -1),
    ],
)
def test_events_move_volume_of_all_campaigns_for_some_days(calm, name, fields, sign):
    """The same proposals with and without the event: volume of focal and siblings differs on a few days, by its size
    (with budgets that no event uses up)."""
    batch, _ = only(budget_headroom=(10.0, 10.0), **fields)
    for with_event, without in zip(daily(batch, "impressions"), daily(calm[0], "impressions"), strict=True):
        change = np.log(with_event / without)
        touched = np.abs(change) > 0.3
        assert ((touched.sum(1) >= 1) & (touched.sum(1) <= 4)).all()
        assert np.median(change[touched]) == pytest.approx(sign * 0.6, abs=0.05)
        assert np.abs(change[~touched]).max() < 0.2
    assert np.allclose(size(batch, name), sign * 0.6)


def test_market_moves_are_no_cause(calm):
    """Volume and a rate of all campaigns step up or down in mid-window; against the siblings nothing happened."""
    batch, verdict = only(market_move_probability=1.0, market_move_volume=(0.3, 0.3), market_move_rate=(0.15, 0.15))
    own, siblings = daily(batch, "impressions")
    moved = np.log(own[:, HALF + 4 :].mean(1) / own[:, : HALF - 4].mean(1))
    theirs = np.log(siblings[:, HALF + 4 :].mean(1) / siblings[:, : HALF - 4].mean(1))
    assert np.median(moved * np.sign(size(batch, "market_move"))) == pytest.approx(0.3, abs=0.05)
    assert np.corrcoef(moved, theirs)[0, 1] > 0.9
    assert verdict.accept.mean() > 0.9
    assert calm[1].accept.mean() > 0.9


def test_late_conversions_are_no_page_degradation():
    """Case 13 of data: off by default; when on, the last days show 40-90 % of their orders, and neither the last days
    nor any stock figure make PAGE_DEGRADATION or OUT_OF_STOCK of it."""
    assert SimulatorParams().late_conversions_probability == 0
    batch, verdict = only(late_conversions_probability=1.0, late_conversions_first=(0.4, 0.5))
    orders, clicks = daily(batch, "orders")[0], daily(batch, "clicks")[0]
    cvr = orders / clicks
    assert np.median(cvr[:, -1] / cvr[:, :HALF].mean(1)) == pytest.approx(0.45, abs=0.05)
    for cause in ("PAGE_DEGRADATION", "OUT_OF_STOCK"):
        assert (verdict.cause_margins[:, CAUSE_INDEX[cause]] > 0).all()  # eliminated
    assert verdict.accept.mean() > 0.9
    # And a stock-out under the same lag is still told from it.
    short, found = only(
        "OUT_OF_STOCK", late_conversions_probability=1.0, late_conversions_first=(0.4, 0.5), strength=(0.7, 1.0)
    )
    assert found.accept.mean() > 0.7
    assert (short.in_stock[found.accept][:, -3:].mean(1) < 0.8 * short.in_stock[found.accept][:, :HALF].mean(1)).all()


def test_missing_days_are_missing_for_everyone_and_change_no_verdict(calm):
    batch, verdict = only(missing_days_probability=1.0)
    gone = ~batch.day_mask
    assert ((gone.sum(1) >= 1) & (gone.sum(1) <= 2)).all()
    assert not gone[:, 0].any() and not gone[:, -1].any()
    for name in ("impressions", "clicks", "orders", "spend", "sales"):
        assert (getattr(batch, name)[gone] == 0).all()
        assert (getattr(batch, f"sibling_{name}").transpose(0, 2, 1)[gone] == 0).all()
    kept = batch.day_mask[:, :, None]
    assert (np.where(kept, batch.impressions, 0) == np.where(kept, calm[0].impressions, 0)).all()
    assert verdict.accept.mean() > 0.9
    _, found = only("BUDGET_CAP", missing_days_probability=1.0)
    assert found.accept.mean() > 0.85


def test_zero_volume_segments_keep_their_rows():
    batch, verdict = only(zero_volume_probability=1.0, zero_volume_share=(0.3, 0.3))
    volume = batch.impressions.sum(1)
    tiny = (volume < 0.01 * np.median(volume, axis=1, keepdims=True)) & batch.segment_mask
    assert 0.2 < tiny.sum() / batch.segment_mask.sum() < 0.4
    assert verdict.accept.mean() > 0.9


def test_benign_budget_change_changes_nothing_else(calm):
    batch, verdict = only(budget_change_probability=1.0)
    moved = np.log(batch.budget[:, -1] / batch.budget[:, 0])
    assert np.allclose(moved, size(batch, "budget_change"), atol=1e-4)
    assert (moved > 0).mean() == pytest.approx(0.6, abs=0.15)
    untouched = (batch.impressions == calm[0].impressions).all((1, 2)).mean()
    assert untouched > 0.6  # a trimmed budget is met on a rare day
    assert verdict.accept.mean() > 0.9


def test_drift_stays_out_of_the_driver_slice():
    """A benign drift of one rate in another slice does not touch the segments in which something is wrong."""
    flags = {"drift": (0.5, 0.5), "drift_probability": 1.0}
    with_drift, _ = only("CREATIVE_FATIGUE", 1, **flags)
    without, _ = only("CREATIVE_FATIGUE", 1)
    same = (with_drift.slice_attributes == without.slice_attributes).all(1)
    assert same.all()
    members = np.take_along_axis(without.segment_values, without.slice_attributes[:, None, :1], 2)[..., 0]
    inside = (members == without.slice_values[:, :1]) & without.segment_mask
    differs = (with_drift.clicks != without.clicks).any(1) | (with_drift.orders != without.orders).any(1)
    differs |= (with_drift.spend != without.spend).any(1)
    assert not (differs & inside).any()
    assert (differs & ~inside).any(1).mean() > 0.8  # the others drift in the very slice


def test_a_capped_day_ends_at_its_budget():
    """BUDGET_CAP: spend meets the lower budget day by day, up to the overspend platforms allow (case 18 of data), while
    rates stay; before, and without it, the budget is far."""
    batch, _ = only("BUDGET_CAP", onset=(1.0, 0.0, 0.0), strength=(0.8, 1.0))
    used = batch.spend.sum(-1) / batch.budget
    assert np.median(used[:, HALF:]) == pytest.approx(1.0, abs=0.02)
    assert np.median(used[:, :HALF]) < 0.75
    assert (used[:, HALF:] < 2.2).all()
    assert 0.02 < (used[:, HALF:] > 1.15).mean() < 0.12
    ctr = batch.clicks.sum(-1) / batch.impressions.sum(-1)
    assert np.abs(np.log(ctr[:, HALF:].mean(1) / ctr[:, :HALF].mean(1))).mean() < 0.03


def test_difficulty_orders_noise_strength_and_confounders():
    easy, paper, hard = (params_of(SimulatorConfig(difficulty=d)) for d in ("easy", "paper", "hard"))
    for low, mid, high in (
        (easy.ctr_cell_cv, paper.ctr_cell_cv, hard.ctr_cell_cv),
        (easy.promotion_probability, paper.promotion_probability, hard.promotion_probability),
        (easy.drift[1], paper.drift[1], hard.drift[1]),
    ):
        assert low < mid < high
    assert (np.abs(easy.effects) >= np.abs(paper.effects)).all()
    assert (np.abs(paper.effects) >= np.abs(hard.effects)).all()
    half = params_of(SimulatorConfig(noise=0.5, confounders=10.0))
    assert half.cvr_cell_cv == pytest.approx(paper.cvr_cell_cv / 2)
    assert half.promotion_probability == 1.0
