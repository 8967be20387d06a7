"""Slice finders against worked examples and closed forms, and on clear tables whose root cause is known."""

import numpy as np
import pytest

from trace_jax.evaluation.finders import adtributor, contribution, riskloc, squeeze
from trace_jax.evaluation.finders.leaves import Element, Leaves, deviation

# The opening example of the Adtributor paper: revenue halves. Data centre X holds most of it and falls with everything;
# that mobile and tablet lose everything is the news. Forecast and actual by value of three attributes.
CENTRES = np.array([[94.0, 6.0], [47.0, 3.0]])
DEVICES = np.array([[50.0, 25.0, 25.0], [49.0, 1.0, 0.0]])


def grid(*sizes):
    """Codes of all leaves of attributes of these sizes."""
    return np.stack([x.reshape(-1) for x in np.meshgrid(*map(np.arange, sizes), indexing="ij")], 1)


def rates(codes, inside, drop, seed=0):
    """A ratio that falls by `drop` in the leaves `inside` and else only by half a percent, the forecasts' error; every
    leaf has its own size and level."""
    rng = np.random.default_rng(seed)
    bottom = np.tile(rng.uniform(500, 1500, len(codes)), (2, 1))
    level = rng.uniform(0.05, 0.1, len(codes))
    off = rng.normal(1.0, 0.005, len(codes))
    top = bottom * np.stack([level, level * off * np.where(inside, 1 - drop, 1.0)])
    return Leaves(codes, top, bottom)


def test_explanatory_power_by_hand():
    assert adtributor.explanatory_power(CENTRES) == pytest.approx([0.94, 0.06])
    assert adtributor.explanatory_power(DEVICES) == pytest.approx([0.02, 0.48, 0.50])


def test_explanatory_power_of_a_ratio_is_its_change_when_one_element_moves():
    """Numerator 10 -> 4 in one of two elements, denominators steady: it explains everything."""
    power = adtributor.explanatory_power(np.array([[10.0, 30.0], [4.0, 30.0]]), np.full((2, 2), 100.0))
    assert power == pytest.approx([1.0, 0.0])
    # A denominator that grows where the ratio is low moves the ratio, too: parts add up to one all the same.
    both = adtributor.explanatory_power(
        np.array([[10.0, 30.0], [12.0, 20.0]]), np.array([[100.0, 100.0], [200.0, 90.0]])
    )
    assert both.sum() == pytest.approx(1.0) and (both > 0).all()


def test_surprise_is_the_jensen_shannon_divergence():
    p, q = DEVICES / DEVICES.sum(1, keepdims=True)
    middle = (p + q) / 2
    by_hand = 0.5 * sum(x * np.log(x / m) for x, m in zip(p, middle, strict=True))
    by_hand += 0.5 * sum(x * np.log(x / m) for x, m in zip(q, middle, strict=True) if x > 0)
    assert adtributor.surprise(DEVICES).sum() == pytest.approx(by_hand)
    assert adtributor.surprise(np.array([[1.0, 3.0], [2.0, 6.0]])) == pytest.approx([0, 0])  # the same distribution


def test_adtributor_prefers_the_surprising_attribute():
    """Both attributes explain the fall; the one whose distribution changed is named, its dead values are."""
    codes = grid(2, 3)
    share = CENTRES[0] / CENTRES[0].sum()
    top = np.stack([np.outer(share, devices).reshape(-1) for devices in DEVICES])
    found = adtributor.candidates(Leaves(codes, top, np.ones_like(top)), ratio=False)
    assert found[0].elements == (Element((1,), (2,)), Element((1,), (1,)))
    assert found[0].explained == pytest.approx(0.98)
    assert found[1].elements == (Element((0,), (0,)),) and found[1].surprise == pytest.approx(0)


def test_adtributor_finds_one_attribute_only():
    codes = grid(3, 3, 4)
    assert adtributor.find(rates(codes, codes[:, 2] == 1, 0.5)) == Element((2,), (1,))
    both = adtributor.find(rates(codes, (codes[:, 0] == 1) & (codes[:, 2] == 1), 0.5))
    assert both is None or len(both.attributes) == 1


