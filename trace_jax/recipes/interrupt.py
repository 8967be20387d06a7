"""Ctrl-C: the first finishes the step at hand and saves, the second ends the process at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys


class Interrupted(Exception):
    """The run stopped on a signal with everything saved.

    `status` is the exit status (128 + signal number), `resume` the command that continues (None: the same command).
    """

    def __init__(self, status: int, resume: str | None = None):
        super().__init__("interrupted")
        self.status, self.resume = status, resume


class Interrupt:
    """Turns SIGINT and SIGTERM into a request that the work looks at where it may stop.

    Used as a context manager around a command. The handler raises nothing: an exception out of nowhere would be lost in
    an event loop of orbax or break JAX in the middle of a compilation. Loops call `check()` between steps, after
    saving; long work that keeps nothing half-way calls it as its progress callback.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = self._previous[number] = signal.signal(number, self._receive)
            outer = getattr(before, "__self__", None)
            if isinstance(outer, Interrupt):  # the command line's, which heard what arrived before this one began
                self.signal = self.signal or outer.signal
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if self.signal is None:
            self.signal = number
            os.write(2, b"\nstopping after this step; once more aborts at once\n")
            return
        # Checkpoints are written beside and renamed, so ending here loses at most the steps since the last one.
        os.write(2, b"\naborted\n")
        for child in multiprocessing.active_children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the signal may have arrived in the middle of a write
                stream.flush()
        os._exit(128 + number)

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    def check(self, *_: object) -> None:
        """Raises `Interrupted` when a signal has arrived. Ignores arguments, to serve as a progress callback."""
        if self.signal is not None:
            raise Interrupted(128 + self.signal)


def ignore_in_worker() -> None:
    """Start of a worker process: a terminal's Ctrl-C reaches every process of the group, only the main one may act."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
