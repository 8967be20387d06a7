"""The log of a data set that is being written: which chunks are on disk, and the lock on the directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from trace_jax.config import ConfigError
from trace_jax.config_rules import shown
from trace_jax.warehouse import files
from trace_jax.warehouse.schema import HIDDEN_TABLES, VISIBLE_TABLES

LOG = "unfinished.jsonl"


def part_name(split: str, table: str, number: int) -> str:
    """Path of one part of a table below the data set's directory."""
    return f"{split}/{'visible' if table in VISIBLE_TABLES else 'hidden'}/{table}/part-{number:05d}.parquet"


class Log:
    """`unfinished.jsonl`: the header in its first line, then one line a chunk.

    Whoever has it open holds the directory alone, by a lock on the file that the kernel drops with the process.

    Args:
        root: an existing directory.
        header: settings and, under "splits", episodes by stratum of each split.
        resume: continue the chunks of a log that is there.
    Attributes:
        done: entries of the chunks that are on disk, by split.
    Raises:
        ConfigError: another process holds the directory, or the log is there without `resume`, of another header or
            damaged.
    """

    def __init__(self, root: Path, header: Mapping[str, Any], resume: bool):
        self.root, self.path = root, root / LOG
        self.header = json.loads(json.dumps(header))  # as it comes back from the file
        self.done: dict[str, list[dict[str, Any]]] = {name: [] for name in self.header["splits"]}
        self._file, made = _hold(self.path)
        try:
            self._begin(made, resume)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, made: bool, resume: bool) -> None:
        content = self._file.read()
        if self._alone() and _says_nothing(content):
            self._file.truncate(0)
            self._append(self.header)
        elif made:  # another process finished between the look at the directory and the lock
            self.path.unlink()
            raise ConfigError(f"{self.root} is not empty: choose a new or an empty directory")
        elif not resume:
            raise ConfigError(
                f"{self.root} holds an unfinished data set: continue it with --resume, remove it or choose another "
                "directory"
            )
        else:
            whole = content[: content.rfind(b"\n") + 1]  # a line that was cut short does not count
            self._restore(whole.splitlines())
            self._file.truncate(len(whole))

    def _alone(self) -> bool:
        return all(path.name == LOG for path in self.root.iterdir())

    def _restore(self, lines: list[bytes]) -> None:
        with self._damage():
            header = json.loads(lines[0])
            there, here = _comparable(header), _comparable(self.header)
        if header != self.header:
            raise ConfigError(
                f"{self.root} holds an unfinished data set of other settings or another version "
                f"({_first_difference(there, here)}): remove it or choose another directory"
            )
        for line in lines[1:]:
            with self._damage():
                entry = json.loads(line)
                self._check(entry)
            for name, digest in entry["sha256"].items():
                path = self.root / name
                if path.is_dir() or not path.exists() or files.sha256(path) != digest:
                    what = "is a directory" if path.is_dir() else "is missing or altered"
                    raise ConfigError(f"{path} {what}: remove {self.root} and start again")
            self.done[entry["split"]].append(entry)

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        """Whatever a damaged line leads to is one error."""
        try:
            yield
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            raise ConfigError(f"{self.path} is damaged: remove {self.root} and start again") from None

    def _check(self, entry: Any) -> None:
        """Raises ValueError (or what the wrong type leads to) unless the entry is that of the split's next chunk."""
        split, number = entry["split"], entry["chunk"]
        wanted, done = list(self.header["splits"][split].values()), self.done[split]
        accepted, proposed = entry["accepted"], entry["proposed"]
        before = done[-1] if done else {"accepted": [0] * len(wanted), "proposed": [0] * len(wanted)}
        if not all(type(n) is int for n in (number, entry["episodes"], *accepted, *proposed)):
            raise ValueError("not whole numbers")
        strata = zip(before["accepted"], accepted, wanted, before["proposed"], proposed, strict=True)
        tables = (*VISIBLE_TABLES, *HIDDEN_TABLES, "episodes")
        if not (
            number == len(done)
            and entry["episodes"] == sum(accepted) - sum(before["accepted"]) > 0
            and all(a <= b <= most and p <= q and b <= q for a, b, most, p, q in strata)
            and set(entry["sha256"]) == {part_name(split, table, number) for table in tables}
        ):
            raise ValueError("not the next chunk")

    def add(self, entry: Mapping[str, Any]) -> None:
        """Logs a chunk whose files are on disk."""
        self._append(entry)
        self.done[entry["split"]].append(dict(entry))

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        rest = memoryview(json.dumps(line).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]

    def remove(self) -> None:
        """The data set is complete."""
        self.path.unlink()

    def close(self) -> None:
        """Lets the directory go. A log without chunks in an otherwise empty directory is removed: it holds nothing."""
        with contextlib.suppress(OSError):
            if not any(self.done.values()) and self._alone():
                self.path.unlink(missing_ok=True)
        self._file.close()


def _hold(path: Path) -> tuple[BinaryIO, bool]:
    """The log opened (unbuffered) and locked, and whether it was made here. ConfigError if another process has it."""
    while True:
        try:
            descriptor, made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                descriptor, made = os.open(path, os.O_RDWR), False
            except FileNotFoundError:  # it has just been finished
                continue
        file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 - held until close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return file, made
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"{path.parent} is being written by another process: wait for it or choose another directory"
            ) from None
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()  # what was locked is no longer the log of this directory


def _says_nothing(content: bytes) -> bool:
    """Whether a log has no chunk and no damage: nothing, a header, or the beginning of one."""
    if content.count(b"\n") != 1 or not content.endswith(b"\n"):
        return b"\n" not in content
    try:
        return "format" in json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return False


def _comparable(header: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a header by dotted name, those that people set first."""
    flat = dict(_flat("", header["settings"]))
    for name, strata in header["splits"].items():
        flat[f"episodes of {name}"] = sum(strata.values())
    return {**flat, "format": header["format"], **dict(_flat("", header["splits"]))}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)


def _first_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    absent = "not set"
    for name in (*here, *there):
        a, b = there.get(name, absent), here.get(name, absent)
        if a != b:
            return f"`{name}` is {shown(a)} there, {shown(b)} here"
    return "the order of its parts"
