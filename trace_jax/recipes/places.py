"""Where a command's results go: a directory that can be written to, and files that replace earlier ones at the end."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trace_jax.config import ConfigError
from trace_jax.recipes.rundir import writing

PARTIAL = ".trace-jax.partial"  # inside a directory: what is still being written


def folder(path: Path, flag: str = "--out") -> Path:
    """Makes a directory for results, before the work that they cost; returns it with links resolved.

    Args:
        flag: that it was given with.

    Raises:
        ConfigError: something else stands there, or it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        found = path.resolve()
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{flag} {path} is no directory, or lies in none: choose another path") from None
    except (OSError, ValueError) as error:  # ValueError: a character that no name has
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(f"cannot write {path}: {reason}; choose another {flag}") from None
    if not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: no permission there; make it writable or choose another {flag}")
    return found


def existing(path: Path, flag: str = "--out") -> Path:
    """A directory that a command reads from and writes into, with links resolved. ConfigError as `folder`, or there is
    none."""
    if not os.path.isdir(path):
        what = "no directory" if os.path.lexists(path) else "not there"
        raise ConfigError(f"{flag} {path} is {what}: give a directory that has what this command goes on from")
    return folder(path, flag)


@contextlib.contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """An empty directory inside `directory`, so on its file system, for files that replace those of `directory` when
    they are whole (`put`). However it ends it is gone at the end, and with it a `directory` that was made for it and
    has got nothing. What a process left that was killed is removed.

    Raises:
        ConfigError: see `folder`.
    """
    made, partial = not os.path.exists(directory), directory / PARTIAL
    folder(directory)
    try:
        with writing(partial):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # it has got something
                directory.rmdir()


def put(partial: Path, directory: Path, first: str) -> None:
    """Moves files into their place.

    Args:
        first: the one that says what the others are. A process that is killed in the middle of this leaves a directory
            that says what it should have, and the same command mends it.

    Raises:
        OSError: one cannot be moved.
    """
    for path in sorted(partial.iterdir(), key=lambda p: p.name != first):
        with writing(directory / path.name):
            os.replace(path, directory / path.name)
