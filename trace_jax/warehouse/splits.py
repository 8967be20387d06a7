"""Sets of verified episodes: made from the simulator's streams, cached, written to and read from Parquet.

    DIR/manifest.json                     seed, sizes, simulator settings, SHA-256 of every file
    DIR/SPLIT/visible/<table>.parquet     what agents see, all episodes of the split, sorted by campaign
    DIR/SPLIT/hidden/gt_*.parquet         causes, evidence, validation
    DIR/SPLIT/hidden/episodes.parquet     the arrays themselves, one row an episode, from which `read` restores the set

Each table is written in groups of rows, so a split never has to fit in memory as tables.
"""

from __future__ import annotations

import contextlib
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
import pyarrow.parquet as pq

import trace_jax.simulator
from trace_jax.config import ConfigError, RunConfig
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.stream import accepted_episodes, paper_composition
from trace_jax.simulator.vocabulary import CAUSE_NAMES, PROFILES, episode_type
from trace_jax.warehouse import materialize
from trace_jax.warehouse.schema import HIDDEN_TABLES, VISIBLE_TABLES

SPLITS = ("train", "validation", "test")
FORMAT = 1  # of the data set on disk
GROUP = 128  # episodes in one row group


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
    def profile(self) -> str:
        return PROFILES[int(self.batch.profile[self.position])]

    @property
    def strength(self) -> float:
        return float(self.batch.strength[self.position])

    @property
    def onset(self) -> int:
        """First affected day of the window, counted from 0."""
        return int(self.batch.onset[self.position])

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
        path = Path(cache_dir) / f"{name}-{_fingerprint(config, name, size)}.npz"
        cached = _load_arrays(path, name) if path.exists() else None
        if cached is not None:
            return cached
    batch, verdict = accepted_episodes(
        config.simulator, config.data.seed, name, paper_composition(size), on_progress=on_progress
    )
    episodes = EpisodeSet(batch, verdict, name)
    if path is not None:
        _save_arrays(path, episodes)
    return episodes


