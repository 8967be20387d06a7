"""Ctrl-C and SIGTERM: the first finishes the step at hand and saves, the second ends the process at once.

A run that stopped so exits with 128 + the signal's number: 130 after Ctrl-C, 143 after the SIGTERM by which Slurm,
Kubernetes and clouds announce that they take a machine away. Not 0, since the work is not done, and none of the
command's own failures (1, 2): 143 is the status a launcher may restart on with the same command and `--resume`. What it
must grant between SIGTERM and SIGKILL is one step and one save.

With several processes the signal may reach one of them, or all at different steps. They must leave at the same step, or
those that go on wait for ever: `agree`, which all call between steps, makes the decision common. JAX has its own notice
of preemption (`multihost_utils.reached_preemption_sync_point`); it knows only SIGTERM, takes that signal's handler away
from Python and tells neither when nor why to leave, so it is not used.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator

from trace_jax.recipes import distributed
from trace_jax.recipes.distributed import several
from trace_jax.warehouse import files


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
    saving; long work that keeps nothing half-way calls it as its progress callback. Loops that several processes run
    together call `agree()` first, once a step:

        if interrupt.agree() or time_to_save:
            save()
        interrupt.check()
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._agreed: int | None = None
        self._previous: dict[int, object] = {}
        self._own = threading.local()

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
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, Interrupt):  # what came after the last look in here, the next stage looks at
                outer.signal = outer.signal or self.signal

    def _receive(self, number: int, frame) -> None:
        if self.signal is None:
            self.signal = number
            distributed.hear(number)
            os.write(2, b"\nstopping after this step; once more aborts at once\n")
            return
        # Checkpoints are written beside and renamed, so ending here loses at most the steps since the last one.
        _end(number, "aborted")

    def agree(self) -> bool:
        """Whether to stop here, the same answer in every process; all call it at the same steps.

        One process: `requested`. Several: true in all of them when a signal has reached any, and they exit alike.
        """
        if several():
            from trace_jax.learner import multihost

            if self._previous:  # jax.distributed.initialize has put a handler of its own in the place of this one
                signal.signal(signal.SIGTERM, self._receive)
            self._agreed = max(multihost.gather("interrupt", self.signal or 0)) or None
        return self.requested

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, this thread of one of several processes stops when it, or some other, hears a signal, without having
        agreed when: for work after which they tell each other."""
        self._own.alone = True
        try:
            yield
        finally:
            self._own.alone = False

    @property
    def requested(self) -> bool:
        """Whether to stop: a signal has arrived, and with several processes they have agreed."""
        return self._stop() is not None

    def check(self, *_: object) -> None:
        """Raises `Interrupted` when it is time to stop. Ignores arguments, to serve as a progress callback."""
        if (number := self._stop()) is not None:
            raise Interrupted(128 + number)

    def _stop(self) -> int | None:
        if not several():
            return self.signal
        return (self.signal or distributed.announced()) if getattr(self._own, "alone", False) else self._agreed


class Break:
    """Ends the process on SIGINT and SIGTERM, at once and wherever it is: for commands that keep nothing half-way.

    `KeyboardInterrupt` does not do: raised in a callback of a library's, such as the one by which JAX hears of garbage
    collections, it is printed and forgotten, and the command goes on; raised on the way back through C++ it aborts.
    Temporary files of the command lie in one folder, which is removed, and so is what was being written (`files`).

    Args:
        line: what is said.
    """

    def __init__(self, line: str):
        self._line = line
        self._previous: dict[int, object] = {}
        self._temporary: str | None = None
        self._before: str | None = None

    def __enter__(self) -> Break:
        self._before = tempfile.tempdir
        with contextlib.suppress(OSError):  # nowhere to write: most of these commands need nothing there
            self._temporary = tempfile.tempdir = tempfile.mkdtemp(prefix="trace-jax-")
        self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        tempfile.tempdir = self._before
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _receive(self, number: int, frame) -> None:
        files.abandon()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        _end(number, self._line)


def _end(number: int, line: str) -> None:
    """Ends the process from a signal's handler."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the signal may have arrived in the middle of a write
            stream.flush()
    with contextlib.suppress(OSError):
        show_cursor = b"\x1b[?25h" if os.isatty(2) else b""  # progress bars hide it
        os.write(2, show_cursor + f"\n{line}\n".encode())
    os._exit(128 + number)


def ignore_in_worker() -> None:
    """Start of a worker process: a terminal's Ctrl-C reaches every process of the group, only the main one may act."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
