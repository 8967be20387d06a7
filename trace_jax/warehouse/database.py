"""The agent's SQL: read-only queries on the tables of one episode, closed to the outside, answered in time.

What an agent's query can reach is the tables given to the constructor: no file, no extension, no Python variable, no
other episode. Queries run in worker processes (`warehouse.processes`), in an instance of the episode's own
(`warehouse.instance`), after a look at the function names they use (`warehouse.sql_guard`). Whatever a query does
there, the caller has an answer or an error within its time limit and a short grace.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trace_jax.warehouse import processes
from trace_jax.warehouse.instance import MAX_ROWS, Outcome, cells
from trace_jax.warehouse.sql_errors import MAX_NAMES, compared_values, explain, known_names, nearest
from trace_jax.warehouse.sql_guard import MAX_SQL_CHARACTERS, refusal

__all__ = ["MAX_ROWS", "MAX_SQL_CHARACTERS", "EpisodeDatabase", "QueryError", "QueryResult", "QueryTimeout"]

MAX_CACHED_CELLS = 200_000  # of one episode's query cache
LOAD_ATTEMPTS = 3
DEFAULT_SECONDS = 60.0  # limit of a query that is given none


class QueryError(ValueError):
    """A query that was refused or failed: one line for the agent."""


class QueryTimeout(QueryError):
    """The query was stopped at its time limit."""


@dataclass(frozen=True)
class QueryResult:
    """Rows of plain values: None, bool, int, float, str, date, and lists or dicts of these.

    Column names are unique (a repeated name gets a suffix). A division by zero is NULL inside the database already, see
    `instance.take`; what else is not finite (1e308 * 10, the correlation of a constant) arrives as None.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts, fresh on every call."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class EpisodeDatabase:
    """The agent-visible tables of one episode.

    `clone` gives further handles on the same tables and query cache (a GRPO group shares one). Thread-safe; the tables
    are given up when the last handle closes.
    """

    def __init__(self, tables: Mapping[str, pa.Table], *, memory_limit_mb: int = 256):
        self._shared = _Shared(tables, memory_limit_mb)
        self._closed = False
        self.waited = 0.0  # seconds that queries of this handle waited for a free worker, or for one to start

    def clone(self) -> EpisodeDatabase:
        """Another handle on the same tables and cache; costs microseconds."""
        other = object.__new__(EpisodeDatabase)
        self._shared.retain()
        other._shared, other._closed, other.waited = self._shared, False, 0.0
        return other

    def query(self, sql: str, *, timeout_s: float | None = None) -> QueryResult:
        """Run one read-only query, or answer it from the cache.

        The same text asked by several threads at once is run once: the others wait for it, each to its own limit, and
        one of them runs it itself if the first gave up.

        Args:
            sql: one SELECT.
            timeout_s: seconds the query may run, not counting a wait for a free worker; `DEFAULT_SECONDS` if None.

        Raises:
            QueryError: the query is refused or fails; QueryTimeout: it ran longer than its limit.
        """
        if self._closed:
            raise QueryError("the episode is closed")
        seconds = DEFAULT_SECONDS if timeout_s is None else timeout_s
        hit, queued = self._shared.answer(sql, seconds)
        self.waited += queued
        if isinstance(hit, QueryError):
            raise type(hit)(str(hit))
        return hit

    def note(self, sql: str, result: QueryResult) -> str | None:
        """Why the result of a query has nothing in it, if a column was compared with a value that it never has."""
        if any(value not in (None, 0) for row in result.rows for value in row):
            return None
        for table, column, value in compared_values(sql, self.columns):
            quoted = column.replace('"', '""')
            found = self.query(
                f'SELECT DISTINCT "{quoted}" FROM "{table}" ORDER BY 1 LIMIT {MAX_NAMES + 1}', timeout_s=5
            )
            exist = [row[0] for row in found.rows if row[0] is not None]
            if value not in exist and len(exist) <= MAX_NAMES:
                near = nearest(value, exist)
                return f"no {column} is '{value}'" + known_names("others" if near else "values", exist, near)
        return None

    @property
    def columns(self) -> Mapping[str, Mapping[str, str]]:
        """Column names and Arrow types of every table."""
        return self._shared.columns

    def close(self) -> None:
        """Give the handle back; may be called twice."""
        if not self._closed:
            self._closed = True
            self._shared.release()

    def __enter__(self) -> EpisodeDatabase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Flight:
    """A query that is being run; `result` is None when it ended without an answer that others may use."""

    def __init__(self):
        self.done = threading.Event()
        self.result: QueryResult | QueryError | None = None


