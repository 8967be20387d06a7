"""The parts of a run on several processes: shares of a collection, signals, refusals, one writer, ending together. Runs
of real processes are in test_launch_processes.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_collect import CONFIG as ROLLOUT
from helpers_collect import Script, ToyChat, ToyEnvironment, call_then_answer

from trace_jax.config import ConfigError, GRPOConfig, MeshConfig, RunConfig, TurnCreditConfig
from trace_jax.learner import multihost
from trace_jax.recipes import interrupt, processes
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.rollout.collect import CollectStats, collect
from trace_jax.rollout.collect_stats import side_by_side
from trace_jax.rollout.trajectory import Trajectory


@pytest.mark.parametrize("parts", [1, 3, 4, 9])
def test_shares_of_a_collection_make_the_whole(parts):
    """Also where groups are cut, or there are fewer rows than processes; a task that is named twice keeps its place."""

    def rows(share):
        # every row has a seed of its own, which decides what it says
        generator = Script(lambda row, turn: call_then_answer(generator.seeds[row] % 3, turn), slots=3)
        found = collect(
            generator,
            ToyChat(),
            ToyEnvironment(),
            [5, 2, 5],
            group=2,
            config=ROLLOUT,
            seed=1,
            step=2,
            share=share,
        )
        return [(t.task_index, t.group, t.sample, t.ids.tolist(), t.reward) for t in found]

    whole = rows((0, 1))
    assert [r[:3] for r in whole] == [(5, 0, 0), (5, 0, 1), (2, 1, 0), (2, 1, 1), (5, 2, 0), (5, 2, 1)]
    shares = [rows((i, parts)) for i in range(parts)]
    assert [row for share in shares for row in share] == whole
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_figures_of_shares():
    a = CollectStats(sampling=3, total=4, calls=2, waited=1, waited_most=0.5, stuck=1)
    b = CollectStats(sampling=2, total=5, calls=3, waited=2, waited_most=0.7, stuck=2)
    both = side_by_side([a, b])
    assert (both.sampling, both.total, both.calls, both.waited, both.waited_most, both.stuck) == (3, 5, 5, 3, 0.7, 3)
    both.add(CollectStats(sampling=1, calls=1, waited_most=0.1, stuck=0))  # a later collection
    assert (both.sampling, both.calls, both.waited_most, both.stuck) == (4, 6, 0.7, 0)


def test_a_signal_of_one_process_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(interrupt, "several", lambda: True)
    with Interrupt() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        asked.check()  # the others do not know yet
        assert not asked.requested
        with asked.alone(), pytest.raises(Interrupted) as stop:
            asked.check()
        assert stop.value.status == 143
        asked.check()


def two(monkeypatch, index=0):
    monkeypatch.setattr(multihost, "count", lambda: 2)
    monkeypatch.setattr(multihost, "index", lambda: index)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RunConfig(grpo=GRPOConfig(staleness=1, weight_sync="in_flight")), "grpo.weight_sync"),
        (RunConfig(grpo=GRPOConfig(staleness=1, turn_credit=TurnCreditConfig(enabled=True))), "grpo.turn_credit"),
        (RunConfig(mesh=MeshConfig(rollout_devices=1)), "mesh.rollout_devices"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(monkeypatch, config, words):
    processes.check(config)
    two(monkeypatch)
    with pytest.raises(ConfigError, match=words):
        processes.check(config)
    processes.check(RunConfig(grpo=GRPOConfig(staleness=1)))


def test_sampling_beside_learning_is_refused_where_lanes_span_processes(monkeypatch):
    shape = {"data": 1, "fsdp": 2, "tensor": 2, "expert": 1}
    devices = np.array([SimpleNamespace(process_index=n) for n in (0, 1, 2, 3)]).reshape(1, 2, 2, 1)
    across, inside = (SimpleNamespace(shape=shape, devices=d) for d in (devices, devices.repeat(2, 2)[:, :, :2]))
    ahead = RunConfig(grpo=GRPOConfig(staleness=1))
    processes.check_lanes(RunConfig(grpo=GRPOConfig(staleness=0)), across)
    processes.check_lanes(ahead, inside)
    with pytest.raises(ConfigError, match=r"`grpo.staleness` is 1.*\(`mesh.tensor` x `mesh.expert` = 2 x 1\) lie in 2"):
        processes.check_lanes(ahead, across)


def test_those_that_only_follow_collect_nothing(monkeypatch, tmp_path):
    """They serve the others meanwhile, hand on nothing, and read what those found; a failure there is theirs, too."""
    two(monkeypatch, index=1)
    said = []

    class Engine:
        share = None

        def follow(self):
            said.append("follow")

        def followed(self):
            said.append("followed")

    def gather(name, value):
        assert value[:2] == [0, 0]
        theirs = RunDirectory.open(tmp_path / "run", lock=False).folder(processes.SHARES)
        processes.write_parquet(theirs / "test-00000000-000000.parquet", found)
        return [[0, len(found), vars(CollectStats(calls=3))], value]

    trajectory = Trajectory(
        ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        turn_index=np.array([-1, 0, 0], np.int32),
        versions=(0,),
        status="finished",
        task_index=0,
        group=0,
        sample=0,
    )
    found = [trajectory]
    monkeypatch.setattr(multihost, "gather", gather)
    stats = CollectStats()
    with RunDirectory.create(tmp_path / "run", RunConfig()) as run, Interrupt() as asked:
        got = processes.shared(run, asked, "test", lambda *_: pytest.fail("it has no share"), Engine(), stats)
        assert said == ["follow", "followed"]
        assert [t.ids.tolist() for t in got] == [[0, 1, 2]] and stats.calls == 3
        Engine.followed = lambda self: (_ for _ in ()).throw(RuntimeError("the device is lost"))
        with pytest.raises(RuntimeError, match="the device is lost"):
            processes.shared(run, asked, "test", lambda *_: [], Engine())


def test_a_bucket_must_be_mounted():
    with pytest.raises(ConfigError, match=r"launch/worker\.sh"):
        processes.open_run(Path("gs://bucket/runs/a"), RunConfig(), RunDirectory.open, new=False)


def test_one_process_writes(tmp_path):
    with RunDirectory.create(tmp_path / "run", RunConfig()) as run:
        follower = processes.Follower.open(tmp_path / "run")  # the lock is the first one's
        run.log("grpo", 1, {"reward": 1.0})
        follower.log("grpo", 1, {"reward": 2.0})
        follower.truncate("grpo", 0)
        follower.write_text("config.yaml", "")
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == 1.0
    assert RunDirectory.open(tmp_path / "run").config == RunConfig()


# Two processes, without devices


FAILING = """
import os, signal, time
from trace_jax.learner import multihost
from trace_jax.recipes import distributed
from trace_jax.recipes.interrupt import Interrupt, Interrupted