def write(
    directory: Path | str, sets: Mapping[str, EpisodeSet], settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write a data set; returns the manifest. The manifest comes last, so a directory with one is complete.

    Args:
        sets: episodes by split name.
        settings: whatever describes their origin (seed, simulator settings), kept in the manifest.
    Raises:
        ConfigError: splits share a campaign, the directory already holds a data set, or writing fails.
    """
    root = Path(directory)
    if (root / "manifest.json").exists():
        raise ConfigError(f"{root} already holds a data set: remove it or choose another directory")
    check_disjoint(sets)
    files: dict[str, str] = {}
    with _disk(root):
        for name, episodes in sets.items():
            for part, tables in (("visible", VISIBLE_TABLES), ("hidden", HIDDEN_TABLES)):
                folder = root / name / part
                folder.mkdir(parents=True, exist_ok=True)
                _write_tables(folder, tables, episodes, part == "visible")
            pq.write_table(_arrays_table(episodes), root / name / "hidden" / "episodes.parquet", compression="zstd")
        for path in sorted(root.glob("*/*/*.parquet")):
            files[path.relative_to(root).as_posix()] = _sha256(path)
        manifest = {
            "format": FORMAT,
            "settings": dict(settings or {}),
            "splits": {n: {"episodes": len(s), "composition": s.composition()} for n, s in sets.items()},
            "sha256": files,
        }
        _replace(root / "manifest.json", json.dumps(manifest, indent=2).encode())
    return manifest


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The part of a run's configuration that determines its splits."""
    return {"seed": config.data.seed, "simulator": dataclasses.asdict(config.simulator), "code": _code_hash()}


def read(directory: Path | str) -> dict[str, EpisodeSet]:
    """The sets of a data set by split name.

    Raises:
        ConfigError: no manifest, an unknown format, or a file that is missing or altered.
    """
    root = Path(directory)
    try:
        manifest = json.loads((root / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{root}: data set format {manifest['format']} is not {FORMAT}; write it again")
        for name, digest in manifest["sha256"].items():
            if _sha256(root / name) != digest:
                raise ConfigError(f"{root / name}: the file differs from the manifest; write the data set again")
        return {name: _read_arrays(root / name / "hidden" / "episodes.parquet", name) for name in manifest["splits"]}
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{root} is not a readable data set ({' '.join(str(error).split())[:200]})") from None


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


def _write_tables(folder: Path, tables: Sequence[str], episodes: EpisodeSet, visible: bool) -> None:
    """All episodes of a split, sorted by campaign id so that the file order is not the order of the set."""
    order = sorted(range(len(episodes)), key=lambda i: episodes[i].campaign_id)
    with contextlib.ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for start in range(0, len(order), GROUP):
            parts = [episodes[i] for i in order[start : start + GROUP]]
            built = [record.visible() if visible else record.hidden() for record in parts]
            for name in tables:
                table = pa.concat_tables([b[name] for b in built]).unify_dictionaries()
                if name not in writers:
                    writers[name] = stack.enter_context(
                        pq.ParquetWriter(folder / f"{name}.parquet", table.schema, compression="zstd")
                    )
                writers[name].write_table(table)


def _fields(episodes: EpisodeSet) -> dict[str, np.ndarray]:
    """Every array of the set by "batch.name" or "verdict.name"."""
    return {
        f"{part}.{f.name}": np.asarray(getattr(getattr(episodes, part), f.name))
        for part in ("batch", "verdict")
        for f in dataclasses.fields(getattr(episodes, part))
    }


def _from_fields(fields: Mapping[str, np.ndarray], split: str) -> EpisodeSet:
    built = {
        part: kind(**{f.name: fields[f"{part}.{f.name}"] for f in dataclasses.fields(kind)})
        for part, kind in (("batch", EpisodeBatch), ("verdict", Verdict))
    }
    return EpisodeSet(**built, split=split)


def _arrays_table(episodes: EpisodeSet) -> pa.Table:
    """One row an episode, each array as bytes; shape and type are in the column's metadata."""
    columns, schema = [], []
    for name, values in _fields(episodes).items():
        rows = np.ascontiguousarray(values).reshape(len(episodes), -1)
        width = rows.shape[1] * rows.itemsize
        columns.append(pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(rows)]))
        metadata = {"dtype": values.dtype.str, "shape": json.dumps(values.shape[1:])}
        schema.append(pa.field(name, pa.binary(width), nullable=False, metadata=metadata))
    return pa.Table.from_arrays(columns, schema=pa.schema(schema))


def _read_arrays(path: Path, split: str) -> EpisodeSet:
    table = pq.read_table(path)
    fields = {}
    for field in table.schema:
        kind = np.dtype(field.metadata[b"dtype"].decode())
        shape = (len(table), *json.loads(field.metadata[b"shape"]))
        raw = b"".join(table[field.name].to_pylist())
        fields[field.name] = np.frombuffer(raw, kind).reshape(shape).copy()
    return _from_fields(fields, split)


def _save_arrays(path: Path, episodes: EpisodeSet) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with _disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                np.savez(file, **_fields(episodes))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _load_arrays(path: Path, split: str) -> EpisodeSet | None:
    """The cached set; None, with a warning, if the file is damaged (it is then made again)."""
    try:
        with np.load(path) as stored:
            return _from_fields(dict(stored), split)
    except Exception as error:  # zipfile, pickle, key and value errors alike mean: not usable
        warnings.warn(f"{path} is damaged ({error}); simulating the split again", stacklevel=3)
        return None


def _fingerprint(config: RunConfig, name: str, size: int) -> str:
    content = json.dumps([settings_of(config), name, size, FORMAT], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


@functools.cache
def _code_hash() -> str:
    """Hash of the simulator's source: other code makes other episodes."""
    digest = hashlib.sha256()
    for path in sorted(Path(trace_jax.simulator.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns errors of the file system (full disk, no permission) into one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another place"
        ) from None
