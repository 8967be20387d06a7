"""The terminal or pipe behind `trace-jax play`: what is typed, what is shown, and Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trace_jax.recipes.play_input import begins_another, in_text, is_open, is_sql, is_unfinished


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
    """SIGINT and SIGTERM while a person is asked: each raises `KeyboardInterrupt` where it arrives.

    The tool may swallow that exception, so `count` says how many there were.
    """

    def __init__(self) -> None:
        self.count, self.signal = 0, signal.SIGINT
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        self.count += 1
        self.signal = signal.Signals(number)
        raise KeyboardInterrupt
