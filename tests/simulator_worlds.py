"""Campaign worlds for the statistics tests: the simulator and the NumPy reference on the same parameters."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import simulator_numpy

from trace_jax.config import SimulatorConfig
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import simulate_rows, stream_key

SHAPE = {"days": 28, "segments": 48, "siblings": 2}
CONFIG = SimulatorConfig(batch=192, **SHAPE)  # one compiled program for all worlds
CTR, CVR, CPC = 0.02, 0.1, 0.8


def quiet(log_volume: float, **changes) -> SimulatorParams:
    """No confounder, no noise but that of the counts and of the Dirichlet split, and a budget that never binds."""
    base = SimulatorParams()
    off = {f.name: 0.0 for f in dataclasses.fields(base) if f.name.endswith(("_cv", "_day_sd", "_probability"))}
    level = {"impressions_log_mean": log_volume, "impressions_log_sd": 0.0, "impressions_log_clip": (0.0, 20.0)}
    still = {"weekday_amplitude": (0.0, 0.0), "trend": (0.0, 0.0), "stock_normal": (0.95, 0.95)}
    return base.replace(**{**off, **level, **still, "budget_headroom": (100.0, 100.0), **changes})


def uniform(log_volume: float, alpha: float = 800.0, **changes) -> SimulatorParams:
    """`quiet`, and all 48 segments are alike: closed forms hold for every cell."""
    base = SimulatorParams()
    same = {
        "segments_active": (48, 48),
        "quality_log_sd": 0.0,
        "segment_weight_log_sd": 0.0,
        "segment_rate_log_sd": 0.0,
        "concentration": (alpha, alpha),
        "vertical_rates": np.broadcast_to(np.float32([CTR, CVR, CPC]), base.vertical_rates.shape).copy(),
        "popularity": np.where(base.popularity > -10, 0, base.popularity).astype(np.float32),
        "rate_multipliers": np.zeros_like(base.rate_multipliers),
        "strategy_tilt": np.zeros_like(base.strategy_tilt),
    }
    return quiet(log_volume, **{**same, **changes})


def ours(seed, cause, dimensions, count, params):
    """`count` proposals of the simulator, host arrays."""
    causes, dims = (np.broadcast_to(np.asarray(x), (count,)) for x in (cause, dimensions))
    return simulate_rows(CONFIG, stream_key(seed, "statistics"), causes, dims, np.arange(count), params)[0]


def reference(seed, cause, dimensions, count, params):
    return simulator_numpy.simulate(np.random.default_rng(seed), cause, dimensions, count, params, **SHAPE)


def other_reference(seed, cause, dimensions, count, params):
    """The reference with Poisson counts in place of multinomial splits and binomial thinning."""
    rng = np.random.default_rng(seed)
    return simulator_numpy.simulate(rng, cause, dimensions, count, params, **SHAPE, literal=False)


SOURCES = {"simulator": ours, "reference": reference}
NO_SIGNAL = CAUSE_INDEX["NO_SIGNAL"]


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sample Kolmogorov-Smirnov distance over its critical value at a level of 1e-4."""
    a, b = np.sort(np.ravel(a)), np.sort(np.ravel(b))
    at = np.concatenate([a, b])
    gap = np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max()
    return gap / (math.sqrt(-math.log(1e-4 / 2) / 2) * math.sqrt(1 / len(a) + 1 / len(b)))


def z_of_mean(x: np.ndarray, expected: float, independent: int | None = None) -> float:
    """Standard errors between a sample mean and its expectation."""
    x = np.asarray(x, float)
    return abs(x.mean() - expected) / (x.std() / math.sqrt(independent or x.size) + 1e-300)


@functools.cache
def no_signal(size: str, source: str, count: int = 2304):
    """Episodes of the full model in which nothing is wrong."""
    small = {"impressions_log_mean": 6.5, "impressions_log_clip": (4.0, 9.0), "late_conversions_probability": 0.3}
    params = SimulatorParams().replace(missing_days_probability=0.3, **(small if size == "small" else {}))
    return {**SOURCES, "other": other_reference}[source](7, NO_SIGNAL, 0, count, params)
