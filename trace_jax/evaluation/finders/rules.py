"""Rules for cause and abstention that all finders share: whose story explains most of what moved.

Each cause is a story: in which totals and in which slice something moves, in which direction (its row in `_STORIES`,
which follows the registry of causes). Its score is the quasi-log-likelihood that the story gains, the sum of z^2/2 over
what moves as told, at its best onset. A cause is named if its score, less a threshold of its own, is the largest and
above 0; otherwise nothing happened. The thresholds are fitted on the training split (`fit`) and stored in `rules.json`
with how they were fitted; `trace-jax fit-rules` makes that file anew.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from trace_jax.config import ConfigError
from trace_jax.evaluation.finders.campaign import INDEX, PAIRS, Pair
from trace_jax.evaluation.finders.quasi import GRADUAL, RATES, TOTALS, Scan
from trace_jax.simulator import slices
from trace_jax.simulator.causes import CAUSE_NAMES, CAUSES, NO_SIGNAL

FILE = Path(__file__).with_name("rules.json")
BUNDLED = {"": FILE, "hard": FILE.with_name("rules_hard.json")}  # by what they were fitted for: `evaluation.set`
TWO = "two_attributes"  # threshold on top for a slice of two attributes: there are five times as many of them
_NEVER = -np.inf


@dataclass(frozen=True)
class _Story:
    """What moves, +1 up and -1 down: totals of the campaign, and rates of a slice against the rest of the campaign."""

    totals: Mapping[str, int]
    slice: Mapping[str, int]
    gradual: bool


def _story(cause: Any) -> _Story:
    """From the signature of a registry entry; a flat feature is one whose movement the story leaves unexplained."""
    signs = {"up": 1, "some up": 1, "down": -1, "some down": -1}
    told = {feature: signs[want] for feature, want in cause.signature.items() if want in signs}
    if cause.level == "segment":
        return _Story({"volume": -1} if cause.compensated else {}, told, cause.gradual)
    totals = {"stock" if f == "in_stock" else f: sign for f, sign in told.items() if not f.startswith("mix_")}
    return _Story(totals, {"share": 1} if cause.level == "mix" else {}, cause.gradual)


NAMES = tuple(c.name for c in CAUSES if c.name != NO_SIGNAL)
_STORIES = {c.name: _story(c) for c in CAUSES if c.name != NO_SIGNAL}
_CODE = {name: CAUSE_NAMES.index(name) for name in NAMES}
_LEVEL = {c.name: c.level for c in CAUSES}
THRESHOLDS = (*NAMES, TWO)


def scores(seen: Scan) -> Float[np.ndarray, "C K"]:
    """Gain of every cause in every slice it may sit in; causes without a slice have it in column 0."""
    total = {name: seen.totals[i] for i, name in enumerate(TOTALS)}
    rate = {name: seen.slices[i] for i, name in enumerate(RATES)}
    out = np.full((len(NAMES), slices.SLICES), _NEVER)
    for c, name in enumerate(NAMES):
        story, may = _STORIES[name], GRADUAL if _STORIES[name].gradual else np.ones(len(GRADUAL), bool)
        gain = sum((_gain(total[f], sign) for f, sign in story.totals.items()), np.zeros(len(GRADUAL)))[:, None]
        gain = gain + sum((_gain(rate[f], sign) for f, sign in story.slice.items()), np.zeros(1))
        best = gain[may].max(0)
        if _LEVEL[name] == "campaign":
            out[c, 0] = best[0]
            continue
        allowed = slices.MAY_SIT[_CODE[name]] & seen.testable
        if _LEVEL[name] == "mix":
            allowed = allowed & (slices.DIMENSIONS == 1)
        out[c, allowed] = best[allowed]
    return out


def _gain(z: np.ndarray, sign: int) -> np.ndarray:
    return 0.5 * np.maximum(sign * z, 0.0) ** 2


@dataclass(frozen=True)
class Verdict:
    """An answer and by how much it beats the next best story, in units of log-likelihood."""

    cause: str
    driver: tuple[Pair, ...]
    margin: float


def decide(
    gains: Float[np.ndarray, "C K"], thresholds: Mapping[str, float], found: Sequence[Pair] | None = None
) -> Verdict:
    """The cause, and the slice of a segment cause.

    Args:
        gains: `scores` of the episode.
        thresholds: by `THRESHOLDS`.
        found: the slice that a finder names, the only one that segment causes are then considered in; None: all.
    """
    best, where = _best(_with_slice(gains, found)[None], thresholds[TWO])
    bar = best[0] - np.array([thresholds[name] for name in NAMES])
    winner = int(bar.argmax())
    others = np.append(np.delete(bar, winner), 0.0)
    if bar[winner] <= 0:
        return Verdict(NO_SIGNAL, (), float(-bar[winner]))
    name = NAMES[winner]
    driver = PAIRS[int(where[0, winner])] if _LEVEL[name] == "segment" else ()
    return Verdict(name, driver, float(bar[winner] - others.max()))


def _with_slice(gains: Float[np.ndarray, "C K"], found: Sequence[Pair] | None) -> Float[np.ndarray, "C K"]:
    """Segment causes outside the slice that was found are out of the question."""
    if found is None:
        return gains
    local = np.array([_LEVEL[name] == "segment" for name in NAMES])
    only = np.arange(slices.SLICES) == INDEX.get(frozenset(found), -1)
    return np.where(local[:, None] & ~only[None], _NEVER, gains)


def _best(gains: Float[np.ndarray, "E C K"], two: float) -> tuple[Float[np.ndarray, "E C"], Int[np.ndarray, "E C"]]:
    """Score of each cause in its best slice, and that slice."""
    penalised = gains - two * (slices.DIMENSIONS == 2)
    where = penalised.argmax(-1)
    return np.take_along_axis(penalised, where[..., None], -1)[..., 0], where


@dataclass(frozen=True)
class Example:
    """A training episode: its scores, what a finder named in it, and the truth."""

    gains: Float[np.ndarray, "C K"]
    found: tuple[Pair, ...] | None
    cause: str
    driver: tuple[Pair, ...]


def fit(
    examples: Sequence[Example], *, rounds: int = 6, on_progress: Callable[[int, int], None] | None = None
) -> tuple[dict[str, float], float]:
    """Thresholds that answer most training episodes fully right, and that share.

    Coordinate ascent from one common start: thresholds in turn, each to the middle of the best stretch of a grid, while
    the others stay. The middle, since the edge of a stretch is where the next episode goes wrong.
    """
    gains = np.stack([_with_slice(e.gains, e.found) for e in examples])
    truth = np.array([NAMES.index(e.cause) if e.cause != NO_SIGNAL else -1 for e in examples])
    gold = np.array([INDEX.get(frozenset(e.driver), -1) for e in examples])
    local = np.array([_LEVEL[name] == "segment" for name in NAMES])

    def right(two: float) -> tuple[np.ndarray, np.ndarray]:
        best, where = _best(gains, two)
        return best, ~local[None] | (where == gold[:, None])

    grid = np.concatenate([np.arange(-6.0, 20.0, 0.25), np.arange(20.0, 60.0, 2.0)])
    bars, two = np.full(len(NAMES), 6.0), 1.0
    best, placed = right(two)
    share = _share(best - bars, placed, truth)
    for step in range(rounds):
        before = share
        for c in range(len(NAMES)):
            this = np.arange(len(NAMES)) == c
            shares = np.array([_share(best - np.where(this, x, bars), placed, truth) for x in grid])
            bars[c], share = grid[_middle(shares)], shares.max()
        twos = np.arange(0.0, 6.0, 0.25)
        shares = np.array([_share(b - bars, p, truth) for b, p in map(right, twos)])
        two, share = float(twos[_middle(shares)]), shares.max()
        best, placed = right(two)
        if on_progress:
            on_progress(step + 1, rounds)
        if share <= before:
            break
    return {**dict(zip(NAMES, bars.tolist(), strict=True)), TWO: two}, float(share)


def _share(bar: Float[np.ndarray, "E C"], placed: np.ndarray, truth: Int[np.ndarray, " E"]) -> float:
    """Share of episodes that are fully right."""
    winner = bar.argmax(-1)
    row = np.arange(len(bar))
    named = np.where(bar[row, winner] > 0, winner, -1)
    return float(((named == truth) & ((named < 0) | placed[row, winner])).mean())


def _middle(values: Float[np.ndarray, " N"]) -> int:
    """Middle of the longest stretch of largest values."""
    top = np.flatnonzero(values >= values.max())
    runs = np.split(top, np.flatnonzero(np.diff(top) > 1) + 1)
    longest = max(runs, key=len)
    return int(longest[len(longest) // 2])


def thresholds(path: str, agent: str) -> dict[str, float]:
    """The fitted thresholds of a finder.

    Args:
        path: a file of `trace-jax fit-rules`, or one of the package by its name in `BUNDLED`.

    Raises:
        ConfigError: the file cannot be read or lacks a threshold.
    """
    return _stored(BUNDLED.get(path, Path(path)), agent)


@functools.lru_cache(maxsize=32)  # asked for at every episode
def _stored(path: Path, agent: str) -> dict[str, float]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["agents"][agent]["thresholds"]
        fitted = {name: float(value) for name, value in stored.items()}
        return fitted | {name: fitted[name] for name in THRESHOLDS}  # KeyError where one is missing
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"`evaluation.rules` {path} holds no thresholds for {agent} ({type(error).__name__}): make it with "
            "`trace-jax fit-rules --out FILE` (and the `--evaluation.set` that it is for)"
        ) from error
