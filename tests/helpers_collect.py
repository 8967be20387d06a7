"""A toy chat format, a toy environment and scripted samplers, for tests of collection without a model."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time

import numpy as np

from trace_jax.config import RolloutConfig
from trace_jax.environments.base import Observation, Reward, Task
from trace_jax.policy.chat import Turn
from trace_jax.rollout.collect import collect
from trace_jax.rollout.generator import SampledTurn

# Id 0 is both padding and end of turn (case 2). "ab" merges, so encode(decode(ids)) != ids (case 1).
PIECES = ["<|im_end|>", "a", "b", "ab", "x", "?", "!", "r"]
END, A, B, AB, X, ASK, DONE, RESULT = range(8)
CONFIG = RolloutConfig(max_turns=4, max_turn_tokens=8, context=64, slots=64, tool_workers=2, trajectory_seconds=20)


class ToyChat:
    """Greedy longest match over single characters and "ab"; unknown characters become "x"."""

    def encode(self, text):
        ids, i = [], 0
        while i < len(text):
            step = 2 if text[i : i + 2] == "ab" else 1
            piece = text[i : i + step]
            ids.append(PIECES.index(piece) if piece in PIECES else X)
            i += step
        return ids

    def encode_prompt(self, system, user):
        return [RESULT, *self.encode(system), END, *self.encode(user)]  # an id 0 inside the prompt

    def encode_observation(self, text):
        return [RESULT, *self.encode(text)]

    def parse_turn(self, ids):
        kind = {ASK: "call", DONE: "answer"}.get(ids[0], "malformed")
        return Turn(kind, "".join(PIECES[i] for i in ids[1:-1]))


class Script:
    """A sampler that answers at once: `script(row, turn)` gives the ids of a turn, cut to its limit, and None keeps the
    turn back until `release_turn`. It checks how it is used and records what it is given.

    Attributes:
      seen: history of each row when its latest turn was asked for. seeds, begun, released, started: as they came.
    """

    def __init__(self, script, slots=64, stop_id=END):
        self.script, self.slots, self.stop_id, self.version = script, slots, stop_id, 0
        self.begun, self.started, self.released, self.ended = [], [], [], 0
        self.seeds, self.history, self.seen, self.turns, self.limits = {}, {}, {}, {}, {}
        self.held, self.waiting, self.adapters = set(), set(), {}
        self.most_held = 0

    def begin(self, sampling, deliver):
        self.begun.append(sampling)
        self.deliver = deliver

    def start(self, row, prompt, seed, limit, adapter=0):
        assert row not in self.seeds and len(self.held) < self.slots, "more rows than slots, or one of them twice"
        self.seeds[row], self.history[row], self.turns[row] = seed, np.asarray(prompt).tolist(), 0
        self.adapters[row] = adapter
        self.held.add(row)
        self.started.append(row)
        self.most_held = max(self.most_held, len(self.held))
        self._ask(row, limit)

    def resume(self, row, ids, limit):
        assert row in self.held and row not in self.waiting and len(ids), "resumed without a turn before"
        self.history[row] += np.asarray(ids).tolist()
        self._ask(row, limit)

    def _ask(self, row, limit):
        assert limit > 0
        self.seen[row], self.limits[row] = list(self.history[row]), limit
        self.waiting.add(row)
        self.asked(row)

    def asked(self, row):
        """A turn is due: here at once."""
        ids = self.script(row, self.turns[row])
        if ids is not None:
            self.release_turn(row, ids)

    def release_turn(self, row, ids):
        """Delivers the turn that a row waits for."""
        ids = list(ids)[: self.limits[row]]
        self.waiting.discard(row)
        if row in self.held:
            self.history[row] += ids
        turn, self.turns[row] = self.turns[row], self.turns[row] + 1
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        stopped = bool(ids) and ids[-1] == self.stop_id
        self.deliver(SampledTurn(row, np.array(ids, np.int32), logprobs, stopped, self.version_of(row, turn)))

    def version_of(self, row, turn):
        return turn

    def release(self, row):
        self.held.remove(row)
        self.released.append(row)

    def end(self):
        self.held.clear()
        self.ended += 1


class Shuffled(Script):
    """The same from a thread, in an order that `rng` chooses among the rows that wait."""

    def __init__(self, script, slots, rng: random.Random, delay: float = 0.0):
        super().__init__(script, slots)
        self.rng, self.delay = rng, delay
        self.lock, self.queue, self.over = threading.Condition(), [], False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, sampling, deliver):
        super().begin(sampling, deliver)
        self.thread.start()

    def asked(self, row):
        with self.lock:
            self.queue.append(row)
            self.lock.notify()

    def _run(self):
        while True:
            with self.lock:
                self.lock.wait_for(lambda: self.queue or self.over)
                if self.over:
                    return
                row = self.queue.pop(self.rng.randrange(len(self.queue)))
            if self.delay:
                time.sleep(self.rng.random() * self.delay)
            self.release_turn(row, self.script(row, self.turns[row]))

    def end(self):
        with self.lock:
            self.over = True
            self.lock.notify()
        self.thread.join()
        super().end()


class ToyEnvironment:
    """Ten thousand tasks; `step(code, index, final)` answers a tool call. Counts episodes."""

    def __init__(self, step=lambda code, index, final: Observation("x")):
        self.step = step
        self.lock = threading.Lock()
        self.opened = self.closed = self.most_open = 0
        self.misused = []

    def __len__(self):
        return 10_000

    def task(self, index):
        return Task(index=index, system="a", user="b", gold_answer="a", labels={"cause": "A"})

    def open(self, task):
        with self.lock:
            self.opened += 1
            self.most_open = max(self.most_open, self.opened - self.closed)
        return ToyEpisode(self, task)


class ToyEpisode:
    """An attempt that notes when it is used after it was closed, or by two threads."""

    def __init__(self, environment, task):
        self.environment, self.task, self.closed = environment, task, False
        self.busy = threading.Lock()

    def step(self, action, *, final_turn=False):
        with self._alone("step"):
            return self.environment.step(action, self.task.index, final_turn)

    @contextlib.contextmanager
    def _alone(self, what):
        alone = self.busy.acquire(blocking=False)
        if not alone or (self.closed and what != "close"):
            self.environment.misused.append(f"{what}, {'closed' if alone else 'in use'}")
        try:
            yield
        finally:
            if alone:
                self.busy.release()

    def grade(self, answer):
        with self._alone("grade"):
            right = float(answer == self.task.gold_answer)
            return Reward(right, {"attr": right}, {"parsed": bool(answer)})

    def close(self):
        with self._alone("close"), self.environment.lock:
            self.environment.closed += not self.closed
            self.closed = True


def call_then_answer(row, turn):
    """A row of two turns."""
    return [ASK, A, B, END] if turn == 0 else [DONE, A, END]


def run(script, environment=None, tasks=(0,), group=1, config=CONFIG, **options):
    """Collects with `Script` or with a sampler that is given in its place; returns it and the trajectories."""
    generator = script if isinstance(script, Script) else Script(script)
    options = {"seed": 1, "step": 0} | options
    environment = environment or ToyEnvironment()
    result = collect(generator, ToyChat(), environment, list(tasks), group=group, config=config, **options)
    assert environment.misused == []
    return generator, result


def rollout_threads():
    """Threads of collections that are still there."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rollout-")]


def eventually(condition, seconds=10.0):
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def open_files():
    """Lowest file number that is free, which rises when files are left open."""
    number = os.dup(0)
    os.close(number)
    return number


def settled():
    """Collects garbage, so that counts of memory are comparable."""
    for _ in range(3):
        gc.collect()
