"""Random draws against closed forms and at the edges."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.simulator import draws


def _poisson_cdf(mean: float, upto: int) -> np.ndarray:
    k = np.arange(upto + 1)
    return np.cumsum(np.exp(k * math.log(mean) - mean - np.array([math.lgamma(i + 1) for i in k])))


@pytest.mark.parametrize("mean", [0.05, 0.7, 4.0, 11.9, 12.1, 40.0, 900.0])
def test_poisson_matches_the_exact_distribution(mean):
    n = 200_000
    u = jax.random.uniform(jax.random.key(0), (n,), minval=1e-7, maxval=1 - 1e-7)
    x = np.asarray(draws.poisson(u, jnp.full(n, mean)))
    exact = _poisson_cdf(mean, int(mean + 12 * math.sqrt(mean) + 12))
    empirical = np.searchsorted(np.sort(x), np.arange(len(exact)), side="right") / n
    # Kolmogorov distance: sampling noise is about 1.36 / sqrt(n) = 0.003.
    assert np.abs(empirical - exact).max() < 0.006
    assert abs(x.mean() - mean) < 5 * math.sqrt(mean / n)
    assert x.var() == pytest.approx(mean, rel=0.03)


def test_poisson_edges():
    """Case 19 of data: no -1, no NaN, no overflow, whatever the mean."""
    means = jnp.array([-3.0, 0.0, 1e-30, jnp.nan, -jnp.inf, jnp.inf, 3e9, 1e10])
    for u in (1e-7, 0.5, 1 - 1e-7):
        x = np.asarray(draws.poisson(jnp.full(means.shape, u), means))
        assert (x >= 0).all()
        assert (x[:5] == 0).all()
        assert (np.abs(x[5:] / 1e9 - 1) < 1e-3).all()


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 1e6), st.floats(1e-6, 1 - 1e-6), st.floats(1e-6, 1 - 1e-6))
def test_poisson_is_monotone_in_the_uniform(mean, a, b):
    low, high = draws.poisson(jnp.array(sorted((a, b)), jnp.float32), jnp.full(2, mean, jnp.float32))
    assert low <= high


@pytest.mark.parametrize("shape", [0.3, 1.0, 5.0, 60.0])
def test_gamma_moments(shape):
    n = 100_000
    tape = draws.Tape(jax.random.key(1), 6 * n, 5 * n)
    x = np.asarray(draws.gamma(tape, jnp.full(n, shape)), np.float64)
    assert x.mean() == pytest.approx(shape, abs=5 * math.sqrt(shape / n))
    assert x.var() == pytest.approx(shape, rel=0.06)
    third = ((x - x.mean()) ** 3).mean() / x.std() ** 3
    assert third == pytest.approx(2 / math.sqrt(shape), rel=0.15, abs=0.05)


def test_tape_refuses_to_reuse_numbers():
    tape = draws.Tape(jax.random.key(0), 4, 2)
    first, second = tape.uniform((2,)), tape.uniform((2,))
    assert not np.isin(first, second).any()
    with pytest.raises(AssertionError, match="too short"):
        tape.uniform()


def test_integers_cover_both_ends():
    x = np.asarray(draws.Tape(jax.random.key(2), 4000, 0).integer(2, 4, (4000,)))
    assert set(x) == {2, 3, 4}
    assert np.bincount(x)[2:].min() > 1200
