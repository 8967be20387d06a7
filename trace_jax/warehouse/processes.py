"""The pool of database workers: which process has which episode, and what happens to one that does not answer.

Few processes serve any number of episodes: an episode is loaded into a worker when it is first asked there (about a
millisecond), and a worker that holds it already is preferred. Killing a worker loses nothing but loaded tables.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

MAX_WORKERS = max(16, 2 * (os.cpu_count() or 1))  # so that a few queries that use their whole time stop nobody else
EAGER_WORKERS = os.cpu_count() or 1  # started as soon as they are needed; beyond these, a short wait comes first
PATIENCE_SECONDS = 0.2  # that wait: most queries end sooner, and starting a worker takes longer
MAX_EPISODES = 24  # loaded in one worker
MAX_REQUESTS = 50_000  # of one worker, then a new one takes its place: no leak adds up
START_SECONDS = 120.0
MAX_QUEUE_SECONDS = 120.0  # for a free worker

# What a child needs of the environment to start Python and find shared libraries; nothing else reaches it.
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


class WorkerLost(Exception):
    """The worker ended by itself: it crashed, or ran out of memory or processor time."""


class WorkerStuck(Exception):
    """The worker did not answer in time and was killed."""


class QueueFull(Exception):
    """No worker became free within `MAX_QUEUE_SECONDS`."""


class Worker:
    """One child process. Used by one thread at a time."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: no directory of the parent's choosing goes ahead of the path given here.
            program = f"import sys; sys.path[:] = {sys.path!r}; from trace_jax.warehouse import worker; worker.main("
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"{program}{theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        self._pipe = Connection(ours.detach())
        self._answered = False
        self.requests = 0
        self.worn = False  # asks to be replaced
        self.loaded: collections.OrderedDict[int, None] = collections.OrderedDict()  # episodes, the last used one last
        self.drops: collections.deque[int] = collections.deque()  # episodes to give up with the next request

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, operation: str, *arguments: Any, seconds: float | None = None) -> tuple[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            WorkerLost, WorkerStuck: see there; the worker is gone.
        """
        self.requests += 1
        drops = [self.drops.popleft() for _ in range(len(self.drops))]  # another thread may append meanwhile
        try:
            self._pipe.send((drops, operation, arguments))
            wait = None if seconds is None else seconds if self._answered else max(seconds, START_SECONDS)
            if not self._pipe.poll(wait):
                self.end()
                raise WorkerStuck
            status, value, self.worn = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise WorkerLost(f"exit status {self._process.returncode}") from error
        self._answered = True
        return status, value

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process; may be called twice."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    # Arrow's own allocators reserve a gigabyte at once, which would count as memory of the worker.
    return {**kept, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}


class Workers:
    """A pool of `Worker`s, started as they are needed; thread-safe."""

    def __init__(self):
        self._free = threading.Condition()
        self._idle: list[Worker] = []
        self._all: list[Worker] = []

    @contextlib.contextmanager
    def lend(self, key: int) -> Iterator[Worker]:
        """A worker for one request about episode `key`, one that has it loaded if such a one is free.

        Raises:
            QueueFull: see there.
        """
        worker = self._take(key)
        try:
            yield worker
        except BaseException:  # interrupted between a request and its answer: the next answer would be the wrong one
            worker.end()
            raise
        finally:
            with self._free:
                if worker.alive and not worker.worn and worker.requests < MAX_REQUESTS:
                    self._idle.append(worker)
                else:
                    self._all.remove(worker)
                    worker.end()
                    if not self._idle:  # started now, so that the next query waits less for it
                        self._all.append(Worker())
                        self._idle.append(self._all[-1])
                self._free.notify()

    def load(self, worker: Worker, key: int, memory_limit_mb: int, tables: Sequence[tuple[str, bytes]]) -> None:
        """Make sure that a lent worker holds the episode. RuntimeError if it cannot."""
        if key in worker.loaded:
            worker.loaded.move_to_end(key)
            return
        with self._free:
            while len(worker.loaded) >= MAX_EPISODES:
                worker.drops.append(worker.loaded.popitem(last=False)[0])
        status, problem = worker.ask("load", key, memory_limit_mb, tables, seconds=START_SECONDS)
        if status != "ok":
            raise RuntimeError(f"cannot load an episode's tables: {problem}")
        with self._free:
            worker.loaded[key] = None

    def forget(self, key: int) -> None:
        """The episode is closed: its workers give up its tables with their next request."""
        with self._free:
            for worker in self._all:
                if key in worker.loaded:
                    del worker.loaded[key]
                    worker.drops.append(key)

    def close_idle(self) -> int:
        """Close the emptied instances that the idle workers keep; returns how many there were."""
        with self._free:
            idle, self._idle = self._idle, []
        closed = 0
        for worker in idle:
            with contextlib.suppress(WorkerLost, WorkerStuck):
                closed += worker.ask("close_idle", seconds=START_SECONDS)[1]
        with self._free:
            for worker in idle:
                if worker.alive:
                    self._idle.append(worker)
                else:
                    self._all.remove(worker)
            self._free.notify_all()
        return closed

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        with self._free:
            return [worker.pid for worker in self._all]

    def end(self) -> None:
        """Kill all workers."""
        with self._free:
            for worker in self._all:
                worker.end()
            self._all, self._idle = [], []

    def _take(self, key: int) -> Worker:
        start = time.monotonic()
        with self._free:
            while True:
                for worker in [w for w in self._idle if not w.alive]:  # ended from outside, or for lack of memory
                    self._idle.remove(worker)
                    self._all.remove(worker)
                for worker in reversed(self._idle):
                    if key in worker.loaded:
                        self._idle.remove(worker)
                        return worker
                if self._idle:
                    return self._idle.pop()
                waited = time.monotonic() - start
                patient = len(self._all) < EAGER_WORKERS or waited >= PATIENCE_SECONDS
                if patient and len(self._all) < MAX_WORKERS:
                    self._all.append(Worker())
                    return self._all[-1]
                if waited >= MAX_QUEUE_SECONDS:
                    raise QueueFull(f"no database worker became free within {MAX_QUEUE_SECONDS:g} s")
                self._free.wait(PATIENCE_SECONDS if len(self._all) < MAX_WORKERS else MAX_QUEUE_SECONDS - waited)


_LOCK = threading.Lock()
_POOL: tuple[int, Workers] | None = None  # process id and the pool that belongs to it


def workers() -> Workers:
    """The pool of this process."""
    global _POOL
    with _LOCK:
        if _POOL is None or _POOL[0] != os.getpid():
            pool = Workers()
            atexit.register(pool.end)
            _POOL = (os.getpid(), pool)
        return _POOL[1]
