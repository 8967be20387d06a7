"""Ctrl-C: the first finishes the step at hand and saves, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


class Interrupted(Exception):
    """The run stopped on a signal with everything saved.

    `status` is the exit status (128 + signal number), `resume` the command that continues (None: the same command).
    """

    def __init__(self, status: int, resume: str | None = None):
        super().__init__("interrupted")
        self.status, self.resume = status, resume


class Interrupt:
    """Turns SIGINT and SIGTERM into a request that the loops look at between steps.

    Used as a context manager around a command. A loop calls `check()` where it may stop, after saving. Work that has
    nothing worth saving half-way runs inside `abortable()`, where the first signal raises at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._abortable = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if self.signal is not None:
            # Checkpoints are written beside and renamed, so ending here loses at most the steps since the last one.
            os.write(2, b"\naborted\n")
            os._exit(128 + number)
        self.signal = number
        if self._abortable:
            raise Interrupted(128 + number)
        os.write(2, b"\nstopping after this step and saving; once more aborts at once\n")

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    def check(self) -> None:
        """Raises `Interrupted` when a signal has arrived."""
        if self.signal is not None:
            raise Interrupted(128 + self.signal)

    @contextlib.contextmanager
    def abortable(self) -> Iterator[None]:
        """A block that a signal may leave anywhere, because it writes nothing before its end."""
        self.check()
        before, self._abortable = self._abortable, True
        try:
            yield
        finally:
            self._abortable = before


def ignore_in_worker() -> None:
    """Pool initialiser: a terminal's Ctrl-C reaches every process of the group, only the main one may act on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
