"""Files that are whole or absent, and errors of the file system as one line."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from trace_jax.config import ConfigError

# Errors whose mend is not space but what stands at the path, or who may write there.
_MENDS = {
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY), "remove it or choose another place"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable or choose another place"),
}

_UNFINISHED: set[Path] = set()


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def unfinished(path: Path, *endings: str) -> Iterator[Path]:
    """A name beside `path` to write to before `os.replace`; what still has it in the end is removed.

    Args:
        endings: of files that the writer makes besides, such as `.wal`.
    """
    # A name that no file of a user's has, nor what another process left behind.
    partial = path.with_name(f"{path.name}.{os.getpid()}.trace-jax.partial")
    own = [partial, *(partial.with_name(partial.name + ending) for ending in endings)]
    _UNFINISHED.update(own)
    try:
        yield partial
    finally:
        for left in own:
            with contextlib.suppress(OSError):  # the error on its way out says more
                left.unlink(missing_ok=True)
            _UNFINISHED.discard(left)


def abandon() -> None:
    """Removes what is unfinished: for a process that a signal ends wherever it is."""
    for left in list(_UNFINISHED):
        with contextlib.suppress(OSError):
            left.unlink(missing_ok=True)


def replace(path: Path, content: bytes | memoryview) -> str:
    """Write `content` to `path` in one step, so that no half file has that name; returns its SHA-256."""
    with unfinished(path) as partial:
        partial.write_bytes(content)
        os.replace(partial, path)
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def disk(path: Path, mend: str = "free space or choose another place") -> Iterator[None]:
    """Turns errors of the file system (full disk, no permission) into one line.

    Args:
        path: named when the error names no file itself.
        mend: for what is not a matter of permissions or of something else in the file's place.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # libraries raise OSError for faults of their own: those are no matter of the disk
            raise
        where = error.filename2 or error.filename or path
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot write {where}: {reason}; {_MENDS.get(error.errno, mend)}") from None
