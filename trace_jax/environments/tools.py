"""The agent's one tool: Python with `sql(query)` inside.

State persists across the calls of an episode, a call has a time limit and its output is cut (arXiv 2609.10315).
The interpreter is pydantic-monty: a sandbox without files, network or host modules, in worker subprocesses. Between
calls the variables of an episode are kept as the session's dump (1 KB plus the data), so a handful of workers serves
any number of episodes, and a call that times out or crashes its worker leaves the variables as they were before it.
"""

from __future__ import annotations

import atexit
import datetime
import math
import os
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import pydantic_monty as monty

from trace_jax.environments.base import Observation
from trace_jax.warehouse.database import QueryError, QueryResult, QueryTimeout

WORKER_MEMORY = 64 * 2**20  # bytes that the variables of one call may take
STATE_LIMIT = 4 * 2**20  # bytes of variables kept between calls
MAX_QUERIES = 200  # host round trips of one call
MAX_ERROR_CHARACTERS = 400

# A call that is nothing but sql("..."): no interpreter needed. No backslash, so that the literal is its own value.
_LITERALS = (r'"""((?:[^"\\]|"(?!""))*)"""', r"'''((?:[^'\\]|'(?!''))*)'''", r'"([^"\\\n]*)"', r"'([^'\\\n]*)'")
_ONLY_SQL = re.compile(r"\s*sql\(\s*(?:" + "|".join(_LITERALS) + r")\s*\)\s*\Z")


class Database(Protocol):
    """What the tool needs of an episode's database."""

    def query(self, sql: str, *, timeout_s: float | None = None) -> QueryResult: ...


class PythonTool:
    """The tool of one episode. Used by one thread at a time; `run` never raises.

    Args:
        database: answers `sql`.
        seconds: wall-clock limit of one call.
        characters: the observation is cut to this length, with a note of what is missing.
        header: put a line of column names over the rows of a result.
    """

    def __init__(self, database: Database, *, seconds: float = 60.0, characters: int = 8000, header: bool = False):
        self._database = database
        self._seconds, self._characters, self._header = seconds, characters, header
        self._state: bytes | None = None  # dump of the session, None before the interpreter was first needed
        self._sql_is_ours: bool | None = True  # None: not known, the last call may have bound the name `sql`

    def run(self, code: str) -> Observation:
        """Run one call and describe its outcome."""
        try:
            if not code.strip():
                return _error("empty call")
            match = _ONLY_SQL.match(code)
            if match and self._name_is_ours():
                return self._run_sql(next(g for g in match.groups() if g is not None))
            return self._run_python(code)
        except monty.MontyCrashedError as crash:
            if getattr(crash, "timed_out", False):
                return self._timeout()
            return _error("the Python worker crashed; variables are as before this call", "tool_failure")
        except Exception as failure:  # whatever breaks here must not end the rollout
            return _error(f"tool failure: {type(failure).__name__}: {failure}", "tool_failure")

    def _run_sql(self, query: str) -> Observation:
        try:
            rows = self._database.query(query, timeout_s=self._seconds).dicts()
        except QueryTimeout:
            return self._timeout()
        except QueryError as error:
            return _error(str(error))
        return Observation(self._cut(*render(rows, self._header)))

    def _run_python(self, code: str) -> Observation:
        deadline = time.monotonic() + self._seconds
        printed = _Printed(self._characters)
        sql = _SqlFunction(self._database, deadline)
        problem: monty.MontyError | None = None
        value, state = None, None
        with _workers().checkout(limits=self._limits()) as session:
            if self._state is not None:
                session.load_session(self._state)
            try:
                value = session.feed_run(code, external_lookup={"sql": sql}, print_callback=printed)
            except (monty.MontyRuntimeError, monty.MontySyntaxError, monty.MontyConversionError) as error:
                problem = error
            late = time.monotonic() >= deadline or (problem is not None and "time limit exceeded" in str(problem))
            if not late:  # a session that was stopped half-way must not be used again
                state = session.dump()
        if late:
            return self._timeout()
        dropped = len(state) > STATE_LIMIT
        if not dropped:
            self._state, self._sql_is_ours = state, None
        if problem is not None:
            return self._python_error(problem, sql, printed)
        lines, rows = render(value, self._header) if value is not None else ([], 0)
        lines = printed.lines() + lines
        text = self._cut(lines or ["(no output)"], rows, printed.missing)
        if dropped:
            return _error(f"variables of this call take more than {STATE_LIMIT >> 20} MB and were dropped\n{text}")
        return Observation(text)

    def _python_error(self, problem: monty.MontyError, sql: _SqlFunction, printed: _Printed) -> Observation:
        text = str(problem)
        if isinstance(problem, monty.MontySyntaxError):
            text = problem.display("type-msg")
        if sql.last_error is not None and text == f"RuntimeError: {sql.last_error}":
            text = sql.last_error  # same words as when the query runs without the interpreter
        observation = _error(text)
        if printed.lines():
            return Observation(self._cut([*printed.lines(), observation.text], 0, printed.missing), True, "error")
        return observation

    def _name_is_ours(self) -> bool:
        """Whether `sql` still means our function, i.e. no earlier call has bound that name."""
        if self._sql_is_ours is None:
            with _workers().checkout(limits=self._limits()) as session:
                session.load_session(self._state)
                try:
                    session.feed_run("sql", external_lookup={})
                    self._sql_is_ours = False
                except monty.MontyRuntimeError as error:
                    self._sql_is_ours = str(error).startswith("NameError")
        return self._sql_is_ours

    def _limits(self) -> monty.ResourceLimits:
        return monty.ResourceLimits(
            max_feed_duration_secs=self._seconds,
            max_memory=WORKER_MEMORY,
            max_suspensions=MAX_QUERIES,
            max_recursion_depth=200,
            max_total_sleep_secs=min(self._seconds, 1.0),
        )

    def _timeout(self) -> Observation:
        return _error(f"the call ran longer than {self._seconds:g} s and was stopped", "timeout")

    def _cut(self, lines: Sequence[str], rows: int = 0, missing: int = 0) -> str:
        return cut(lines, self._characters, rows, missing)


