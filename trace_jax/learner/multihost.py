"""What the processes of a run tell each other, over JAX's coordination service: text between hosts, no device.

Device collectives (`multihost_utils`) would do on the main thread, but every process must enqueue its device programs
in one order, which a background thread beside a training loop cannot promise. One process pays nothing.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from trace_jax.config import ConfigError

T = TypeVar("T")
LAST_WORDS_SECONDS = 1.0  # the others' last calls after they have all said that they end
TIMEOUT_SECONDS = 24 * 3600  # one that died is found by the heartbeats; process 0 may work alone for hours

_rounds: collections.Counter[str] = collections.Counter()
_waiting: dict[str, tuple[str, float]] = {}  # folder of what this process waits for, since when


def count() -> int:
    """How many processes run together. Starts no backend unless there are several."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Which of them this is; 0 writes what is written once."""
    return jax.process_index() if count() > 1 else 0


def client() -> Any:
    """The coordination service's client of this process; it is thread-safe."""
    return jax._src.distributed.global_state.client  # noqa: SLF001 - JAX has no public name for it; orbax does so too


def part() -> None:
    """Waits for the other processes and leaves them. The caller ends its process next, by `os._exit`.

    Process 0 does not take the service down as `jax.distributed.shutdown` does: gRPC's server aborts (`Check failed:
    queue.Pop() == nullptr`) when a last call of another process arrives while it is being destroyed.

    Raises:
        RuntimeError: they did not come, or one has ended already.
    """
    if count() == 1:
        return
    lead = index() == 0
    client().shutdown()
    if lead:
        time.sleep(LAST_WORDS_SECONDS)


def awaited() -> list[tuple[str, float, list[int]]]:
    """What this process waits for: its name, for how many seconds, and the processes that have not come yet. For
    another thread than the one that waits."""
    found = []
    for name, (folder, since) in list(_waiting.items()):
        there = {int(key.rsplit("/", 1)[1]) for key, _ in client().key_value_dir_get(folder)}
        found.append((name, time.monotonic() - since, sorted(set(range(count())) - there)))
    return found


def gather(name: str, value: Any) -> list[Any]:
    """The JSON-able values of all processes, in their order; waits for all of them.

    Args:
        name: every process calls in the same order for one name; different names may be used by different threads.

    Raises:
        RuntimeError: a process did not come within `TIMEOUT_SECONDS`.
    """
    if count() == 1:
        return [value]
    folder = f"trace_jax/{name}/"
    this = _rounds[name]
    _rounds[name] += 1
    store = client()
    store.key_value_set(f"{folder}{this}/{index():06d}", json.dumps(value))
    _waiting[name] = f"{folder}{this}/", time.monotonic()
    try:
        store.wait_at_barrier(f"{folder}{this}", TIMEOUT_SECONDS * 1000)
    finally:
        del _waiting[name]
    values = [text for _, text in sorted(store.key_value_dir_get(f"{folder}{this}/"))]
    if this:  # every process has read the round before, or it would not be here
        store.key_value_delete(f"{folder}{this - 1}/{index():06d}")
    return [json.loads(text) for text in values]


def together(name: str, work: Callable[[], T]) -> list[T]:
    """Does `work` in every process and gathers what it returned; when it failed in one, it fails in all.

    Raises:
        ConfigError: raised by the work of some process.
        Exception: this process's own failure, or RuntimeError for another's.
    """
    failure, result = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    if count() == 1:
        if failure is not None:
            raise failure
        return [result]
    kind = "" if failure is None else "config" if isinstance(failure, ConfigError) else "other"
    told = gather(name, [kind, str(failure), result])
    if failure is not None:
        raise failure
    for process, (kind, text, _) in enumerate(told):
        if kind:
            raise ConfigError(text) if kind == "config" else RuntimeError(f"in process {process}: {text}")
    return [result for *_, result in told]


def first(name: str, work: Callable[[], T]) -> T:
    """What `work` returns in process 0, which alone does it, in all of them. Raises what `together` does."""
    return together(name, lambda: None if index() else work())[0]
