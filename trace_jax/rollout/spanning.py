"""A lane whose devices lie in several processes.

A program over such devices runs when all of these processes have launched it, each on its own devices, and they must
launch the programs of a lane in one order. So one of them leads: it schedules rows, runs tools and reads what was
drawn, like the only process of any other lane. Before each call that touches a device it tells the others, which make
the same call. They have no rows, and read nothing back.

A message is a name, some numbers and the numpy arguments of a call, a few kilobytes: parameters and caches stay where
they are. What carries it (`Channel`) is not decided here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from trace_jax.policy.mixture import Lock
from trace_jax.rollout.calls import Calls, Weights
from trace_jax.rollout.generator import Deliver
from trace_jax.rollout.programs import State
from trace_jax.rollout.sampling import Sampling

STATE = ("token", "position", "left", "adapter")  # of `State`, in the order of a message, before its lock
PREFILLED = 5  # arrays of a prefill call, before its lock


class Channel(Protocol):
    """One way from the process that leads a lane to each of the others, in order and without loss."""

    def send(self, message: bytes) -> None:
        """Called where the lane is led. May wait for a process that has not received earlier messages."""
        ...

    def receive(self) -> bytes:
        """The next message, called in the other processes; waits for it."""
        ...


@dataclass(frozen=True)
class Message:
    """A call to make.

    Attributes:
      name: of a method of `Calls`.
      numbers: its integers; of "begin" the sampler's fields.
      arrays: its arrays.
      version: of the parameters that it takes; -1: none.
    """

    name: str
    numbers: tuple[int | float, ...] = ()
    arrays: tuple[np.ndarray, ...] = ()
    version: int = -1

    def encoded(self) -> bytes:
        """A line of JSON, then the arrays one after the other."""
        shapes = [(a.dtype.str, a.shape) for a in self.arrays]
        head = json.dumps([self.name, self.numbers, self.version, shapes]).encode()
        return b"\n".join([head, b"".join(np.ascontiguousarray(a).tobytes() for a in self.arrays)])

    @classmethod
    def decoded(cls, data: bytes) -> Message:
        """What `encoded` wrote.

        Raises:
          ValueError: something else.
        """
        head, _, rest = data.partition(b"\n")
        name, numbers, version, shapes = json.loads(head)
        arrays, at = [], 0
        for kind, shape in shapes:
            array = np.frombuffer(rest, kind, int(np.prod(shape, dtype=np.int64)), at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
        if at != len(rest):
            raise ValueError(f"a message of a lane has {len(rest)} bytes of arrays, its head says {at}")
        return cls(name, tuple(numbers), tuple(arrays), version)


class Announced(Calls):
    """The calls of a lane that this process leads: the others are told of each before it is made here."""

    def __init__(self, *args, channel: Channel):
        """`args`: of `Calls`."""
        super().__init__(*args)
        self._channel = channel
        self._open = False

    def _tell(self, name: str, *numbers: int | float, arrays: Sequence[Any] = (), version: int = -1) -> None:
        self._channel.send(Message(name, numbers, tuple(np.asarray(a) for a in arrays), version).encoded())

    def begin(self, sampling: Sampling) -> None:
        self._tell("begin", sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        self._open = True
        super().begin(sampling)

    def end(self) -> None:
        if self._open:
            self._open = False
            self._tell("end")

    def room(self, group, slots, length):
        self._tell("room", group, slots, length)
        super().room(group, slots, length)

    def prefill(self, weights, group, ids, starts, counts, slots, adapter, lock=None):
        arrays = (ids, starts, counts, slots, adapter)
        self._tell("prefill", group, arrays=(*arrays, *(lock or ())), version=weights[1])
        return super().prefill(weights, group, *arrays, lock)

    def copy(self, target, source, sources, targets):
        self._tell("copy", target, source, arrays=(sources, targets))
        super().copy(target, source, sources, targets)

    def wait(self, group):
        self._tell("wait", group)
        super().wait(group)

    def decode(self, weights, group, state, seeds, going):
        arrays = (seeds, *(getattr(state, name) for name in STATE), *(state.lock or ()))
        self._tell("decode", group, going, arrays=arrays, version=weights[1])
        return super().decode(weights, group, state, seeds, going)


class Follower:
    """The part of this process in a lane that another one leads, and the thread that plays it."""

    def __init__(self, calls: Calls, channel: Channel):
        self.calls = calls
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._alarm: Deliver | None = None

    def follow(self) -> None:
        """Makes the calls of one collection from now on."""
        self._error = self._alarm = None
        self._thread = threading.Thread(target=self._serve, name="rollout-follower", daemon=True)
        self._thread.start()

    def watch(self, alarm: Deliver) -> None:
        """Has a failure delivered at once, to a collection of this process that is under way meanwhile."""
        self._alarm = alarm
        if self._error is not None:
            alarm(self._error)

    def followed(self) -> None:
        """Returns when the process that leads has ended the collection.

        Raises:
          BaseException: what a call raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        try:
            while self._replay(Message.decoded(self._channel.receive())):
                pass
        except BaseException as error:
            self._error = error
            if self._alarm is not None:
                self._alarm(error)

    def _replay(self, message: Message) -> bool:
        """Makes a call; whether there are more to come."""
        name, numbers, arrays = message.name, message.numbers, message.arrays
        if name == "begin":
            self.calls.begin(Sampling(*numbers))
        elif name == "end":
            self.calls.end()
        elif name in ("room", "copy", "wait"):
            getattr(self.calls, name)(*numbers, *arrays)
        elif name == "prefill":
            lock = Lock(*arrays[PREFILLED:]) if arrays[PREFILLED:] else None
            self.calls.prefill(self._weights(message.version), *numbers, *arrays[:PREFILLED], lock)
        elif name == "decode":
            group, going = numbers
            seeds, *fields = arrays
            lock = Lock(*fields[len(STATE) :]) if fields[len(STATE) :] else None
            state = State(**dict(zip(STATE, fields, strict=False)), lock=lock)
            # waited for: what fails on the devices is raised here, and not in some later call
            jax.block_until_ready(self.calls.draw(self._weights(message.version), group, state, seeds, going))
        else:
            raise ValueError(f"a lane is told to {name!r}, which is no call")
        return name != "end"

    def _weights(self, version: int) -> Weights:
        weights = self.calls.weights
        if weights is None or weights[1] != version:
            held = "none" if weights is None else f"version {weights[1]}"
            raise RuntimeError(f"a lane samples with version {version} of the policy, and this process holds {held}")
        return weights
