"""Files that are whole or absent, and errors of the file system as one line."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from trace_jax.config import ConfigError


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace(path: Path, content: bytes | memoryview) -> str:
    """Write `content` to `path` in one step, so that no half file has that name; returns its SHA-256."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def disk(path: Path, mend: str = "free space or choose another place") -> Iterator[None]:
    """Turns errors of the file system (full disk, no permission) into one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {(error.strerror or str(error)).lower()}; {mend}") from None
