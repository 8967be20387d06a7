"""Work in the background with its error kept for the next one who waits; what holds back Ctrl-C and orbax's log."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator


class Background:
    """At most one piece of work in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work has been started that nobody has waited for."""
        return self._thread is not None

    def start(self, work: Callable[[], None]) -> None:
        """Starts work; the one before must have been waited for.

        Not a daemon: an interpreter that ends in an orderly way lets it finish.
        """
        assert self._thread is None

        def run():
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when there is no work; raises what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds back the first Ctrl-C until the block is done; a second one interrupts at once (still atomic)."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pending = []

    def remember(number, frame):
        pending.append(number)
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(signal.SIGINT, None)


_lock, _depth, _before = threading.Lock(), 0, False


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps orbax from logging a traceback for a failure that becomes one line here; threads may overlap in it."""
    global _depth, _before
    logger = logging.getLogger("absl")
    with _lock:
        if _depth == 0:
            _before, logger.disabled = logger.disabled, True
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                logger.disabled = _before
