"""Progress on stderr: rich bars on a terminal, otherwise one plain line every few seconds."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress


def _format(figures: dict[str, float | None]) -> str:
    return "  ".join(f"{k} {'-' if v is None else format(v, '.4g')}" for k, v in figures.items())


class Bar:
    """One stage's progress. `step` counts completed units out of `total`."""

    def __init__(self, console: Console, name: str, total: int, completed: int, interval: float):
        self._console, self.name, self.total = console, name, total
        self._start, self._first, self._interval = time.monotonic(), completed, interval
        self._last = self._start
        self._rich: RichProgress | None = None
        if console.is_terminal:
            self._rich = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self._task = self._rich.add_task(name, total=total, completed=completed, figures="")
            self._rich.start()

    def update(self, step: int, **figures: float | None) -> None:
        """Shows `step` units done and the figures (loss, reward, ...) of the latest one, None: not known."""
        if self._rich is not None:
            self._rich.update(self._task, completed=step, figures=_format(figures))
            return
        now = time.monotonic()
        if step < self.total and now - self._last < self._interval:
            return
        self._last = now
        done = step - self._first
        left = f"{(now - self._start) / done * (self.total - step):.0f}s" if done > 0 else "-"
        self._console.print(
            f"{self.name} {step}/{self.total}  {_format(figures)}  eta {left}", highlight=False, soft_wrap=True
        )

    def close(self) -> None:
        """Leaves the finished bar on the screen."""
        if self._rich is not None:
            self._rich.stop()


class _Quiet(io.TextIOBase):
    """A stream that drops what its own stream can no longer take: nobody watching is no reason to stop working."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class Progress:
    """Where the recipes report to. `interval`: seconds between plain lines when stderr is not a terminal."""

    def __init__(self, console: Console | None = None, interval: float = 10.0):
        self.console = console or Console(file=_Quiet(sys.stderr))
        self.interval = interval

    @contextlib.contextmanager
    def bar(self, name: str, total: int, completed: int = 0) -> Iterator[Bar]:
        """A bar for one stage, closed whatever happens inside."""
        bar = Bar(self.console, name, total, completed, self.interval)
        try:
            yield bar
        finally:
            bar.close()

    def note(self, text: str) -> None:
        """One line of information."""
        self.console.print(text, highlight=False, soft_wrap=True)
