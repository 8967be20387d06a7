"""Many trajectories in a row: nothing grows, and broken tools cost exactly their own trajectories."""

import collections
import dataclasses
import gc
import random
import threading
import tracemalloc

import pytest
from helpers_collect import (
    CONFIG,
    Script,
    Shuffled,
    ToyEnvironment,
    ToyEpisode,
    call_then_answer,
    eventually,
    open_files,
    rollout_threads,
    run,
    settled,
)
from helpers_episodes import fake_set
from test_rollout_outputs import LIMITS, chat  # noqa: F401

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Observation
from trace_jax.rollout.collect import CollectStats, collect, metrics
from trace_jax.rollout.generator import SampledTurn
from trace_jax.rollout.row import Row
from trace_jax.rollout.trajectory import Trajectory
from trace_jax.rollout.workers import Call, stuck_threads
from trace_jax.warehouse.database import EpisodeDatabase

OURS = (Row, Call, Trajectory, SampledTurn, ToyEnvironment, ToyEpisode)
FAST = dataclasses.replace(CONFIG, slots=64, tool_workers=4)


def _some(rows: int, each: int, seed: int = 0):
    """A script in which rows end in every way that a policy can bring about."""

    def script(row, turn):
        kind = random.Random(seed * rows + row).random()
        if kind < 0.1:
            return [1, 2, 0]  # malformed
        if kind < 0.2:
            return [5] * 20  # cut by the token limit
        return call_then_answer(row, turn if turn < each else 1)

    return script


def _collection(rows: int, number: int) -> None:
    """One collection of short trajectories, thrown away."""
    environment = ToyEnvironment()
    generator = Shuffled(_some(rows, 2, number), 64, random.Random(number))
    _, result = run(generator, environment, tasks=range(rows // 8), group=8, config=FAST, step=number)
    assert len(result) == rows // 8 * 8 and environment.opened == environment.closed


def _held() -> tuple[int, int]:
    """Threads and open files."""
    return threading.active_count(), open_files()


def _objects() -> tuple[int, int]:
    """Objects of collections that are alive, and objects in all."""
    settled()
    alive = gc.get_objects()
    return sum(isinstance(thing, OURS) for thing in alive), len(alive)


@pytest.mark.parametrize("rows", [300, *(pytest.param(n, marks=pytest.mark.slow) for n in (1000, 10_000))])
def test_ten_collections_leave_nothing_behind(rows):
    """3,000 trajectories in ten collections (up to 100,000 with `-m slow`): memory, threads and open files stay."""
    held, objects = _held(), []
    others, _ = _objects()  # what tests before this one still hold
    for number in range(10):
        _collection(rows, number)
        assert _held() == held
        objects.append(_objects())
    assert max(ours for ours, _ in objects) <= others
    assert objects[9][1] - objects[2][1] < 100  # caches fill in the first collections
    tracemalloc.start()  # arrays are no objects of the collector's; tracing is slow
    try:
        memory = []
        for number in range(3):
            _collection(rows // 2, number)
            settled()
            memory.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(memory[1:]) - memory[0] < 20 * rows, memory  # the ids of a row alone are more than that


def test_broken_tools_are_counted_exactly():
    """5 % of the tools crash and 5 % hang: the run ends, every status is counted, and what hung is let go at last."""
    rows, gate = 1000, threading.Event()
    fates = ["crash"] * (rows // 20) + ["hang"] * (rows // 20) + ["work"] * (rows - 2 * (rows // 20))
    random.Random(0).shuffle(fates)

    def step(code, index, final):
        if fates[index] == "crash":
            raise RuntimeError("worker died")
        if fates[index] == "hang":
            gate.wait(60)
        return Observation("x")

    environment, stats = ToyEnvironment(step), CollectStats()
    config = dataclasses.replace(FAST, trajectory_seconds=4.0, tool_queue_seconds=60.0)
    threads, patch = threading.active_count(), pytest.MonkeyPatch()
    try:
        patch.setattr("trace_jax.rollout.workers.STALL_SECONDS", 0.01)
        _, result = run(
            Shuffled(call_then_answer, 64, random.Random(1)), environment, tasks=range(rows), config=config, stats=stats
        )
        assert stats.stuck == stuck_threads() == rows // 20
    finally:
        patch.undo()
        gate.set()
    expected = {"crash": "tool_failure", "hang": "timed_out", "work": "finished"}
    assert [t.status for t in result] == [expected[fate] for fate in fates]
    figures = metrics(result, stats)
    assert (figures["tools/calls"], figures["tools/failures"], figures["tools/hung"]) == (rows, 50, 50)
    assert (figures["status/finished"], figures["status/tool_failure"], figures["status/timed_out"]) == (
        0.9,
        0.05,
        0.05,
    )
    assert eventually(lambda: stuck_threads() == 0 and environment.opened == environment.closed == rows)
    assert eventually(lambda: rollout_threads() == [] and threading.active_count() == threads)


def _databases():
    return sum(isinstance(thing, EpisodeDatabase) for thing in gc.get_objects())


def test_the_real_environment_gives_everything_back(chat):  # noqa: F811
    """Several hundred investigations with the real tool: databases are closed, threads and files do not add up."""
    environment = AdsEnvironment(fake_set(12), EnvironmentConfig(tool_seconds=10))
    codes = [
        'sql("SELECT geo, sum(clicks) FROM segment_daily GROUP BY geo ORDER BY geo")',
        "rows = sql('SELECT count(*) AS n FROM daily_campaign')\nrows[0]['n'] + 1",
        "sql('SELECT nothing')",
        "1 / 0",
    ]
    turns = [[chat.encode_call(code) for code in codes[i:] + codes[:i]] for i in range(4)]
    statuses = collections.Counter()

    def collected(step):
        script = lambda row, turn: turns[row % 4][turn] if turn < 2 else chat.encode_answer("{}")  # noqa: E731
        generator = Script(script, slots=16, stop_id=chat.stop_id)
        result = collect(
            generator, chat, environment, list(range(12)), group=8, config=LIMITS, seed=0, step=step, workers=3
        )
        statuses.update(t.status for t in result)
        settled()
        databases = sum(isinstance(thing, EpisodeDatabase) for thing in gc.get_objects())
        return len(environment._open), databases, *_held()

    settled()
    before = _databases()  # those of other tests in this process
    first, *later = [collected(step) for step in range(5)]
    assert statuses == {"finished": 5 * 96} and rollout_threads() == []
    for shared, databases, threads, files in later:
        assert (shared, databases) == (0, before)
        # Pools of processes may grow when machines are busy; a collection opens 96 episodes of 12 tasks.
        assert threads - first[2] < 12 and files - first[3] < 48
