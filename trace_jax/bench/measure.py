"""Timing, the machine's description, and the physical floors that the benchmarks are measured against.

A floor is taken in the same process right beside the measurement: absolute speeds of two machines, or of two hours on a
shared one, say little; the share of what the machine can do at that moment says a lot.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PACKAGES = (
    "trace-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "duckdb",
    "pyarrow",
    "sentencepiece",
    "pydantic-monty",
)


def seconds(work: Callable[[], Any], repeats: int, warmup: int = 1) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after `warmup` calls that compile. Waits for arrays returned."""
    times = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return times


def timed(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    return seconds(work, 1, warmup=0)[0]


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, fastest and slowest of some repeats."""
    return {"median": statistics.median(times), "fastest": min(times), "slowest": max(times)}


def machine() -> dict[str, Any]:
    """Where and with what a benchmark ran."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    devices = jax.devices()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": usable,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def matmul_peak(dtype: str, repeats: int) -> dict[str, Any]:
    """Fastest dense matmul seen, GFLOP/s over the default device: the floor of everything a policy computes."""
    sizes = (512, 1024, 1536) if jax.default_backend() == "cpu" else (4096, 8192)
    best, at = 0.0, sizes[0]
    for n in sizes:
        a, b = (jax.random.normal(jax.random.key(i), (n, n), dtype) for i in (0, 1))
        product = jax.jit(jnp.dot)
        rate = 2 * n**3 / spread(seconds(lambda: product(a, b), repeats, warmup=2))["fastest"] / 1e9  # noqa: B023
        if rate > best:
            best, at = rate, n
    return {"matmul_gflops": best, "matmul_size": at, "dtype": dtype}


def copy_rate(repeats: int) -> float:
    """Bytes a second read and written by a plain element-wise operation on an array beyond any cache."""
    count = 2**24 if jax.default_backend() == "cpu" else 2**28
    scale = jax.jit(lambda x: x * 1.5, donate_argnums=0)  # in place: a fresh output would be paged in each time
    held = jnp.ones(count, jnp.float32)

    def work():
        nonlocal held
        held = scale(held)
        return held

    return 2 * 4 * count / spread(seconds(work, repeats))["fastest"]
