"""Tools that fail, hang, wait too long or are interrupted: each ends its own trajectory, and nothing stays behind."""

import dataclasses
import itertools
import math
import queue
import threading
import time

import pytest
from helpers_collect import (
    ASK,
    CONFIG,
    DONE,
    END,
    A,
    Script,
    ToyEnvironment,
    call_then_answer,
    eventually,
    rollout_threads,
    run,
)

from trace_jax.environments.base import Observation
from trace_jax.rollout.collect import CollectStats, metrics
from trace_jax.rollout.workers import Call, WorkerPool, stuck_threads

WAIT = 15  # seconds that a test gives to what should happen at once


@pytest.fixture
def gate():
    """An event on which tools hang; set at the end, and then nothing may be left of them."""
    gate = threading.Event()
    yield gate
    gate.set()
    assert eventually(lambda: rollout_threads() == [] and stuck_threads() == 0)


@pytest.fixture
def make_pool():
    """Makes pools and closes them, whatever happens."""
    pools = []

    def make(lanes, **options):
        pools.append(WorkerPool(lanes, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def _submit(pool, *runs, seconds=WAIT, queue_seconds=math.inf, cleanup=lambda value: None, lane="tool"):
    """Calls and the queue that they are delivered to."""
    done = queue.SimpleQueue()
    calls = [Call(work, done.put, time.monotonic() + seconds, queue_seconds, cleanup=cleanup) for work in runs]
    for call in calls:
        pool.submit(lane, call)
    return calls, done


def _deliveries(done, count):
    return {done.get(timeout=WAIT) for _ in range(count)}


def test_pool_delivers_values_and_errors(make_pool):
    """Whatever a call raises is its error: an extension's panic or an exit do not end the thread."""

    def leave():
        raise SystemExit("panic")

    pool = make_pool({"tool": 2})
    calls, done = _submit(pool, lambda: 7, lambda: 1 / 0, leave, lambda: 8)
    assert _deliveries(done, 4) == set(calls)
    assert [call.value for call in calls] == [7, None, None, 8] and all(call.state == "done" for call in calls)
    assert [type(call.error) for call in calls] == [type(None), ZeroDivisionError, SystemExit, type(None)]
    pool.close()
    assert rollout_threads() == []


def test_pool_never_runs_more_calls_than_workers(make_pool):
    running, most, lock = itertools.count(), [], threading.Lock()
    level = [0]

    def work():
        with lock:
            level[0] += 1
            most.append(level[0])
        time.sleep(0.001)
        with lock:
            level[0] -= 1
        return next(running)

    pool = make_pool({"tool": 3, "open": 1})
    calls, done = _submit(pool, *[work] * 60)
    _deliveries(done, 60)
    assert max(most) == 3 and sorted(call.value for call in calls) == list(range(60))
    assert all(call.waited >= 0 and call.seconds >= 0.001 for call in calls)
    pool.close()


def test_hung_calls_are_replaced_and_cleaned_up(gate, make_pool):
    """A call over its deadline is told at once, its place goes to a fresh thread, its value is cleaned up when it
    returns."""
    cleaned = []
    pool = make_pool({"tool": 2})
    hanging, done = _submit(pool, *[lambda: gate.wait(WAIT)] * 2, seconds=0.5, cleanup=cleaned.append)
    assert _deliveries(done, 2) == set(hanging)
    assert all(call.state == "hung" and call.seconds > 0 for call in hanging) and stuck_threads() == 2
    (quick,), done = _submit(pool, lambda: "done")
    assert _deliveries(done, 1) == {quick} and quick.value == "done" and cleaned == []
    pool.close()
    gate.set()
    assert eventually(lambda: cleaned == [True, True])


def test_the_longest_run_does_not_count_the_wait(gate, make_pool):
    """Two calls of which each takes most of its time, one after the other on one worker."""
    pool, done = make_pool({"tool": 1}), queue.SimpleQueue()
    calls = [Call(lambda: time.sleep(0.3), done.put, run_seconds=0.5) for _ in range(2)]
    calls.append(Call(lambda: gate.wait(WAIT), done.put, run_seconds=0.5))
    for call in calls:
        pool.submit("tool", call)
    _deliveries(done, 3)
    assert [call.state for call in calls] == ["done", "done", "hung"]


def test_stalled_calls_give_up_their_place(gate, monkeypatch, make_pool):
    """Two slow calls on two workers do not hold up the third, and are done when they return in time."""
    monkeypatch.setattr("trace_jax.rollout.workers.STALL_SECONDS", 0.02)
    pool = make_pool({"tool": 2})
    slow, done = _submit(pool, *[lambda: gate.wait(WAIT)] * 2)
    (quick,), quickly = _submit(pool, lambda: "done")
    assert _deliveries(quickly, 1) == {quick} and all(call.state == "running" for call in slow)
    gate.set()
    assert _deliveries(done, 2) == set(slow) and all(call.value and call.state == "done" for call in slow)
    pool.close()


def test_calls_that_wait_too_long_expire(gate, make_pool):
    pool = make_pool({"tool": 1})
    _, first = _submit(pool, lambda: gate.wait(WAIT))
    ran = []
    (late,), done = _submit(pool, lambda: ran.append(1), queue_seconds=0.05)
    assert _deliveries(done, 1) == {late} and late.state == "expired" and late.waited >= 0.05
    (overdue,), done = _submit(pool, lambda: ran.append(1), seconds=0.05)
    assert _deliveries(done, 1) == {overdue} and overdue.state == "expired"
    (unwanted,), done = _submit(pool, lambda: ran.append(1))
    assert pool.drop("tool", unwanted) and not pool.drop("tool", unwanted) and unwanted.state == "dropped"
    gate.set()
    _deliveries(first, 1)
    pool.close()
    assert ran == [] and done.empty()


def test_stuck_threads_are_bounded(gate, make_pool):
    """Beyond the bound nothing replaces a hung call, so later ones wait until it returns."""
    pool = make_pool({"tool": 1}, most_stuck=2)
    hanging, done = [], queue.SimpleQueue()
    for _ in range(3):
        (call,), done = _submit(pool, lambda: gate.wait(WAIT), seconds=0.3)
        hanging.append(call)
        assert _deliveries(done, 1) == {call} and call.state == "hung"
    (late,), expired = _submit(pool, lambda: 1, queue_seconds=0.1)
    assert _deliveries(expired, 1) == {late} and late.state == "expired" and stuck_threads() == 2
    (after,), done = _submit(pool, lambda: 2)
    gate.set()
    assert _deliveries(done, 1) == {after} and after.value == 2
    pool.close()


def test_closing_drops_what_waits_and_gives_up_what_runs(gate, make_pool):
    cleaned = []
    pool = make_pool({"tool": 1})
    (busy,), done = _submit(pool, lambda: gate.wait(WAIT), cleanup=cleaned.append)
    (waiting,), _ = _submit(pool, lambda: None)
    assert eventually(lambda: busy.state == "running")
    pool.close(grace=0.05)
    assert (busy.state, waiting.state) == ("hung", "dropped") and len(rollout_threads()) == 1
    gate.set()
    assert eventually(lambda: cleaned == [True]) and done.empty()


def test_closing_runs_nothing_new(make_pool):
    """What runs may end, what waits is not begun any more."""
    pool, ran, begun = make_pool({"tool": 1}), [], threading.Event()
    (busy,), _ = _submit(pool, lambda: (begun.set(), time.sleep(0.2)))
    (waiting,), _ = _submit(pool, lambda: ran.append(1))
    assert begun.wait(WAIT)
    pool.close(grace=WAIT)
    assert (busy.state, waiting.state, ran, rollout_threads()) == ("done", "dropped", [], [])


@pytest.mark.parametrize("kind", ["raises", "panics", "reports", "no observation", "hangs", "open", "open hangs"])
def test_a_broken_tool_ends_only_its_own_trajectory(kind, gate):
    def step(code, index, final):
        if index == 1:
            if kind == "raises":
                raise RuntimeError("worker died")
            if kind == "panics":
                raise BaseException("worker died")
            if kind == "reports":
                return Observation("error: gone", error=True, status="tool_failure")
            if kind == "no observation":
                return None
            if kind == "hangs":
                gate.wait(WAIT)
        return Observation("x")

    class Environment(ToyEnvironment):
        def open(self, task):
            if kind == "open" and task.index == 1:
                raise OSError("no memory")
            episode = super().open(task)
            if kind == "open hangs" and task.index == 1:
                gate.wait(WAIT)
            return episode

    environment, stats = Environment(step), CollectStats()
    config = dataclasses.replace(CONFIG, trajectory_seconds=0.5 if "hangs" in kind else 20.0)
    start = time.monotonic()
    generator, result = run(call_then_answer, environment, tasks=[0, 2, 1], group=2, config=config, stats=stats)
    assert time.monotonic() - start < 5
    expected = "timed_out" if "hangs" in kind else "tool_failure"
    assert [t.status for t in result] == ["finished"] * 4 + [expected] * 2
    assert [t.reward for t in result] == [1, 1, 1, 1, 0, 0] and all(t.info["error"] for t in result[4:])
    assert all(t.loss_mask.sum() == 4 and t.tool_calls == 1 for t in result[4:])  # nothing follows the sampled call
    assert stats.calls == (4 if "open" in kind else 6) and stats.hung == 2 * (kind == "hangs")
    assert stats.failures == 2 * (kind in ("raises", "panics", "reports", "no observation"))
    shares = metrics(result, stats)
    assert shares["status/finished"] == pytest.approx(2 / 3) and shares[f"status/{expected}"] == pytest.approx(1 / 3)
    assert sorted(generator.released) == list(range(6))
    gate.set()  # hung episodes are closed when their call returns
    assert eventually(lambda: environment.closed == environment.opened) and environment.misused == []
    assert environment.opened >= (4 if "open" in kind else 6)


def test_an_answer_whose_episode_does_not_open_is_not_graded():
    class Environment(ToyEnvironment):
        def open(self, task):
            raise OSError("no memory")

    _, (t,) = run(lambda row, turn: [DONE, A, END], Environment())
    assert (t.status, t.reward, t.answer) == ("tool_failure", 0.0, "a") and "no memory" in t.info["error"]


def test_grading_that_fails_or_hangs_ends_only_its_own_trajectory(gate):
    class Environment(ToyEnvironment):
        def open(self, task):
            episode, grade = super().open(task), ToyEnvironment().open(task).grade

            def graded(answer):
                if task.index == 1:
                    raise ValueError("odd answer")
                if task.index == 2:
                    gate.wait(WAIT)
                return grade(answer)

            episode.grade = graded
            return episode

    environment, config = Environment(), dataclasses.replace(CONFIG, trajectory_seconds=0.4)
    _, result = run(call_then_answer, environment, tasks=[0, 1, 2, 3], config=config)
    assert [t.status for t in result] == ["finished", "tool_failure", "tool_failure", "finished"]
    assert "odd answer" in result[1].info["error"] and "grading" in result[2].info["error"]
    gate.set()
    assert eventually(lambda: environment.closed == 4)


def test_a_long_wait_for_a_worker_ends_the_trajectory(gate):
    """One worker, held by the first row's call until the second row has given up waiting for it."""
    config = dataclasses.replace(CONFIG, tool_queue_seconds=0.1)

    class Watching(Script):
        def release(self, row):
            super().release(row)
            gate.set()

    stats = CollectStats()
    step = lambda code, index, final: Observation("x" if gate.wait(WAIT) else "b")  # noqa: E731
    generator, result = run(
        Watching(call_then_answer), ToyEnvironment(step), tasks=[0, 1], config=config, workers=1, stats=stats
    )
    assert [t.status for t in result] == ["finished", "timed_out"] and "tool_queue_seconds" in result[1].info["error"]
    assert stats.expired == 1 and stats.calls == 2 and 0.1 <= stats.waited_most < WAIT
    figures = metrics(result, stats)
    assert figures["tools/expired"] == 1 and figures["tools/queue_seconds_max"] >= 0.1
    assert figures["tools/queue_seconds_mean"] == pytest.approx(stats.waited / 2)


def test_the_wall_limit_holds_while_a_row_waits_for_the_sampler():
    """The row is given up and its slot passed on; its turn, which comes late, changes nothing."""

    class Late(Script):
        def release(self, row):
            super().release(row)
            if row == 0:
                self.release_turn(0, [DONE, A, END])

    config = dataclasses.replace(CONFIG, trajectory_seconds=0.3)
    script = lambda row, turn: None if row == 0 else call_then_answer(row, turn)  # noqa: E731
    environment = ToyEnvironment()
    generator, result = run(Late(script, slots=1), environment, tasks=range(3), config=config)
    assert [t.status for t in result] == ["timed_out", "finished", "finished"]
    assert result[0].sampled_tokens == 0 and result[0].oldest_version == -1 and "0.3 s" in result[0].info["error"]
    assert generator.released == [0, 1, 2] and environment.opened == environment.closed


def test_the_wall_limit_counts_all_turns_together(gate):
    config = dataclasses.replace(CONFIG, trajectory_seconds=0.25, max_turns=50)
    step = lambda *_: (time.sleep(0.06), Observation("x"))[1]  # noqa: E731
    _, (t,) = run(lambda row, turn: [ASK, A, END], ToyEnvironment(step), config=config)
    assert t.status == "timed_out" and 1 <= t.tool_calls <= 5


def _left_behind(generator, environment):
    return (generator.ended, environment.opened - environment.closed, rollout_threads())


def test_an_error_of_the_sampler_is_raised_when_everything_is_closed():
    generator = Script(lambda row, turn: call_then_answer(row, turn) if row else None)
    environment = ToyEnvironment(lambda *_: (generator.deliver(MemoryError("device")), Observation("x"))[1])
    with pytest.raises(MemoryError, match="device"):
        run(generator, environment, tasks=range(5))
    assert _left_behind(generator, environment) == (1, 0, [])


@pytest.mark.parametrize("moment", ["first", "in tools", "in grading"])
def test_an_interrupt_leaves_nothing_behind(moment, gate, monkeypatch):
    """`progress` raises before anything was sampled, while tools run and wait, or while answers are graded."""
    monkeypatch.setattr("trace_jax.rollout.collect.TICK_SECONDS", 0.02)

    class Interrupted(Exception):
        pass

    in_tools = threading.Semaphore(0)

    def step(code, index, final):
        in_tools.release()
        if moment == "in tools":
            time.sleep(0.2)
        return Observation("x")

    def progress(ended, total):
        if moment == "first" or (moment == "in tools" and in_tools.acquire(blocking=False)) or ended:
            raise Interrupted

    generator, environment = Script(call_then_answer, slots=6), ToyEnvironment(step)
    with pytest.raises(Interrupted):
        run(generator, environment, tasks=range(20), progress=progress)
    assert _left_behind(generator, environment) == (1, 0, [])


def test_an_interrupt_does_not_wait_for_a_hung_tool(gate, monkeypatch):
    """Its episode is closed when it returns."""
    monkeypatch.setattr("trace_jax.rollout.collect.TICK_SECONDS", 0.02)
    hanging = threading.Event()

    def step(code, index, final):
        hanging.set()
        gate.wait(WAIT)
        return Observation("x")

    def progress(ended, total):
        if hanging.is_set():
            raise KeyboardInterrupt

    generator, environment, start = Script(call_then_answer), ToyEnvironment(step), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(generator, environment, progress=progress)
    assert time.monotonic() - start < 8 and generator.ended == 1 and environment.closed == 0
    gate.set()
    assert eventually(lambda: environment.closed == 1)