class _Shared:
    """An episode's tables, its query cache and the number of handles on it."""

    _keys = itertools.count()

    def __init__(self, tables: Mapping[str, pa.Table], memory_limit_mb: int):
        self.columns = {name: {f.name: str(f.type) for f in table.schema} for name, table in tables.items()}
        self._key, self._limit = next(self._keys), memory_limit_mb
        self._tables = [(name, _stream(table)) for name, table in tables.items()]
        self._lock = threading.Lock()
        self._handles = 1
        self._cache: dict[str, QueryResult | QueryError] = {}
        self._flights: dict[str, _Flight] = {}
        self._cells = 0
        with self._loaded_worker():  # so that opening an episode pays for loading it
            pass

    def answer(self, sql: str, seconds: float) -> tuple[QueryResult | QueryError, float]:
        """The result of a query, an error that would come again, or a QueryTimeout; and seconds waited for a worker."""
        deadline = time.monotonic() + seconds
        while True:
            with self._lock:
                hit, flight = self._cache.get(sql), self._flights.get(sql)
                if hit is not None:
                    return hit, 0.0
                if leads := flight is None:
                    flight = self._flights[sql] = _Flight()
            left = deadline - time.monotonic()
            if leads:
                try:
                    result, lasting, queued = self._run(sql, max(left, 0.0), seconds)
                    if lasting:
                        self._remember(sql, result)
                        flight.result = result
                    return result, queued
                finally:
                    with self._lock:
                        del self._flights[sql]
                    flight.done.set()
            flight.done.wait(left)
            if flight.result is not None:
                return flight.result, 0.0
            if time.monotonic() >= deadline:
                return _stopped(seconds), 0.0

    def _run(self, sql: str, left: float, seconds: float) -> tuple[QueryResult | QueryError, bool, float]:
        """Execute without the cache. Also: would the same query end the same way again; seconds waited for a worker."""
        problem = refusal(sql, self.columns)
        if problem:
            return QueryError(problem), True, 0.0
        start = asked = time.monotonic()
        lasting = False
        try:
            for attempt in range(2):
                try:
                    with self._loaded_worker() as worker:
                        now = time.monotonic()
                        asked = asked if attempt else now
                        rest = max(left - (now - asked), 0.0)
                        outcome = worker.ask("query", self._key, sql, rest, seconds=rest + grace(seconds))
                    break
                except processes.WorkerLost:
                    # Something else may have killed the worker (the kernel, short of memory): the answer must not
                    # depend on that. If another one dies of the same query, the query did it.
                    if attempt:
                        raise
            result, lasting = self._outcome(sql, seconds, outcome)
        except processes.WorkerStuck:
            result = _stopped(seconds)
        except processes.WorkerLost:
            result = QueryError("the query was stopped: it took too much memory or broke the database engine")
        except (processes.QueueFull, RuntimeError) as failure:
            result = QueryError(str(failure))
        return result, lasting, asked - start

    def _outcome(self, sql: str, seconds: float, outcome: Outcome) -> tuple[QueryResult | QueryError, bool]:
        status, value = outcome
        if status == "rows":
            return QueryResult(*value), True
        if status == "timeout":
            return _stopped(seconds), False
        if status == "error":
            return QueryError(explain(value, sql, self.columns)), True
        return QueryError(f"the database worker failed: {value}"), False

    @contextlib.contextmanager
    def _loaded_worker(self) -> Iterator[processes.Worker]:
        """A worker that holds the tables. RuntimeError if none can be had."""
        for attempt in range(LOAD_ATTEMPTS):
            with contextlib.ExitStack() as stack:
                try:
                    worker = stack.enter_context(processes.workers().lend(self._key))
                    processes.workers().load(worker, self._key, self._limit, self._tables)
                except (processes.WorkerLost, processes.WorkerStuck) as failure:  # it died before it was asked anything
                    if attempt == LOAD_ATTEMPTS - 1:
                        raise RuntimeError(f"cannot load an episode's tables: {failure}") from failure
                    worker.end()
                    continue
                yield worker
                return

    def _remember(self, sql: str, result: QueryResult | QueryError) -> None:
        count = 8 if isinstance(result, QueryError) else 8 + cells(result.rows)
        with self._lock:
            if self._handles and self._cells + count <= MAX_CACHED_CELLS and sql not in self._cache:
                self._cells += count
                self._cache[sql] = result

    def retain(self) -> None:
        with self._lock:
            if self._handles == 0:
                raise QueryError("the episode is closed")
            self._handles += 1

    def release(self) -> None:
        with self._lock:
            self._handles -= 1
            if self._handles:
                return
            self._cache.clear()
        processes.workers().forget(self._key)


def grace(seconds: float) -> float:
    """Seconds beyond its limit that a query may take to stop by itself, before its worker is killed."""
    return min(max(0.5 * seconds, 0.2), 1.0)


def close_idle() -> int:
    """Close the emptied instances that wait for the next episode; returns how many there were.

    Frees their memory when no more episodes will be opened for a while; the next one then pays for connecting again.
    """
    return processes.workers().close_idle()


def _stopped(seconds: float) -> QueryTimeout:
    return QueryTimeout(f"the query was stopped after {seconds:g} s")


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
