"""Data sets on disk: written a chunk of episodes at a time, continued after an interruption, read back.

    DIR/README.md                                            the dataset card
    DIR/manifest.json                                        settings, composition, acceptance, SHA-256 of every file
    DIR/SPLIT/visible/TABLE/part-00000.parquet               what agents see
    DIR/SPLIT/hidden/{gt_episode,gt_evidence,gt_validation}/part-00000.parquet   causes, evidence, validation
    DIR/SPLIT/hidden/episodes/part-00000.parquet             the arrays themselves, from which `read` restores the set

A chunk is one part of each table, so a set of any size takes the memory of a few chunks. The rows of a part are sorted
by campaign id, and the order of the set is only in `episodes`. The manifest comes last: a directory with one is
complete. Until then `unfinished.jsonl` (`warehouse.dataset_log`) lists the chunks that are on disk.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trace_jax.config import ConfigError
from trace_jax.simulator.accepted import CHUNK, Place
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.warehouse import dataset_card, files, materialize
from trace_jax.warehouse.dataset_log import LOG, Log, part_name
from trace_jax.warehouse.splits import EpisodeSet, check_disjoint, fields_of, from_fields

FORMAT = 2
MANIFEST, CARD = "manifest.json", "README.md"
ROW_GROUP = 1 << 17  # rows; fixed, so that bytes depend on the content alone
_CONTINUE = "free space and continue with --resume"
_WORKERS = min(4, os.cpu_count() or 1)  # chunks that are written while others are simulated


class Writer:
    """A data set while it is written. A context manager: on the way out it finishes the chunks at hand and logs them.

    Args:
        directory: made if it does not exist.
        settings: whatever determines the content; a set is only continued under the same ones.
        wanted: episodes of each split, by "CAUSE/dimensions", or "CAUSE/dimensions/stage" where it has stages.
        resume: continue what an interrupted writer left there.
    Raises:
        ConfigError: the directory holds a data set, an unfinished one (without `resume`, or of other settings or
            damaged), is being written by another process, or cannot be written.
    """

    def __init__(
        self,
        directory: Path | str,
        settings: Mapping[str, Any],
        wanted: Mapping[str, Mapping[str, int]],
        resume: bool = False,
    ):
        self.root = root = Path(directory)
        header = {"format": FORMAT, "settings": dict(settings), "splits": {k: dict(v) for k, v in wanted.items()}}
        self._pending: deque[Future] = deque()
        if root.exists() and not root.is_dir():
            raise ConfigError(f"{root} is a file: choose a directory")
        if (root / MANIFEST).exists():
            raise ConfigError(f"{root} already holds a data set: remove it or choose another directory")
        with files.disk(root):
            if root.exists() and not (root / LOG).exists() and any(root.iterdir()):  # its README.md may be somebody's
                raise ConfigError(f"{root} is not empty: choose a new or an empty directory")
            root.mkdir(parents=True, exist_ok=True)
            self._log = Log(root, header, resume)
        self._done = self._log.done
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="dataset")

    def place(self, split: str) -> Place | None:
        """Where the stream of a split goes on; None at its beginning."""
        if not self._done[split]:
            return None
        last = self._done[split][-1]
        return Place(last["chunk"] + 1, tuple(last["accepted"]), tuple(last["proposed"]))

    def episodes(self, split: str) -> int:
        """Episodes of a split that are on disk."""
        return sum(entry["episodes"] for entry in self._done[split])

    def append(self, split: str, batch: EpisodeBatch, verdict: Verdict, number: int, place: Place | None) -> None:
        """Hand over chunk `number` of a split, to be written while the next is simulated. Waits when several are being
        written already, which bounds the memory. ConfigError if an earlier one could not be written."""
        while len(self._pending) >= _WORKERS:
            self._note(self._pending.popleft())
        self._pending.append(self._pool.submit(self._write, split, batch, verdict, number, place))

    def _write(self, split: str, batch: EpisodeBatch, verdict: Verdict, number: int, place: Place | None) -> dict:
        names = np.array([materialize.campaign_name(i) for i in batch.campaign_id])
        by_name = np.argsort(names)
        digests: dict[str, str] = {}

        def store(tables: Mapping[str, pa.Table]) -> None:
            for table, content in tables.items():
                name = part_name(split, table, number)
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                digests[name] = files.replace(self.root / name, _parquet(content))

        store(materialize.visible_chunk(batch, by_name))
        store(materialize.hidden_chunk(batch, verdict, by_name))
        store({"episodes": _arrays_table(batch, verdict)})
        entry = {"split": split, "chunk": number, "episodes": len(names), "sha256": digests}
        return entry | ({"accepted": place.accepted, "proposed": place.proposed} if place else {})

    def _note(self, job: Future) -> None:
        """Waits for a chunk to be on disk and logs it."""
        with files.disk(self.root, _CONTINUE):
            try:
                self._log.add(job.result())
            except BaseException:
                self._pending.clear()  # a chunk does not count without those before it
                raise

    def finish(self) -> dict[str, Any]:
        """Writes the card and, last, the manifest, which is returned.

        Raises:
            ConfigError: something cannot be written, or the chunks are not those of the composition.
        """
        while self._pending:
            self._note(self._pending.popleft())
        header = self._log.header
        for name, wanted in header["splits"].items():
            self._check_whole(name, wanted)
        digests = {n: d for entries in self._done.values() for e in entries for n, d in e["sha256"].items()}
        manifest = {
            "format": FORMAT,
            "settings": header["settings"],
            "splits": {
                name: {
                    "episodes": self.episodes(name),
                    "parts": len(self._done[name]),
                    "composition": _by_stratum(wanted),
                    **_acceptance(wanted, self._done[name]),
                }
                for name, wanted in header["splits"].items()
            },
        }
        with files.disk(self.root, _CONTINUE):
            digests[CARD] = files.replace(self.root / CARD, dataset_card.card(manifest).encode())
            manifest["sha256"] = dict(sorted(digests.items()))
            files.replace(self.root / MANIFEST, json.dumps(manifest, indent=2).encode())
            self._log.remove()
        return manifest

    def _check_whole(self, split: str, wanted: Mapping[str, int]) -> None:
        """Refuses a split whose chunks are not all there, once each, with the episodes of its composition."""
        entries, total = self._done[split], sum(wanted.values())
        whole = [entry["chunk"] for entry in entries] == list(range(len(entries))) and self.episodes(split) == total
        if entries and "accepted" in entries[-1]:
            whole = whole and list(entries[-1]["accepted"]) == list(wanted.values())
        if not whole:
            raise ConfigError(
                f"{self.root} is damaged: {split} has {self.episodes(split)} episodes in {len(entries)} parts that are "
                f"not the {total} of its composition; remove it and start again"
            )

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            while self._pending:
                self._note(self._pending.popleft())
        except ConfigError:
            if kind is None:  # else the error on its way out says more
                raise
        finally:
            self._pool.shutdown()
            self._log.close()


def _acceptance(wanted: Mapping[str, int], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By cause: episodes, the proposals they were found in (up to the last one taken), and the share."""
    if not entries or "proposed" not in entries[-1]:
        return {}
    out: dict[str, dict[str, float]] = {}
    for stratum, accepted, proposed in zip(wanted, entries[-1]["accepted"], entries[-1]["proposed"], strict=True):
        cause = out.setdefault(stratum.partition("/")[0], {"accepted": 0, "proposed": 0})
        cause["accepted"] += accepted
        cause["proposed"] += proposed
    for cause in out.values():
        cause["share"] = round(cause["accepted"] / cause["proposed"], 4)
    return {"acceptance": out}


