"""What the user says of the tables in a mapping file. It may hold any of these; what it leaves out is guessed:

columns: {date: Day, impressions: Impr., spend: Cost, geo: Country/Territory}   # field: column, null: none
values: {geo: {France: JP, Spain: DE}}   # the user's value: the word of the agent's vocabulary that stands for it
date_format: "%d/%m/%Y"
timezone: America/Los_Angeles            # of the account, for columns of moments
decimal: ","
"""

from __future__ import annotations

import stat
import zoneinfo
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from trace_jax.config import ConfigError
from trace_jax.config_io import nearest, read_yaml
from trace_jax.diagnose import synonyms
from trace_jax.diagnose.user_files import reading
from trace_jax.simulator.vocabulary import ATTRIBUTES

KEYS = ("columns", "values", "date_format", "timezone", "decimal")
_OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # what a shell has opened already, and somebody writes to


@dataclass(frozen=True)
class Declared:
    """What the user said; empty where nothing was said."""

    columns: Mapping[str, str | None] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    date_format: str = ""
    timezone: str = ""
    decimal: str = ""


def check_zone(name: str, where: str) -> str:
    """The name itself. ConfigError if Python or DuckDB knows no such time zone."""
    try:
        zoneinfo.ZoneInfo(name)
        with duckdb.connect(":memory:") as connection:  # which has no localtime and no right/UTC
            connection.execute("SELECT now() AT TIME ZONE $1", [name]).fetchall()
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError, duckdb.Error):
        raise ConfigError(f"{where}: no time zone {name!r}; use a name such as America/Los_Angeles or UTC") from None
    return name


def load(path: Path) -> Declared:
    """A mapping file. ConfigError for what it may not hold."""
    _check_regular(path)
    data = read_yaml(path, "mapping file")
    for key in data:
        _text(path, "a key", key)
        if key not in KEYS:
            meant = nearest(key, KEYS)
            raise ConfigError(f"{path}: {key}: " + (f"did you mean {meant}?" if meant else f"use {', '.join(KEYS)}"))
    columns, values = _table(path, data, "columns"), _table(path, data, "values")
    for name, column in columns.items():
        _known(path, "columns", name, synonyms.FIELDS)
        if column is not None:
            _text(path, f"columns.{name}", column, "name one column, or null for none")
    words: dict[str, dict[str, str]] = {}
    for dimension in values:
        _known(path, "values", dimension, synonyms.DIMENSIONS)
        words[dimension] = {}
        for value, word in _table(path, values, dimension, "values.").items():
            if value is None or isinstance(value, bool):
                _text(path, f"values.{dimension}", value)
            _known(path, f"values.{dimension}.{value}", word, ATTRIBUTES[dimension], inside=False)
            words[dimension][str(value)] = word
    texts = {}
    for key in ("date_format", "timezone", "decimal"):
        texts[key] = "" if data.get(key) is None else _text(path, key, data[key])
    if texts["decimal"] not in ("", ".", ","):
        raise ConfigError(f'{path}: decimal: {texts["decimal"]!r}; use "." or ","')
    if texts["timezone"]:
        check_zone(texts["timezone"], f"{path}: timezone")
    return Declared(columns, words, **texts)


def _check_regular(path: Path) -> None:
    """Refuses what would be read for ever: a named pipe that nobody writes to, a device."""
    if not path.exists() or str(path).startswith(_OPEN):  # `read_yaml` has a line for the first
        return
    with reading(path):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigError(f"--mapping {path} is no regular file: save the mapping to a file first")


def _text(path: Path, where: str, value: Any, mend: str = "") -> str:
    """The value itself. ConfigError if YAML has read another thing than a text."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | Sequence):
        raise ConfigError(f"{path}: {where}: {mend or 'give one text, not several'}")
    shown = "null" if value is None else str(value).lower()
    why = " (which yes, no, on and off are to YAML, too)" if isinstance(value, bool) else ""
    raise ConfigError(f"{path}: {where}: {shown}{why} is no text: write it in quotes if it is one")


def _table(path: Path, data: Mapping[str, Any], key: str, prefix: str = "") -> dict[Any, Any]:
    found = data.get(key) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: {prefix}{key}: give names and values, one a line")
    return dict(found)


def _known(path: Path, where: str, name: Any, valid: Sequence[str], *, inside: bool = True) -> None:
    """Refuses a name that is not valid; `inside`: `where` is the table that it is a key of."""
    name = _text(path, where, name)
    if name not in valid:
        meant = nearest(name, valid)
        raise ConfigError(
            f"{path}: {f'{where}.{name}' if inside else where}: "
            + (f"did you mean {meant}?" if meant else f"use one of {', '.join(valid)}")
        )


def absent(declared: Declared, held: Mapping[str, Sequence[str]]) -> list[str]:
    """Declared values that no table has, in words.

    Args:
        held: dimension -> its values as spelled.
    """
    out = []
    for dimension, words in declared.values.items():
        if dimension not in held:
            out.append(f"values.{dimension} of the mapping: the tables have no {dimension} that is looked at")
            continue
        there = {synonyms.spelling(value) for value in held[dimension]}
        lost = [value for value in words if synonyms.spelling(value) not in there]
        if lost:
            meant = nearest(lost[0], held[dimension])
            mend = f"; did you mean {meant!r} by {lost[0]!r}?" if meant else ""
            more = f" and {len(lost) - 6} more" if len(lost) > 6 else ""
            shown = ", ".join(map(repr, lost[:6])) + more
            out.append(f"values.{dimension} of the mapping: the tables have no value {shown}{mend}")
    return out
