"""Streams of episodes: proposals by (seed, split, stratum, index), and accepted sets of a composition."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import ConfigError, SimulatorConfig
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.metrics import simulate_one
from trace_jax.simulator.oracle import OracleParams, verify_one
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import CAUSE_INDEX, CAUSES, SEGMENT_CAUSES

Stratum = tuple[str, int]  # cause name, number of attributes in the driver slice
Composition = dict[Stratum, int]

BLOCK = 64  # episodes computed together; batches are multiples of it

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


def paper_composition(total: int) -> Composition:
    """The paper's composition scaled to `total`: by type, then equally over the causes of the type."""
    members: dict[str, list[Stratum]] = {
        "campaign": [(c.name, 0) for c in CAUSES if c.level == "campaign"],
        "mix": [(c.name, 1) for c in CAUSES if c.level == "mix"],
        "segment_1d": [(name, 1) for name in SEGMENT_CAUSES],
        "segment_2d": [(name, 2) for name in SEGMENT_CAUSES],
        "no_signal": [("NO_SIGNAL", 0)],
    }
    composition: Composition = {}
    for kind, count in _apportion(total, PAPER_TYPES).items():
        composition.update(_apportion(count, {stratum: 1 for stratum in members[kind]}))
    return {stratum: n for stratum, n in composition.items() if n}


def stream_key(seed: int, split: str) -> jax.Array:
    """Root key of a split. Threefry by name: other generators are not invariant under vmap (case 21)."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(key, zlib.crc32(split.encode()) & 0x7FFFFFFF)


@functools.partial(jax.jit, static_argnames=("days", "segments", "siblings"))
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
) -> tuple[EpisodeBatch, Verdict]:
    """Simulate and verify the proposals `indices` of a stream; row i depends on (key, stratum i, index i) alone. E is a
    multiple of BLOCK."""

    def one(index, cause, dims):
        own = jax.random.fold_in(jax.random.fold_in(key, cause * 4 + dims), index)
        episode = simulate_one(own, index, cause, dims, days=days, segments=segments, siblings=siblings, params=params)
        return episode, verify_one(episode, oracle)

    # Blocks of one fixed shape: vectorised code rounds differently at different widths, and an episode must be the
    # same bits whatever batch it is asked for in.
    blocks = jax.tree.map(lambda x: x.reshape(-1, BLOCK), (indices, causes, dimensions))
    out = jax.lax.map(lambda block: jax.vmap(one)(*block), blocks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


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
    """Proposals of one stratum with host arrays. `indices` may have any length; padded to the compiled batch."""
    params, oracle = params or SimulatorParams(), oracle or OracleParams()
    key = stream_key(seed, split)
    parts, size = [], -(-config.batch // BLOCK) * BLOCK
    for start in range(0, len(indices), size):
        part = np.asarray(indices[start : start + size], np.int32)
        padded = np.resize(part, size)
        code = np.full(size, CAUSE_INDEX[cause], np.int32)
        dims = np.full(size, dimensions, np.int32)
        out = simulate(
            key, jnp.asarray(padded), jnp.asarray(code), jnp.asarray(dims), params, oracle,
            days=config.days, segments=config.segments, siblings=config.siblings,
        )  # fmt: skip
        parts.append(jax.tree.map(lambda x, n=len(part): np.asarray(x)[:n], out))
    return concatenate(parts)


def concatenate(parts: list) -> tuple[EpisodeBatch, Verdict]:
    """Join pytrees of host arrays along the episode axis."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def accepted_episodes(
    config: SimulatorConfig,
    seed: int,
    split: str,
    composition: Composition,
    params: SimulatorParams | None = None,
    oracle: OracleParams | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    max_proposals: int = 200,
) -> tuple[EpisodeBatch, Verdict]:
    """The first accepted proposals of each stratum, in an order shuffled by (seed, split).

    Args:
        composition: episodes wanted by (cause, number of slice attributes).
        on_progress: called with (accepted so far, total wanted).
        max_proposals: give up on a stratum after this many proposals per wanted episode (plus 20 batches).
    Raises:
        ConfigError: a stratum accepts too few proposals at these settings.
    """
    total, done, parts = sum(composition.values()), 0, []
    for (cause, dimensions), wanted in composition.items():
        kept, start = 0, 0
        while kept < wanted:
            if start > max_proposals * wanted + 20 * config.batch:
                raise ConfigError(
                    f"simulator: only {kept} of {wanted} {cause} episodes with {dimensions} slice attributes were "
                    f"accepted in {start} proposals; use more days or segments"
                )
            indices = np.arange(start, start + config.batch)
            batch, verdict = propose(config, seed, split, cause, dimensions, indices, params, oracle)
            rows = np.flatnonzero(verdict.accept)[: wanted - kept]
            parts.append(jax.tree.map(lambda x, rows=rows: x[rows], (batch, verdict)))
            kept, start = kept + len(rows), start + config.batch
            done += len(rows)
            if on_progress:
                on_progress(done, total)
    batch, verdict = concatenate(parts)
    order = np.random.default_rng([seed, zlib.crc32(split.encode())]).permutation(total)
    return jax.tree.map(lambda x: x[order], (batch, verdict))
