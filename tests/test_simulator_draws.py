"""Random draws against closed forms, on grids of the uniform rather than by sampling, and at the edges."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError
from trace_jax.simulator import draws

GRID = np.asarray(draws.unit_uniform(jnp.arange(0, 2**32, 2**12, dtype=jnp.uint32)))[::4]  # 262,144 steps of 2^-18
_erf = np.vectorize(math.erf)


def _normal_cdf(z):
    return 0.5 + 0.5 * _erf(np.asarray(z) / math.sqrt(2))


def _poisson_cdf(mean: float) -> tuple[int, np.ndarray]:
    """The first count with noticeable mass, and P(X <= k) from there on (float64 sums of lgamma terms)."""
    spread = 9 * math.sqrt(mean) + 30
    first, last = max(0, int(mean - spread)), int(mean + spread)
    terms = [math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(first, last + 1)]
    return first, np.cumsum(terms)


@pytest.mark.parametrize(
    "mean", [0.05, 0.7, 2.4, 3.9999, 4.0001, 4.6, 6.0, 11.0, 19.0, 21.0, 30.0, 300.0, 2500.0, 1e4, 1e5]
)
def test_poisson_distance_to_the_exact_distribution(mean):
    mean = float(np.float32(mean))
    x = np.asarray(draws.poisson(jnp.asarray(GRID), jnp.full(GRID.shape, mean, jnp.float32)))
    assert (np.diff(x) >= 0).all()
    first, exact = _poisson_cdf(mean)
    ours = np.searchsorted(x, np.arange(first, first + len(exact)), side="right") / len(x)
    bound = 2e-6 if mean < draws.SMALL_MEAN else 8e-5 if mean < 20 else 5e-5
    # The uniform's grid resolves a CDF to 1/len.
    assert np.abs(ours - exact).max() < bound + 1 / len(x)
    centred = x.astype(float) - x.mean()
    assert x.mean() == pytest.approx(mean, abs=5e-4 * math.sqrt(mean))
    assert (centred**2).mean() == pytest.approx(mean, rel=2e-3)
    # Third moment over sd^3, which is 1 / sqrt(mean); the grid leaves out tails beyond 2^-19.
    assert (centred**3).mean() / mean**1.5 == pytest.approx(1 / math.sqrt(mean), rel=0.02, abs=5e-4)


@pytest.mark.parametrize("mean", [1e6, 3e7, 1e9])
def test_large_poisson_counts_are_resolved_to_one(mean):
    """Case 23 of data: counts in float32 would be rounded to multiples of 64 near 1e9."""
    x = np.asarray(draws.poisson(jnp.asarray(GRID), jnp.full(GRID.shape, mean, jnp.float32)), np.int64)
    assert (np.diff(x) >= 0).all()
    z = (x - mean) / math.sqrt(mean)
    skew = (z * z - 1) / (6 * math.sqrt(mean))
    assert np.abs(_normal_cdf(z - skew)[::64] - GRID[::64]).max() < 3e-4  # half a count, 1 / sqrt(8 pi mean), at 1e6
    assert len(np.unique(x % 64)) == 64


def test_poisson_edges():
    """Case 19 of data: no -1, no NaN, no overflow, whatever the mean."""
    means = jnp.array([-3.0, 0.0, 1e-30, jnp.nan, -jnp.inf, jnp.inf, 3e9, 1e10])
    for u in (2**-24, 1e-7, 0.5, 1 - 1e-7, 1 - 2**-24):
        x = np.asarray(draws.poisson(jnp.full(means.shape, u), means))
        assert (x >= 0).all()
        assert (x[:5] == 0).all()
        assert (np.abs(x[5:] / 1e9 - 1) < 1e-3).all()
    small = jnp.geomspace(1e-6, 1e-2, 500)
    assert np.asarray(draws.poisson(jnp.full(500, 1 - 2**-24), small)).max() <= 4  # rounding never runs off the sum


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 1e6), st.floats(1e-6, 1 - 1e-6), st.floats(1e-6, 1 - 1e-6))
def test_poisson_is_monotone_in_the_uniform(mean, a, b):
    low, high = draws.poisson(jnp.array(sorted((a, b)), jnp.float32), jnp.full(2, mean, jnp.float32))
    assert low <= high


def test_normal_quantile():
    u = np.concatenate([GRID, [2**-24, 1e-7, 1 - 1e-7, 1 - 2**-24]]).astype(np.float32)
    z = np.asarray(draws.normal_quantile(jnp.asarray(u)), np.float64)
    # |error in z| < 2e-5, tails included: the exact CDF of z -+ 2e-5 brackets u.
    lower, upper = [np.array([math.erfc(-(v + d) / math.sqrt(2)) / 2 for v in z]) for d in (-2e-5, 2e-5)]
    assert (lower < u).all() and (u < upper).all()
    assert (np.diff(z[: len(GRID)]) > 0).all()


class _Grid:
    """A tape that hands out what it is given."""

    def __init__(self, normals, uniforms):
        self.normal, self.uniform = (lambda shape: normals), (lambda shape: uniforms)


def _gamma_quantiles(shape: float, probabilities: np.ndarray) -> np.ndarray:
    """Exact log quantiles: the density of y = log x, exp(a y - e^y) / Gamma(a), integrated by trapezoids in float64."""
    upper = math.log(shape + 12 * math.sqrt(shape) + 40)
    lower = -30 / shape - 5 if shape < 2 else math.log(shape) - 15 / math.sqrt(shape)
    y = np.linspace(lower, upper, 400_001)
    density = np.exp(shape * y - np.exp(y) - math.lgamma(shape))
    cdf = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2) * (y[1] - y[0])])
    assert cdf[-1] == pytest.approx(1, abs=1e-6)
    return np.interp(probabilities, cdf, y)


@pytest.mark.parametrize("shape", [0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 12.0, 60.0, 1000.0])
def test_gamma_distance_to_the_exact_distribution(shape):
    z = np.linspace(-5.2, 5.2, 801)
    v = (np.arange(400) + 0.5) / 400
    u, weight = v**4, 4 * v**3 / 400  # dense at small uniforms, where a small shape's boost varies fast
    normals, uniforms = (jnp.asarray(x, jnp.float32) for x in np.meshgrid(z, u))
    x = np.asarray(draws.gamma(_Grid(normals, uniforms), jnp.full(normals.shape, shape)), np.float64)
    assert (np.diff(x, axis=1) >= 0).all()
    wanted = np.linspace(0.002, 0.998, 200)
    limits = np.exp(_gamma_quantiles(shape, wanted))
    ours = sum(w * _normal_cdf(np.interp(limits, row, z)) for w, row in zip(weight, x, strict=True))
    assert np.abs(ours - wanted).max() < 3e-4


@pytest.mark.parametrize("shape", [0.3, 1.0, 5.0, 60.0])
def test_gamma_moments(shape):
    n = 100_000
    x = np.asarray(draws.gamma(draws.Tape(jax.random.key(1), n, n), jnp.full(n, shape)), np.float64)
    assert x.mean() == pytest.approx(shape, abs=5 * math.sqrt(shape / n))
    assert x.var() == pytest.approx(shape, rel=0.06)
    third = ((x - x.mean()) ** 3).mean() / x.std() ** 3
    assert third == pytest.approx(2 / math.sqrt(shape), rel=0.15, abs=0.05)


def test_gamma_edges():
    """Case 19 of data: finite and not negative, whatever the shape."""
    shapes = jnp.array([-1.0, 0.0, 1e-30, jnp.nan, 1e-3, 1e9, jnp.inf])
    for z, u in ((-6.0, 2**-24), (6.0, 1 - 2**-24)):
        x = np.asarray(draws.gamma(_Grid(jnp.full(7, z), jnp.full(7, u)), shapes))
        assert np.isfinite(x).all() and (x >= 0).all()


def test_rounds_against_jax_and_random123():
    """That proves the rounds and the key schedule; thirteen rounds stop earlier in the same code. For these there is
    the known answer of Random123 (counter 0, key 0), whose halves are joined by xor here."""
    zero = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
    assert int(draws.random_bits(zero, 1, 13)[0]) == 0x9D1C5EC6 ^ 0x8BD50731
    for seed in (0, 7, 2**40 + 3):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), seed % 1000)
        with jax.threefry_partitionable(True):
            theirs = jax.random.bits(key, (1001,))
        assert (draws.random_bits(key, 1001) == theirs).all()
        assert (draws.random_bits(key, 501, start=500) == theirs[500:]).all()


@pytest.mark.parametrize("rng", draws.RNGS)
def test_uniforms_are_uniform_and_uncorrelated(rng):
    """Case 22 of data: neither neighbours in a tape nor tapes of neighbouring keys are correlated."""
    n = 1_000_000
    keys = [jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), i) for i in range(3)]
    bits = [np.asarray(draws.random_bits(key, n, draws.RNG_ROUNDS[rng])) for key in keys]
    x = [np.asarray(draws.unit_uniform(jnp.asarray(b)), np.float64) for b in bits]
    # Chi-square of k cells is k - 1 +- sqrt(2 k); five standard deviations.
    counts = np.bincount((x[0] * 1000).astype(int), minlength=1000)
    assert abs(((counts - n / 1000) ** 2 / (n / 1000)).sum() - 999) < 5 * math.sqrt(2000)
    pairs = np.bincount((x[0][:-1] * 32).astype(int) * 32 + (x[0][1:] * 32).astype(int), minlength=1024)
    assert abs(((pairs - n / 1024) ** 2 / (n / 1024)).sum() - 1023) < 5 * math.sqrt(2048)
    for a, b in ((x[0][:-1], x[0][1:]), (x[0][:-48], x[0][48:]), (x[0], x[1]), (x[1], x[2]), (x[0], x[2])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(n)
    for bit in range(32):  # each bit is set half the time and says nothing about the next word's
        one = (bits[0] >> bit) & 1
        assert abs(one.mean() - 0.5) < 2.5 / math.sqrt(n)
        assert abs((one[1:] == one[:-1]).mean() - 0.5) < 2.5 / math.sqrt(n)


def test_uniforms_never_reach_the_ends():
    """Case 19 of data: a uniform of 0 or 1 would become an infinite normal."""
    ends = np.asarray(draws.unit_uniform(jnp.array([0, 2**32 - 1], jnp.uint32)))
    assert ends.tolist() == [2**-24, 1 - 2**-24]


@pytest.mark.parametrize("rng", draws.RNGS)
def test_a_row_of_a_vmap_is_the_single_tape(rng):
    """Case 21 of data: the numbers of an episode do not depend on its batch."""

    def numbers(key):
        tape = draws.Tape(key, 701, 300, rng)
        return tape.uniform((701,)), tape.normal((300,))

    keys = jax.random.split(jax.random.key(5, impl="threefry2x32"), 7)
    batched = jax.jit(jax.vmap(numbers))(keys)
    for i in (0, 3, 6):
        uniforms, normals = numbers(keys[i])
        assert (uniforms == batched[0][i]).all()
        np.testing.assert_allclose(normals, batched[1][i], atol=2e-6)  # two programs may round differently
    assert not np.isin(draws.normal_quantile(batched[0][0]), batched[1][0]).any()


def test_generators_that_cannot_replay_are_refused():
    """Case 21 of data: what the refusal says about rbg is so, and keys and names of it are refused."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 4)
    rows = jax.vmap(lambda key: jax.random.uniform(key, (8,)))(keys)
    assert not (rows[2] == jax.random.uniform(keys[2], (8,))).all()
    threefry = jax.random.key(0, impl="threefry2x32")
    for key, name in ((threefry, "rbg"), (threefry, "unsafe_rbg"), (threefry, "mersenne"), (keys[0], draws.RNGS[0])):
        with pytest.raises(ConfigError, match="rbg draw differ from the single draw; use one of threefry2x32"):
            draws.Tape(key, 4, 4, name)


def test_halves_cover_every_size():
    for n in (0, 1, 255, 256, 257, 4033):
        got = np.asarray(draws._by_halves(lambda start, length: start + jnp.arange(length), n, jnp.int32))
        assert (got == np.arange(n)).all()


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