class _SqlFunction:
    """`sql` as the sandbox sees it."""

    def __init__(self, database: Database, deadline: float):
        self._database, self._deadline = database, deadline
        self.last_error: str | None = None

    def __call__(self, query: Any) -> list[dict[str, Any]]:
        self.last_error = None
        if not isinstance(query, str):
            raise TypeError("sql() takes the query as one string")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("out of time")
        try:
            return self._database.query(query, timeout_s=left).dicts()
        except QueryTimeout as error:
            raise TimeoutError(str(error)) from None
        except QueryError as error:
            self.last_error = str(error)
            raise RuntimeError(self.last_error) from None


class _Printed:
    """Collects print output up to a length and counts the rest."""

    def __init__(self, limit: int):
        self._limit, self._parts, self._size = limit, [], 0
        self.missing = 0

    def __call__(self, stream: str, text: str) -> None:
        kept = text[: max(self._limit - self._size, 0)]
        self._parts.append(kept)
        self._size += len(kept)
        self.missing += len(text) - len(kept)

    def lines(self) -> list[str]:
        text = "".join(self._parts)
        return text.removesuffix("\n").split("\n") if text else []


def render(value: Any, header: bool = False) -> tuple[list[str], int]:
    """A call's value as lines, and how many of the last lines are result rows.

    A list of row dicts (same keys) or of tuples: one line a row, values joined by single spaces, numbers as in
    `scalar`; `header` puts the column names first. Anything else is one value, written like Python with the
    same numbers.
    """
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, dict) and all(isinstance(r, dict) and r.keys() == first.keys() for r in value):
            lines = [" ".join(map(_nested, row.values())) for row in value]
            return ([" ".join(map(str, first)), *lines] if header else lines), len(lines)
        if all(isinstance(row, tuple) for row in value):
            return [" ".join(map(_nested, row)) for row in value], len(value)
    return (value if isinstance(value, str) else _nested(value)).split("\n"), 0


def scalar(value: Any) -> str | None:
    """One value: null, true or false, integers in full, floats with at most 4 significant digits, ISO dates."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return (
            str(value) if abs(value) < 10**40 else f"{'-' if value < 0 else ''}(integer of {value.bit_length()} bits)"
        )
    if isinstance(value, str):
        return value
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return None


def _nested(value: Any, depth: int = 0) -> str:
    text = scalar(value)
    if text is not None:
        return text if depth == 0 or not isinstance(value, str) else repr(value)
    if depth > 20:
        return "..."
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_nested(k, depth + 1)}: {_nested(v, depth + 1)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_nested(v, depth + 1) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(_nested(v, depth + 1) for v in value)) + "}" if value else "set()"
    return repr(value)


def cut(lines: Sequence[str], limit: int, rows: int = 0, missing: int = 0) -> str:
    """Join lines to at most `limit` characters, with a note of the rows (or characters) left out.

    Args:
        rows: how many of the last lines are rows of a result; these are cut at whole rows.
        missing: characters dropped before this call.
    """
    text = "\n".join(lines)
    if len(text) <= limit and not missing:
        return text
    total = len(text) + missing
    if rows and not missing:
        room = limit - len(f"\n... {rows} more rows")
        kept, used = 0, -1
        while kept < len(lines) and used + 1 + len(lines[kept]) <= room:
            used += 1 + len(lines[kept])
            kept += 1
        left = len(lines) - kept
        if 0 < left < len(lines) and left <= rows:
            return "\n".join([*lines[:kept], f"... {left} more row{'s' if left > 1 else ''}"])
    note = f"\n... {total} characters in all"
    kept_text = text[: max(limit - len(note), 0)]
    return f"{kept_text}\n... {total - len(kept_text)} more characters"


def _error(text: str, status: str = "error") -> Observation:
    head, _, tail = text.partition("\n")
    line = "error: " + " ".join(head.split())[:MAX_ERROR_CHARACTERS]
    return Observation(f"{line}\n{tail}" if tail else line, True, status)


_POOL_LOCK = threading.Lock()
_POOL: tuple[int, monty.Monty] | None = None  # process id and the pool that belongs to it


def _workers() -> monty.Monty:
    """The worker pool of this process, started at first use."""
    global _POOL
    with _POOL_LOCK:
        if _POOL is None or _POOL[0] != os.getpid():
            pool = monty.Monty(
                min_processes=1,
                max_processes=max(4, os.cpu_count() or 1),
                checkout_timeout=300.0,
                max_checkouts_per_worker=5000,
            )
            pool.__enter__()
            atexit.register(pool.__exit__, None, None, None)
            _POOL = (os.getpid(), pool)
        return _POOL[1]
