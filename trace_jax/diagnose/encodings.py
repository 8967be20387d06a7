"""How a file's bytes become text: told from all of them, and copied to UTF-8 where DuckDB does not read it."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

from trace_jax.config import ConfigError
from trace_jax.diagnose.user_files import BLOCK, reading
from trace_jax.warehouse.files import disk

_CONTROL = frozenset(range(32)) - {9, 10, 12, 13, 26}
_BINARY = "is binary, no table: name a CSV, Parquet or DuckDB file"
DUCKDB = {"utf-8": "utf-8", "utf-8-sig": "utf-8", "latin-1": "latin-1", "utf-16": "utf-16", "utf-16-le": "utf-16"}
ICONV = {"cp1252": "WINDOWS-1252", "utf-16-be": "UTF-16BE"}  # what DuckDB does not read, as iconv calls it

Report = Callable[[int, int], None]  # bytes done, in all


def nothing(done: int, total: int) -> None:
    """Reports to nobody."""


def encoding_of(path: Path, head: bytes, report: Report = nothing) -> str:
    """Encoding of the whole file, as Python calls it.

    Args:
        head: its first bytes.

    Raises:
        ConfigError: it is no text, or in an encoding that is not read.
    """
    for mark in (b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff"):
        if head.startswith(mark):
            raise ConfigError(f"{path} is UTF-32 text: save it as UTF-8")
    if head.startswith(b"\xff\xfe"):
        return "utf-16"
    if head.startswith(b"\xfe\xff"):
        return "utf-16-be"
    even = len(head) & ~1
    if b"\x00" in head:
        zeros = head[0:even:2].count(0), head[1:even:2].count(0)
        for name, high, low in (("utf-16-le", *zeros[::-1]), ("utf-16-be", *zeros)):
            if even >= 4 and high > 0.3 * even / 2 and low == 0:
                return name
        raise ConfigError(f"{path} {_BINARY}")
    if sum(b in _CONTROL for b in head[:4096]) > 0.01 * len(head[:4096]):
        raise ConfigError(f"{path} {_BINARY}")
    decoder, size = codecs.getincrementaldecoder("utf-8")(), path.stat().st_size
    try:
        with reading(path), open(path, "rb") as file:
            while block := file.read(BLOCK):
                decoder.decode(block)
                report(file.tell(), size)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "cp1252" if _has_windows_letters(path) else "latin-1"
    return "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8"


def _has_windows_letters(path: Path) -> bool:
    """Whether a file has bytes that are letters in Windows-1252 and nothing in Latin-1."""
    with reading(path), open(path, "rb") as file:
        while block := file.read(BLOCK):
            if len(block.translate(None, delete=bytes(range(0x80, 0xA0)))) < len(block):
                return True
    return False


def utf8_copy(path: Path, encoding: str, folder: Path, report: Report = nothing) -> Path:
    """A copy in UTF-8, in a folder that is the caller's to remove.

    Raises:
        ConfigError: the file is not in that encoding after all, or the disk is full.
    """
    found = folder / f"utf8-{len(list(folder.iterdir()))}.csv"
    decoder, size = codecs.getincrementaldecoder(encoding)(), path.stat().st_size
    try:
        with reading(path), open(path, "rb") as file, disk(found), open(found, "wb") as out:
            while block := file.read(BLOCK):
                out.write(decoder.decode(block).encode())
                report(file.tell(), size)
            out.write(decoder.decode(b"", final=True).encode())
    except UnicodeError:
        named = {"cp1252": "UTF-8, Latin-1 or Windows-1252", "utf-16-be": "whole UTF-16"}[encoding]
        raise ConfigError(f"{path} is no {named} text: save it as UTF-8") from None
    return found


def prepared(path: Path, encoding: str) -> tuple[str, str]:
    """The command that makes such a copy for good, as an SQL comment, and the name of its file."""
    name = f"{path}.utf8"
    quoted = ["'" + text.replace("'", "'\\''") + "'" for text in (str(path), name)]
    return f"-- first, in a shell: iconv -f {ICONV[encoding]} -t UTF-8 {quoted[0]} > {quoted[1]}\n", name
