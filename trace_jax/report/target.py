"""Where a page goes: checked before the work, written in one step, and nothing but an earlier page is replaced."""

from __future__ import annotations

import os
from pathlib import Path

from trace_jax.config import ConfigError
from trace_jax.warehouse.files import unfinished

MARK = '<meta name="generator" content="trace-jax">'  # in the head of every page


def _unwritable(out: Path, error: OSError, flag: str) -> ConfigError:
    return ConfigError(f"cannot write {out}: {(error.strerror or str(error)).lower()}; choose another {flag}")


def check_target(out: Path, *, ours: bool = False, flag: str = "--out") -> None:
    """Refuse, before the work, a page that could not or should not be written.

    Args:
        ours: `out` is where our own page belongs, whatever stands there.
        flag: that `out` was given with.
    Raises:
        ConfigError: `out` is a directory, a device, or a file that is no page of ours, or its directory cannot be made
            or written to.
    """
    if out.is_dir():
        raise ConfigError(f"{flag} {out} is a directory: name a file, e.g. {out / 'page.html'}")
    try:
        page = out.is_file() and (ours or MARK in out.read_bytes()[:4096].decode(errors="replace"))
        if out.exists() and not page:
            raise ConfigError(f"{flag} {out} exists and is no page of trace-jax: choose another file")
        missing = [folder for folder in out.absolute().parents if not folder.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)  # as a try: it is made with the page
        for folder in missing:
            folder.rmdir()
    except OSError as error:
        raise _unwritable(out, error, flag) from None
    place = next(folder for folder in out.absolute().parents if folder.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {out}: no permission in {place}; choose another {flag}")


def put(out: Path, page: str, *, ours: bool = False, flag: str = "--out") -> Path:
    """Put a page in place in one step.

    Raises:
        ConfigError: it cannot be written, see `check_target`.
    """
    check_target(out, ours=ours, flag=flag)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(out) as partial:
            partial.write_text(page, encoding="utf-8")
            os.replace(partial, out)
    except OSError as error:
        raise _unwritable(out, error, flag) from None
    return out
