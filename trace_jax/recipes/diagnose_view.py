"""What `trace-jax diagnose` shows while it works: columns, quality, windows, the investigation, the answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trace_jax.diagnose import findings, mapping
from trace_jax.diagnose.findings import Diagnosis, Evidence, Parts
from trace_jax.diagnose.mapping import Plan
from trace_jax.diagnose.quality import Report
from trace_jax.diagnose.windows import Windows
from trace_jax.diagnose.words import Words
from trace_jax.environments.ads.answer import parse_lenient
from trace_jax.recipes.play_after import query_of, step_in_words
from trace_jax.recipes.play_answer import spoken
from trace_jax.simulator.causes import NO_SIGNAL

SHOWN_LINES = 8  # of what a call showed
PIPE_WIDTH = 140  # columns of a table where nobody knows how many there are


class View:
    """Writes to stdout; plain text when that is no terminal."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        if not self._console.is_terminal:
            self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False, width=PIPE_WIDTH)
        self._console.on_broken_pipe = _broken_pipe
        self._calls = 0

    def say(self, text: str = "", style: str = "") -> None:
        """One line, as it is."""
        self._console.print(Text(_printable(text), style=style))

    def _head(self, text: str) -> None:
        self.say()
        self.say(text, "bold")

    def _table(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = Table(*names, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(_printable(v)) for v in row))
        self._console.print(table, soft_wrap=False)

    def columns(self, plans: Sequence[Plan]) -> None:
        """What was understood of each table."""
        for plan in plans:
            self._head(f"{plan.source.name}: columns")
            self._table(("field", "column", "read as"), mapping.rows(plan))

    def quality(self, report: Report) -> None:
        """The report on the data, before anything is concluded."""
        self._head("quality of the data")
        for finding in report.findings:
            mark = "!" if finding.serious else " "
            self.say(f" {mark} {finding.text}", "yellow" if finding.serious else "")

    def windows(self, windows: Windows, words: Sequence[Words]) -> None:
        """What is compared, and in which words the agent reads it."""
        self._head("windows")
        self.say(
            f"   before {windows.before[0]} to {windows.before[1]}, after {windows.after[0]} to {windows.after[1]}"
        )
        self.say(f"   {windows.how}")
        if words:
            self._head("your values in the agent's words")
            self._table(
                ("dimension", "word", "your values", ""),
                [(w.dimension if not n else "", *line) for w in words for n, line in enumerate(w.lines())],
            )

    def question(self, text: str, agent: str) -> None:
        """What the agent is asked."""
        self._head(f"investigation ({agent})")
        self.say(f"   asked: {text}")

    def call(self, code: str) -> None:
        """A tool call, in words where it is one of the analyst's."""
        self._calls += 1
        told = step_in_words(query_of(code))
        told = told if len(told) <= 200 else told[:197] + "..."
        self.say(f"   {self._calls}. {told}", "cyan")

    def seen(self, text: str) -> None:
        """What the call showed."""
        lines = text.splitlines()
        for line in lines[:SHOWN_LINES]:
            self.say(f"        {line}")
        if len(lines) > SHOWN_LINES:
            self.say(f"        ... {len(lines) - SHOWN_LINES} more lines", "dim")
        if any("null" in line.split() for line in lines[:SHOWN_LINES]):
            self.say("        (null: nothing to compare, as where a column is missing or never changes)", "dim")

    def answered(self, number: int, calls: int, answer: str | None) -> None:
        """How an investigation ended."""
        parsed = parse_lenient(answer or "")
        said = spoken(parsed.root_cause, parsed.driver_segments) if parsed else "no readable answer"
        self.say(f"   investigation {number + 1}: {said} after {calls} call{'s' * (calls != 1)}")

    def answer(
        self, diagnosis: Diagnosis, rows: Sequence[Evidence], parts: Sequence[Parts], opens: Sequence[str]
    ) -> None:
        """The diagnosis with everything that it rests on and what it leaves open."""
        self._head("answer")
        self.say(f"   {diagnosis.text}", "bold green" if diagnosis.level == "high" else "bold yellow")
        for doubt in diagnosis.doubts:
            self.say(f" ! {doubt}", "yellow")
        if diagnosis.cause not in (None, NO_SIGNAL):
            self.say(f"   known by: {findings.describe(diagnosis.cause)}")
        elif diagnosis.cause is not None and not diagnosis.doubts:
            self.say(f"   {findings.describe(diagnosis.cause)}")
        self.say(f"   confidence {diagnosis.level}: {findings.agreed(diagnosis)}")
        for why in diagnosis.why:
            self.say(f"     - {why}")
        for text, votes in diagnosis.others:
            self.say(f"     - {votes} of {diagnosis.of}: {text}")
        for part in parts:
            self.say(f"   {part.text}")
        for found in rows:
            self._head(f"evidence: {found.title}")
            self._table(found.columns, found.rows)
            for line in found.sql.splitlines():
                self.say(f"     {line}", "dim")
        self._head("not checked")
        for line in opens:
            self.say(f"   - {line}")

    def setup(self, text: str) -> None:
        """The statements after which the queries of the evidence give the same rows in any DuckDB."""
        self._head("to run the evidence again, in DuckDB, first")
        self._console.print(Text(text.rstrip(), style="dim"))


def _printable(value: Any) -> str:
    """A value as one line without control characters: a cell of a file must not steer the terminal."""
    text = "" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() else "?" for c in text)


def _broken_pipe() -> None:
    """rich would end the program with status 1; the command line knows what a closed pipe means."""
    raise BrokenPipeError
