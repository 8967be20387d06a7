"""How a call's value becomes text: rows as lines or as an aligned table, numbers short, everything bounded.

A value of a few kilobytes can mean more text than a machine holds (ten lists, each of a hundred times the one before):
rendering stops when its budget of characters is used up.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic_monty as monty

MAX_RENDERED = 400_000  # characters of a rendered value; what follows is not even counted
MAX_DEPTH = 20
MAX_INTEGER_BITS = 128  # a longer integer is described, not written: its digits take quadratic time
MAX_TABLE_ROWS = 60
MAX_CELL = 40  # characters of a cell in a table


def render(value: Any, table: bool = False) -> tuple[list[str], int, int]:
    """A call's value as lines.

    A list of row dicts (same keys) or of tuples is a result: one line a row, values joined by single spaces, numbers as
    in `scalar`; `table` aligns the columns, puts their names first and shortens long cells. Anything else is one value,
    written like Python with the same numbers.

    Returns:
        the lines; how many of the last ones are rows; how many rows there are besides.
    """
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, dict) and all(isinstance(r, dict) and r.keys() == first.keys() for r in value):
            return _rows(list(first), [r.values() for r in value], table)
        if all(isinstance(row, tuple) for row in value):
            return _rows(None, value, table)
    return (value if isinstance(value, str) else _Writer().write(value)).split("\n"), 0, 0


def _rows(names: Sequence[Any] | None, rows: Sequence[Iterable[Any]], table: bool) -> tuple[list[str], int, int]:
    if table:
        return _table(names, rows)
    writer = _Writer()
    lines = []
    for row in rows:
        lines.append(" ".join(map(writer.write, row)))
        if writer.left <= 0:
            break
    return lines, len(lines), len(rows) - len(lines)


def _table(names: Sequence[Any] | None, rows: Sequence[Iterable[Any]]) -> tuple[list[str], int, int]:
    shown = [list(row) for row in rows[:MAX_TABLE_ROWS]]
    writer = _Writer()
    cells = [[_short(writer.write(value)) for value in row] for row in shown]
    head = [] if names is None else [[_short(str(name)) for name in names]]
    width = max(map(len, shown))
    right = [all(_numeric(row[k]) for row in shown if k < len(row)) for k in range(width)]
    wide = [max((len(row[k]) for row in head + cells if k < len(row)), default=0) for k in range(width)]
    lines = [
        "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, wide, right, strict=False)).rstrip()
        for row in head + cells
    ]
    return lines, len(cells), len(rows) - len(cells)


def _numeric(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _short(text: str) -> str:
    text = text.replace("\n", " ").replace("\r", " ").replace("\t", " ")
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 3] + "..."


def scalar(value: Any) -> str | None:
    """One value: null, true or false, integers in full, floats with at most 4 significant digits, ISO dates."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, int):
        if value.bit_length() <= MAX_INTEGER_BITS or abs(value) < 10**40:
            return str(value)
        return f"{'-' if value < 0 else ''}(integer of {value.bit_length()} bits)"
    if isinstance(value, str):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return None


class _Writer:
    """Writes values like Python until `MAX_RENDERED` characters are used up, then only dots."""

    def __init__(self):
        self.left = MAX_RENDERED

    def write(self, value: Any, depth: int = 0) -> str:
        text = scalar(value)
        if text is None:
            text = self._compound(value, depth)
        elif depth and isinstance(value, str):
            text = repr(value[: max(self.left, 0)])
        self.left -= min(len(text), 8) if isinstance(value, (list, tuple, dict, set, frozenset)) else len(text) + 2
        return text

    def _compound(self, value: Any, depth: int) -> str:
        if depth > MAX_DEPTH or self.left <= 0:
            return "..."
        if isinstance(value, Mapping):
            return "{" + self._pairs(value, ": ", depth) + "}"
        if isinstance(value, (list, tuple)):
            inner = self._items(value, depth)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, (set, frozenset)):
            return "{" + self._items(value, depth, ordered=True) + "}" if value else "set()"
        if isinstance(value, (bytes, bytearray)):
            return repr(value[: max(self.left, 0)])
        if isinstance(value, monty.MontyClassProxy):
            return f"{value.name}(" + self._pairs(value.attributes, "=", depth) + ")"
        if isinstance(value, monty.MontyClassTypeProxy):
            return f"<class {value.name}>"
        if isinstance(value, monty.MontyStdTypeProxy):
            return f"<{value.kind} {value.name}>"
        if isinstance(value, monty.ExternalModule):
            return "<module>"
        if callable(value):
            return repr(value) if isinstance(value, type) else f"<function {getattr(value, '__name__', '?')}>"
        if isinstance(value, BaseException):
            return f"{type(value).__name__}({self._items(value.args, depth)})"
        if isinstance(value, Iterable):
            return f"{type(value).__name__}({self._items(value, depth)})"
        return repr(value)

    def _items(self, values: Iterable[Any], depth: int, ordered: bool = False) -> str:
        parts = []
        for value in values:
            if self.left <= 0:
                parts.append("...")
                break
            parts.append(self.write(value, depth + 1))
        return ", ".join(sorted(parts) if ordered else parts)

    def _pairs(self, values: Mapping[Any, Any], between: str, depth: int) -> str:
        parts = []
        for name, value in values.items():
            if self.left <= 0:
                parts.append("...")
                break
            key = str(name) if between == "=" else self.write(name, depth + 1)
            parts.append(f"{key}{between}{self.write(value, depth + 1)}")
        return ", ".join(parts)


def cut(lines: Sequence[str], limit: int, rows: int = 0, missing: int = 0, more: int = 0) -> str:
    """Join lines to at most `limit` characters, with a note of the rows (or characters) left out.

    Args:
        lines: the text.
        limit: characters.
        rows: how many of the last lines are rows of a result; these are cut at whole rows.
        missing: characters dropped before this call.
        more: rows dropped before this call.
    """
    text = "\n".join(lines)
    if more and not missing:
        note = _rows_note(more)
        if len(text) + len(note) <= limit:
            return text + note
    elif len(text) <= limit and not missing:
        return text
    total = len(text) + missing
    if rows and not missing:
        room = limit - len(_rows_note(rows + more))
        kept, used = 0, -1
        while kept < len(lines) and used + 1 + len(lines[kept]) <= room:
            used += 1 + len(lines[kept])
            kept += 1
        left = len(lines) - kept
        if 0 < left < len(lines) and left <= rows:
            return "\n".join(lines[:kept]) + _rows_note(left + more)
    note = f"\n... {total} characters in all"
    kept_text = text[: max(limit - len(note), 0)]
    return f"{kept_text}\n... {total - len(kept_text)} more characters"


def _rows_note(count: int) -> str:
    return f"\n... {count} more row{'s' if count > 1 else ''}"
