"""Sets of accepted episodes, a chunk at a time, so that a set of any size takes the memory of one chunk.

The order of a set is a function of (seed, split, composition): chunk `j` holds the next accepted proposals, by index,
of each stratum, shuffled inside the chunk. How proposals were batched, on how many devices they ran and where a set was
interrupted have no part in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from trace_jax.config import ConfigError, SimulatorConfig
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.stream import Composition, paper_composition, rows_multiple, simulate_rows, stream_key

CHUNK = 1024  # episodes; about 35 MB of arrays at the default sizes
_PATIENCE = 1280  # proposals of a stratum before a low acceptance is believed
_SURPLUS = 1.1  # proposals asked for over what the acceptance so far says is needed


@dataclass(frozen=True)
class Place:
    """Where a stream stands between two chunks: all that is needed to continue it. By stratum, in the composition's
    order: episodes taken so far, and proposals up to and including the last one taken."""

    chunk: int
    accepted: tuple[int, ...]
    proposed: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Accepted episodes (host arrays) in the order of the set."""

    number: int
    batch: EpisodeBatch
    verdict: Verdict
    place: Place  # after this chunk
    simulated: int  # proposals computed since the start of the iteration; depends on the batch, unlike all else


def balanced_composition(total: int) -> Composition:
    """`total` episodes spread equally over the strata of the paper's composition."""
    strata = list(paper_composition(10**6))
    each, more = divmod(total, len(strata))
    return {s: each + (i < more) for i, s in enumerate(strata) if each + (i < more)}


def prefix(count: int, wanted: np.ndarray) -> np.ndarray:
    """Episodes of each stratum among the first `count` of a set that has `wanted` in all.

    Apportioned by Sainte-Lague, the quotient method with the least bias that is also monotone: a larger prefix never
    has fewer of any stratum, which largest remainders do not promise.
    """
    total = int(wanted.sum())
    taken = (2 * count * wanted + total) // (2 * total)  # exact but for ties and an excess of a few
    while taken.sum() < count:
        taken[np.argmin((2 * taken + 1) / wanted)] += 1
    while taken.sum() > count:
        last = (2 * taken - 1) / wanted
        taken[len(last) - 1 - np.argmax(last[::-1])] -= 1
    return taken


