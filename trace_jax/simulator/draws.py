"""Random draws that are exact at small counts, cheap at large ones and safe at the edges (cases 19 and 20 of data).

Every sampler is a function of one or two uniforms with a fixed number of additions and multiplications: no loop whose
length depends on the data, no table look-up, nothing that a vmap would serialise. Errors are Kolmogorov distances to
the exact distribution, tested on grids of the uniform; `docs/notes/sampling.md` has the derivations and the speeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from trace_jax.config import ConfigError

RNG_ROUNDS = {"threefry2x32": 20, "threefry2x32_13": 13}
RNGS = tuple(RNG_ROUNDS)

SMALL_MEAN = 4.0  # below: exact inverse CDF; from here on: the asymptotic quantile
MAX_MEAN = 1e9
MIN_SHAPE, MAX_SHAPE = 1e-3, 1e9
_SMALL_STEPS = 17  # P(Poisson(4) > 17) < 3e-7, what _SLACK cuts off anyway
_SLACK = 5e-7  # float32 sums of the CDF may stop this short of one; a uniform above must not run to the last step

# Polynomials fitted in float64 with NumPy (weighted least squares, reweighted towards minimax); lowest order first.
_LOG2 = (0.44254494, -0.2756003, 0.18194884, -0.0959564, 0.02584142)
_QUANTILE = (7.52768753, 3.99067619, -0.9153112, 0.35142743, -0.10061481, -0.01532173, 0.1044646, -0.21309564,
             0.1350766, 0.06288563, -0.06804352)  # fmt: skip
_QUANTILE_CENTRE = 8.0
_POISSON_CURVE = (1.0 / 6.0, -0.0156236, 0.00543551)
_POISSON_SHIFT = (1.0 / 3.0, -0.02315671, 0.00153795)
_POISSON_INVERSE = -0.01821056
_GAMMA_CUBIC = (-0.00152158556, 0.012743588, -0.00276749902, -0.0022126346)
_GAMMA_QUARTIC = (-0.00272747335, -0.00615904647, 0.00896046258, -0.00315873413, 0.000646860201)
_GAMMA_LOWEST = -3.4  # z e at which the cube root stops falling: P < 4e-4 for shapes near 0, below 1e-6 from shape 1

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_SMALLEST_LOOP = 256  # values; fewer are not worth a loop


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    value = jnp.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        value = value * x + c
    return value


def _by_halves(function: Callable[..., Array], size: int, dtype: jnp.dtype) -> Array:
    """The `size` values that `function(start, length)` computes for [start, start + length), computed in two halves.

    The loop is there for its border. XLA fuses whatever it can on CPUs, and a sampler that ends up inside its consumers
    is computed once for each of them, or, where a concatenation or two slices meet, one element at a time: simulating
    an episode took more than twice as long without. Halves of an odd size overlap by one value, computed twice alike.
    """
    if size < _SMALLEST_LOOP:
        return function(0, size)
    half = -(-size // 2)

    def body(i: Array, values: Array) -> Array:
        start = i * (size - half)
        return jax.lax.dynamic_update_slice(values, function(start, half), (start,))

    return jax.lax.fori_loop(0, 2, body, jnp.zeros(size, dtype))


def _elementwise(function: Callable[..., Array], dtype: jnp.dtype, *arguments: Array) -> Array:
    """`function` of arrays of one shape, through `_by_halves`."""
    arguments = jnp.broadcast_arrays(*arguments)
    flat = [x.reshape(-1) for x in arguments]

    def part(start: int | Array, length: int) -> Array:
        return function(*(jax.lax.dynamic_slice(x, (start,), (length,)) for x in flat))

    return _by_halves(part, flat[0].size, dtype).reshape(arguments[0].shape)


def random_bits(key: PRNGKeyArray, count: int, rounds: int = 20, start: int | Array = 0) -> UInt32[Array, " count"]:
    """Words `start` to `start + count` of Threefry-2x32 in counter mode (Salmon et al. 2011, SC'11).

    Word i is the xor of both halves of block (0, i); with 20 rounds these are the bits of `jax.random.bits(key, (n,))`.
    The rounds are unrolled here, which XLA compiles into one vector loop; `jax.random` rolls them on CPUs to compile
    small programs sooner. Word i depends on (key, i) alone, so a row of a vmap is the single call.
    """
    k0, k1 = jax.random.key_data(key)
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(_PARITY))
    x1 = jax.lax.iota(jnp.uint32, count) + jnp.asarray(start).astype(jnp.uint32)
    x0 = jnp.zeros_like(x1) + k0
    x1 = x1 + k1
    for i in range(rounds):
        turn = _ROTATIONS[(i // 4) % 2][i % 4]
        x0 = x0 + x1
        x1 = ((x1 << turn) | (x1 >> (32 - turn))) ^ x0
        if i % 4 == 3:
            group = i // 4 + 1
            x0 = x0 + schedule[group % 3]
            x1 = x1 + schedule[(group + 1) % 3] + np.uint32(group)
    return x0 ^ x1


def unit_uniform(bits: UInt32[Array, ...]) -> Float[Array, ...]:
    """The float32 (k + 1/2) / 2^23 of the upper 23 bits k: symmetric about 1/2, in [2^-24, 1 - 2^-24], exact."""
    near_one = jax.lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32)
    return near_one - np.float32(1 - 2**-24)


def _log2(x: Float[Array, ...]) -> Float[Array, ...]:
    """log2 of a positive normal float32; absolute error below 3e-6, and none at powers of two (so it is monotone)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23).astype(jnp.float32) - 127.0
    m = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32) - 1.0
    return exponent + m * (1.0 + (1.0 - m) * _horner(_LOG2, m))


