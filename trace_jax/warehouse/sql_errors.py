"""Error messages that teach: DuckDB's words made one line that names what exists.

A message names the nearest existing name first, then the list if it is short. What is not recognised stays as it is.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping

from trace_jax.warehouse.sql_guard import words

MAX_NAMES = 24  # a longer list of names is not printed
_PATTERNS = {
    "table": re.compile(r"Table with name (?:\"?main\"?\.)?\"?(?P<name>.+?)\"? does not exist"),
    "column": re.compile(r"(?:Referenced column|column) \"(?P<name>[^\"]+)\" (?:not found|does not exist)", re.I),
    "qualified": re.compile(r"Table \"(?P<table>[^\"]+)\" does not have a column named \"(?P<name>[^\"]+)\""),
    "alias": re.compile(r"Referenced table \"(?P<name>[^\"]+)\" not found"),
    "function": re.compile(
        r"(?:Function|Aggregate) with name (?P<name>\S+) does not exist!(?: Did you mean \"(?P<near>[^\"]+)\")?"
    ),
    "group": re.compile(r"column \"(?P<name>[^\"]+)\" must appear in the GROUP BY clause"),
    "arguments": re.compile(r"No function matches the given name and argument types '(?P<call>[^']{1,120})'"),
}
_PREFIX = re.compile(r"^(?:Binder|Catalog|Parser|Invalid Input|Conversion|Out of Range) Error: ")


def explain(message: str, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    """The message for the agent.

    Args:
        message: DuckDB's, in one line.
        sql: the query.
        tables: columns of every table that exists, with their types.
    """
    for kind, pattern in _PATTERNS.items():
        found = pattern.search(message)
        if found:
            return _WORDINGS[kind](found, sql, tables)
    if "Out of Memory" in message:
        return "Out of Memory Error: the query needs more memory than an episode has; aggregate, filter or join less"
    if "syntax error" in message and "Parser Error" in message:
        return re.split(r"\s+(?=LINE \d+:)", message)[0]
    return message.partition(" Candidate functions:")[0]


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The names that a misspelt one may have meant, the most likely first; at most three."""
    known = {n.lower(): n for n in names}
    close = difflib.get_close_matches(name.lower()[:100], list(known), n=3, cutoff=0.6)
    within = [n for n in known if len(name) > 2 and (name.lower() in n or n in name.lower()) and n not in close]
    return [known[n] for n in [*close, *within][:3]]


def known_names(label: str, names: Iterable[str], near: Iterable[str] = ()) -> str:
    """ "; did you mean a?; LABEL: b, c", the list only if it is short."""
    near, names = list(near), list(names)
    text = f"; did you mean {' or '.join(near)}?" if near else ""
    rest = [n for n in names if n not in near]
    return text + (f"; {label}: {', '.join(rest)}" if rest and len(rest) <= MAX_NAMES else "")


def compared_values(sql: str, tables: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str, str]]:
    """(table, column, value) of every text that the query compares a text column with, by = or IN."""
    tokens = words(sql)
    present = {text.lower() for _, text in tokens}
    homes = {
        column.lower(): (table, column)
        for table, columns in tables.items()
        if table.lower() in present
        for column, kind in columns.items()
        if "string" in kind  # or a dictionary of strings
    }
    out = []
    for i, (kind, text) in enumerate(tokens):
        if kind not in ("word", "quoted") or text.lower() not in homes:
            continue
        rest = tokens[i + 1 : i + 40]
        if rest[:1] == [("other", "=")]:
            values = rest[1:2]
        elif rest[:2] == [("word", "in"), ("other", "(")]:
            values = itertools.takewhile(lambda t: t != ("other", ")"), rest[2:])
        else:
            continue
        out += [
            (*homes[text.lower()], v[1:-1].replace("''", "'"))
            for kind, v in values
            if kind == "text" and v.startswith("'")
        ]
    return out[:8]


def _table(found: re.Match, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    near = nearest(found["name"], tables)
    return f"no table {found['name']}" + known_names("others" if near else "tables", tables, near)


def _column(found: re.Match, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    name = found["name"]
    used = [t for t in tables if t.lower() in {text.lower() for _, text in words(sql)}] or list(tables)
    if "table" in found.re.groupindex and found["table"] in tables:
        used = [found["table"]]
    columns = list(dict.fromkeys(c for t in used for c in tables[t]))
    near = nearest(name, columns)
    elsewhere = [t for t in tables if t not in used and name in tables[t]]
    text = f"no column {name} in {' or '.join(used)}"
    if elsewhere:
        return f"{text}; {' and '.join(elsewhere)} {'has' if len(elsewhere) == 1 else 'have'} it"
    if name.isupper() and not near:
        text += f" (a text value needs single quotes: '{name}')"
    return text + known_names("columns" if not near else "others", columns, near)


def _alias(found: re.Match, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    return f"no table or alias {found['name']} in this FROM clause" + known_names("tables", tables)


def _function(found: re.Match, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    return f"no function {found['name']}" + (f"; did you mean {found['near']}?" if found["near"] else "")


def _group(found: re.Match, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    return f"column {found['name']} is neither grouped nor aggregated: add GROUP BY {found['name']} (or GROUP BY ALL)"


def _arguments(found: re.Match, sql: str, tables: Mapping[str, Mapping[str, str]]) -> str:
    return f"no function matches {found['call']}: check the number and the types of its arguments"


_WORDINGS = {
    "table": _table,
    "column": _column,
    "qualified": _column,
    "alias": _alias,
    "function": _function,
    "group": _group,
    "arguments": _arguments,
}
