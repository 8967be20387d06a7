"""What the figures say against an answer: series made with NumPy whose truth is known."""

import datetime

import numpy as np
import pytest

from trace_jax.diagnose import doubts, findings
from trace_jax.diagnose.findings import Diagnosis
from trace_jax.diagnose.series import Series
from trace_jax.diagnose.windows import Windows
from trace_jax.simulator.causes import CAUSES

FIRST = datetime.date(2026, 10, 5)
DAY = datetime.timedelta(1)
WINDOWS = Windows((FIRST, FIRST + 13 * DAY), (FIRST + 14 * DAY, FIRST + 27 * DAY), "as given")
LATE = np.arange(28) >= 14
SLICE = ("device", "Mobile")


def sums(rng, impressions=20_000, **factors):
    """Sums by day; `factors` of ctr, cvr, cpc and impressions are numbers or arrays."""
    noise = lambda: rng.lognormal(0, 0.03, 28)  # noqa: E731
    f = {"impressions": 1.0, "ctr": 1.0, "cvr": 1.0, "cpc": 1.0} | factors
    shown = np.round(impressions * noise() * f["impressions"])
    clicks = rng.poisson(shown * 0.03 * noise() * f["ctr"]).astype(float)
    orders = rng.poisson(clicks * 0.1 * noise() * f["cvr"]).astype(float)
    return {"impressions": shown, "clicks": clicks, "orders": orders, "spend": clicks * 0.8 * noise() * f["cpc"]}


def case(seed=0, siblings=None, inside=None, **factors):
    """A campaign of two devices: `factors` act on both, `inside` on Mobile, `siblings` on the other campaigns."""
    rng = np.random.default_rng(seed)
    mobile, desktop = sums(rng, **factors | (inside or {})), sums(rng, **factors)
    totals = {m: mobile[m] + desktop[m] for m in mobile}
    other = sums(rng, 100_000, **siblings) if siblings is not None else {}
    names = ("Other",) if other else ()
    values = {SLICE: mobile, ("device", "Desktop"): desktop}
    found = Series("Brand", FIRST, np.ones(28, bool), totals, values, other, names)
    return found, {"slice": mobile, "rest": desktop}


def falls(by):
    return np.where(LATE, by, 1.0)


def test_a_cause_is_doubted_by_what_it_is_told_by():
    assert doubts.against("PAGE_DEGRADATION", case(cvr=falls(0.6))[0], {}, WINDOWS) == ()
    told = doubts.against("PAGE_DEGRADATION", case(ctr=falls(0.7))[0], {}, WINDOWS)
    assert len(told) == 2 and "CVR going down" in told[0] and "leaves CTR as it is, and it went -" in told[1]
    risen = doubts.against("BID_INCREASE", case(cpc=falls(0.7))[0], {}, WINDOWS)
    assert "CPC going up, and it went -" in risen[0]
    # the other campaigns did the same: it was the market
    market = case(1, cvr=falls(0.6), siblings={"cvr": falls(0.6)})[0]
    assert "CVR against the other campaigns going down" in doubts.against("PAGE_DEGRADATION", market, {}, WINDOWS)[0]


def test_a_slice_is_compared_with_the_rest():
    slowly = 1 - 0.5 * np.clip((np.arange(28) - 13) / 14, 0, 1)
    assert doubts.against("CREATIVE_FATIGUE", *case(inside={"ctr": slowly}), WINDOWS) == ()
    assert doubts.at_once("CREATIVE_FATIGUE", *case(inside={"ctr": slowly}), WINDOWS) == ()
    fallen = case(inside={"ctr": falls(0.6)})
    assert doubts.against("CREATIVE_FATIGUE", *fallen, WINDOWS) == ()
    told = doubts.at_once("CREATIVE_FATIGUE", *fallen, WINDOWS)
    assert doubts.at_once("AD_QUALITY_DROP", *fallen, WINDOWS) == ()  # which may come at once
    assert len(told) == 1 and "comes gradually" in told[0] and "within days" in told[0]
    told = doubts.against("COMPETITIVE_PRESSURE", *case(ctr=falls(0.7), cpc=falls(1.4)), WINDOWS)
    assert any("of the slice against the rest going" in line for line in told)


