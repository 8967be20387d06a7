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


def _run(
    config: SimulatorConfig,
    key: jax.Array,
    causes: np.ndarray,
    dimensions: np.ndarray,
    indices: np.ndarray,
    params: SimulatorParams | None,
    oracle: OracleParams | None,
) -> tuple[EpisodeBatch, Verdict]:
    """Proposals with host arrays, any number of them; padded to the compiled batch."""
    parts, size = [], -(-config.batch // BLOCK) * BLOCK
    for start in range(0, len(indices), size):
        rows = [np.asarray(x[start : start + size], np.int32) for x in (indices, causes, dimensions)]
        padded = [jnp.asarray(np.resize(x, size)) for x in rows]
        out = simulate(
            key, *padded, params or SimulatorParams(), oracle or OracleParams(),
            days=config.days, segments=config.segments, siblings=config.siblings,
        )  # fmt: skip
        parts.append(jax.tree.map(lambda x, n=len(rows[0]): np.asarray(x)[:n], out))
    return concatenate(parts)


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
    return _run(config, stream_key(seed, split), causes, dims, np.asarray(indices), params, oracle)


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
        max_proposals: give up on a stratum after this many proposals per wanted episode (plus 20 blocks).
    Raises:
        ConfigError: a stratum accepts too few proposals at these settings.
    """
    total, key, parts = sum(composition.values()), stream_key(seed, split), []
    strata = list(composition)
    wanted = np.array(list(composition.values()))
    proposed, accepted = np.zeros(len(strata), int), np.zeros(len(strata), int)
    code = np.array([CAUSE_INDEX[cause] for cause, _ in strata])
    dims = np.array([dimensions for _, dimensions in strata])
    size = -(-config.batch // BLOCK) * BLOCK
    while (accepted < wanted).any():
        hopeless = (proposed > max_proposals * wanted + 20 * BLOCK) & (accepted < wanted)
        if hopeless.any():
            i = int(np.flatnonzero(hopeless)[0])
            raise ConfigError(
                f"simulator: only {accepted[i]} of {wanted[i]} {strata[i][0]} episodes with {dims[i]} slice attributes "
                f"were accepted in {proposed[i]} proposals; use more days or segments"
            )
        # Rows go to the strata by what each still needs at its acceptance so far. How a batch is filled has no effect
        # on which episodes are taken: always a stratum's first accepted ones by index.
        rate = (accepted + 1.0) / (proposed + 2.0)
        need = np.where(accepted < wanted, np.ceil(1.1 * (wanted - accepted) / rate), 0.0)
        count = np.minimum(need, np.floor(need * size / need.sum()) + 1).astype(int)
        which = np.repeat(np.arange(len(strata)), count)[:size]
        which = np.sort(np.resize(which, size))  # a batch that needs fewer rows repeats strata rather than idle
        count = np.bincount(which, minlength=len(strata))
        offset = np.concatenate([np.arange(n) for n in count])
        batch, verdict = _run(config, key, code[which], dims[which], proposed[which] + offset, params, oracle)
        proposed += count
        rank = np.zeros(size, int)  # of an accepted row among the accepted of its stratum
        for i in range(len(strata)):
            rows = np.flatnonzero((which == i) & verdict.accept)
            rank[rows] = accepted[i] + np.arange(len(rows))
            accepted[i] += len(rows)
        rows = np.flatnonzero(verdict.accept & (rank < wanted[which]))
        parts.append((which[rows], rank[rows], jax.tree.map(lambda x, rows=rows: x[rows], (batch, verdict))))
        if on_progress:
            on_progress(int(np.minimum(accepted, wanted).sum()), total)
    stratum, rank, episodes = concatenate(parts)
    by_index = np.lexsort((rank, stratum))
    order = by_index[np.random.default_rng([seed, zlib.crc32(split.encode())]).permutation(total)]
    return jax.tree.map(lambda x: x[order], episodes)
