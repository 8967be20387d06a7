"""Simulator throughput: campaign-episodes a second, raw and verified, by batch, against floors taken in the same run.

Every round measures all programs of a batch in turn, so that a change of the machine's load meets all alike; ratios are
medians over rounds of ratios within a round. All programs return new arrays. Floors, each drawing as many uniform
threefry numbers as the episodes take and writing arrays of the same bytes:

    floor           `jax.random.uniform` for the whole batch, as a user would call it
    blocked_floor   the same in the simulator's blocks, where the numbers stay in a core's cache
    own_floor       in blocks, with the simulator's own unrolled threefry

and beside them the NumPy reference of the tests, one process as it is.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trace_jax
from trace_jax.bench import measure, sim_programs
from trace_jax.config import RunConfig, SimulatorConfig
from trace_jax.simulator import metrics, stream
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.difficulty import params_of
from trace_jax.simulator.oracle import OracleParams

BATCHES = (256, 1024, 4096, 16384)
HELD = 4  # copies of a batch's arrays that a round may hold at once
STREAM = (50, 200)  # batches of a stream after which the memory in use is compared; the allocator settles before
NUMPY_EPISODES = 256  # of one call of the reference; what fits its caches best
REFERENCE = Path(trace_jax.__file__).parents[1] / "tests" / "simulator_numpy.py"
FLOORS = ("floor", "blocked_floor", "own_floor")
COMPOSITION = stream.paper_composition(1000)

Rows = tuple[jax.Array, jax.Array, jax.Array]  # indices, causes, dimensions


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """Propose batches over all strata in turn, again and again with new indices."""
    sizes, devices = config.simulator, jax.local_devices()
    leaves = jax.tree.leaves(sim_programs.episode_shapes(sizes))
    episode_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
    batches = [b for b in BATCHES if b * episode_bytes * HELD < _memory() / 2] or [min(BATCHES)]
    multiple = stream.rows_multiple(devices)
    batches = list(dict.fromkeys(-(-b // multiple) * multiple for b in batches))
    bench = _Bench(sizes, devices)
    growth = bench.memory_growth_mb(batches[0])
    reference = _reference(sizes)

    table = []
    for batch in batches:
        rounds = [bench.round(batch, reference) for _ in range(repeats + 1)][1:]  # the first one compiles
        table.append(_row(batch, rounds))
    best = max(table, key=lambda row: row["verified_episodes_per_s"])
    share = best["verified_over_raw"]
    paper, balanced = (_acceptance(bench.acceptance(), w) for w in (COMPOSITION, dict.fromkeys(COMPOSITION, 1)))
    cells = sizes.days * sizes.segments
    scaling = bench.weak_scaling(repeats) if len(devices) > 1 else None
    result = {
        "raw_episodes_per_s": best["raw_episodes_per_s"],
        "verified_episodes_per_s": best["verified_episodes_per_s"] * paper,
        "floor_ratio": best["floor_ratio"],
        "numpy_speedup": best.get("numpy_speedup"),
        "verified_share": share * paper,
        "sizes": {
            **sim_programs.shape_of(sizes),
            "batch": best["batch"],
            "block": stream.block(devices),
            "bytes_per_episode": episode_bytes,
            "numbers_per_episode": sum(metrics.tape_size(**sim_programs.shape_of(sizes))),
        },
        "floor": {
            "floor_episodes_per_s": best["floor_episodes_per_s"],
            "blocked_floor_episodes_per_s": best["blocked_floor_episodes_per_s"],
            "own_floor_episodes_per_s": best["own_floor_episodes_per_s"],
            "buffers": "new arrays for every batch, in floors and simulator alike",
        },
        "measured": {
            "seconds": best["seconds"],
            "proposals_per_second": best["verified_episodes_per_s"],
            "accepted_per_second": best["verified_episodes_per_s"] * paper,
            "acceptance": paper,
            "acceptance_balanced": balanced,
            "cells_per_second": best["raw_episodes_per_s"] * cells,
            "bytes_per_second": best["raw_episodes_per_s"] * episode_bytes,
            "rss_growth_mb": growth,
        },
        "share": {
            "of_floor": 1 / best["floor_ratio"],
            "of_blocked_floor": 1 / best["blocked_floor_ratio"],
            "of_own_floor": 1 / best["own_floor_ratio"],
            "verified_of_raw": share * paper,
            "verified_of_raw_balanced": share * balanced,
        },
        "acceptance": {f"{cause}/{dimensions}": a for (cause, dimensions), a in bench.acceptance().items()},
        "table": table,
        "weak_scaling": scaling,
    }
    if reference is None:
        result["note"] = f"numpy_speedup is null: the reference is not installed (no {REFERENCE.name} in a checkout)"
    else:
        literal = best["numpy_speedup_literal"]
        result["floor"] |= {"numpy_episodes_per_s": best["numpy_episodes_per_s"], "numpy_speedup_literal": literal}
    return result


def _row(batch: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """One line of the table, from the seconds of some rounds."""

    def rate(name: str, episodes: int = batch) -> float:
        return episodes / statistics.median(r[name] for r in rounds)

    def ratio(a: str, b: str, factor: float = 1.0) -> float:
        return factor * statistics.median(r[a] / r[b] for r in rounds)

    row = {
        "batch": batch,
        "raw_episodes_per_s": rate("raw"),
        "verified_episodes_per_s": rate("verified"),  # proposals simulated and verified
        "verified_over_raw": ratio("raw", "verified"),
        **{f"{floor}_ratio": ratio("verified", floor) for floor in FLOORS},
        **{f"{floor}_episodes_per_s": rate(floor) for floor in FLOORS},
        "seconds": {name: measure.spread([r[name] for r in rounds]) for name in rounds[0]},
    }
    if "numpy" in rounds[0]:
        scale = batch / NUMPY_EPISODES
        row["numpy_episodes_per_s"] = rate("numpy", NUMPY_EPISODES)
        row["numpy_speedup"] = ratio("numpy", "raw", scale)
        row["numpy_speedup_literal"] = ratio("numpy_literal", "raw", scale)
    return row


def _acceptance(by_stratum: dict[stream.Stratum, float], wanted: dict[stream.Stratum, int]) -> float:
    """Accepted over proposed episodes for a set with the composition `wanted`: rare strata need more proposals."""
    proposed = sum(n / max(by_stratum[s], 1e-9) for s, n in wanted.items())
    return sum(wanted.values()) / proposed


class _Bench:
    """The programs, and the place in the stream of proposals."""

    def __init__(self, sizes: SimulatorConfig, devices: list[jax.Device]):
        self.sizes, self.devices = sizes, devices
        self.key, self.params, self.oracle = stream.stream_key(0, "bench"), params_of(sizes), OracleParams()
        width, plain = stream.block(devices), sim_programs.floor(sizes, own_generator=False)
        self.programs = {
            "raw": sim_programs.in_blocks(sim_programs.raw(sizes), devices, width),
            "floor": sim_programs.in_blocks(plain, devices, 0),
            "blocked_floor": sim_programs.in_blocks(plain, devices, width),
            "own_floor": sim_programs.in_blocks(sim_programs.floor(sizes, own_generator=True), devices, width),
        }
        self.strata = list(COMPOSITION)
        self.codes = np.array([(CAUSE_INDEX[cause], dimensions) for cause, dimensions in self.strata], np.int32)
        self.start = 0
        self.counts = np.zeros((2, len(self.strata)), int)  # proposed, accepted

    def rows(self, batch: int) -> Rows:
        """The next `batch` proposals: every stratum as often as every other."""
        at = np.arange(self.start, self.start + batch)
        self.start += batch
        which = at % len(self.strata)
        index = at // len(self.strata)
        return tuple(jnp.asarray(x, jnp.int32) for x in (index, *self.codes[which].T))

    def verified(self, rows: Rows, devices: list[jax.Device] | None = None):
        shape = sim_programs.shape_of(self.sizes)
        rng, devices = self.sizes.rng, devices or self.devices
        return stream.simulate(self.key, *rows, self.params, self.oracle, **shape, rng=rng, devices=devices)

    def round(self, batch: int, reference: Callable[..., Any] | None) -> dict[str, float]:
        """Seconds of each program for one batch."""
        which = np.arange(self.start, self.start + batch) % len(self.strata)
        rows, accepted = self.rows(batch), []
        times = {
            name: measure.timed(lambda: program(self.key, self.params, *rows))  # noqa: B023
            for name, program in self.programs.items()
        }

        def verify():
            out = self.verified(rows)
            accepted.append(out[1].accept)
            return out

        times["verified"] = measure.timed(verify)
        for kind, weights in enumerate((None, np.asarray(accepted[0]))):
            self.counts[kind] += np.bincount(which, weights, minlength=len(self.strata)).astype(int)
        if reference is not None:
            cause, dimensions = self.codes[np.arange(NUMPY_EPISODES) % len(self.strata)].T
            for name, literal in (("numpy", False), ("numpy_literal", True)):
                times[name] = measure.timed(lambda: reference(cause, dimensions, literal))  # noqa: B023
        return times

    def acceptance(self) -> dict[stream.Stratum, float]:
        proposed, accepted = self.counts
        return dict(zip(self.strata, (accepted / np.maximum(proposed, 1)).tolist(), strict=True))

    def memory_growth_mb(self, batch: int) -> float:
        """Growth of the process's high-water mark between the first and the last batches of a stream, MB."""
        seen = {}
        for done in range(1, STREAM[1] + 1):
            jax.block_until_ready(self.verified(self.rows(batch)))
            if done in STREAM:
                seen[done] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, kilobytes elsewhere
        return (seen[STREAM[1]] - seen[STREAM[0]]) * unit / 1e6

    def weak_scaling(self, repeats: int) -> list[dict[str, float]]:
        """Verified proposals a second for one block after the other on 1, 2, 4, ... devices, equally many on each."""
        counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= len(self.devices)]
        each = 4 * stream.block(self.devices)

        def once(n: int) -> float:
            rows = self.rows(n * each)
            return measure.timed(lambda: self.verified(rows, self.devices[:n]))

        rounds = [[once(n) for n in counts] for _ in range(repeats + 1)][1:]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        return [
            {"devices": n, "episodes_per_s": n * each / t, "episodes_per_s_and_device": each / t}
            for n, t in zip(counts, medians, strict=True)
        ]


def _reference(sizes: SimulatorConfig) -> Callable[..., Any] | None:
    """The NumPy implementation of the tests on one set of random numbers, if this is a checkout."""
    if not REFERENCE.is_file():
        return None
    spec = importlib.util.spec_from_file_location(REFERENCE.stem, REFERENCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng, params, shape = np.random.default_rng(0), params_of(sizes), sim_programs.shape_of(sizes)

    def simulate(cause: np.ndarray, dimensions: np.ndarray, literal: bool) -> None:
        module.simulate(rng, cause, dimensions, len(cause), params, **shape, literal=literal)

    return simulate


def _memory() -> float:
    """Bytes of memory of the machine, or of its accelerator."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 8e9
