"""Threads that run tool calls with a wall-clock limit each.

Python cannot stop a thread, so a call that overruns is abandoned: its caller moves on, a fresh thread takes over its
place, and whatever the call holds is cleaned up when (if) it returns. One hung tool therefore ends one trajectory,
not the run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# A call that has run this long no longer holds a worker's place, so that a few slow calls do not hold up the others.
STALL_SECONDS = 10.0


@dataclass
class Call:
    """One tool call. `seconds` counts from the moment a thread took it up, not its wait in the queue."""

    run: Callable[[], Any]
    limit: float
    cleanup: Callable[[], None]
    value: Any = None
    error: BaseException | None = None
    started: float | None = None
    seconds: float = 0.0
    done: bool = False
    abandoned: bool = False
    stalled: bool = False


class WorkerPool:
    """Runs batches of calls; used by one thread at a time."""

    def __init__(self, workers: int):
        self._workers = workers
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._places = 0  # threads that are idle or in a call that is neither stalled nor abandoned
        with self._changed:
            self._refill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_) -> None:
        for _ in range(self._places):
            self._calls.put(None)

    def run(self, calls: Sequence[Call]) -> None:
        """Returns when every call is `done` or `abandoned`. Errors of a call end up in its `error`."""
        for call in calls:
            self._calls.put(call)
        waiting = list(calls)
        with self._changed:
            while waiting := [call for call in waiting if not call.done and not call.abandoned]:
                self._changed.wait(self._enforce(waiting))

    def _enforce(self, waiting: Sequence[Call]) -> float | None:
        """Abandons calls over their limit, replaces the threads of stalled ones; seconds until the next such moment."""
        now, soonest = time.monotonic(), None
        for call in waiting:
            if call.started is None:
                continue
            age = now - call.started
            if age >= call.limit:
                call.abandoned, call.seconds = True, age
            if (call.abandoned or age >= STALL_SECONDS) and not call.stalled:
                call.stalled = True
                self._places -= 1
            if not call.abandoned:
                left = call.limit - age if call.stalled else min(call.limit, STALL_SECONDS) - age
                soonest = left if soonest is None else min(soonest, left)
        self._refill()
        return 0.0 if any(call.abandoned for call in waiting) else soonest

    def _refill(self) -> None:
        while self._places < self._workers:
            self._places += 1
            threading.Thread(target=self._work, name="rollout-tool", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            with self._changed:
                call.started = time.monotonic()
                self._changed.notify()  # the caller starts watching the clock
            try:
                call.value = call.run()
            except Exception as error:
                call.error = error
            with self._changed:
                if not call.abandoned:
                    call.seconds = time.monotonic() - call.started
                    call.done = True
                self._changed.notify()
                late, replaced = call.abandoned, call.stalled
            if late:
                call.cleanup()
            if replaced:
                return