def normal_quantile(u: Float[Array, ...]) -> Float[Array, ...]:
    """Standard normal quantile; absolute error below 2e-5 for u in [2^-24, 1 - 2^-24].

    Odd in u - 1/2, so z = (u - 1/2) H(t) with t = -log(4 u (1 - u)); H is smooth on all of t in [0, 15.3] and a
    polynomial of degree 10 there. One logarithm, no branch between centre and tails.
    """
    t = jnp.minimum(-math.log(2.0) * _log2(4.0 * u * (1.0 - u)), 15.3)
    return (u - 0.5) * _horner(_QUANTILE, (t - _QUANTILE_CENTRE) * (1.0 / _QUANTILE_CENTRE))


class Tape:
    """All random numbers of one episode, drawn at once from one key and handed out in order while tracing.

    One counter-mode draw instead of a hundred small ones keeps the compiled program small (threefry is unrolled at
    every call site) and its elements are as independent as those of separate keys. `uniforms` and `normals` are static;
    running over the end is an error at trace time, never a reused number.

    Args:
        key: a typed threefry key.
        rng: one of `RNGS`: "threefry2x32" (20 rounds, the bits of `jax.random`) or "threefry2x32_13" (13 rounds, the
            fewest that pass BigCrush according to Salmon et al. 2011; cheaper).
    Raises:
        ConfigError: another generator, by name or as the implementation of `key`.
    """

    def __init__(self, key: PRNGKeyArray, uniforms: int, normals: int, rng: str = "threefry2x32"):
        for name, where in ((rng, "rng"), (str(jax.random.key_impl(key)), "implementation of the key")):
            if name not in RNGS:
                raise ConfigError(
                    f"simulator: {where} {name!r} cannot replay an episode: rows of a vmapped rbg draw differ from the "
                    f"single draw; use one of {', '.join(RNGS)}"
                )

        def numbers(start: int | Array, length: int) -> Array:
            return unit_uniform(random_bits(key, length, RNG_ROUNDS[rng], start))

        self._uniforms = _by_halves(numbers, uniforms, jnp.float32)
        self._normals = _by_halves(lambda i, n: normal_quantile(numbers(uniforms + i, n)), normals, jnp.float32)
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


def _poisson_small(u: Array, mean: Array) -> Array:
    """Inverse CDF by forward summation, scaled by exp(mean): how many k have u exp(mean) > sum_{j<=k} mean^j/j!."""
    target = u * jnp.exp(mean) * (1.0 - _SLACK)
    power, total, count = jnp.ones_like(mean), jnp.ones_like(mean), (target > 1.0).astype(jnp.int32)
    for k in range(1, _SMALL_STEPS):
        power = power * mean
        total = total + power * (1.0 / math.factorial(k))
        count = count + (target > total)
    return count


