"""The terminal or pipe behind `trace-jax play`: what is typed, what is shown, and Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trace_jax.recipes.play_input import begins_another, in_text, is_open, is_sql, is_unfinished

PATIENCE_SECONDS = 0.05  # for the main thread to hear a signal
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Reader:
    """Entries of one or more lines from stdin. Prompts, line editing and completion are for terminals only.

    Args:
        words: what the tab key completes.
    """

    def __init__(self, words: Sequence[str]):
        self.interactive = bool(sys.stdin and sys.stdin.isatty())
        self._words = sorted(words)
        self._ahead: list[str] = []  # lines that were read, but not yet taken; the last comes first
        self._pasted = False  # whether they were pasted
        if self.interactive:
            with contextlib.suppress(ImportError):  # not everywhere
                self._edit()
        elif sys.stdin is not None:
            with contextlib.suppress(AttributeError):
                sys.stdin.reconfigure(errors="replace")

    def _edit(self) -> None:
        import readline

        readline.set_completer(self._complete)
        readline.set_completer_delims(" \t\n,=()'\"")
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        if not libedit:
            readline.parse_and_bind("set enable-bracketed-paste on")  # what is pasted is one entry

    def _complete(self, text: str, state: int) -> str | None:
        found = [w for w in self._words if w.lower().startswith(text.lower())] if text else ["    "]
        return found[state] if state < len(found) else None

    def line(self, prompt: str) -> str | None:
        """One line without its end (several if they were pasted), None at the end of the input."""
        if self._ahead:
            return self._ahead.pop()
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.rstrip("\r\n") if line else None

    def entry(self, prompt: str) -> str | None:
        """One entry: a line, or several while it is open (`is_open`). None at the end of the input.

        An empty line ends it, and of SQL a line that begins something else. Pasted SQL ends with what was pasted,
        unless something must follow.
        """
        self._pasted = self._pasted and bool(self._ahead)
        first = self._of_paste(self.line(prompt))
        if first is None:
            return None
        text = first.strip()
        if not text or text.startswith("#") or re.match(r"\.\D|\.\Z", text):
            return text
        lines, indent = [text], len(first) - len(first.lstrip())
        while is_open(lines):
            if self._pasted and not self._ahead and is_sql(text) and not is_unfinished("\n".join(lines)):
                break
            line = self._of_paste(self.line("." * (len(prompt) - 1) + " "), inside=True)
            if line is None or (not line.strip() and not in_text(lines)):
                break
            if begins_another(lines, line):
                self._ahead.append(line)
                break
            lines.append(line[indent:] if not line[:indent].strip() else line)
        return "\n".join(lines)

    def _of_paste(self, text: str | None, inside: bool = False) -> str | None:
        """The first line of several that were pasted, if they begin with SQL or go on with it; others stay together."""
        if text is None or "\n" not in text or not (inside or is_sql(text) or text.lstrip().startswith(".")):
            return text
        first, *rest = text.split("\n")
        self._ahead += rest[::-1]
        self._pasted = True
        return first


class Screen:
    """Standard output: styled on a terminal, otherwise plain text."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout) if sys.stdout.isatty() else None

    def say(self, text: str = "", style: str = "") -> None:
        """Lines as they are."""
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(Text(text, style=style), soft_wrap=True, highlight=False)

    def prose(self, text: str, style: str = "") -> None:
        """Lines that may be broken between words."""
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(Text(text, style=style), highlight=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows of text in aligned columns."""
        if self._console is not None:
            built = Table(*columns)
            for row in rows:
                built.add_row(*map(Text, row))
            self._console.print(built)
            return
        widths = [max(len(row[c]) for row in [columns, *rows]) for c in range(len(columns))]
        for row in (columns, *rows):
            self.say("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())


class Stops:
    """SIGINT and SIGTERM while a person is asked: each raises `KeyboardInterrupt` in the main thread, soon.

    Python acts on a signal between two steps of its own, so the main thread does not hear one while it waits in native
    code: for the interpreter of a tool call, or for a key if the signal came just before that wait began. A second
    thread therefore watches for signals, ends the Python of a call, and sends a signal that was not heard again.

    The tool may swallow the exception, so `count` says how many there were.

    Args:
        end_call: ends the Python that runs for the person, if any.
    """

    def __init__(self, end_call: Callable[[], None]) -> None:
        self.count, self.signal = 0, signal.SIGINT
        self._end_call = end_call
        self._previous: dict[int, Any] = {}
        self._arrived = self._repeated = 0  # signals, and how many of them the watcher sent

    def __enter__(self) -> Stops:
        self._told, self._teller = socket.socketpair()  # the system writes the number of each signal
        self._told.setblocking(False)
        self._teller.setblocking(False)
        self._left = threading.Event()
        for number in _NUMBERS:
            self._previous[number] = signal.signal(number, self._receive)
        self._woken = signal.set_wakeup_fd(self._teller.fileno(), warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._left.set()
        self._teller.close()  # ends the watcher's wait
        self._watcher.join()
        self._told.close()

    def _watch(self) -> None:
        while True:
            select.select([self._told], [], [])
            if self._left.is_set():
                return
            if self._unheard():
                self._end_call()
            self._left.wait(PATIENCE_SECONDS)
            if (number := self._unheard()) and hasattr(signal, "pthread_kill") and not self._left.is_set():
                self._repeated += 1
                signal.pthread_kill(threading.main_thread().ident, number)

    def _unheard(self) -> int | None:
        """A signal that has arrived, but that the main thread has not taken note of."""
        with contextlib.suppress(BlockingIOError):
            return next((n for n in self._told.recv(4096, socket.MSG_PEEK) if n in _NUMBERS), None)
        return None

    def _receive(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            while told := self._told.recv(4096):
                self._arrived += sum(n in _NUMBERS for n in told)
        # Should this be early, before the number is written or a repeated one sent, it is called once more.
        if self._arrived - self._repeated > self.count:
            self.count = self._arrived - self._repeated
            self.signal = signal.Signals(number)
            raise KeyboardInterrupt
