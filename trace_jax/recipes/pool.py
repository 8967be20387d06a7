"""Worker processes that can be left at any moment.

`concurrent.futures.ProcessPoolExecutor` waits for running tasks when it is shut down and holds named semaphores that
outlive a hard exit. Here every worker is a process at the end of a pipe: killing it is always clean.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import queue
from collections.abc import Callable, Sequence
from typing import Any

from trace_jax.recipes.interrupt import ignore_in_worker

POLL_SECONDS = 0.1  # how long a Ctrl-C may go unnoticed while results are awaited


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of a task."""


def _serve(pipe) -> None:
    """Runs tasks of the pipe until it closes. Answers with (True, result) or (False, error)."""
    ignore_in_worker()
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(*args))
        except Exception as error:
            answer = (False, error)
        try:
            pipe.send(answer)
        except OSError:  # the main process is gone
            return


class ProcessPool:
    """`count` processes; a thread of this process feeds each. A context manager: leaving it kills what still runs."""

    def __init__(self, count: int):
        # Fork would copy a process that already runs JAX's threads.
        context = multiprocessing.get_context("spawn")
        self._idle: queue.SimpleQueue = queue.SimpleQueue()
        self._processes = []
        for _ in range(count):
            pipe, far = context.Pipe()
            process = context.Process(target=_serve, args=(far,), daemon=True)
            process.start()
            far.close()
            self._processes.append(process)
            self._idle.put(pipe)
        self._threads = concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="pool")

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *exc) -> None:
        for process in self._processes:
            process.kill()  # ends the `recv` that a thread may be in
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()

    def submit(self, function: Callable, *args: Any) -> concurrent.futures.Future:
        """Like `concurrent.futures.Executor.submit`.

        The future raises what the function raised, or `WorkerDied`.
        """
        return self._threads.submit(self._run, function, args)

    def _run(self, function: Callable, args: tuple) -> Any:
        pipe = self._idle.get()
        try:
            pipe.send((function, args))
            good, value = pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied("a worker process ended unexpectedly (out of memory?)") from None
        finally:
            self._idle.put(pipe)
        if good:
            return value
        raise value


def wait(
    jobs: Sequence[concurrent.futures.Future],
    check: Callable[[], None],
    on_progress: Callable[[int], None],
    enough: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> list[Any]:
    """Results of the jobs in order.

    Several times a second meanwhile it calls `check`, which may raise, and `on_progress` with the number of jobs done.

    Args:
        enough: whether the results of the first jobs, in order, will do; the fewest that do are returned then, and jobs
            that have not begun are cancelled.
    """
    pending: set[concurrent.futures.Future] = set(jobs)
    first: list[Any] = []
    while True:
        while len(first) < len(jobs) and (job := jobs[len(first)]).done() and not job.exception():
            first.append(job.result())
            if enough(first):
                for other in pending:
                    other.cancel()
                return first
        if len(first) == len(jobs):
            return first
        check()
        on_progress(len(jobs) - len(pending))
        _, pending = concurrent.futures.wait(pending, POLL_SECONDS, concurrent.futures.FIRST_EXCEPTION)
        failed = next((job for job in jobs if job.done() and job.exception()), None)
        if failed is not None:
            check()  # a signal to the whole process group is the reason rather than the failure
            raise failed.exception()
