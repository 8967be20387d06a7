"""One in-memory DuckDB instance with the tables of an episode, read-only and closed to the outside.

Runs inside a database worker process (`warehouse.worker`). Three fences here, because no single one holds (measured
with DuckDB 2.0); the fourth, which function names a query may use, is `warehouse.sql_guard`, and what an instance
cannot stop from inside (a binder that expands an expression without end, an allocation outside the memory limit, a
crash) ends with its process:

- the instance: no external access, no Python replacement scans, one thread, a memory limit, no spilling, locked
  configuration;
- the statement: exactly one, of type SELECT (DESCRIBE, SHOW and SUMMARIZE are of that type);
- a read-only transaction: `WITH x AS (INSERT ...) SELECT` is of type SELECT and would otherwise write.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import math
import re
from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from trace_jax.warehouse.watchdog import Watchdog

MAX_ROWS = 20_000  # rows of one result; more is an error that says to aggregate
MAX_CELLS = 1_000_000  # of one result, see `cells`
MAX_IDLE_INSTANCES = 32  # emptied instances kept for the next episode: connecting costs 13 ms, emptying 1 ms
FETCH_ROWS = 2048  # rows that come out of the engine at a time: its own chunk

Outcome = tuple[str, Any]  # ("rows", (columns, rows)), ("error", message that would come again), ("timeout", "")

_WATCHDOG = Watchdog()
_IDLE: list[tuple[int, duckdb.DuckDBPyConnection]] = []


class Instance:
    """The tables of one episode in an instance of their own. Used by one thread.

    Args:
        tables: name and Arrow table of each; nothing else will be within reach of a query.
        memory_limit_mb: what the engine may allocate; it never spills to disk.
    """

    def __init__(self, tables: Sequence[tuple[str, pa.Table]], memory_limit_mb: int):
        self._limit, self._names = memory_limit_mb, tuple(name for name, _ in tables)
        self.connection = take(memory_limit_mb)
        self._cursor: duckdb.DuckDBPyConnection | None = None
        for name, table in tables:
            # A relation creates the table without a registered view in between: a quarter less time than
            # `CREATE TABLE ... AS SELECT` from one, and nothing but tables to clear away later.
            self.connection.from_arrow(table).create('"' + name.replace('"', '""') + '"')

    def query(self, sql: str, seconds: float | None) -> Outcome:
        """Run one read-only query; stop it after so many seconds."""
        fresh = self._cursor is None
        if fresh:
            self._cursor = self.connection.cursor()
        cursor = self._cursor
        ticket = _WATCHDOG.watch(cursor, seconds) if seconds is not None else None
        try:
            if fresh:
                cursor.execute("BEGIN TRANSACTION READ ONLY")
            statements = cursor.extract_statements(sql)
            if len(statements) != 1:
                return "error", f"one statement a query, got {len(statements)}"
            if statements[0].type != duckdb.StatementType.SELECT:
                kind = str(statements[0].type).rpartition(".")[2]
                hint = " (write PIVOT ... ON column IN (...))" if kind == "MULTI" else ""
                return "error", f"only SELECT queries are allowed, got {kind}{hint}"
            cursor.execute(statements[0])
            return self._fetch(cursor)
        except duckdb.InterruptException:
            self._restart()
            return "timeout", ""
        except MemoryError:  # an allocation that the process was not given
            self._restart()
            return "error", "Out of Memory Error: the query needs more memory than an episode has"
        except Exception as error:  # DuckDB's own, or a value that Python cannot hold (a date of the year 200000)
            self._restart()
            return "error", one_line(error)
        finally:
            if ticket is not None:
                _WATCHDOG.done(ticket)

    def _fetch(self, cursor: duckdb.DuckDBPyConnection) -> Outcome:
        """The rows, a chunk at a time: a result past the limits is given up before it is materialised."""
        columns = [d[0] for d in cursor.description or []]
        rows: list[tuple[Any, ...]] = []
        size = 0
        while chunk := cursor.fetchmany(FETCH_ROWS):
            size += cells(chunk)
            if len(rows) + len(chunk) > MAX_ROWS:
                self._restart()
                return "error", f"the result has more than {MAX_ROWS} rows; aggregate or add LIMIT"
            if size > MAX_CELLS:
                self._restart()
                return "error", "the result is too large; aggregate or shorten its lists and texts"
            rows += chunk
        return "rows", (_unique(columns), tuple(tuple(map(plain, row)) for row in rows))

    def _restart(self) -> None:
        """An error aborts the read-only transaction: open a new one with a fresh cursor at the next query."""
        if self._cursor is not None:
            with contextlib.suppress(duckdb.Error):
                self._cursor.close()
            self._cursor = None

    def close(self) -> None:
        """Empty the instance and keep it for the next episode, or close it.

        Agents can create nothing, so dropping our tables empties it; what is left over says that this was not so.
        """
        self._restart()
        try:
            for name in self._names:
                self.connection.execute('DROP TABLE "' + name.replace('"', '""') + '"').fetchall()
            left = self.connection.execute(
                "SELECT (SELECT count(*) FROM duckdb_tables()) + (SELECT count(*) FROM duckdb_variables())"
                " + (SELECT count(*) FROM duckdb_views() WHERE NOT internal)"
            ).fetchall()
            if left == [(0,)] and len(_IDLE) < MAX_IDLE_INSTANCES:
                _IDLE.append((self._limit, self.connection))
                return
        except duckdb.Error:
            pass  # an instance in an unknown state is closed below
        self.connection.close()


def take(memory_limit_mb: int) -> duckdb.DuckDBPyConnection:
    """An empty instance: an idle one, or a new one."""
    for i in reversed(range(len(_IDLE))):
        if _IDLE[i][0] == memory_limit_mb:
            return _IDLE.pop(i)[1]
    connection = duckdb.connect(
        ":memory:",
        config={
            "threads": 1,
            "async_threads": 0,  # the default starts eight threads an instance
            "memory_limit": f"{memory_limit_mb}MB",
            "temp_directory": "",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
        },
    )
    # 1/0 would be inf, 0/0 NaN, and NaN sorts greatest: `ORDER BY ctr DESC LIMIT 1` would pick an empty segment.
    connection.execute("SET GLOBAL ieee_floating_point_ops = false")
    with contextlib.suppress(duckdb.CatalogException):  # before DuckDB 2 the first setting alone gives NULL
        connection.execute("SET GLOBAL error_on_division_by_zero = false")
    # These two forbid changing what is set above, so they come last.
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def close_idle() -> int:
    """Close the emptied instances that wait for the next episode; returns how many there were."""
    idle, _IDLE[:] = list(_IDLE), []
    for _, connection in idle:
        connection.close()
    return len(idle)


def one_line(error: Exception) -> str:
    """DuckDB's message without the echo of the query."""
    text = re.split(r"\n\s*LINE \d+:", str(error), maxsplit=1)[0]
    return " ".join(text[:4000].split())[:600]


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        out.append(f"{name}_{count}" if count else name)
    return tuple(out) if len(set(out)) == len(out) else tuple(f"{n}_{i}" for i, n in enumerate(names))


def cells(rows: Sequence[Any]) -> int:
    """Size of a result: its values, with lists counted by item and long texts by 16 characters."""
    total = 0
    for value in rows:
        if isinstance(value, (list, tuple)):
            total += cells(value)
        elif isinstance(value, dict):
            total += cells(list(value.values()))
        else:
            total += 1 + (len(value) >> 4 if isinstance(value, (str, bytes)) else 0)
    return total


def plain(value: Any) -> Any:
    """A value that crosses into the interpreter unchanged."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, decimal.Decimal):
        value = float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, datetime.date):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return str(value)