distributed.join()
index = multihost.index()
print(distributed.leads(), multihost.gather("who", index), multihost.first("lead", lambda: index), flush=True)
with Interrupt() as asked:
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        with asked.alone():
            for _ in range(600):
                asked.check()
                time.sleep(0.1)
    except Interrupted as stop:
        print("stopped", stop.status, flush=True)
    asked.check()  # no more than that: they have not agreed
multihost.gather("stopped", index)
if index == 1:
    distributed.leave(7, "the disk is gone")
multihost.gather("never", index)
"""


def test_processes_find_each_other_by_slurm_and_end_together():
    """A signal to one reaches the work of both. One fails: the other, which waits for it, ends with its status and says
    why."""
    job = os.getpid() % 4096 + 4096 * 7  # JAX derives the port from it
    started = []
    for index in range(2):
        slurm = {"SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": 2, "SLURM_PROCID": index}
        slurm |= {"SLURM_LOCALID": index, "SLURM_STEP_NUM_TASKS": 2, "JAX_PLATFORMS": "cpu"}
        env = os.environ | {name: str(value) for name, value in slurm.items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", FAILING], env=env, **pipes))
    try:
        said = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [7, 7], said
    assert [out for out, _ in said] == ["True [0, 1] 0\nstopped 143\n", "False [0, 1] 0\nstopped 143\n"]
    assert "trace-jax: process 1 failed: the disk is gone" in said[0][1]
