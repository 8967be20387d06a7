"""Which words a query may use, decided before it runs.

The instance is closed to the outside and the worker can be killed; this adds what neither gives: the same answer every
time (`random()`, `now()`, which would make a cached answer differ from a fresh one), no change of the instance from
inside a SELECT (`enable_profiling()`), nothing about the host (`current_setting('secret_directory')`), and a word of
explanation instead of a worker's death for the plainest memory bombs (`repeat('x', 3000000000)`).

The query is read as tokens, so that a comment between a name and its parenthesis hides nothing and a word in a string
is no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_SQL_CHARACTERS = 20_000

_TOKEN = re.compile(
    r"(?P<space>[\s\u180e\u200b-\u200f\u2060\ufeff]+|--[^\n\r]*)"  # DuckDB reads spaces of zero width as spaces, too
    r"|(?P<comment>/\*)"
    r"|(?P<text>[eE]'(?:[^'\\]|\\.|'')*'|'[^']*'|\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)"
    r'|(?P<quoted>"(?:[^"]|"")*")'
    r"|(?P<word>[^\W\d]\w*)"
    r"|(?P<number>\d[\w.]*)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_COMMENT_END = re.compile(r"/\*|\*/")

# Functions: what could differ from one call to the next, changes the instance, tells about the host, or allocates by a
# number in its arguments. A name of this list is refused where a parenthesis follows.
_FUNCTIONS = re.compile(
    r"random|setseed|\w*uuid\w*|now|today|ago|sleep_ms|pg_sleep|get_current_\w+|current_(?:date|time\w*|local\w*|\w+_id)"
    r"|localtime\w*|transaction_timestamp|txid_current|pg_\w*time|nextval|setval|currval|reservoir_quantile"
    r"|write_log|current_setting|getvariable|getenv|parse_duckdb_log_message|json_execute_serialized_sql"
    r"|repeat|repeat_row|lpad|rpad|list_resize|array_resize|printf|format|bitstring|vector_type|json_serialize_plan"
    r"|pg_get_\w+|inet_\w+"
)
# Table functions and pragmas that may be used; any other name of `_TABLE_FUNCTION` is refused.
_OPEN_TABLE_FUNCTIONS = {
    "duckdb_columns", "duckdb_constraints", "duckdb_databases", "duckdb_functions", "duckdb_indexes",
    "duckdb_keywords", "duckdb_schemas", "duckdb_tables", "duckdb_types", "duckdb_views", "generate_series",
    "json_each", "json_tree", "pragma_show", "pragma_table_info", "range", "unnest",
}  # fmt: skip
_TABLE_FUNCTION = re.compile(
    r"(?:duckdb|pragma|enable|disable|verify|read|parquet|sniff|icu_calendar|test|which|add|remove|register|deregister"
    r"|create|destroy|truncate|import|copy|show|python)_\w+"
    r"|\w+_scan\w*|\w*checkpoint\w*|\w*external_resource\w*|glob|query|query_table|summary|storage_info|metadata_info"
    r"|database_(?:list|size)|user_agent|platform|extension_versions|table_info|python_map_function"
)
# Names that need no parenthesis: functions that are words, sampling, and views over the host's settings and log.
_WORDS = re.compile(
    r"current_(?:date|time\w*|local\w*|\w+_id)|localtime\w*|tablesample|pg_settings"
    r"|duckdb_(?:logs?\w*|settings|secrets|extensions|memory|variables|prepared_statements|temporary_files)"
)
_SHOWN = frozenset({"all", "columns", "databases", "schemas", "tables", "from", "as"})  # the last two: a name `show`
_ARGUMENT_SIZED = frozenset({"range", "generate_series"})  # a table of them streams; a list of them is made at once
_MARKS = re.compile(r"\A(?:[eE]?'|\$\w*\$)|(?:'|\$\w*\$)\Z")  # quotes around a text


def refusal(sql: str, tables: Iterable[str] = ()) -> str | None:
    """Why a query may not run, in one line; None if it may.

    Args:
        sql: the query.
        tables: the tables that it may ask for; SHOW of any other name would be a setting of the host.
    """
    if not sql.strip():
        return "empty query"
    if len(sql) > MAX_SQL_CHARACTERS:
        return f"the query is longer than {MAX_SQL_CHARACTERS} characters"
    try:
        sql.encode()
    except UnicodeEncodeError:
        return "the query is not valid Unicode text"
    if "\0" in sql:  # DuckDB would stop reading here without a word
        return "the query holds a NUL character"
    found = _refused(words(sql), {name.lower() for name in tables})
    return f"{' '.join(found.split())[:80]} is not allowed here" if found else None


def words(sql: str) -> list[tuple[str, str]]:
    """The tokens of a query as (kind, text): word (lower case), quoted (a name, without its quotes), text, number or
    other. Comments and space are left out; an unfinished comment or text is read as DuckDB does, to the end."""
    tokens, at = [], 0
    while at < len(sql):
        match = _TOKEN.match(sql, at)
        kind, at = match.lastgroup, match.end()
        if kind == "comment":
            at = _after_comment(sql, at)
        elif kind == "quoted":
            tokens.append((kind, match.group()[1:-1].replace('""', '"')))
        elif kind == "word":
            tokens.append((kind, match.group().lower()))
        elif kind != "space":
            tokens.append(("text" if kind == "tag" else kind, match.group()))
    return tokens


def _after_comment(sql: str, at: int) -> int:
    """The position after a block comment, which may hold others."""
    depth = 1
    while depth:
        match = _COMMENT_END.search(sql, at)
        if match is None:
            return len(sql)
        depth += 1 if match.group() == "/*" else -1
        at = match.end()
    return at


def _refused(tokens: list[tuple[str, str]], tables: set[str]) -> str | None:
    for i, (kind, text) in enumerate(tokens):
        if kind == "text":
            name = _MARKS.sub("", text).strip().lower()
            if _WORDS.fullmatch(name):  # FROM 'name' means FROM name
                return name
            continue
        if kind not in ("word", "quoted"):
            continue
        name = text.lower()
        called = i + 1 < len(tokens) and tokens[i + 1] == ("other", "(")
        if _WORDS.fullmatch(name) and not (called and name in _OPEN_TABLE_FUNCTIONS):
            return name
        if name == "show" and i + 1 < len(tokens) and tokens[i + 1][0] in ("word", "quoted", "text"):
            shown = _MARKS.sub("", tokens[i + 1][1]).lower()
            if shown not in tables and shown not in _SHOWN:
                return f"show {shown}"
        if name == "using" and i + 1 < len(tokens) and tokens[i + 1] == ("word", "sample"):
            return "using sample"
        if not called or name in _OPEN_TABLE_FUNCTIONS - _ARGUMENT_SIZED:
            continue
        if name in _ARGUMENT_SIZED:
            before = tokens[i - 1] if i else ("", "")
            if before not in (("word", "from"), ("word", "join")):
                return name
        elif _FUNCTIONS.fullmatch(name) or _TABLE_FUNCTION.fullmatch(name):
            return name
    return None
