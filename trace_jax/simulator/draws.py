"""Random draws that are fast under vmap and safe at the edges (cases 19 and 20: no -1, NaN or overflow counts)."""

from __future__ import annotations

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
    z = jax.scipy.special.ndtri(u)
    root = jnp.sqrt(mean)
    quantile = mean + root * z + (z * z - 1.0) / 6.0 + (z - z**3) / (72.0 * root)
    # The expansion is that of a continuous variable whose floor after +1/2 is the count.
    return jnp.floor(jnp.maximum(quantile, 0.0) + 0.5)


def poisson(key: PRNGKeyArray, mean: Float[Array, ...]) -> Int[Array, ...]:
    """Poisson counts (int32). Means that are NaN or negative count as 0 and means above 1e9 as 1e9."""
    mean = jnp.clip(jnp.where(jnp.isfinite(mean), mean, jnp.where(mean > 0, MAX_MEAN, 0.0)), 0.0, MAX_MEAN)
    u = jax.random.uniform(key, mean.shape, jnp.float32, minval=1e-7, maxval=1.0 - 1e-7)
    small = _poisson_small(u, jnp.minimum(mean, SMALL_MEAN))
    large = _poisson_large(u, jnp.maximum(mean, SMALL_MEAN))
    return jnp.where(mean < SMALL_MEAN, small, large).astype(jnp.int32)


def gamma(key: PRNGKeyArray, shape: Float[Array, ...], tries: int = 4) -> Float[Array, ...]:
    """Gamma(shape, 1) by Marsaglia and Tsang's method with a fixed number of tries (no data-dependent loop).

    A try is accepted with probability above 0.95, so after four the proposal is kept unaccepted in fewer than 1e-5
    of draws. Shapes below one use the boost gamma(a) = gamma(a + 1) * U^(1/a).
    """
    boost = shape < 1.0
    a = jnp.where(boost, shape + 1.0, shape)
    d = a - 1.0 / 3.0
    c = 1.0 / jnp.sqrt(9.0 * d)
    normal_key, uniform_key, boost_key = jax.random.split(key, 3)
    z = jax.random.normal(normal_key, (tries, *shape.shape), jnp.float32)
    u = jax.random.uniform(uniform_key, (tries, *shape.shape), jnp.float32, minval=1e-7)
    v = (1.0 + c * z) ** 3
    safe = jnp.maximum(v, 1e-12)
    ok = (v > 0) & (jnp.log(u) < 0.5 * z * z + d - d * v + d * jnp.log(safe))
    first = jnp.argmax(ok, axis=0)
    draw = d * jnp.take_along_axis(safe, first[None], axis=0)[0]
    lift = jax.random.uniform(boost_key, shape.shape, jnp.float32, minval=1e-7) ** (1.0 / jnp.maximum(shape, 1e-3))
    return jnp.where(boost, draw * lift, draw)


def lognormal(key: PRNGKeyArray, cv: Float[Array, ""], shape: tuple[int, ...]) -> Float[Array, ...]:
    """Multiplicative noise with mean one and coefficient of variation `cv`."""
    variance = jnp.log1p(cv * cv)
    return jnp.exp(jnp.sqrt(variance) * jax.random.normal(key, shape, jnp.float32) - variance / 2)


def between(key: PRNGKeyArray, limits: tuple[float, float], shape: tuple[int, ...] = ()) -> Float[Array, ...]:
    """Uniform in [limits[0], limits[1]]."""
    low, high = limits
    return low + (high - low) * jax.random.uniform(key, shape, jnp.float32)


def integer_between(key: PRNGKeyArray, limits: tuple[int, int]) -> Int[Array, ""]:
    """Uniform integer in [limits[0], limits[1]], both ends included."""
    return jax.random.randint(key, (), limits[0], limits[1] + 1)
