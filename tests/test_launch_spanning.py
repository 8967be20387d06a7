"""A run whose sampling lanes lie in two processes each: as in one process; killed, stopped and continued. Minutes."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from recipes_helpers import compile_cache, reached
from test_launch_processes import CONFIG, LIMIT, ROWS, STEPS, alone, children, launch, running, same_run, until

from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache"]  # fixture
pytestmark = pytest.mark.slow

SIZES = "--policy.layers 1 --policy.width 32 --policy.heads 2 --policy.head-dim 16 --policy.mlp-width 0"
EXPERTS = "--policy.experts 4 --policy.experts-per-token 2 --policy.expert-width 32 --rollout.replay-routes true"
VALIDATION = "--grpo.validation-episodes 3 --grpo.validate-every 5"
# Four processes with a device each: two lanes, of processes 0 and 1, and of 2 and 3.
GRPO = [*f"{STEPS} {VALIDATION} --mesh.fsdp 2 --mesh.expert 2".split()]


@pytest.fixture(scope="module")
def base(compile_cache, tmp_path_factory):
    run = tmp_path_factory.mktemp("launch") / "base"
    words = f"{SIZES} {EXPERTS} {ROWS} --sft.epochs 4".split()
    alone(compile_cache, 1, "sft", "--config", CONFIG, "--run-dir", run, *words)
    return run


@pytest.fixture(scope="module")
def single(base, compile_cache):
    """Five steps on one process with four devices."""
    run = base.parent / "single"
    alone(compile_cache, 4, "grpo", "--init", base, "--run-dir", run, *GRPO)
    return run


def test_lanes_over_two_processes_equal_one(base, single, compile_cache, tmp_path):
    """Tokens, log-probabilities, figures and parameters."""
    run, log = tmp_path / "four", tmp_path / "log"
    job = launch(compile_cache, log, 4, 1, "grpo", "--init", base, "--run-dir", run, *GRPO)
    assert job.wait() == 0, log.read_text()[-4000:]
    same_run(run, single)


def test_a_follower_and_a_leader_are_killed_and_the_job_stopped(base, single, compile_cache, tmp_path):
    """Each ends the job, which says why and goes on from the last checkpoint; SIGTERM saves. In the end it is as if
    nothing had happened."""
    run, log = tmp_path / "run", tmp_path / "log"
    flags = ("--restarts", "2", "--patience", "600")  # the launcher kills nobody
    job = launch(compile_cache, log, 4, 1, "grpo", "--init", base, "--run-dir", run, *GRPO, flags=flags)
    try:
        for step, victim in ((1, 3), (2, 2)):
            until(job, lambda step=step: reached(run, "grpo", step), log)
            pids = children(job)
            assert len(pids) == 4
            os.kill(pids[victim], signal.SIGKILL)
            begun = time.monotonic()
            until(job, lambda pids=pids: not running(pids), log)
            took = time.monotonic() - begun
            print(f"after kill -9 of process {victim} the others ended in {took:.1f} s")
            assert took < LIMIT
            assert f"process {victim} ended: killed by SIGKILL" in log.read_text()
        until(job, lambda: reached(run, "grpo", 3), log)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 143, log.read_text()[-4000:]
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.send_signal(signal.SIGTERM)
    assert not reached(run, "grpo", 5)
    job = launch(compile_cache, log, 4, 1, "grpo", "--run-dir", run, "--resume")
    assert job.wait() == 0, log.read_text()[-4000:]
    same_run(run, single)


def test_a_follower_that_fails_ends_the_job(base, compile_cache, tmp_path):
    """Process 0 waits on its device for what process 1 does not launch: it ends all the same, and says why."""
    run, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, str(Path(__file__).with_name("launch_faults.py")), "follower"]
    words = ["grpo", "--init", base, "--run-dir", run, *GRPO]
    job = launch(compile_cache, log, 4, 1, *words, flags=("--patience", "600"), command=command)
    until(job, lambda: "the device is lost" in log.read_text(), log)
    begun = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - begun < LIMIT
    assert "trace-jax: process 1 failed: " in log.read_text()


def test_the_whole_recipe_with_one_lane_over_two_processes(compile_cache, tmp_path):
    """SFT, GRPO with turn credit, sampling in 8 bits, evaluation before and after."""
    run, log = tmp_path / "run", tmp_path / "log"
    small = "--sft.epochs 4 --grpo.steps 2 --grpo.iterations 1 --data.test 4 --grpo.validation-episodes 0"
    credit = "--grpo.turn-credit.enabled true --grpo.turn-credit.microbatch.row-length 512"
    mesh = "--rollout.weights int8 --mesh.expert 2"
    words = ["--config", CONFIG, "--run-dir", run, *f"{SIZES} {EXPERTS} {small} {ROWS} {credit} {mesh}".split()]
    job = launch(compile_cache, log, 2, 1, "train", *words)
    assert job.wait() == 0, log.read_text()[-4000:]
    assert {p.stem for p in (run / "evaluation").glob("*.json")} == {"untrained", "explorer", "solver", "sft", "grpo"}
    assert all(len(t.probes) for t in read_parquet(run / "trajectories" / "grpo-000002.parquet"))


def test_adapters_are_scored_as_in_one_process(compile_cache, tmp_path):
    """Heads over two processes, the frozen base gathered onto the lane."""
    runs, log = [tmp_path / "one", tmp_path / "two"], tmp_path / "log"
    sizes = SIZES.replace("mlp-width 0", "mlp-width 64 --policy.kv-heads 2 --lora.rank 4 --mesh.tensor 2")
    small = f"{sizes} {ROWS} --sft.epochs 2 --grpo.steps 0 --data.test 6"
    words = [["train", "--config", CONFIG, "--run-dir", run, *small.split()] for run in runs]
    alone(compile_cache, 2, *words[0])
    job = launch(compile_cache, log, 2, 1, *words[1])
    assert job.wait() == 0, log.read_text()[-4000:]
    for agent in ("untrained", "sft"):
        one, two = (read_parquet(run / "trajectories" / f"{agent}.parquet") for run in runs)
        assert len(one) == 6 and any(len(t.versions) > 1 or t.status != "finished" for t in one)
        for a, b in zip(one, two, strict=True):
            assert np.array_equal(a.ids, b.ids) and (a.status, a.reward) == (b.status, b.reward)


def test_sampling_beside_learning_is_refused(base, compile_cache, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    ahead = [*GRPO, "--grpo.staleness", "1"]
    job = launch(compile_cache, log, 4, 1, "grpo", "--init", base, "--run-dir", run, *ahead)
    assert job.wait() == 2
    said = [line for line in log.read_text().splitlines() if "`grpo.staleness` is 1" in line]
    assert said and "lie in 2 processes" in said[0] and "Traceback" not in log.read_text()
