"""The agent's one tool: Python with `sql(query)` inside.

State persists across the calls of an episode, a call has a time limit and its output is cut (arXiv 2609.10315).
The interpreter is pydantic-monty: a sandbox without files, network or host modules, in worker subprocesses. Between
calls the variables of an episode are kept as the session's dump (1 KB plus the data), so a handful of workers serves
any number of episodes, and a call that times out or crashes its worker leaves the variables as they were before it.
The same calls on the same episode give the same text: the sandbox's clock stands still and its `random` is seeded.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pydantic_monty as monty

from trace_jax.environments import python_helpers
from trace_jax.environments.base import Observation
from trace_jax.environments.render import cut, render
from trace_jax.warehouse.database import QueryError, QueryResult, QueryTimeout

WORKER_MEMORY = 64 * 2**20  # bytes that the variables of one call may take
STATE_LIMIT = 4 * 2**20  # bytes of variables kept between calls
PROVED_GROWTH = 64 * 2**10  # bytes more than the last one from which a state is loaded on trial before it is kept
MAX_QUERIES = 200  # host round trips of one call
MAX_CODE_CHARACTERS = 100_000
MAX_ERROR_CHARACTERS = 400
MAX_PROCESSES = max(16, 2 * (os.cpu_count() or 1))  # a few endless calls must not make everybody wait

# A call that is nothing but sql("..."): no interpreter needed. No backslash, so that the literal is its own value.
_LITERALS = (r'"""((?:[^"\\]|"(?!""))*)"""', r"'''((?:[^'\\]|'(?!''))*)'''", r'"([^"\\\n]*)"', r"'([^'\\\n]*)'")
_ONLY_SQL = re.compile(r"\s*sql\(\s*(?:" + "|".join(_LITERALS) + r")\s*\)\s*\Z")
_POLICY = monty.OSPolicy(datetime=datetime.datetime(2026, 1, 1), random_start={"seed": 0})
_OUT_OF_MEMORY = "exceeded its memory limit and was terminated"


class Database(Protocol):
    """What the tool needs of an episode's database."""

    waited: float  # seconds that queries waited for a free worker, which the agent does not pay for

    def query(self, sql: str, *, timeout_s: float | None = None) -> QueryResult: ...

    def note(self, sql: str, result: QueryResult) -> str | None: ...


class PythonTool:
    """The tool of one episode. Used by one thread at a time; `run` never raises.

    Args:
        database: answers `sql`.
        seconds: limit of one call, not counting waits for a free worker.
        characters: the observation is cut to this length, with a note of what is missing.
        header: print rows as an aligned table with the column names over it, and add a note when an empty result has a
            plain reason.
    """

    def __init__(self, database: Database, *, seconds: float = 60.0, characters: int = 8000, header: bool = False):
        self._database = database
        self._seconds, self._characters, self._header = seconds, characters, header
        self._state: bytes | None = None  # dump of the session, None before the interpreter was first needed
        self._older: bytes | None = None  # the one before, should the last one not load
        self._sql_is_ours: bool | None = True  # None: not known, the last call may have bound the name `sql`
        self._has_helpers = False  # whether the state holds `python_helpers.SOURCE`
        self._calls: collections.deque[str] = collections.deque(maxlen=20)  # that ended well, for messages

    def run(self, code: str) -> Observation:
        """Run one call and describe its outcome."""
        try:
            if not code.strip():
                return _error("empty call")
            if len(code) > MAX_CODE_CHARACTERS:
                return _error(f"the code is longer than {MAX_CODE_CHARACTERS} characters")
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
            result = self._database.query(query, timeout_s=self._seconds)
            note = self._database.note(query, result) if self._header else None
        except QueryTimeout:
            return self._timeout()
        except QueryError as error:
            return _error(str(error))
        return self._describe(result.dicts(), [], 0, note)

    def _run_python(self, code: str) -> Observation:
        printed = _Printed(self._characters)
        helpers = not self._has_helpers and python_helpers.mentioned(code)
        problem: monty.MontyError | None = None
        value, state, too_large = None, None, False
        with self._session() as session:
            if self._state is not None and not self._restore(session):
                return _error("the variables of the last call could not be restored; try again", "tool_failure")
            sql = _SqlFunction(self._database, self._seconds, notes=self._header)
            lookup = {"sql": sql, "table": self._table}
            try:
                if helpers:
                    session.feed_run(python_helpers.SOURCE)
                value = session.feed_run(code, external_lookup=lookup, print_callback=printed)
            except (monty.MontyRuntimeError, monty.MontySyntaxError, monty.MontyConversionError) as error:
                problem = error
            late = sql.left <= 0 or (problem is not None and "time limit exceeded" in str(problem))
            spent = problem is not None and str(problem).startswith("MemoryError")
            if not late and not spent:  # a session that was stopped half-way must not be used again
                try:
                    state = session.dump()
                except monty.MontyRuntimeError as error:  # a copy of the variables beside them is too much
                    if _OUT_OF_MEMORY not in str(error):
                        raise
                    too_large = True
        if late:
            return self._timeout()
        dropped = too_large or (state is not None and not self._loadable(state))
        if state is not None and not dropped:
            self._older, self._state, self._sql_is_ours = self._state, state, None
            self._has_helpers = self._has_helpers or helpers
            self._calls.append(code)
        if problem is not None:
            return self._python_error(problem, sql, printed)
        seen = self._describe(value, printed.lines(), printed.missing, sql.note)
        if dropped:
            problem = _error(f"variables of this call take more than {STATE_LIMIT >> 20} MB and were dropped")
            return Observation(f"{problem.text}\n{seen.text}", True, "error")
        return seen

    def _describe(self, value: Any, printed: Sequence[str], missing: int, note: str | None) -> Observation:
        lines, rows, more = render(value, self._header) if value is not None else ([], 0, 0)
        tail = f"\nnote: {note}" if note else ""
        lines = [*printed, *lines] or ["(no output)"]
        return Observation(cut(lines, self._characters - len(tail), rows, missing, more) + tail)

    def _python_error(self, problem: monty.MontyError, sql: _SqlFunction, printed: _Printed) -> Observation:
        text = str(problem)
        if isinstance(problem, monty.MontySyntaxError):
            text = problem.display("type-msg")
        if sql.last_error is not None and text == f"RuntimeError: {sql.last_error}":
            text = sql.last_error  # same words as when the query runs without the interpreter
        elif _OUT_OF_MEMORY in text:
            text = f"MemoryError: the call needs more than {WORKER_MEMORY >> 20} MB; variables are as before it"
        else:
            text = self._teach(text)
        observation = _error(text)
        if printed.lines():
            room = max(self._characters - len(observation.text) - 1, 0)
            return Observation(f"{cut(printed.lines(), room, 0, printed.missing)}\n{observation.text}", True, "error")
        return observation

    def _teach(self, text: str) -> str:
        """The message of a Python error, with what exists instead of a missing name."""
        missing = re.match(r"NameError: name '(\w+)' is not defined\Z", text)
        if missing:
            return text + python_helpers.unknown_name(missing[1], python_helpers.defined_names(self._calls))
        missing = re.match(r"(?:ModuleNotFoundError: No module named|ImportError: .*?) '([\w.]+)'", text)
        if missing:
            return text + python_helpers.unknown_module(missing[1])
        return text

    def _name_is_ours(self) -> bool:
        """Whether `sql` still means our function, i.e. no earlier call has bound that name."""
        if self._sql_is_ours is None:
            with self._session() as session:
                if not self._restore(session):
                    return True
                try:
                    session.feed_run("sql", external_lookup={})
                    self._sql_is_ours = False
                except monty.MontyRuntimeError as error:
                    self._sql_is_ours = str(error).startswith("NameError")
        return self._sql_is_ours

    def _loadable(self, state: bytes) -> bool:
        """Whether a state may be kept: one that fits, and whose session can be restored within its memory.

        A dump is smaller than what it stands for (tables grow to a peak and keep that size), and an episode whose state
        cannot be loaded would have no further call.
        """
        if len(state) > STATE_LIMIT:
            return False
        if len(state) < len(self._state or b"") + PROVED_GROWTH:
            return True
        try:
            with self._session() as session:
                session.load_session(state)
                session.feed_run("0")
            return True
        except (monty.MontyError, RuntimeError):
            return False

    def _restore(self, session: monty.MontySession) -> bool:
        """Load the variables; where that fails, go back to those of the call before, or none: the episode goes on."""
        try:
            session.load_session(self._state)
            return True
        except monty.MontyRuntimeError:
            self._state, self._older = self._older, None
            self._sql_is_ours, self._has_helpers = None if self._state else True, False
            return False

    @contextlib.contextmanager
    def _session(self) -> Iterator[monty.MontySession]:
        limits = monty.ResourceLimits(
            max_feed_duration_secs=self._seconds,
            max_memory=WORKER_MEMORY,
            max_suspensions=MAX_QUERIES,
            max_recursion_depth=200,
            max_total_sleep_secs=min(self._seconds, 1.0),
        )
        options = {"limits": limits, "os_policy": _POLICY, "external_modules": python_helpers.modules()}
        with contextlib.ExitStack() as stack:
            for left in range(MAX_PROCESSES, -1, -1):
                try:
                    session = stack.enter_context(_workers().checkout(**options))
                    break
                except monty.MontyCrashedError:  # it ended while it was idle; a Ctrl-C at a terminal ends all of them
                    if not left:
                        raise
            pid = session.worker_pid
            try:
                with _BUSY_LOCK:
                    _BUSY.add(pid)
                yield session
            finally:
                with _BUSY_LOCK:
                    _BUSY.discard(pid)

    def _table(self, rows: Any) -> str:
        """`table` as the sandbox sees it: rows as the text that a result prints as."""
        if not isinstance(rows, list) or not all(isinstance(row, (dict, tuple)) for row in rows):
            raise TypeError("table() takes a list of rows, as sql() returns them")
        lines, count, more = render(rows, table=True)
        return cut(lines, self._characters, count, 0, more)

    def _timeout(self) -> Observation:
        return _error(f"the call ran longer than {self._seconds:g} s and was stopped", "timeout")


class _SqlFunction:
    """`sql` as the sandbox sees it, within the time limit of the call, which begins now."""

    def __init__(self, database: Database, seconds: float, notes: bool):
        self._database, self._notes = database, notes
        self._deadline = time.monotonic() + seconds - database.waited
        self.last_error: str | None = None
        self.note: str | None = None  # on the last query's result

    @property
    def left(self) -> float:
        """Seconds of the call that are left; waits for a free database worker are not counted."""
        return self._deadline + self._database.waited - time.monotonic()

    def __call__(self, query: Any) -> list[dict[str, Any]]:
        self.last_error = self.note = None
        if not isinstance(query, str):
            raise TypeError("sql() takes the query as one string")
        left = self.left
        if left <= 0:
            raise TimeoutError("out of time")
        try:
            result = self._database.query(query, timeout_s=left)
            if self._notes:
                self.note = self._database.note(query, result)
            return result.dicts()
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
        if kept:
            self._parts.append(kept)
        self._size += len(kept)
        self.missing += len(text) - len(kept)

    def lines(self) -> list[str]:
        text = "".join(self._parts)
        return text.removesuffix("\n").split("\n") if text else []


def _error(text: str, status: str = "error") -> Observation:
    """An error in one line, whatever its message holds."""
    line = " ".join(text[: 4 * MAX_ERROR_CHARACTERS].split())[:MAX_ERROR_CHARACTERS]
    return Observation(f"error: {line}", True, status)


_BUSY_LOCK = threading.Lock()
_BUSY: set[int | None] = set()  # process ids of the workers that run a call


def stop_calls() -> None:
    """End the Python that runs now, of all tools of this process: each call is told that its worker crashed.

    For another thread than the one that waits for a call: the interpreter's binding waits in native code, where that
    thread hears no signal.
    """
    with _BUSY_LOCK:
        for pid in _BUSY - {None}:
            if not _has_ended(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def _has_ended(pid: int | None) -> bool:
    """Whether a child process has ended, be it reaped or not; False where the system cannot say."""
    if pid is None or not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


_POOL_LOCK = threading.Lock()
_POOL: tuple[int, monty.Monty] | None = None  # process id and the pool that belongs to it


def _workers() -> monty.Monty:
    """The worker pool of this process, started at first use."""
    global _POOL
    with _POOL_LOCK:
        if _POOL is None or _POOL[0] != os.getpid():
            pool = monty.Monty(
                min_processes=1,
                max_processes=MAX_PROCESSES,
                checkout_timeout=300.0,
                max_checkouts_per_worker=5000,
                feed_duration_limit_grace=0.5,
            )
            pool.__enter__()
            # The interpreter's binding imports this three times a call. Where it is not installed, that is a search of
            # the whole path each time, half of what a call costs; an entry of None says at once that there is none.
            if importlib.util.find_spec("opentelemetry") is None:
                sys.modules["opentelemetry"] = None
            atexit.register(pool.__exit__, None, None, None)
            _POOL = (os.getpid(), pool)
        return _POOL[1]