def test_no_signal_is_doubted_where_something_moved():
    quiet = sum(bool(doubts.unexplained(case(seed)[0], WINDOWS)) for seed in range(40))
    assert quiet <= 1
    assert "CTR went -" in doubts.against("NO_SIGNAL", case(ctr=falls(0.7))[0], {}, WINDOWS)[0]
    moved = doubts.unexplained(case(inside={"ctr": falls(0.6)})[0], WINDOWS)
    assert "device 'Mobile' against the rest went -" in moved[0] or "device 'Desktop' against the rest" in moved[0]
    # as much as season and market do; and what the other campaigns do, too
    assert doubts.unexplained(case(ctr=falls(0.9))[0], WINDOWS) == ()
    assert doubts.unexplained(case(cpc=falls(1.4), siblings={"cpc": falls(1.4)})[0], WINDOWS) == ()
    assert "CPC against the other campaigns" in doubts.unexplained(case(cpc=falls(1.4), siblings={})[0], WINDOWS)[0]


def test_the_statistic_is_the_pooled_t_of_two_samples():
    rng = np.random.default_rng(3)
    y = rng.normal(5, 1, 28)
    totals = {"impressions": np.full(28, 1e4), "clicks": np.full(28, 1e3), "orders": y * 100}
    found = Series("Brand", FIRST, np.ones(28, bool), totals, {})
    masks = (~LATE, LATE)
    move = doubts._move("cvr", found.totals, None, found, masks)
    a, b = (y[mask] / 10 for mask in masks)
    pooled = (13 * a.var(ddof=1) + 13 * b.var(ddof=1)) / 26
    assert move.z == pytest.approx((b.mean() - a.mean()) / np.sqrt(pooled * 2 / 14))
    assert move.change == pytest.approx(np.log(b.mean() / a.mean()))


def test_every_cause_can_be_asked_about_with_few_columns():
    """Without orders, spend or other campaigns, and with a slice that has no clicks."""
    rng = np.random.default_rng(0)
    few = {m: sums(rng)[m] for m in ("impressions", "clicks")}
    nothing = {m: np.zeros(28) for m in few}
    found = Series("Brand", FIRST, np.ones(28, bool), few, {SLICE: nothing})
    for cause in CAUSES:
        slices = {"slice": nothing, "rest": few} if cause.level == "segment" else {}
        told = doubts.against(cause.name, found, slices, WINDOWS)
        assert all(line.startswith(cause.name) for line in told)
        assert not any(m in line for line in told for m in ("CVR", "CPC"))


def test_doubts_and_a_second_opinion_lower_the_confidence():
    sure = Diagnosis("PAGE_DEGRADATION", (), (), 5, 5, (), "high", ())
    other = Diagnosis("CREATIVE_FATIGUE", (("device", "Mobile"),), (("device", "MOBILE"),), 1, 1, (), "high", ())
    same = findings.weighed(sure, (), (), sure)
    assert same.level == "high" and same.why == () and findings.agreed(same).endswith("so does the scripted analyst")
    differs = findings.weighed(sure, (), (), other)
    assert differs.level == "medium"
    assert differs.why == ("the scripted analyst says CREATIVE_FATIGUE in device = Mobile",)
    remarked = findings.weighed(sure, (), ("it came at once",), sure)
    assert remarked.level == "medium" and remarked.why == ("it came at once",)
    doubted = findings.weighed(sure, ("CVR rose",), (), None)
    assert doubted.level == "low" and doubted.second == "" and findings.agreed(doubted) == "5 of 5 investigations agree"
    assert findings.meaning(doubted) == "The figures do not bear this answer out:"
    none = Diagnosis(None, (), (), 5, 5, (), "low", ())
    assert "none of 5 investigations" in findings.agreed(none) and "--agent analyst" in findings.agreed(none)
