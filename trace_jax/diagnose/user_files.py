"""The user's files are opened here for reading, and nowhere for writing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from trace_jax.config import ConfigError

BLOCK = 1 << 22
LONGEST_LINE, SHORT_LINE = 1 << 20, 1 << 14  # bytes; DuckDB leaves out lines above 2 MB and says nothing
MOST_SURPLUS = 2000  # cells of a line for which there are no names: DuckDB's time grows with their square


class reading:
    """Errors of the file system as one line."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"cannot read {self._path}: {reason}; check the name and who may read it") from None


def digest(path: Path, report: Callable[[int, int], None] = lambda done, total: None) -> str:
    """SHA-256 of a file of the user's. ConfigError if it cannot be read.

    Args:
        report: called with (bytes done, in all).
    """
    found = hashlib.sha256()
    with reading(path), open(path, "rb") as file:
        size = path.stat().st_size
        while block := file.read(BLOCK):
            found.update(block)
            report(file.tell(), size)
    return found.hexdigest()


def check_lines(
    path: Path, delimiter: str, columns: int, report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Refuses what is no row of a report and would take DuckDB minutes, or be left out by it without a word.

    Args:
        columns: names that there are.
        report: as of `digest`.

    Raises:
        ConfigError: a line of the text is too long, or has far more cells than there are names.
    """
    mark, rest, done = delimiter.encode(), b"", 0
    with reading(path), open(path, "rb") as file:
        size = path.stat().st_size
        while block := file.read(BLOCK):
            block, at = rest + block, 0
            whole = _last_end(block, 0, len(block)) + 1
            while at < whole:
                end = _last_end(block, at, at + SHORT_LINE)
                if end < 0:
                    end = min(e for e in (block.find(b"\n", at), block.find(b"\r", at)) if e >= 0)
                    _check_line(path, block[at:end], (mark, columns), done + at)
                at = end + 1
            rest, done = block[whole:], done + whole
            if len(rest) > LONGEST_LINE:
                break
            report(file.tell(), size)
    _check_line(path, rest, (mark, columns), done)


def _check_line(path: Path, line: bytes, table: tuple[bytes, int], position: int) -> None:
    mark, columns = table
    if len(line) > LONGEST_LINE:
        found = f"is longer than {LONGEST_LINE >> 20} MiB"
    elif line.count(mark) > columns + MOST_SURPLUS:
        found = f"has {line.count(mark) + 1:,} cells for {columns:,} columns"
    else:
        return
    number = _lines_before(path, position) + 1
    raise ConfigError(f"{path}: line {number:,} {found}: its line end may be lost; take it out, or export again")


def _last_end(block: bytes, start: int, end: int) -> int:
    """Position of the last line end in a part of a block, -1 without one."""
    return max(block.rfind(b"\n", start, end), block.rfind(b"\r", start, end))


def _lines_before(path: Path, position: int) -> int:
    feeds = returns = 0
    with open(path, "rb") as file:
        while block := file.read(min(BLOCK, position - file.tell())):
            feeds, returns = feeds + block.count(b"\n"), returns + block.count(b"\r")
    return feeds or returns
