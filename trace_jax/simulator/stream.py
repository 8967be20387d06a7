"""Streams of episodes: proposals by (seed, split, stratum, index), simulated and verified on every local device.

Compositions (how many episodes of which cause) are here, too; sets of accepted episodes are in `simulator.accepted`.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trace_jax.config import ConfigError, SimulatorConfig
from trace_jax.simulator import difficulty
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSES, SEGMENT_CAUSES
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.identity import INDEX_LIMIT
from trace_jax.simulator.metrics import simulate_one
from trace_jax.simulator.oracle import OracleParams, verify_one
from trace_jax.simulator.params import SimulatorParams

Stratum = tuple[str, int]  # cause name, number of attributes in the driver slice
Composition = dict[Stratum, int]

_CPU_BLOCK, _WIDE_BLOCK = 64, 1024  # episodes computed together: what fits a core's cache, what fills an accelerator

# Episodes by type in the paper's test set of 235 (arXiv 2609.10315).
PAPER_TYPES = {"campaign": 30, "mix": 21, "segment_1d": 115, "segment_2d": 49, "no_signal": 20}


def _apportion(total: int, weights: dict) -> dict:
    """Largest-remainder split of `total` in proportion to `weights`, ties broken by order."""
    mass = sum(weights.values())
    exact = {k: total * w / mass for k, w in weights.items()}
    whole = {k: int(v) for k, v in exact.items()}
    for k in sorted(exact, key=lambda k: whole[k] - exact[k])[: total - sum(whole.values())]:
        whole[k] += 1
    return whole


def composition_of(total: int, types: dict[str, float]) -> Composition:
    """`total` episodes in proportion to `types` (weights by episode type), equally over the causes of each type."""
    members: dict[str, list[Stratum]] = {
        "campaign": [(c.name, 0) for c in CAUSES if c.level == "campaign"],
        "mix": [(c.name, 1) for c in CAUSES if c.level == "mix"],
        "segment_1d": [(name, 1) for name in SEGMENT_CAUSES],
        "segment_2d": [(name, 2) for name in SEGMENT_CAUSES],
        "no_signal": [("NO_SIGNAL", 0)],
    }
    composition: Composition = {}
    for kind, count in _apportion(total, types).items():
        composition.update(_apportion(count, {stratum: 1 for stratum in members[kind]}))
    return {stratum: n for stratum, n in composition.items() if n}


def paper_composition(total: int) -> Composition:
    """The composition of the paper's test set, scaled to `total`."""
    return composition_of(total, PAPER_TYPES)


def composition_for(config: SimulatorConfig, total: int) -> Composition:
    """The paper's composition with the configured share of two-attribute slices among the segment episodes."""
    segment = PAPER_TYPES["segment_1d"] + PAPER_TYPES["segment_2d"]
    two = segment * config.two_attribute_share
    return composition_of(total, {**PAPER_TYPES, "segment_1d": segment - two, "segment_2d": two})


