"""Sets of verified episodes in memory: made from the simulator's streams and cached. On disk: `warehouse.dataset`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa

import trace_jax.simulator
from trace_jax.config import ConfigError, RunConfig, SimulatorConfig
from trace_jax.simulator.accepted import accepted_episodes, concatenate
from trace_jax.simulator.causes import CAUSE_NAMES, NO_SIGNAL, episode_type
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.stream import Composition, composition_for
from trace_jax.simulator.vocabulary import PROFILES
from trace_jax.warehouse import materialize
from trace_jax.warehouse.files import disk

SPLITS = ("train", "validation", "test")
FORMAT = 2  # of the cache


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode of a set: `position` is its row in `batch`, `index` its number in the set."""

    index: int
    split: str
    batch: EpisodeBatch
    verdict: Verdict
    position: int

    @property
    def cause(self) -> str:
        return CAUSE_NAMES[int(self.batch.cause[self.position])]

    @property
    def driver(self) -> tuple[tuple[str, str], ...]:
        """(attribute, value) pairs of the hidden slice; mix causes have one too, though answers need not name it."""
        return materialize.driver_pairs(self.batch, self.position)

    @property
    def type(self) -> str:
        return episode_type(self.cause, len(self.driver))

    @property
    def profile(self) -> str | None:
        """Shape of the onset; like strength and onset None where nothing happened, whatever the arrays drew."""
        return None if self.cause == NO_SIGNAL else PROFILES[int(self.batch.profile[self.position])]

    @property
    def strength(self) -> float | None:
        return None if self.cause == NO_SIGNAL else float(self.batch.strength[self.position])

    @property
    def onset(self) -> int | None:
        """First affected day of the window, counted from 0."""
        return None if self.cause == NO_SIGNAL else int(self.batch.onset[self.position])

    @property
    def campaign_id(self) -> str:
        return materialize.campaign_name(self.batch.campaign_id[self.position])

    def visible(self) -> dict[str, pa.Table]:
        """The tables an agent may query."""
        return materialize.visible_tables(self.batch, self.position)

    def hidden(self) -> dict[str, pa.Table]:
        """The truth, for people and tests."""
        return materialize.hidden_tables(self.batch, self.verdict, self.position)


@dataclass(frozen=True)
class EpisodeSet:
    """Verified episodes with host arrays."""

    batch: EpisodeBatch
    verdict: Verdict
    split: str = "stream"

    def __len__(self) -> int:
        return int(self.batch.cause.shape[0])

    def __getitem__(self, index: int) -> EpisodeRecord:
        if not 0 <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        return EpisodeRecord(index, self.split, self.batch, self.verdict, index)

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return (self[i] for i in range(len(self)))

    def take(self, positions: Sequence[int] | np.ndarray) -> EpisodeSet:
        """The episodes at these positions, in this order; they are renumbered from 0."""
        rows = np.asarray(positions, np.int64)
        batch, verdict = jax.tree.map(lambda x: x[rows], (self.batch, self.verdict))
        return EpisodeSet(batch, verdict, self.split)

    def slice(self, start: int, stop: int) -> EpisodeSet:
        """Episodes start..stop-1, renumbered from 0."""
        return self.take(np.arange(start, stop))

    def composition(self) -> dict[str, int]:
        """Episodes by "CAUSE/dimensions"."""
        return dict(sorted(Counter(f"{record.cause}/{len(record.driver)}" for record in self).items()))