def _poisson_large(u: Array, mean: Array) -> Array:
    """Temme's uniform asymptotic quantile (the idea of Giles 2016, ACM TOMS 42(1)) as polynomials in s = w/sqrt(mean).

    With w the normal quantile of u, mean r(s) + c0(r(s)) = mean + sqrt(mean) w + w^2 (1/6 + O(s)) + 1/3 + O(s). The
    leading terms are kept exact, so the error vanishes for large means; the rest is fitted to the exact boundaries
    x(P(X <= k)) = k + 1 over means from 4 to 3e5, with one term in 1/mean.
    """
    w = normal_quantile(u)
    inverse_root = jax.lax.rsqrt(mean)
    s = w * inverse_root
    shift = _horner(_POISSON_SHIFT, s) + _POISSON_INVERSE * (inverse_root * inverse_root)
    offset = mean * s + w * w * _horner(_POISSON_CURVE, s) + shift
    # The integer part apart: near 1e9 a float32 sum would round to multiples of 64.
    whole = jnp.floor(mean)
    return whole.astype(jnp.int32) + jnp.floor(mean - whole + offset).astype(jnp.int32)


def _poisson(u: Array, mean: Array) -> Array:
    mean = jnp.minimum(jnp.where(mean > 0.0, mean, 0.0), MAX_MEAN)  # a comparison with NaN is false
    small = _poisson_small(u, jnp.minimum(mean, SMALL_MEAN))
    large = _poisson_large(u, jnp.maximum(mean, SMALL_MEAN))
    return jnp.where(mean < SMALL_MEAN, small, jnp.maximum(large, 0))


def poisson(u: Float[Array, ...], mean: Float[Array, ...]) -> Int[Array, ...]:
    """Poisson counts (int32) from uniforms in (0, 1); non-decreasing in u.

    Kolmogorov distance to the exact distribution: 1e-6 below `SMALL_MEAN` (an inverse CDF in float32), 8e-5 from there
    on, 5e-5 above mean 20, 3e-6 above 1e4. Means that are NaN or negative count as 0, means above 1e9 as 1e9. Several
    calls are cheaper than one with stacked means (docs/notes/sampling.md).
    """
    return _elementwise(_poisson, jnp.int32, u, mean)


def _gamma(z: Array, lift: Array, shape: Array) -> Array:
    shape = jnp.minimum(jnp.where(shape > MIN_SHAPE, shape, MIN_SHAPE), MAX_SHAPE)  # a comparison with NaN is false
    base = shape + 1.0
    e = jax.lax.rsqrt(base)
    z = jnp.maximum(z, _GAMMA_LOWEST * (base * e))
    correction = _horner(_GAMMA_CUBIC, z) + e * _horner(_GAMMA_QUARTIC, z)
    root = jnp.maximum(1.0 + e * (z * (1.0 / 3.0) + e * (-1.0 / 9.0 + e * correction)), 0.0)
    return base * root * root * root * jnp.exp(math.log(2.0) * _log2(lift) / shape)


def gamma(tape: Tape, shape: Float[Array, ...]) -> Float[Array, ...]:
    """Gamma(shape, 1), from one normal and one uniform of the tape an element.

    Every shape takes the exact boost gamma(a) = gamma(a + 1) * U^(1/a), so only shapes above one need a quantile:
    Wilson and Hilferty's cube of a normal, a (1 + z e/3 - e^2/9)^3 with e = 1/sqrt(a), and a correction, polynomials in
    z times e^3 and e^4, fitted to the exact quantile over shapes from 1.1 up. Kolmogorov distance to the exact
    distribution: 3e-4. Shapes below 1e-3 and NaN count as 1e-3, shapes above 1e9 as 1e9.
    """
    return _elementwise(_gamma, jnp.float32, tape.normal(shape.shape), tape.uniform(shape.shape), shape)
