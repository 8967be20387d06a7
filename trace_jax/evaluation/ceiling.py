"""The likelihood ceiling: a diagnostician that knows the simulator but not the label.

It weighs every hypothesis (cause, slice, onset, strength) by the probability of the visible tables under it
(`evaluation.likelihood`), averages over onset and strength with the simulator's own priors, and answers with the most
likely cause and slice. Being close to the best that anyone could do, its FullAttr@1 (arXiv 2609.10315, metrics) says
what is attainable on a set of episodes.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from trace_jax.evaluation.likelihood import Evidence, budget_gain, evidence
from trace_jax.simulator import slices
from trace_jax.simulator.causes import CAUSES, CHANNELS, Cause
from trace_jax.simulator.episode import EpisodeBatch
from trace_jax.simulator.interventions import MAX_OVERLAP, MAX_SHARE, MIN_SHARE
from trace_jax.simulator.params import SimulatorParams
from trace_jax.simulator.vocabulary import PROFILES

NONE = -1  # slice of an answer that names none
FINDING = 0.9  # posterior probability of a cause from which on the diagnostician would raise it
_DELAYS, _RAMPS = 8, 6  # grid points of the priors; eight meet every delay of a two-week window
_NODES, _STRENGTHS = 6, 48  # strengths at which a gain is computed, and to which it is interpolated
_UNFINDABLE = -8.0  # log prior of a slice that the simulator only uses when it has no other
_TWO_ATTRIBUTES = 0.2988  # prior share of two-attribute slices, that of the paper's test set
_BLOCK, _CALL = 8, 64  # episodes evaluated together (what fits a core's cache), and in one compiled call
_SLACK = 1.1  # what is known of a slice's share from the baseline's counts, as a factor


@chex.dataclass(frozen=True)
class Diagnosis:
    """Answers and what they rest on. E episodes, K candidate slices of `simulator.slices`."""

    cause: Int[Array, " E"]  # code into CAUSES
    slice: Int[Array, " E"]  # candidate slice, NONE for causes without one
    probability: Float[Array, " E"]  # of the answer
    causes: Float[Array, "E causes"]  # posterior probability
    slices: Float[Array, "E K"]  # log posterior of every slice under the answered cause, NONE's is not in it


def _onsets(days: int, params: SimulatorParams) -> tuple[Float[Array, "P T"], Float[Array, "2 P"]]:
    """Onset shapes and their log prior for causes that may start at once (0) and for gradual ones (1)."""
    half = days // 2
    day, window = jnp.arange(days), days - half
    middle = lambda limits, n: limits[0] + (limits[1] - limits[0]) * (jnp.arange(n) + 0.5) / n  # noqa: E731
    onset = jnp.concatenate([jnp.zeros(1), jnp.round(middle(params.delay, _DELAYS) * window), jnp.zeros(_RAMPS)])
    length = jnp.concatenate([jnp.ones(1 + _DELAYS), middle(params.ramp, _RAMPS) * window])
    shapes = jnp.clip((day - half - onset[:, None] + 1) / length[:, None], 0.0, 1.0)
    weights = jnp.stack(params.onset)
    share = dict(zip(PROFILES, weights / weights.sum(), strict=True))

    def prior(immediate, ramp):
        parts = [immediate[None], *([share["delayed"][None] / _DELAYS] * _DELAYS), *([ramp[None] / _RAMPS] * _RAMPS)]
        return jnp.log(jnp.maximum(jnp.concatenate(parts), 1e-9))

    at_once = prior(share["immediate"], share["ramp"])
    gradual = prior(jnp.zeros(()), share["ramp"] + share["immediate"])
    return shapes, jnp.stack([at_once, gradual])


def _strengths() -> tuple[np.ndarray, np.ndarray]:
    """Chebyshev nodes in [0, 1] and the matrix [_STRENGTHS, _NODES] from values there to values on a fine grid.

    A gain is a quadratic in effects that are exponentials of the strength: a polynomial of degree 5 follows it over the
    whole range, while the fine grid resolves peaks that are far narrower than the range.
    """
    nodes = 0.5 - 0.5 * np.cos((np.arange(_NODES) + 0.5) * np.pi / _NODES)
    fine = (np.arange(_STRENGTHS) + 0.5) / _STRENGTHS
    powers = np.vander(2 * nodes - 1, _NODES)
    return nodes.astype(np.float32), np.linalg.solve(powers.T, np.vander(2 * fine - 1, _NODES).T).T.astype(np.float32)


STRENGTH_NODES, STRENGTH_MATRIX = _strengths()


def _slice_prior(episode: EpisodeBatch, member: Float[Array, "G K"]) -> Float[Array, " K"]:
    """Log weight of each slice in the simulator's draw, from the baseline's clicks."""
    half = episode.clicks.shape[0] // 2
    clicks = episode.clicks[:half].sum(0).astype(jnp.float32)
    clicks = clicks / jnp.maximum(clicks.sum(), 1.0)
    share, nearest = slices.overlaps(clicks, member)
    findable = (share * _SLACK > MIN_SHARE) & (share < MAX_SHARE * _SLACK) & (nearest < MAX_OVERLAP * _SLACK)
    weight = 0.7 * jnp.log(share + 1e-6) + jnp.where(findable, 0.0, _UNFINDABLE)
    # Slices that no segment tells apart have the same evidence: the simpler one goes first.
    return weight - 1e-3 * jnp.asarray(slices.DIMENSIONS)


def _candidates(cause: Cause, code: int) -> np.ndarray:
    """Slices in which a cause may sit; mix causes name one value of their attribute."""
    allowed = slices.MAY_SIT[code] & ((slices.DIMENSIONS == 1) | (cause.level == "segment"))
    return np.flatnonzero(allowed)


def _within(weight: Float[Array, " N"], dimensions: np.ndarray) -> Float[Array, " N"]:
    """Log prior of the candidates of one cause: a share for each number of attributes, by weight inside it."""
    out = weight
    for d in np.unique(dimensions):
        of = dimensions == d
        total = jax.scipy.special.logsumexp(jnp.where(of, weight, -jnp.inf))
        share = 1.0 if (dimensions == d).all() else {1: 1.0 - _TWO_ATTRIBUTES, 2: _TWO_ATTRIBUTES}[int(d)]
        out = jnp.where(of, weight - total + np.log(share), out)
    return out


def _gains(
    seen: Evidence, cause: Cause, effect: dict[str, Float[Array, "P S W"]], rows: np.ndarray
) -> Float[Array, "R P S"]:
    """Log-likelihood gains of a cause at each of its slices (one row for causes without)."""
    local = cause.level == "segment"
    where = rows if local else np.full(1, slices.SLICES)
    grid = next(iter(effect.values())).shape[:2]
    gain = jnp.zeros((max(len(rows), 1), *grid))
    for metric in ("ctr", "cvr"):
        if metric in cause.effects:
            gain += getattr(seen, metric).rows(where).gain(jnp.expm1(effect[metric]))
    if "cpc" in cause.effects:
        gain += seen.cpc.rows(where).gain(effect["cpc"])
    if "in_stock" in cause.effects:  # CVR follows the stock, which is seen, so it is no evidence of its own
        gain += seen.in_stock.gain(jnp.expm1(effect["in_stock"]))
    if "mix" in cause.effects:
        gain += seen.mix.rows(rows).gain(effect["mix"])
    if cause.compensated:
        lost = jnp.log1p(seen.share[rows][:, None, None, None] * jnp.expm1(effect["mix"])[None])
        path = effect.get("volume", 0.0) + lost
        flat = path.reshape(1, -1, path.shape[-1])
        gain += seen.volume.gain_by_row(flat).reshape(gain.shape)
    elif "volume" in cause.effects:
        gain += seen.volume.gain(effect["volume"])
    return gain


def _diagnose_one(episode: EpisodeBatch, params: SimulatorParams) -> Diagnosis:
    days = episode.impressions.shape[0]
    half, count = days // 2, len(CAUSES)
    member = slices.members(episode.segment_values, episode.segment_mask).astype(jnp.float32)
    seen = evidence(episode, member, params)
    weight = _slice_prior(episode, member)
    shapes, priors = _onsets(days, params)
    low, high = params.strength
    strengths = low + (high - low) * STRENGTH_NODES
    post = jnp.full((count, slices.SLICES + 1), -jnp.inf)
    for c, cause in enumerate(CAUSES):
        if cause.level == "none":
            post = post.at[c, -1].set(0.0)
            continue
        rows = _candidates(cause, c)
        limits = params.effects[c]
        by_strength = limits[:, 0] + strengths[:, None] * (limits[:, 1] - limits[:, 0])
        effect = {h: by_strength[None, :, CHANNELS.index(h), None] * shapes[:, None, half:] for h in cause.effects}
        gain = _gains(seen, cause, effect, rows)
        if "budget" in cause.effects:
            most = limits[CHANNELS.index("budget"), 0] - jnp.log(params.budget_headroom[0])
            gain += budget_gain(episode, shapes, most, params)[None, :, None]
        gain = gain @ STRENGTH_MATRIX.T + priors[int(cause.gradual)][None, :, None] - np.log(_STRENGTHS)
        total = jax.scipy.special.logsumexp(gain, axis=(1, 2))
        if len(rows):
            post = post.at[c, rows].set(total + _within(weight[rows], slices.DIMENSIONS[rows]))
        else:
            post = post.at[c, -1].set(total[0])
    post = post - jax.scipy.special.logsumexp(post)
    causes = jax.scipy.special.logsumexp(post, axis=1)
    # Only segment causes are asked for their slice; the others are right by name alone.
    segment = jnp.asarray(np.array([cause.level == "segment" for cause in CAUSES]))
    best = jnp.where(segment, post[:, :-1].max(1), causes)
    answer = jnp.argmax(best)
    named = jnp.asarray(np.array([bool(cause.drivers) for cause in CAUSES]))[answer]
    return Diagnosis(
        cause=answer.astype(jnp.int32),
        slice=jnp.where(named, jnp.argmax(post[answer, :-1]), NONE).astype(jnp.int32),
        probability=jnp.exp(best[answer]),
        causes=jnp.exp(causes),
        slices=post[answer, :-1],
    )


@jax.jit
def _call(batch: EpisodeBatch, params: SimulatorParams) -> Diagnosis:
    blocks = jax.tree.map(lambda x: x.reshape(-1, _BLOCK, *x.shape[1:]), batch)
    out = jax.lax.map(lambda b: jax.vmap(_diagnose_one, in_axes=(0, None))(b, params), blocks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


def diagnose(
    batch: EpisodeBatch, params: SimulatorParams, on_progress: Callable[[int, int], None] | None = None
) -> Diagnosis:
    """The most likely (cause, slice) of every episode, from agent-visible fields; a pure function of those.

    Args:
        batch: E episodes, any number >= 1; a few at a time, so that memory does not grow with E. One compilation serves
            all E.
        params: of the simulator that made them.
        on_progress: called with (episodes done, E).
    """
    params = jax.tree.map(jnp.float32, params)
    size, parts = len(batch.cause), []
    for start in range(0, size, _CALL):
        rows = np.minimum(np.arange(start, start + _CALL), size - 1)  # the last call is padded with the last episode
        out = _call(jax.tree.map(lambda x, r=rows: np.asarray(x)[r], batch), params)
        count = min(_CALL, size - start)
        parts.append(jax.tree.map(lambda x, n=count: np.asarray(x)[:n], out))
        if on_progress:
            on_progress(start + count, size)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
