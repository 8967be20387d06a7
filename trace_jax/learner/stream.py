"""Messages from one process to some others, in order, over JAX's coordination service (see `multihost`).

It is there already, every process is connected to it, and it knows which of them are alive: a reader whose sender dies
is ended with the job, by JAX's heartbeats or by the sender's last words, and needs no time-out of its own. A message
takes one call to process 0 and one from it; those that all have read are removed a window at a time.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from trace_jax.learner import multihost

WINDOW = 64  # messages; a sender is at most two windows ahead of the slowest reader

_made: collections.Counter[str] = collections.Counter()


class Stream:
    """One end of the stream of a name. Every process of it makes its end, in the same order for one name."""

    def __init__(self, name: str, processes: Sequence[int]):
        """`processes`: the first sends, the others receive."""
        self._folder = f"trace_jax_stream/{name}/{_made[name]}/"
        _made[name] += 1
        self._readers = list(processes[1:])
        self._count = 0  # messages that went through this end

    def send(self, message: bytes) -> None:
        """Sends a message to all readers; waits for those that are two windows behind.

        Raises:
            RuntimeError: the coordination service is gone.
        """
        window, store = self._count // WINDOW, multihost.client()
        if self._count % WINDOW == 0 and window >= 2:
            self._remove(window - 2)
        store.key_value_set_bytes(f"{self._folder}{window}/{self._count % WINDOW}", message)
        self._count += 1

    def receive(self) -> bytes:
        """The next message; waits for it.

        Raises:
            RuntimeError: none came within `multihost.TIMEOUT_SECONDS`, or the coordination service is gone.
        """
        window, store = self._count // WINDOW, multihost.client()
        key = f"{self._folder}{window}/{self._count % WINDOW}"
        message = store.blocking_key_value_get_bytes(key, multihost.TIMEOUT_SECONDS * 1000)
        self._count += 1
        if self._count % WINDOW == 0:
            store.key_value_set(f"{self._folder}{window}/read/{multihost.index()}", "")
        return message

    def _remove(self, window: int) -> None:
        """Removes a window that all readers have read."""
        store = multihost.client()
        for process in self._readers:
            store.blocking_key_value_get(f"{self._folder}{window}/read/{process}", multihost.TIMEOUT_SECONDS * 1000)
        store.key_value_delete(f"{self._folder}{window}/")
