"""Progress while `trace-jax diagnose` reads large files: how far the pass at hand is, and which pass it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb

from trace_jax.recipes.progress import Bar, Progress

LARGE = 50_000_000  # bytes of a file that is worth a bar
EVERY = 0.25  # seconds between two looks at how far DuckDB is


class Passes:
    """Passes over the files, those of DuckDB seen from beside it. Each fills the bar from its beginning."""

    def __init__(self, bar: Bar):
        self._bar, self._lock = bar, threading.Lock()
        self._number, self._last = 1, 0.0

    def show(self, done: float, total: float) -> None:
        """So much of the pass at hand; less than before: the next one has begun."""
        share = 100 * min(max(done / max(total, 1e-9), 0.0), 1.0)
        with self._lock:
            self._number += share < self._last - 1.0
            self._last = share
            self._bar.update(min(int(share), 99), **{"pass": self._number})

    @contextlib.contextmanager
    def watching(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Shows how far the queries of a connection are, from a thread of its own."""
        connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(EVERY):
                if (percent := connection.query_progress()) > 0:
                    self.show(percent, 100.0)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


Show = Callable[[float, float], None]  # done, in all


def _quiet(done: float, total: float) -> None:
    """Of files that take no time."""


@contextlib.contextmanager
def reading(
    progress: Progress, files: Sequence[Path], connection: duckdb.DuckDBPyConnection | None = None
) -> Iterator[Show]:
    """A bar over what is read while it lasts, if any of the files is large. What it gives is called by passes that are
    not DuckDB's.

    Args:
        connection: whose queries are shown, too.
    """
    large = [path.name for path in files if path.is_file() and path.stat().st_size > LARGE]
    if not large:
        yield _quiet
        return
    with contextlib.ExitStack() as stack:
        passes = Passes(stack.enter_context(progress.bar(f"reading {', '.join(large)}", 100)))
        if connection is not None:
            stack.enter_context(passes.watching(connection))
        yield passes.show
