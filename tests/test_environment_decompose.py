"""Mix and rate parts of a change, against hand-made numbers and properties that define them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.environments.ads.decompose import contributions, decompose, deviation, per_day, windows

IMPRESSIONS = 1000.0


def two_segments(shares, rates):
    """Sums of two windows from shares [2 windows, segments] and rates likewise."""
    impressions = np.array(shares) * IMPRESSIONS
    clicks = impressions * np.array(rates)
    return decompose((clicks[0], clicks[1]), (impressions[0], impressions[1]))


def test_pure_mix_is_all_mix():
    """Case 1 of data: shares (.5, .5) -> (.8, .2) at rates .01, .05 is 3.0 % -> 1.8 %, all of it mix."""
    found = two_segments([(0.5, 0.5), (0.8, 0.2)], [(0.01, 0.05)] * 2)
    assert found.before == pytest.approx(0.030, abs=1e-12) and found.after == pytest.approx(0.018, abs=1e-12)
    assert found.mix_share == pytest.approx(1.0, abs=1e-9)
    assert found.mix.sum() == pytest.approx(-0.012, abs=1e-9) and np.abs(found.rate).max() < 1e-9


def test_pure_rate_is_all_rate():
    """Case 1 of data, the mirror: fixed shares, one rate 40 % down."""
    found = two_segments([(0.5, 0.5)] * 2, [(0.01, 0.05), (0.01, 0.03)])
    assert found.mix_share == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(found.rate, [0.0, -0.01], atol=1e-12)


def test_mixed_parts_sum_to_the_total_and_reverse_with_the_windows():
    """Case 1 of data, mixed: parts by hand, exact sum, and the change back is the change with its sign turned."""
    shares, rates = [(0.5, 0.5), (0.8, 0.2)], [(0.01, 0.05), (0.02, 0.04)]
    found, back = two_segments(shares, rates), two_segments(shares[::-1], rates[::-1])
    np.testing.assert_allclose(found.rate, [0.65 * 0.01, 0.35 * -0.01], atol=1e-12)
    middle = (0.030 + 0.024) / 2
    np.testing.assert_allclose(found.mix, [0.3 * (0.015 - middle), -0.3 * (0.045 - middle)], atol=1e-12)
    assert found.mix.sum() + found.rate.sum() == pytest.approx(0.024 - 0.030, abs=1e-9)
    np.testing.assert_allclose(found.mix, -back.mix, atol=1e-12)
    np.testing.assert_allclose(found.rate, -back.rate, atol=1e-12)


def test_simpson_and_ratio_of_sums():
    """Case 2 of data: every rate 10 % up, the whole down; and rows 1/10, 10/1000 are .0109, not the mean .055."""
    found = two_segments([(0.5, 0.5), (0.8, 0.2)], [(0.01, 0.05), (0.011, 0.055)])
    assert found.total < 0 < found.rate.min() and found.mix.sum() < found.total
    once = decompose((np.array([1, 10]),) * 2, (np.array([10, 1000]),) * 2)
    assert round(once.before, 4) == 0.0109 and once.before < 0.055 / 4


def test_zero_total_has_parts_and_a_warning_but_no_shares():
    """Case 4 of data: offsetting changes; absolute units, a warning, nothing divided by zero."""
    found = two_segments([(0.5, 0.5)] * 2, [(0.01, 0.05), (0.02, 0.04)])
    assert abs(found.total) < 1e-15 and found.mix_share is None and "did not change" in found.warning
    np.testing.assert_allclose(found.rate, [0.005, -0.005], atol=1e-12)
    change, warning = contributions(np.array([100.0, 50.0]), np.array([130.0, 20.0]))
    np.testing.assert_array_equal(change, [30.0, -30.0])
    assert "did not change" in warning
    assert contributions(np.array([100.0, 50.0]), np.array([130.0, 30.0]))[1] == ""


def test_windows_of_unequal_length():
    """Case 5 of data: 30 days against 7 in which nothing happens is no change, though the sums differ by 77 %; the
    onset day is in one window only; a missing day is no day."""
    daily = np.full((37, 2), 400.0)
    before, after = windows(37, 30)
    assert (before ^ after).all() and after[30] and not before[30] and before.sum() == 30
    assert 1 - daily[after].sum() / daily[before].sum() == pytest.approx(0.77, abs=0.005)
    change, warning = contributions(per_day(daily, before), per_day(daily, after))
    np.testing.assert_array_equal(change, [0.0, 0.0])
    assert warning
    found = decompose(*[(x[before].sum(0), x[after].sum(0)) for x in (daily * 0.02, daily)])
    assert found.total == pytest.approx(0.0, abs=1e-15)
    present = np.arange(37) != 33
    np.testing.assert_allclose(per_day(daily * present[:, None], after, present), [400.0, 400.0])


def test_empty_leaves_change_nothing():
    """Case 6 of data: finite scores with a zero on either side, no leaf dropped, all-zero leaves without effect."""
    np.testing.assert_array_equal(deviation(np.array([5, 0, 0, 3]), np.array([0, 4, 0, 3])), [1.0, -1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="expected"):
        deviation(np.array([1.0]), np.array([np.nan]))
    n, d = (np.array([3.0, 0, 5]), np.array([4.0, 2, 0])), (np.array([100.0, 0, 90]), np.array([120.0, 30, 0]))
    plain, padded = decompose(n, d), decompose(*(tuple(np.r_[x, 0.0, 0.0] for x in pair) for pair in (n, d)))
    np.testing.assert_array_equal(padded.mix, [*plain.mix, 0.0, 0.0])
    np.testing.assert_array_equal(padded.rate, [*plain.rate, 0.0, 0.0])
    # A leaf that appears or disappears is mix, and there.
    assert plain.rate[1] == plain.rate[2] == 0.0 and plain.mix[1] > 0 > plain.mix[2]


def test_zero_denominators_are_finite():
    """Case 11 of data: 1/0 and 0/0 in a segment, and in a whole window."""
    found = decompose((np.array([0.0, 9]), np.array([1.0, 8])), (np.array([0.0, 90]), np.array([0.0, 80])))
    assert np.isfinite([*found.mix, *found.rate]).all() and "without a denominator" in found.warning
    assert found.mix.sum() + found.rate.sum() == pytest.approx(9 / 80 - 9 / 90, abs=1e-9)
    empty = decompose((np.zeros(2), np.ones(2)), (np.zeros(2), np.ones(2)))
    assert empty.before is None and empty.after == 1.0 and empty.total == 0.0 and "before" in empty.warning
    assert not empty.mix.any() and empty.mix_share is None


def test_what_is_no_count_is_refused():
    with pytest.raises(ValueError, match="not negative"):
        decompose((np.array([-1.0]), np.array([1.0])), (np.ones(1), np.ones(1)))


counts = st.lists(
    st.tuples(*[st.integers(0, 10**9)] * 2, *[st.floats(0, 1)] * 2),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(counts)
def test_parts_sum_to_the_total(rows):
    """Case 1 of data as a property: whatever the shares and rates, mix + rate is the change within 1e-9, and pure mix
    (rates alike in both windows) has no rate part."""
    d1, d2, r1, r2 = (np.array(x, float) for x in zip(*rows, strict=True))
    found = decompose((d1 * r1, d2 * r2), (d1, d2))
    if d1.sum() and d2.sum():
        expected = (d2 * r2).sum() / d2.sum() - (d1 * r1).sum() / d1.sum()
        assert found.total == pytest.approx(expected, abs=1e-12)
    assert found.mix.sum() + found.rate.sum() == pytest.approx(found.total, abs=1e-9)
    assert np.abs(decompose((d1 * r1, d2 * r1), (d1, d2)).rate).max() < 1e-12
