"""Lanes over several processes without any: messages, what is replayed in which order, failures, who leads. Two real
processes are in test_rollout_devices.py, runs of them in test_launch_spanning.py."""

import dataclasses
import queue
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from helpers_rollout import CONFIG, POLICY, STOP, VOCABULARY, live, prompts_of

from trace_jax.policy.mixture import Lock
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout import engine as engines
from trace_jax.rollout import programs
from trace_jax.rollout.calls import Calls
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.placement import Place, owners
from trace_jax.rollout.programs import State
from trace_jax.rollout.sampling import Sampling
from trace_jax.rollout.spanning import Announced, Follower, Message


class Pipe:
    """A channel to one reader, which sees copies."""

    def __init__(self):
        self.sent = queue.SimpleQueue()

    def send(self, message):
        self.sent.put(bytes(message))

    def receive(self):
        return self.sent.get(timeout=60)


def test_messages_arrive_as_they_were_sent():
    arrays = (
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([[1, 2**32 - 1]], np.uint32),
        np.zeros((0, 4), np.float32),
        np.frombuffer(b"\n\n\n\n", np.int32),  # the head ends with the first line, whatever follows
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
    )
    sent = Message("prefill", (3, 0.1 + 0.2), arrays, 7)
    got = Message.decoded(sent.encoded())
    assert (got.name, got.numbers, got.version) == ("prefill", (3, 0.1 + 0.2), 7)
    for a, b in zip(got.arrays, arrays, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert Message.decoded(Message("end").encoded()) == Message("end")
    with pytest.raises(ValueError, match="bytes of arrays"):
        Message.decoded(sent.encoded() + b"more")


def ints(*shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


STATE = State(**{n: ints(4) + i for i, n in enumerate(("token", "position", "left", "adapter"))})
LOCK = Lock(ints(4), ints(2, 4, 3).astype(np.float32))
CALLS = [  # in the order of a collection: name, arguments; parameters by their version alone
    ("begin", (Sampling(0.7, 5, 0.9, 0.01),)),
    ("room", (0, 4, 128)),
    ("prefill", (("params", 5), 0, ints(2, 3), ints(2), ints(2) + 1, ints(2) + 2, ints(2) + 3, None)),
    ("prefill", (("params", 5), 0, ints(2, 3), ints(2), ints(2) + 1, ints(2) + 2, ints(2) + 3, LOCK)),
    ("room", (1, 4, 192)),
    ("copy", (1, 0, ints(3), ints(3) + 1)),
    ("wait", (1,)),
    ("draw", (("params", 5), 1, STATE, ints(4, 2).astype(np.uint32), 3)),
    ("draw", (("params", 5), 1, STATE.replace(lock=LOCK), ints(4, 2).astype(np.uint32), 3)),
]


@pytest.fixture
def made(monkeypatch):
    """Every call of `Calls`, which does nothing else."""
    found = []
    for name in ("begin", "room", "prefill", "copy", "wait", "draw"):
        monkeypatch.setattr(Calls, name, lambda self, *args, name=name: found.append((name, args)))
    return found


def follower(pipe):
    calls = Calls(None, None, "float32", None)
    calls.weights = ("params", 5)
    return Follower(calls, pipe)


def test_followers_make_the_same_calls_in_the_same_order(made):
    pipe = Pipe()
    lead = Announced(None, None, "float32", None, channel=pipe)
    for name, args in CALLS:
        getattr(lead, "decode" if name == "draw" else name)(*args)
    lead.end()
    lead.end()  # told once
    assert len(made) == len(CALLS)
    made.clear()
    mine = follower(pipe)
    mine.follow()
    mine.followed()
    assert pipe.sent.empty()
    assert [name for name, _ in made] == [name for name, _ in CALLS]
    for (_, got), (_, expected) in zip(made, CALLS, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Message("decode", (0, 1), (ints(4, 2), *[ints(4)] * 4), 6), "samples with version 6.*holds version 5"),
        (Message("format", (0,)), "'format', which is no call"),
    ],
)
def test_what_cannot_be_followed_is_raised_at_once_and_at_the_end(made, message, words):
    pipe, told = Pipe(), queue.SimpleQueue()
    mine = follower(pipe)
    mine.follow()
    mine.watch(told.put)
    pipe.send(message.encoded())
    with pytest.raises((RuntimeError, ValueError), match=words):
        raise told.get(timeout=60)
    with pytest.raises((RuntimeError, ValueError), match=words):
        mine.followed()
    mine.watch(told.put)  # a collection that begins later hears of it, too
    assert not told.empty()


def test_a_follower_has_the_caches_of_the_lane_that_it_follows(monkeypatch):
    """A real engine whose one lane is announced; the follower, on the same device, ends with the same keys and values,
    to the last bit."""
    monkeypatch.setattr(programs, "CPU_CHUNKS", programs.CPU_CHUNKS[-1:])
    policy, config = dataclasses.replace(POLICY, layers=1), dataclasses.replace(CONFIG, slots=20)
    engine = Engine(Transformer(policy, VOCABULARY, rngs=nnx.Rngs(0)), config, STOP, lanes=1)
    (lane,), pipe = engine._lanes, Pipe()
    needed = (engine._programs, policy, config.cache_dtype, lane.place)
    weights, lane.calls = lane.calls.weights, Announced(*needed, channel=pipe)
    lane.calls.weights = weights
    mine = Follower(Calls(*needed), pipe)
    mine.calls.weights = weights
    for collection in range(2):
        mine.follow()
        live(engine, prompts_of(24), range(24), turns=2, disorder=collection)
        mine.followed()
        ours, theirs = mine.calls.caches, lane.calls.caches
        assert ours.keys() == theirs.keys() == {0, 1}
        for group in ours:
            for a, b in zip(jax.tree.leaves(ours[group]), jax.tree.leaves(theirs[group]), strict=True):
                np.testing.assert_array_equal(a, b)
    engine.free()
    assert not lane.calls.caches and lane.weights is None


def mesh(*processes, tensor=2, expert=1):
    """Only what says where devices are."""
    devices = np.array([SimpleNamespace(process_index=p) for p in processes])
    rows = len(processes) // (tensor * expert)
    shape = {"data": 1, "fsdp": rows, "tensor": tensor, "expert": expert}
    return SimpleNamespace(devices=devices.reshape(1, rows, tensor, expert), shape=shape)


def test_the_lowest_process_of_a_lane_leads_it(monkeypatch):
    overlapping = mesh(1, 0, 1, 2, 3, 3)
    assert owners(overlapping) == [(0, 1), (1, 2), (3,)]
    assert owners(mesh(0, 1, 2, 3, tensor=2, expert=2)) == [(0, 1, 2, 3)]
    assert owners(mesh(0, 0, 0, 0), lambda d: 7) == [(7,), (7,)]
    shares = []
    for process in range(4):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        shares.append(engines._share(overlapping))
    assert shares == [(0, 3), (1, 3), None, (2, 3)]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert not Place(None, processes=(0, 1)).leads and Place(None, processes=(1, 2)).leads and Place(None).leads
