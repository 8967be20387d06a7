"""One in-memory DuckDB instance per episode, read-only for the agent and closed to the outside.

What an agent's query can reach is the tables given to the constructor: no file, no extension, no Python variable, no
other episode. Four fences, because no single one holds (measured with DuckDB 2.0):

- the instance: no external access, no Python replacement scans, one thread, a memory limit, no spilling, locked
  configuration;
- the statement: exactly one, of type SELECT (DESCRIBE, SHOW and SUMMARIZE are of that type);
- a read-only transaction: `WITH x AS (INSERT ...) SELECT` is of type SELECT and would otherwise write;
- function names: table functions such as `enable_profiling()` change the instance from inside a SELECT, `random()`
  would make a cached answer differ from a fresh one, and scalar functions such as `repeat` allocate outside the
  memory limit.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import heapq
import itertools
import math
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

MAX_ROWS = 20_000  # rows of one result; more is an error that says to aggregate
MAX_CELLS = 1_000_000  # of one result, see `_cells`
MAX_SQL_CHARACTERS = 20_000
MAX_CACHED_CELLS = 200_000  # of one episode's query cache
MAX_IDLE_INSTANCES = 32  # emptied instances kept for the next episode: connecting costs 13 ms, emptying 1 ms

_REFUSED = re.compile(
    r"\b(?:enable_\w+|disable_\w+|\w*checkpoint|query|query_table|json_execute_serialized_sql|\w+_scan|arrow_scan_dumb"
    r"|python_map_function|\w*external_resource\w*|\w+_grammar_extension|truncate_duckdb_logs|write_log|setval|nextval"
    r"|setseed|random|\w*uuid\w*|tablesample|using\s+sample|current_(?:date|time\w*|local\w*|\w+_id)|get_current_\w+"
    r"|localtime\w*|transaction_timestamp|txid_current|pg_\w*time|duckdb_(?:memory|connection_count|live\w*|log\w*)"
    r"|(?:now|today|ago)(?=[\"\s]*\()"
    r"|repeat|repeat_row|lpad|rpad|list_resize|array_resize|printf|format|sleep_ms|pg_sleep)\b"
    r"|(?<!from )(?<!join )\b(?:range|generate_series)(?=[\"\s]*\()",
    re.IGNORECASE,
)


class QueryError(ValueError):
    """A query that was refused or failed: one line for the agent."""


class QueryTimeout(QueryError):
    """The query was interrupted, by its own time limit or by `EpisodeDatabase.interrupt`."""


@dataclass(frozen=True)
class QueryResult:
    """Rows of plain values: None, bool, int, float, str, date, and lists or dicts of these.

    Column names are unique (a repeated name gets a suffix). A division by zero is NULL inside the database already, see
    `_take_instance`; what else is not finite (1e308 * 10, the correlation of a constant) arrives as None.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts, fresh on every call."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class EpisodeDatabase:
    """The agent-visible tables of one episode.

    `clone` gives further handles on the same instance and query cache (a GRPO group shares one). A handle is used by
    one thread at a time; `interrupt` and `close` may come from any thread. The instance is given back when the last
    handle closes.
    """

    def __init__(self, tables: Mapping[str, pa.Table], *, memory_limit_mb: int = 256):
        self._shared = _Shared(tables, memory_limit_mb)
        self._cursor: duckdb.DuckDBPyConnection | None = None
        self._closed = False

    def clone(self) -> EpisodeDatabase:
        """Another handle on the same tables and cache; costs microseconds."""
        other = object.__new__(EpisodeDatabase)
        self._shared.retain()
        other._shared, other._cursor, other._closed = self._shared, None, False
        return other

    def query(self, sql: str, *, timeout_s: float | None = None) -> QueryResult:
        """Run one read-only query.

        Raises:
            QueryError: the query is refused or fails; QueryTimeout: it ran longer than `timeout_s` seconds.
        """
        if self._closed:
            raise QueryError("the episode is closed")
        hit = self._shared.cached(sql)
        if hit is None:
            hit = self._run(sql, timeout_s)
            self._shared.remember(sql, hit)
        if isinstance(hit, QueryError):
            raise QueryError(str(hit))
        return hit

    def interrupt(self) -> None:
        """Stop the running query of this handle, if any."""
        cursor = self._cursor
        if cursor is not None:
            cursor.interrupt()

    def close(self) -> None:
        """Give the handle back; may be called twice."""
        if not self._closed:
            self._closed = True
            if self._cursor is not None:
                self._cursor.close()
                self._cursor = None
            self._shared.release()

    def __enter__(self) -> EpisodeDatabase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, sql: str, timeout_s: float | None) -> QueryResult | QueryError:
        """Execute without the cache. Errors that would come again are returned (and cached); a time-out is raised."""
        refusal = _refusal(sql)
        if refusal:
            return QueryError(refusal)
        fresh = self._cursor is None
        if fresh:
            self._cursor = self._shared.connection.cursor()
        cursor = self._cursor
        ticket = _WATCHDOG.watch(cursor, timeout_s) if timeout_s is not None else None
        try:
            if fresh:  # an interrupt may arrive here already; without its transaction a cursor must not be kept
                cursor.execute("BEGIN TRANSACTION READ ONLY")
            statements = cursor.extract_statements(sql)
            if len(statements) != 1:
                return QueryError(f"one statement a query, got {len(statements)}")
            if statements[0].type != duckdb.StatementType.SELECT:
                kind = str(statements[0].type).rpartition(".")[2]
                hint = " (write PIVOT ... ON column IN (...))" if kind == "MULTI" else ""
                return QueryError(f"only SELECT queries are allowed, got {kind}{hint}")
            cursor.execute(statements[0])
            names = [d[0] for d in cursor.description or []]
            rows = cursor.fetchmany(MAX_ROWS + 1)
            if len(rows) > MAX_ROWS:
                self._restart()
                return QueryError(f"the result has more than {MAX_ROWS} rows; aggregate or add LIMIT")
            cursor.fetchall()  # nothing is left, but an unfinished result would block the connection
        except duckdb.InterruptException:
            self._restart()
            raise QueryTimeout(
                f"the query was stopped after {timeout_s:g} s" if timeout_s else "the query was stopped"
            ) from None
        except (duckdb.Error, UnicodeError, OverflowError, AttributeError) as error:
            self._restart()
            return QueryError(_one_line(error))
        finally:
            if ticket is not None:
                _WATCHDOG.done(ticket)
        if _cells(rows) > MAX_CELLS:
            return QueryError("the result is too large; aggregate or shorten its lists and texts")
        return QueryResult(_unique(names), tuple(tuple(map(_plain, row)) for row in rows))

    def _restart(self) -> None:
        """An error aborts the read-only transaction: open a new one with a fresh cursor at the next query."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


class _Shared:
    """An instance with its tables, its query cache and the number of handles on it."""

    def __init__(self, tables: Mapping[str, pa.Table], memory_limit_mb: int):
        self._limit, self._names = memory_limit_mb, tuple(tables)
        self._lock = threading.Lock()
        self._handles = 1
        self._cache: dict[str, QueryResult | QueryError] = {}
        self._cells = 0
        self.connection = _take_instance(memory_limit_mb)
        for name, table in tables.items():
            # A relation creates the table without a registered view in between: a quarter less time than
            # `CREATE TABLE ... AS SELECT` from one, and nothing but tables to clear away later.
            self.connection.from_arrow(table).create(f'"{name}"')

    def cached(self, sql: str) -> QueryResult | QueryError | None:
        return self._cache.get(sql)

    def remember(self, sql: str, result: QueryResult | QueryError) -> None:
        cells = 8 if isinstance(result, QueryError) else 8 + _cells(result.rows)
        with self._lock:
            if self._cells + cells <= MAX_CACHED_CELLS and sql not in self._cache:
                self._cells += cells
                self._cache[sql] = result

    def retain(self) -> None:
        with self._lock:
            if self._handles == 0:
                raise QueryError("the episode is closed")
            self._handles += 1

    def release(self) -> None:
        with self._lock:
            self._handles -= 1
            last = self._handles == 0
        if last:
            self._cache.clear()
            _give_back(self.connection, self._limit, self._names)


_IDLE: list[tuple[int, duckdb.DuckDBPyConnection]] = []
_IDLE_LOCK = threading.Lock()


def close_idle() -> int:
    """Close the emptied instances that wait for the next episode; returns how many there were.

    Frees their memory when no more episodes will be opened for a while; the next one then pays for connecting again.
    """
    with _IDLE_LOCK:
        idle, _IDLE[:] = list(_IDLE), []
    for _, connection in idle:
        connection.close()
    return len(idle)


def _take_instance(memory_limit_mb: int) -> duckdb.DuckDBPyConnection:
    """An empty instance: an idle one, or a new one."""
    with _IDLE_LOCK:
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


def _give_back(connection: duckdb.DuckDBPyConnection, limit: int, names: tuple[str, ...]) -> None:
    """Empty an instance and keep it, or close it. Agents can create nothing, so dropping our tables empties it."""
    try:
        for name in names:
            connection.execute(f'DROP TABLE "{name}"').fetchall()
        left = connection.execute("SELECT count(*) FROM duckdb_tables()").fetchall()
        with _IDLE_LOCK:
            if left == [(0,)] and len(_IDLE) < MAX_IDLE_INSTANCES:
                _IDLE.append((limit, connection))
                return
    except duckdb.Error:
        pass  # an instance in an unknown state is closed below
    connection.close()


class _Watchdog:
    """One thread that interrupts queries that outlive their time (a timer thread each would cost more than a query)."""

    def __init__(self):
        self._wake = threading.Condition()
        self._heap: list[tuple[float, int]] = []
        self._live: dict[int, duckdb.DuckDBPyConnection] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def watch(self, cursor: duckdb.DuckDBPyConnection, seconds: float) -> int:
        with self._wake:
            ticket = next(self._numbers)
            deadline = time.monotonic() + max(seconds, 0.0)
            self._live[ticket] = cursor
            heapq.heappush(self._heap, (deadline, ticket))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="query-watchdog", daemon=True)
                self._thread.start()
            elif self._heap[0][1] == ticket:
                self._wake.notify()
        return ticket

    def done(self, ticket: int) -> None:
        with self._wake:
            self._live.pop(ticket, None)

    def _loop(self) -> None:
        with self._wake:
            while True:
                while self._heap and self._heap[0][1] not in self._live:
                    heapq.heappop(self._heap)
                if not self._heap:
                    self._wake.wait(60.0)
                    continue
                deadline, ticket = self._heap[0]
                left = deadline - time.monotonic()
                if left > 0:
                    self._wake.wait(left)
                    continue
                heapq.heappop(self._heap)
                with contextlib.suppress(duckdb.Error):  # the cursor may have been closed meanwhile
                    self._live[ticket].interrupt()
                # An interrupt that arrives before the query starts is lost: try again until the query reports back.
                heapq.heappush(self._heap, (time.monotonic() + 0.05, ticket))


_WATCHDOG = _Watchdog()


def _refusal(sql: str) -> str | None:
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
    found = _REFUSED.search(sql)
    return f"{found.group(0)} is not allowed here" if found else None


def _one_line(error: Exception) -> str:
    """DuckDB's message without the echo of the query."""
    text = re.split(r"\n\s*LINE \d+:", str(error), maxsplit=1)[0]
    return " ".join(text.split())[:400]


def _unique(names: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        out.append(f"{name}_{count}" if count else name)
    return tuple(out) if len(set(out)) == len(out) else tuple(f"{n}_{i}" for i, n in enumerate(names))


def _cells(rows: Sequence[Any]) -> int:
    """Size of a result: its values, with lists counted by item and long texts by 16 characters."""
    total = 0
    for value in rows:
        if isinstance(value, (list, tuple)):
            total += _cells(value)
        elif isinstance(value, dict):
            total += _cells(list(value.values()))
        else:
            total += 1 + (len(value) >> 4 if isinstance(value, (str, bytes)) else 0)
    return total


def _plain(value: Any) -> Any:
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
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value)
