"""Random draws that are fast under vmap and safe at the edges (cases 19 and 20: no -1, NaN or overflow counts)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

SMALL_MEAN = 12.0  # below: exact inverse CDF; above: Cornish-Fisher quantile
_STEPS = 36  # P(Poisson(12) > 36) < 1e-8, under the resolution of a float32 uniform
MAX_MEAN = 1e9


def _poisson_small(u: Array, mean: Array) -> Array:
    """Inverse CDF by forward summation; exact to float32 rounding for mean <= SMALL_MEAN."""

    def step(carry, k):
        pmf, cdf, count = carry
        count = count + (u > cdf)
        pmf = pmf * mean / k
        return (pmf, cdf + pmf, count), None

    pmf = jnp.exp(-mean)
    start = (pmf, pmf, jnp.zeros_like(mean))
    (_, _, count), _ = jax.lax.scan(step, start, jnp.arange(1, _STEPS + 1, dtype=mean.dtype), unroll=4)
    return count


def _poisson_large(u: Array, mean: Array) -> Array:
    """Third-order Cornish-Fisher expansion of the Poisson quantile; CDF error below 1e-3 for mean >= SMALL_MEAN."""
    z = jnp.sqrt(2.0) * jax.lax.erf_inv(2.0 * u - 1.0)
    root = jnp.sqrt(mean)
    quantile = mean + root * z + (z * z - 1.0) / 6.0 + (z - z**3) / (72.0 * root)
    # The expansion is that of a continuous variable whose floor after +1/2 is the count.
    return jnp.floor(jnp.maximum(quantile, 0.0) + 0.5)


class Tape:
    """All random numbers of one episode, drawn at once from one key and handed out in order while tracing.

    One counter-mode draw instead of a hundred small ones keeps the compiled program small (threefry is unrolled at
    every call site) and its elements are as independent as those of separate keys. `size` is static; running over the
    end is an error at trace time, never a reused number.
    """

    def __init__(self, key: PRNGKeyArray, uniforms: int, normals: int):
        raw = jax.random.uniform(key, (uniforms + normals,), jnp.float32, minval=1e-7, maxval=1.0 - 1e-7)
        self._uniforms = raw[:uniforms]
        self._normals = jnp.sqrt(2.0) * jax.lax.erf_inv(2.0 * raw[uniforms:] - 1.0)
        self._used = [0, 0]

    def _take(self, which: int, shape: tuple[int, ...]) -> Array:
        pool, start, count = (self._uniforms, self._normals)[which], self._used[which], math.prod(shape)
        if start + count > pool.size:
            raise AssertionError(f"tape of {pool.size} numbers is too short: {start + count} wanted")
        self._used[which] += count
        return pool[start : start + count].reshape(shape)

    def uniform(self, shape: tuple[int, ...] = ()) -> Float[Array, ...]:
        """Uniform in (0, 1)."""
        return self._take(0, shape)

    def normal(self, shape: tuple[int, ...] = ()) -> Float[Array, ...]:
        """Standard normal."""
        return self._take(1, shape)

    def between(self, limits: tuple[float, float], shape: tuple[int, ...] = ()) -> Float[Array, ...]:
        """Uniform in (limits[0], limits[1])."""
        return limits[0] + (limits[1] - limits[0]) * self.uniform(shape)

    def integer(self, low: int, high: int, shape: tuple[int, ...] = ()) -> Int[Array, ...]:
        """Uniform integer in [low, high]."""
        return low + jnp.minimum(jnp.floor(self.uniform(shape) * (high - low + 1)), high - low).astype(jnp.int32)

    def gumbel(self, shape: tuple[int, ...] = ()) -> Float[Array, ...]:
        """Standard Gumbel; the argmax of log-weights plus these is a categorical draw."""
        return -jnp.log(-jnp.log(self.uniform(shape)))

    def lognormal(self, cv: Float[Array, ""], shape: tuple[int, ...]) -> Float[Array, ...]:
        """Multiplicative noise with mean one and coefficient of variation `cv`."""
        variance = jnp.log1p(cv * cv)
        return jnp.exp(jnp.sqrt(variance) * self.normal(shape) - variance / 2)


def poisson(u: Float[Array, ...], mean: Float[Array, ...]) -> Int[Array, ...]:
    """Poisson counts (int32) from uniforms. Means that are NaN or negative count as 0, means above 1e9 as 1e9."""
    mean = jnp.clip(jnp.where(jnp.isfinite(mean), mean, jnp.where(mean > 0, MAX_MEAN, 0.0)), 0.0, MAX_MEAN)
    small = _poisson_small(u, jnp.minimum(mean, SMALL_MEAN))
    large = _poisson_large(u, jnp.maximum(mean, SMALL_MEAN))
    return jnp.where(mean < SMALL_MEAN, small, large).astype(jnp.int32)


def gamma(tape: Tape, shape: Float[Array, ...], tries: int = 4) -> Float[Array, ...]:
    """Gamma(shape, 1) by Marsaglia and Tsang's method with a fixed number of tries (no data-dependent loop).

    A try is accepted with probability above 0.95, so after four the first proposal is kept unaccepted in fewer than
    1e-5 of draws. Shapes below one use the boost gamma(a) = gamma(a + 1) * U^(1/a).
    """
    boost = shape < 1.0
    a = jnp.where(boost, shape + 1.0, shape)
    d = a - 1.0 / 3.0
    c = 1.0 / jnp.sqrt(9.0 * d)
    z, u = tape.normal((tries, *shape.shape)), tape.uniform((tries, *shape.shape))
    v = (1.0 + c * z) ** 3
    safe = jnp.maximum(v, 1e-12)
    ok = (v > 0) & (jnp.log(u) < 0.5 * z * z + d - d * v + d * jnp.log(safe))
    draw = safe[0]
    for i in reversed(range(tries)):
        draw = jnp.where(ok[i], safe[i], draw)
    lift = tape.uniform(shape.shape) ** (1.0 / jnp.maximum(shape, 1e-3))
    return jnp.where(boost, d * draw * lift, d * draw)