def stream_key(seed: int, split: str) -> jax.Array:
    """Root key of a split. Threefry by name: other generators are not invariant under vmap (case 21)."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(key, zlib.crc32(split.encode()) & 0x7FFFFFFF)


def block(devices: Sequence[jax.Device] | None = None) -> int:
    """Episodes computed together on one device."""
    return _CPU_BLOCK if (devices or jax.local_devices())[0].platform == "cpu" else _WIDE_BLOCK


def rows_multiple(devices: Sequence[jax.Device] | None = None) -> int:
    """Batches of `simulate` are multiples of this: one block on every device."""
    devices = devices or jax.local_devices()
    return block(devices) * len(devices)


@functools.lru_cache(maxsize=32)
def _program(devices: tuple[jax.Device, ...], days: int, segments: int, siblings: int, rng: str):
    """The compiled simulator of one shape on some devices."""
    width = block(devices)

    def one(key, params, oracle, index, cause, dims):
        episode = simulate_one(
            key, index, cause, dims, days=days, segments=segments, siblings=siblings, params=params, rng=rng
        )
        return episode, verify_one(episode, oracle)

    def rows(key, params, oracle, indices, causes, dimensions):
        # Blocks of one fixed shape: vectorised code rounds differently at different widths, and an episode must be
        # the same bits whatever batch it is asked for in.
        count = len(indices)
        blocks = jax.tree.map(lambda x: x.reshape(-1, width), (indices, causes, dimensions))
        if count == width:  # a loop of one turn would be unrolled into another program with other rounding
            blocks = jax.tree.map(lambda x: jnp.concatenate([x, x]), blocks)
        out = jax.lax.map(lambda b: jax.vmap(functools.partial(one, key, params, oracle))(*b), blocks)
        return jax.tree.map(lambda x: x.reshape(x.shape[0] * width, *x.shape[2:])[:count], out)

    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("episodes",))
        shared, split = P(), P("episodes")
        rows = jax.shard_map(
            rows,
            mesh=mesh,
            in_specs=(shared, shared, shared, split, split, split),
            out_specs=split,
            check_vma=False,
        )
    return jax.jit(rows)


def simulate(
    key: jax.Array,
    indices: jax.Array,
    causes: jax.Array,
    dimensions: jax.Array,
    params: SimulatorParams,
    oracle: OracleParams,
    *,
    days: int,
    segments: int,
    siblings: int,
    rng: str = "threefry2x32",
    devices: Sequence[jax.Device] | None = None,
) -> tuple[EpisodeBatch, Verdict]:
    """Simulate and verify the proposals `indices` of a stream; row i depends on (key, stratum i, index i) alone.

    Args:
        key: threefry key of the stream.
        indices: [E], E a multiple of `rows_multiple(devices)`; causes and dimensions likewise.
        devices: default: all of this process; the rows are split over them and the result is the same.
    Raises:
        ConfigError: the key is of a generator whose draws change under vmap (case 21 of the data cases).
    """
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ConfigError(f"simulate needs a threefry2x32 key, not {jax.random.key_impl(key)}: see stream_key")
    program = _program(tuple(devices or jax.local_devices()), days, segments, siblings, rng)
    return program(key, params, oracle, indices, causes, dimensions)


def simulate_rows(
    config: SimulatorConfig,
    key: jax.Array,
    causes: np.ndarray,
    dimensions: np.ndarray,
    indices: np.ndarray,
    params: SimulatorParams | None = None,
    oracle: OracleParams | None = None,
) -> tuple[EpisodeBatch, Verdict]:
    """Proposals with host arrays, any number of them; padded to the compiled batch.

    Raises:
        ConfigError: an index beyond those that have an id of their own.
    """
    limit = INDEX_LIMIT // max(config.siblings, 1)
    if len(indices) and int(np.max(indices)) >= limit:
        raise ConfigError(f"simulator: more than {limit} proposals of one cause; use several values of data.seed")
    multiple = rows_multiple()
    parts, size = [], -(-config.batch // multiple) * multiple
    params = difficulty.params_of(config) if params is None else params
    for start in range(0, len(indices), size):
        rows = [np.asarray(x[start : start + size], np.int32) for x in (indices, causes, dimensions)]
        padded = [jnp.asarray(np.resize(x, size)) for x in rows]
        out = simulate(
            key, *padded, params, oracle or OracleParams(),
            days=config.days, segments=config.segments, siblings=config.siblings, rng=config.rng,
        )  # fmt: skip
        parts.append(jax.tree.map(lambda x, n=len(rows[0]): np.asarray(x)[:n], out))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def propose(
    config: SimulatorConfig,
    seed: int,
    split: str,
    cause: str,
    dimensions: int,
    indices: np.ndarray,
    params: SimulatorParams | None = None,
    oracle: OracleParams | None = None,
) -> tuple[EpisodeBatch, Verdict]:
    """The proposals `indices` of one stratum of a stream, with host arrays."""
    causes, dims = np.full(len(indices), CAUSE_INDEX[cause]), np.full(len(indices), dimensions)
    return simulate_rows(config, stream_key(seed, split), causes, dims, np.asarray(indices), params, oracle)
