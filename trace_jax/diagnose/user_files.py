"""The user's files are opened here for reading, and nowhere for writing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from trace_jax.config import ConfigError

BLOCK = 1 << 22


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
