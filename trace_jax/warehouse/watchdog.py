"""One thread that interrupts queries that outlive their time (a timer thread each would cost more than a query)."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time

import duckdb

AGAIN_SECONDS = 0.05  # an interrupt that arrives before its query starts is lost: repeat it until the query is over


class Watchdog:
    """Interrupts DuckDB cursors at their deadlines; thread-safe."""

    def __init__(self):
        self._wake = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._live: dict[int, duckdb.DuckDBPyConnection] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def watch(self, cursor: duckdb.DuckDBPyConnection, seconds: float) -> int:
        """Interrupt the cursor in so many seconds, unless `done` is called with the returned ticket before."""
        with self._wake:
            ticket = next(self._numbers)
            deadline = time.monotonic() + max(seconds, 0.0)
            self._live[ticket] = cursor
            heapq.heappush(self._heap, (deadline, ticket))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="query-watchdog", daemon=True)
                self._thread.start()
            elif self._heap[0][1] == ticket:
                self._wake.notify()
        return ticket

    def done(self, ticket: int) -> None:
        """The query of this ticket is over."""
        with self._wake:
            self._live.pop(ticket, None)

    def _loop(self) -> None:
        with self._wake:
            while True:
                while self._heap and self._heap[0][1] not in self._live:
                    heapq.heappop(self._heap)
                if not self._heap:
                    self._wake.wait(60.0)
                    continue
                deadline, ticket = self._heap[0]
                left = deadline - time.monotonic()
                if left > 0:
                    self._wake.wait(left)
                    continue
                heapq.heappop(self._heap)
                with contextlib.suppress(duckdb.Error):  # the cursor may have been closed meanwhile
                    self._live[ticket].interrupt()
                heapq.heappush(self._heap, (time.monotonic() + AGAIN_SECONDS, ticket))
