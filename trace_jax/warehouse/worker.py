"""A database worker: a process that holds the instances of several episodes and answers one request at a time.

DuckDB stops a query only between its chunks. A binder that expands an alias 2^26 times, an edit distance of two long
texts, or a scalar function that allocates gigabytes outside the engine's memory limit goes on, and no thread can be
stopped from outside: a process can. So queries run here, without the parent's environment, arguments or files, under
the kernel's own limits on memory and processor time; the parent kills a worker that does not answer and loads the
episode into another.

Requests are tuples (keys of episodes to drop, operation, arguments); the answers are `Outcome`s of `instance.query`,
or ("ok", value), and whether the worker should be replaced.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

from trace_jax.warehouse import instance
from trace_jax.warehouse.instance import Instance, Outcome

SPARE_MEMORY = 384 * 2**20  # bytes above the engine's limit: texts of scalar functions, the result as Python objects
MAX_GROWTH = 2**30  # bytes of tables and of what was never given back, after which a worker is replaced


def main(descriptor: int) -> None:
    """Answer requests on the inherited socket until the parent closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent
    os.chdir("/")
    worker = _Worker()
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            outcome = worker.answer(*pipe.recv())
            pipe.send((*outcome, worker.worn))


class _Worker:
    def __init__(self):
        self._held: dict[int, Instance] = {}
        self._base = self._level = _data_bytes()  # of the process without and with the tables that it holds
        self._largest = 0  # memory limit of an instance

    @property
    def worn(self) -> bool:
        """Whether an earlier query has left so much allocated that a later one might lack it."""
        return _data_bytes() - self._level > SPARE_MEMORY // 2 or self._level - self._base > MAX_GROWTH

    def answer(self, drops: Sequence[int], operation: str, arguments: tuple[Any, ...]) -> Outcome:
        try:
            for key in drops:
                if key in self._held:
                    self._held.pop(key).close()
            return getattr(self, f"_{operation}")(*arguments)
        except Exception as failure:  # the parent reports it and replaces this process
            return "failed", f"{type(failure).__name__}: {failure}"

    def _load(self, key: int, memory_limit_mb: int, tables: Sequence[tuple[str, bytes]]) -> Outcome:
        self._largest = max(self._largest, memory_limit_mb * 2**20)
        _limit(resource.RLIMIT_DATA, resource.RLIM_INFINITY)
        self._held[key] = Instance([(name, _table(data)) for name, data in tables], memory_limit_mb)
        self._level = _data_bytes()
        _limit(resource.RLIMIT_DATA, self._level + self._largest + SPARE_MEMORY)
        return "ok", None

    def _query(self, key: int, sql: str, seconds: float) -> Outcome:
        # A query that never returns must not outlive even a parent that was killed: the kernel ends it.
        _limit(resource.RLIMIT_CPU, int(time.process_time() + 2 * seconds + 10))
        return self._held[key].query(sql, seconds)

    def _settings(self, key: int) -> Outcome:
        rows = self._held[key].connection.execute("SELECT name, value::VARCHAR FROM duckdb_settings()").fetchall()
        return "ok", dict(rows)

    def _close_idle(self) -> Outcome:
        return "ok", instance.close_idle()


def _table(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as stream:
        return stream.read_all()


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY and (soft > hard or soft == resource.RLIM_INFINITY):
        soft = hard
    with contextlib.suppress(ValueError, OSError):  # a platform without this limit
        resource.setrlimit(what, (soft, hard))


def _data_bytes() -> int:
    """Bytes of data this process has now, 0 where the system does not say."""
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/statm") as text:
        return int(text.read().split()[5]) * resource.getpagesize()
    return 0