def accepted_chunks(
    config: SimulatorConfig,
    seed: int,
    split: str,
    composition: Composition,
    params: SimulatorParams | None = None,
    oracle: OracleParams | None = None,
    *,
    chunk: int = CHUNK,
    start: Place | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    max_proposals: int = 200,
) -> Iterator[Chunk]:
    """The accepted episodes of a stream in chunks of `chunk` episodes (the last may be smaller); all proposals without
    `config.verified`.

    Proposals run in full batches; accepted ones that a chunk has no room for wait for the next. Their number, and with
    it the memory, is bounded by one chunk and one batch.

    Args:
        composition: episodes wanted in all, by (cause, number of slice attributes).
        start: continue after the chunk that had this place.
        on_progress: called after each batch with (accepted so far, total wanted).
        max_proposals: give up on a stratum after this many proposals per wanted episode (plus 1280).
    Raises:
        ConfigError: a stratum accepts too few proposals at these settings.
    """
    key, strata = stream_key(seed, split), list(composition)
    wanted = np.array([composition[s] for s in strata], np.int64)
    code = np.array([CAUSE_INDEX[cause] for cause, _ in strata])
    dims = np.array([dimensions for _, dimensions in strata])
    multiple = rows_multiple()
    size, total = -(-config.batch // multiple) * multiple, int(wanted.sum())
    place = start or Place(0, (0,) * len(strata), (0,) * len(strata))
    taken, proposed = np.array(place.accepted, np.int64), np.array(place.proposed, np.int64)
    found, examined, simulated = taken.copy(), proposed.copy(), 0  # `found` counts the accepted ones that wait, too
    waiting: list = []
    for number in range(place.chunk, -(-total // chunk)):
        target = prefix(min((number + 1) * chunk, total), wanted)
        share = target - taken
        while (found < target).any():
            _give_up(strata, target, found, proposed, max_proposals)
            count = _fill(size, number, chunk, wanted, found, proposed)
            which = np.repeat(np.arange(len(strata)), count)
            offset = np.concatenate([np.arange(n) for n in count])
            out = simulate_rows(config, key, code[which], dims[which], proposed[which] + offset, params, oracle)
            rows = np.flatnonzero(np.asarray(out[1].accept) | (not config.verified))
            waiting.append((which[rows], jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], out)))
            proposed += count
            found += np.bincount(which[rows], minlength=len(strata))
            simulated += size
            if on_progress:
                on_progress(int(np.minimum(found, wanted).sum()), total)
        which, episodes = concatenate(waiting)
        order = np.argsort(which, kind="stable")  # a stratum's rows wait in the order of their index
        rank = np.empty(len(which), np.int64)
        rank[order] = np.arange(len(which)) - np.searchsorted(which[order], which[order])
        rows = order[rank[order] < share[which[order]]]
        examined = np.array(
            [n if not k else int(episodes[0].index[rows[which[rows] == i][-1]]) + 1
             for i, (n, k) in enumerate(zip(examined, share, strict=True))]
        )  # fmt: skip
        taken = target
        rows = rows[np.random.default_rng([seed, zlib.crc32(split.encode()), number]).permutation(len(rows))]
        batch, verdict = jax.tree.map(lambda x, rows=rows: x[rows], episodes)
        place = Place(number + 1, tuple(taken.tolist()), tuple(examined.tolist()))
        later = np.flatnonzero((rank >= share[which]) & (rank < (share + wanted - taken)[which]))
        waiting = [(which[later], jax.tree.map(lambda x, rows=later: x[rows], episodes))]
        del episodes
        yield Chunk(number, batch, verdict, place, simulated)


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
    """All chunks of `accepted_chunks` in one.

    Raises:
        ConfigError: a stratum accepts too few proposals at these settings.
    """
    chunks = accepted_chunks(
        config, seed, split, composition, params, oracle, on_progress=on_progress, max_proposals=max_proposals
    )
    return concatenate([(chunk.batch, chunk.verdict) for chunk in chunks])


def concatenate(parts: list):
    """Join pytrees of host arrays along the episode axis."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _fill(
    size: int, number: int, chunk: int, wanted: np.ndarray, found: np.ndarray, proposed: np.ndarray
) -> np.ndarray:
    """How many of the `size` rows of a batch go to each stratum: by what each still needs at its acceptance so far, for
    chunk `number` and as many of the following ones as fill the batch. No effect on which episodes are taken."""
    rate, total = (found + 1.0) / (proposed + 2.0), int(wanted.sum())
    need, end = np.zeros(len(wanted)), number * chunk
    while need.sum() < size and end < total:
        end = min(end + chunk, total)
        target = prefix(end, wanted)
        need = np.where(found < target, np.ceil(_SURPLUS * (target - found) / rate), 0.0)
    count = np.minimum(need, np.floor(need * size / need.sum()) + 1).astype(int)
    which = np.repeat(np.arange(len(wanted)), count)[:size]
    # A batch that needs fewer rows repeats strata rather than idle: more of them may be rejected than expected.
    return np.bincount(np.resize(which, size), minlength=len(wanted))


def _give_up(strata: list, target: np.ndarray, found: np.ndarray, proposed: np.ndarray, max_proposals: int) -> None:
    hopeless = np.flatnonzero((proposed > max_proposals * target + _PATIENCE) & (found < target))
    if len(hopeless):
        i = int(hopeless[0])
        raise ConfigError(
            f"simulator: only {found[i]} of {target[i]} {strata[i][0]} episodes with {strata[i][1]} slice attributes "
            f"were accepted in {proposed[i]} proposals; use more days or segments, raise simulator.strength, lower "
            "simulator.noise or choose an easier simulator.difficulty"
        )