def load_split(
    config: RunConfig,
    name: str,
    cache_dir: Path | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EpisodeSet:
    """A split of the run: `config.data.<name>` episodes of the paper's composition, a function of the configuration.

    Args:
        cache_dir: keep the arrays there and reuse them; a file of other settings or other simulator code is not reused.
        on_progress: called with (accepted so far, wanted) while episodes are simulated.
    Raises:
        ConfigError: there is no such split, the settings accept too few episodes, or the disk is full.
    """
    if name not in SPLITS:
        raise ConfigError(f"split {name!r}: use one of {', '.join(SPLITS)}")
    size = getattr(config.data, name)
    path = None
    if cache_dir is not None:
        path = _cache_path(config, name, cache_dir)
        cached = _load_arrays(path, name) if path.exists() else None
        if cached is not None:
            return cached
    episodes = EpisodeSet(*_simulated(config, name, size, on_progress), name)
    if path is not None:
        _save_arrays(path, episodes)
    return episodes


def kept_splits(config: RunConfig, name: str, cache_dir: Path | str) -> Iterator[EpisodeSet]:
    """What `load_split` kept there under the name of a split: first what it would take, then, newest first, what was
    made with other settings or by other code of the simulator, as it was when the run used it."""
    own = _cache_path(config, name, cache_dir)
    others = sorted(Path(cache_dir).glob(f"{name}-*.npz"), key=lambda path: -path.stat().st_mtime)
    for path in dict.fromkeys((own, *others)):
        if path.is_file() and (episodes := _load_arrays(path, name)) is not None:
            yield episodes


def _cache_path(config: RunConfig, name: str, cache_dir: Path | str) -> Path:
    return Path(cache_dir) / f"{name}-{_fingerprint(config, name, getattr(config.data, name))}.npz"


def load_composed(
    config: SimulatorConfig,
    seed: int,
    stream: str,
    composition: Composition,
    cache_dir: Path | str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EpisodeSet:
    """A set of any composition, a function of the arguments; see `load_split`.

    Args:
        stream: its name; sets of different names share no episode.
        composition: episodes by (cause, attributes of the slice).
    Raises:
        ConfigError: the settings accept too few episodes, or the disk is full.
    """
    path = None
    if cache_dir is not None:
        settings = dataclasses.asdict(config) | {"batch": None}
        content = [seed, stream, sorted((*k, n) for k, n in composition.items()), settings, code_hash(), FORMAT]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        path = Path(cache_dir) / f"{stream}-{digest}.npz"
        cached = _load_arrays(path, stream) if path.exists() else None
        if cached is not None:
            return cached
    episodes = EpisodeSet(*accepted_episodes(config, seed, stream, composition, on_progress=on_progress), stream)
    if path is not None:
        _save_arrays(path, episodes)
    return episodes


@dataclass(frozen=True)
class Stage:
    """Episodes start..stop-1 of a split, of one stream and one difficulty: all of it, or a stage of a curriculum."""

    simulator: SimulatorConfig
    stream: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def stages_of(config: RunConfig, name: str, size: int) -> list[Stage]:
    """What a split of `size` episodes is made of, in its order: the training split may have a curriculum."""
    curriculum = config.data.curriculum if name == "train" else ()
    if not curriculum:
        return [Stage(config.simulator, name, 0, size)]
    bounds = [size * i // len(curriculum) for i in range(len(curriculum) + 1)]
    return [
        Stage(dataclasses.replace(config.simulator, difficulty=level), f"{name}-{i}-{level}", bounds[i], bounds[i + 1])
        for i, level in enumerate(curriculum)
    ]


def _simulated(
    config: RunConfig, name: str, size: int, on_progress: Callable[[int, int], None] | None
) -> tuple[EpisodeBatch, Verdict]:
    """The episodes of a split, stage by stage."""
    parts = []
    for stage in stages_of(config, name, size):
        report = on_progress and (lambda done, _, start=stage.start: on_progress(start + done, size))
        composition = composition_for(stage.simulator, stage.size)
        parts.append(
            accepted_episodes(stage.simulator, config.data.seed, stage.stream, composition, on_progress=report)
        )
    return concatenate(parts)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What determines the splits of a run: `simulator.batch` and the devices do not."""
    simulator = dataclasses.asdict(config.simulator)
    del simulator["batch"]
    return {
        "seed": config.data.seed,
        "curriculum": list(config.data.curriculum),
        "simulator": simulator,
        "code": code_hash(),
    }


def check_disjoint(sets: Mapping[str, EpisodeSet]) -> None:
    """Refuse splits that share a campaign or an intervention, or that hold one twice.

    Raises:
        ConfigError: the shared campaign and the two splits.
    """
    owner: dict[Any, str] = {}
    for name, episodes in sets.items():
        batch = episodes.batch
        interventions = zip(
            batch.cause.tolist(),
            map(tuple, batch.slice_values.tolist()),
            batch.strength.tolist(),
            batch.onset.tolist(),
            batch.start_day.tolist(),
            strict=True,
        )
        for i, key in enumerate(interventions):
            campaign = episodes[i].campaign_id
            for what in (campaign, key):
                if what in owner:
                    raise ConfigError(
                        f"campaign {campaign} is in {owner[what]} and in {name}: choose another data.seed"
                    )
                owner[what] = name


def fields_of(batch: EpisodeBatch, verdict: Verdict) -> dict[str, np.ndarray]:
    """Every array of a set by "batch.name" or "verdict.name"."""
    return {
        f"{part}.{f.name}": np.asarray(getattr(owner, f.name))
        for part, owner in (("batch", batch), ("verdict", verdict))
        for f in dataclasses.fields(owner)
    }


def from_fields(fields: Mapping[str, np.ndarray], split: str) -> EpisodeSet:
    """The inverse of `fields_of`. KeyError if one is missing."""
    built = {
        part: kind(**{f.name: fields[f"{part}.{f.name}"] for f in dataclasses.fields(kind)})
        for part, kind in (("batch", EpisodeBatch), ("verdict", Verdict))
    }
    return EpisodeSet(**built, split=split)


def _save_arrays(path: Path, episodes: EpisodeSet) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                np.savez(file, **fields_of(episodes.batch, episodes.verdict))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _load_arrays(path: Path, split: str) -> EpisodeSet | None:
    """The cached set; None, with a warning, if the file is damaged (it is then made again)."""
    try:
        with np.load(path) as stored:
            return from_fields(dict(stored), split)
    except Exception as error:  # zipfile, pickle, key and value errors alike mean: not usable
        warnings.warn(f"{path} is damaged ({error}) and not used", stacklevel=3)
        return None


def _fingerprint(config: RunConfig, name: str, size: int) -> str:
    content = json.dumps([settings_of(config), name, size, FORMAT], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@functools.cache
def code_hash() -> str:
    """Hash of the simulator's source: other code makes other episodes."""
    digest = hashlib.sha256()
    for path in sorted(Path(trace_jax.simulator.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