@pytest.mark.parametrize("find", [squeeze.find, riskloc.find])
@pytest.mark.parametrize("cause", [((2, 1),), ((0, 0),), ((0, 1), (2, 3)), ((1, 2), (2, 0))])
@pytest.mark.parametrize("drop", [0.4, 0.7])
def test_clear_slices_are_found(find, cause, drop):
    """On nearly noise-free data with a single cause, on which both papers report near perfect scores."""
    codes = grid(3, 3, 4)
    inside = np.all([codes[:, a] == v for a, v in cause], axis=0)
    found = find(rates(codes, inside, drop))
    assert found == Element(tuple(a for a, _ in cause), tuple(v for _, v in cause))


@pytest.mark.parametrize("find", [squeeze.find, riskloc.find])
def test_rises_are_found_too(find):
    codes = grid(3, 3, 4)
    assert find(rates(codes, codes[:, 1] == 2, -0.8)) == Element((1,), (2,))


def test_leaves_of_one_cause_share_their_deviation():
    """The generalised ripple effect: 2 (f - v)/(f + v) of a common factor x is 2 (1 - x)/(1 + x), whatever the size."""
    f = np.array([3.0, 50.0, 0.2])
    assert deviation(f, 0.5 * f) == pytest.approx(np.full(3, 2 / 3))
    assert deviation(np.zeros(2), np.array([0.0, 1.0])) == pytest.approx([0, -2])


def test_the_knee_keeps_what_matters():
    keep = squeeze.relevant(np.array([10.0, 0.1, 9.0, 0.1, 0.1, 0.1]))
    assert keep.tolist() == [True, False, True, False, False, False]
    assert not squeeze.relevant(np.zeros(3)).any()


def test_two_causes_are_two_clusters():
    """Squeeze and RiskLoc name both when two slices fall by different amounts."""
    codes = grid(4, 4, 4)
    leaves = rates(codes, codes[:, 0] == 1, 0.3)
    top = leaves.top.copy()
    top[1, codes[:, 1] == 2] *= 0.3
    both = Leaves(codes, top, leaves.bottom)
    assert {Element((0,), (1,)), Element((1,), (2,))} <= {
        e for cause in squeeze.localise(both, normal=squeeze.SLIGHT) for e in cause
    }
    assert set(riskloc.localise(both)) == {Element((0,), (1,)), Element((1,), (2,))}


def test_the_cut_mirrors_the_quiet_side():
    """Scores -0.1 to 0.1 are normal; the anomaly lies far above: everything beyond 0.1 is abnormal, outliers aside."""
    score = np.concatenate([np.linspace(-0.1, 0.1, 41), np.full(8, 0.9) + 0.001 * np.arange(8)])
    assert riskloc.cut(score) == pytest.approx(0.075)  # the sixth smallest
    assert riskloc.cut(-score) == pytest.approx(-0.075)


def test_risk_by_hand():
    """Two leaves fall alike, a normal third weighs 0.2: r1 = 2 (2/3) / (4/3 + 0.2 + 1), r2 = 0 for the two alone."""
    f, v = np.array([10.0, 20.0, 10.0]), np.array([5.0, 10.0, 10.0])
    score = deviation(f, v)
    abnormal = np.array([True, True, False])
    weight = np.array([2 / 3, 2 / 3, 0.2])
    alone = riskloc.risk(score, f, v, abnormal, weight, abnormal)
    assert alone == pytest.approx((4 / 3) / (4 / 3 + 1))
    together = riskloc.risk(score, f, v, abnormal, weight, np.ones(3, bool))
    a = f * 25 / 40
    assert together == pytest.approx((4 / 3) / (4 / 3 + 1.2) - np.abs(2 * (a - v) / (a + v)).sum() / (4 / 3))


def test_contribution_drills_only_where_one_part_carries_it():
    rows = [
        ("TOP_OF_SEARCH", None, None, None, -0.010),
        ("TOP_OF_SEARCH", None, None, "US", -0.009),
        (None, None, None, "US", -0.004),
    ]
    assert contribution.choose(rows, 0.8) == (("placement", "TOP_OF_SEARCH"), ("geo", "US"))
    assert contribution.choose(rows, 0.95) == (("placement", "TOP_OF_SEARCH"),)
    assert contribution.choose([("TOP_OF_SEARCH", None, None, None, 0.01)], 0.8) == ()
    both = (("placement", "TOP_OF_SEARCH"), ("geo", "US"))
    assert 0.5 <= contribution.fit([rows], [both]) <= 0.9 and contribution.fit([rows], [both[:1]]) > 0.9
