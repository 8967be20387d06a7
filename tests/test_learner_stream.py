"""Messages from one process to others over a store that stands in for JAX's coordination service."""

import collections
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from trace_jax.learner import multihost, stream
from trace_jax.learner.stream import WINDOW, Stream


class Store:
    """The calls of the coordination service's client that a stream makes."""

    def __init__(self):
        self.values, self.most, self._changed = {}, 0, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self._changed:
            assert key not in self.values, "the service refuses to overwrite"
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self._changed.notify_all()

    key_value_set = key_value_set_bytes

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, timeout=30)
            return self.values[key]

    blocking_key_value_get = blocking_key_value_get_bytes

    def key_value_delete(self, key):
        with self._changed:
            self.values = {k: v for k, v in self.values.items() if not k.startswith(key)}


def test_all_readers_get_every_message_and_what_they_have_read_is_removed(monkeypatch):
    """The sender waits for the slowest, so that the service never holds more than two windows and their marks."""
    store, process = Store(), threading.local()
    monkeypatch.setattr(multihost, "client", lambda: store)
    monkeypatch.setattr(multihost, "index", lambda: process.index)
    count, ends = 5 * WINDOW + 3, []
    for _ in range(3):  # in three processes, which count for themselves
        monkeypatch.setattr(stream, "_made", collections.Counter())
        ends.append(Stream("lane", (4, 2, 7)))
    sent = []

    def send():
        process.index = 4
        for number in range(count):
            ends[0].send(str(number).encode())
            sent.append(number)

    def read(index, end, pause):
        process.index = index
        found = []
        for _ in range(count):
            found.append(int(end.receive()))
            if pause and found[-1] % WINDOW == 0:
                time.sleep(0.02)
                assert len(sent) <= found[-1] + 2 * WINDOW + 1
        return found

    with ThreadPoolExecutor(3) as pool:
        writing = pool.submit(send)
        quick, slow = pool.submit(read, 2, ends[1], False), pool.submit(read, 7, ends[2], True)
        writing.result()
        assert quick.result() == slow.result() == list(range(count))
    assert store.most <= 2 * (WINDOW + 2) + 1 < count
    assert not any(key.startswith("trace_jax_stream/lane/0/0/") for key in store.values)
    assert Stream("lane", (4, 2, 7))._folder != ends[0]._folder  # another engine's
