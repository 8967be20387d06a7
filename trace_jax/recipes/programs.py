"""Compiled programs that are kept between commands."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import jax


def keep() -> None:
    """For commands whose time goes into compiling, such as a look at one episode: keep the programs for the next one,
    unless the user settled that with JAX_COMPILATION_CACHE_DIR. Without a home to write to, they are not kept."""
    if jax.config.jax_compilation_cache_dir:
        return
    with contextlib.suppress(OSError, RuntimeError):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "trace-jax" / "programs" / platform.node()  # a program is of one machine, a home may not be
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
