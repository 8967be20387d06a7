"""Entry point of the console script: sees to it that memory is kept between steps, then runs the command.

Programs of XLA's CPU backend take hundreds of megabytes at every call and give them back. By default glibc returns such
pieces to the kernel, which clears and maps them again page by page, 4 KiB each: an update of the nano policy takes a
quarter less time without that, one of a 4-layer slice of Qwen3-0.6B too. glibc reads these settings when a process
begins, so the command starts itself once more with them.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
# Nothing is mapped apart and nothing is trimmed, so what was freed is taken again; in one arena, because further ones
# have a size beyond which they map all the same; in huge pages where the kernel has them.
TUNABLES = {
    "glibc.malloc.mmap_max": 0,
    "glibc.malloc.trim_threshold": 2**40,
    "glibc.malloc.arena_max": 1,
    "glibc.malloc.hugetlb": 1,
}
OFF = "TRACE_JAX_KEEP_MEMORY"  # set to 0: memory goes back to the system at once


def main() -> int:
    """Runs the command of `sys.argv`; returns its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):  # while modules are loaded; the command has handlers of its own
        signal.signal(number, _stopped)
    tunables = wanted(os.environ)
    if tunables is not None and sys.executable and len(sys.orig_argv) > 1:
        # Inherited by what the command starts; the process id and open files stay.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: tunables})
    from trace_jax import cli

    return cli.main()


def _stopped(number: int, frame: object) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


def wanted(environment: Mapping[str, str]) -> str | None:
    """What `GLIBC_TUNABLES` must say: what it says already, and those of `TUNABLES` that it leaves open.

    Returns:
      None where nothing is to be done: all is said, the user turned it off, or glibc is absent or older than 2.35.
    """
    given = [part for part in environment.get(VARIABLE, "").split(":") if part]
    named = {part.partition("=")[0] for part in given}
    missing = [f"{name}={value}" for name, value in TUNABLES.items() if name not in named]
    library, version = platform.libc_ver()
    if not missing or environment.get(OFF) == "0" or library != "glibc":
        return None
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        return None
    return ":".join(given + missing)