def _by_stratum(wanted: Mapping[str, int]) -> dict[str, int]:
    """Episodes by "CAUSE/dimensions", summed over the stages of a split that has some."""
    out: dict[str, int] = {}
    for name, count in wanted.items():
        stratum = "/".join(name.split("/")[:2])
        out[stratum] = out.get(stratum, 0) + count
    return out


def write(
    directory: Path | str, sets: Mapping[str, EpisodeSet], settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write sets that are in memory; returns the manifest.

    Args:
        sets: episodes by split name.
        settings: whatever describes their origin, kept in the manifest.
    Raises:
        ConfigError: splits share a campaign, the directory already holds a data set, or writing fails.
    """
    check_disjoint(sets)
    with Writer(directory, settings or {}, {name: episodes.composition() for name, episodes in sets.items()}) as writer:
        for name, episodes in sets.items():
            for number, start in enumerate(range(0, len(episodes), CHUNK)):
                part = episodes.slice(start, min(start + CHUNK, len(episodes)))
                writer.append(name, part.batch, part.verdict, number, None)
        return writer.finish()


def read(directory: Path | str, splits: Sequence[str] | None = None) -> dict[str, EpisodeSet]:
    """The sets of a data set by split name, in memory. `splits`: only these.

    Raises:
        ConfigError: no manifest, an unknown format, no such split, or a file that is missing or altered.
    """
    root = Path(directory)
    try:
        manifest = json.loads((root / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{root}: data set format {manifest['format']} is not {FORMAT}; write it again")
        for name in splits or ():
            if name not in manifest["splits"]:
                raise ConfigError(f"{root} has no split {name!r}; it has {', '.join(manifest['splits'])}")
        names = list(splits or manifest["splits"])
        for name, digest in manifest["sha256"].items():
            if name.partition("/")[0] in (*names, CARD) and files.sha256(root / name) != digest:
                raise ConfigError(f"{root / name}: the file differs from the manifest; write the data set again")
        return {
            name: _read_arrays(
                [root / part_name(name, "episodes", i) for i in range(manifest["splits"][name]["parts"])], name
            )
            for name in names
        }
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        if isinstance(error, ConfigError):
            raise
        if (root / LOG).exists() and not (root / MANIFEST).exists():
            raise ConfigError(f"{root} is unfinished: continue it with `trace-jax simulate --resume`") from None
        raise ConfigError(f"{root} is not a readable data set ({' '.join(str(error).split())[:200]})") from None


def _parquet(table: pa.Table) -> memoryview:
    """A table as a Parquet file. Only text is worth a dictionary; figures compress as they are."""
    text = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=text, row_group_size=ROW_GROUP)
    return memoryview(sink.getvalue())


def _arrays_table(batch: EpisodeBatch, verdict: Verdict) -> pa.Table:
    """One row an episode, each array as bytes; shape and type are in the column's metadata."""
    columns, schema = [], []
    for name, values in fields_of(batch, verdict).items():
        rows = np.ascontiguousarray(values).reshape(len(values), int(np.prod(values.shape[1:])))
        width = rows.shape[1] * rows.itemsize
        if width:
            kind = pa.binary(width)
            column = pa.FixedSizeBinaryArray.from_buffers(kind, len(rows), [None, pa.py_buffer(rows)])
        else:  # of campaigns without siblings; Parquet has no fixed length of 0
            kind = pa.binary()
            column = pa.array([b""] * len(rows), kind)
        columns.append(column)
        metadata = {"dtype": values.dtype.str, "shape": json.dumps(values.shape[1:])}
        schema.append(pa.field(name, kind, nullable=False, metadata=metadata))
    return pa.Table.from_arrays(columns, schema=pa.schema(schema))


def _read_arrays(paths: Sequence[Path], split: str) -> EpisodeSet:
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    fields = {}
    for field in table.schema:
        kind = np.dtype(field.metadata[b"dtype"].decode())
        shape = (len(table), *json.loads(field.metadata[b"shape"]))
        raw = b"".join(table[field.name].to_pylist())
        fields[field.name] = np.frombuffer(raw, kind).reshape(shape).copy()
    return from_fields(fields, split)
