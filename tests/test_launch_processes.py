"""Real processes started by launch/local.py: GRPO as on one process, a process that is killed, SIGTERM, a continued run
on other numbers of processes, faults of one host. Minutes: a machine of two cores runs four processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from recipes_helpers import compile_cache, figures, final_state, reached

from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache"]  # fixture
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "search_smoke.yaml"
SIZES = "--policy.layers 1 --policy.width 32 --policy.heads 2 --policy.head-dim 16 --policy.mlp-width 64"
ROWS = "--sft.microbatch.rows 8 --grpo.microbatch.rows 8 --rollout.slots 8"
# Hardly trained, the policy is never right: what differs within a group is the penalty for length.
STEPS = "--grpo.steps 5 --grpo.save-every 1 --grpo.iterations 1 --grpo.overlong-buffer 383"
VALIDATION = "--grpo.validation-episodes 3 --grpo.validate-every 5"
GRPO = [*f"{STEPS} {VALIDATION} --mesh.fsdp 4".split()]
LIMIT = 60  # seconds, for a job to end after one of its processes did


def environment(cache, **more):
    own = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return {k: v for k, v in os.environ.items() if not k.startswith("TRACE_JAX_")} | own | more


def alone(cache, devices, *argv):
    """One process; its standard error."""
    command = [sys.executable, "-m", "trace_jax.cli", *map(str, argv)]
    env = environment(cache, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def launch(cache, log, count, devices, *argv, flags=(), command=None):
    """launch/local.py; what it and the processes say goes to `log`."""
    script = [str(ROOT / "launch" / "local.py")]
    if command is not None:  # another program in the place of trace-jax
        change = f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r}); import local; local.COMMAND = {command!r}"
        script = ["-c", f"{change}; sys.exit(local.main())"]
    sizes = ["--processes", count, "--devices-per-process", devices, *flags, "--"]
    words = [sys.executable, *script, *map(str, sizes), *map(str, argv)]
    with open(log, "w") as out:
        return subprocess.Popen(words, env=environment(cache), stdout=out, stderr=subprocess.STDOUT)


def until(process, condition, log, seconds=900):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.05)


def children(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def running(pids):
    """Those that still run (a zombie does not)."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        found += [] if state in "ZX" else [pid]
    return found


def trajectories(run):
    return [t for path in sorted((run / "trajectories").glob("grpo-*.parquet")) for t in read_parquet(path)]


def difference(run, other):
    """Largest difference of the arrays of two runs' last checkpoints, relative to the largest of an array; what else a
    checkpoint holds is the same."""
    (arrays, extra), (others, other_extra) = final_state(run), final_state(other)
    assert extra == other_extra and arrays.keys() == others.keys()
    pairs = [(np.asarray(arrays[k], float), np.asarray(others[k], float)) for k in arrays]
    return max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-3)) for a, b in pairs)


def same_run(run, other):
    """Token for token the same trajectories and, but for rounding, the same log-probabilities, figures, parameters."""
    for a, b in zip(trajectories(run), trajectories(other), strict=True):
        assert np.array_equal(a.ids, b.ids) and (a.group, a.sample) == (b.group, b.sample)
        assert (a.status, a.reward, a.info, a.labels) == (b.status, b.reward, b.info, b.labels)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    for a, b in zip(figures(run), figures(other), strict=True):
        assert (a["stage"], a["step"]) == (b["stage"], b["step"]) and a.keys() == b.keys()
        for name in ("reward", "loss", "entropy", "grad_norm", "length", "trajectories", "tools/calls"):
            if name in a:
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), name
    assert difference(run, other) < 1e-5


@pytest.fixture(scope="module")
def base(compile_cache, tmp_path_factory):
    run = tmp_path_factory.mktemp("launch") / "base"
    alone(compile_cache, 1, "sft", "--config", CONFIG, "--run-dir", run, *f"{SIZES} {ROWS} --sft.epochs 4".split())
    return run


@pytest.fixture(scope="module")
def single(base, compile_cache):
    """Five steps on one process with eight devices."""
    run = base.parent / "single"
    alone(compile_cache, 8, "grpo", "--init", base, "--run-dir", run, *GRPO)
    moved = [r["grad_norm"] for r in figures(run) if r["stage"] == "grpo"]
    assert len(moved) == 5 and min(moved) > 0.01  # there is something to compare
    return run


def test_four_processes_equal_one(base, single, compile_cache, tmp_path):
    run, log = tmp_path / "four", tmp_path / "log"
    job = launch(compile_cache, log, 4, 2, "grpo", "--init", base, "--run-dir", run, *GRPO, "--json")
    assert job.wait() == 0, log.read_text()[-4000:]
    same_run(run, single)
    said = [line for line in log.read_text().splitlines() if line.startswith('{"stage"')]
    assert len(said) == 1  # process 0 speaks
    for index in range(4):
        assert f"process {index} of 4" in (run / "logs" / f"process-{index}.log").read_text()
    assert len(list((run / ".shares").iterdir())) <= 4  # no more than the last collection's


def test_killed_stopped_and_continued_on_two(base, single, compile_cache, tmp_path):
    """kill -9 of one process: the others end by themselves, the launcher goes on from the last checkpoint; SIGTERM:
    saved, status 143; the newest checkpoint is damaged: two processes go on from the one before it. In the end it is as
    if nothing had happened."""
    run, log = tmp_path / "run", tmp_path / "log"
    flags = ("--restarts", "1", "--patience", "600")  # the launcher kills nobody
    job = launch(compile_cache, log, 4, 2, "grpo", "--init", base, "--run-dir", run, *GRPO, flags=flags)
    try:
        until(job, lambda: reached(run, "grpo", 2), log)
        first = children(job)
        assert len(first) == 4
        os.kill(first[2], signal.SIGKILL)
        begun = time.monotonic()
        until(job, lambda: not running(first), log)
        took = time.monotonic() - begun
        print(f"after kill -9 of one process the others ended in {took:.1f} s")
        assert took < LIMIT
        until(job, lambda: reached(run, "grpo", 3), log)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 143, log.read_text()[-4000:]
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.send_signal(signal.SIGTERM)
    said = log.read_text()
    assert "process 2 ended: killed by SIGKILL" in said and "restart 1 of 1" in said and "continue with:" in said

    saves = run / "checkpoints" / "grpo"
    newest = max(saves.glob("[0-9]*"))
    assert int(newest.name) < 5
    data = max((p for p in (newest / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)

    job = launch(compile_cache, log, 2, 4, "grpo", "--run-dir", run, "--resume")
    assert job.wait() == 0, log.read_text()[-4000:]
    assert f"{newest} is damaged" in log.read_text() and "going on from the one before it" in log.read_text()
    same_run(run, single)


def test_sampling_ahead_of_learning(base, compile_cache, tmp_path):
    """With staleness 1 the next collection is under way while one is learned from: stopped and continued on two
    processes, it is as on one."""
    ahead = [*STEPS.replace("steps 5", "steps 4").split(), *["--grpo.staleness", "1", "--mesh.fsdp", "2"]]
    single, run, log = tmp_path / "single", tmp_path / "run", tmp_path / "log"
    alone(compile_cache, 4, "grpo", "--init", base, "--run-dir", single, *ahead)
    job = launch(compile_cache, log, 2, 2, "grpo", "--init", base, "--run-dir", run, *ahead)
    until(job, lambda: reached(run, "grpo", 1), log)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143, log.read_text()[-4000:]
    assert not reached(run, "grpo", 4)
    job = launch(compile_cache, log, 2, 2, "grpo", "--run-dir", run, "--resume")
    assert job.wait() == 0, log.read_text()[-4000:]
    assert {v for t in trajectories(run) for v in t.versions} == {0, 1, 2}
    same_run(run, single)


def test_a_slow_host_is_named_and_a_full_disk_ends_the_job(base, compile_cache, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, str(Path(__file__).with_name("launch_faults.py"))]
    flags = ("--patience", "600")
    job = launch(
        compile_cache, log, 2, 1, "grpo", "--init", base, "--run-dir", run, *STEPS.split(), flags=flags, command=command
    )
    until(job, lambda: "no space left" in log.read_text().lower(), log)
    begun = time.monotonic()
    assert job.wait() == 2
    assert time.monotonic() - begun < LIMIT
    said = log.read_text()
    assert "waiting for process 1 for" in said  # the slow one
    assert "trace-jax: process 1 failed: cannot write" in said and "no space left on device" in said
    assert reached(run, "grpo", 2) or reached(run, "grpo", 1)


def test_evaluation_on_two_processes(base, compile_cache, tmp_path):
    """The same trajectories and figures as on one; what only one process can do is refused with a line."""
    both, said = {}, {}
    for count in (1, 2):
        run, log = tmp_path / f"run{count}", tmp_path / f"log{count}"
        shutil.copytree(base, run)
        words = ["eval", "--run-dir", run, "--agent", "sft", "--evaluation.samples", "2", "--json"]
        job = launch(compile_cache, log, count, 2 // count, *words)
        assert job.wait() == 0, log.read_text()[-4000:]
        (said[count],) = [line for line in log.read_text().splitlines() if line.startswith("{")]
        (file,) = (run / "trajectories" / "other").glob("*.parquet")
        both[count] = read_parquet(file)
    assert json.loads(said[1]) == json.loads(said[2])
    for a, b in zip(both[1], both[2], strict=True):
        assert np.array_equal(a.ids, b.ids) and (a.task_index, a.sample) == (b.task_index, b.sample)
    log = tmp_path / "log"
    job = launch(compile_cache, log, 2, 1, "eval", "--run-dir", base, "--agent", "solver")
    assert job.wait() == 2 and "not solver: start the command once" in log.read_text()


def test_the_whole_recipe_on_two_processes(compile_cache, tmp_path):
    """Teacher, tokenizer, SFT, GRPO with turn credit, evaluation, report; then the export, by one process."""
    run, log = tmp_path / "run", tmp_path / "log"
    small = "--sft.epochs 4 --grpo.steps 1 --grpo.iterations 1 --data.test 4 --grpo.validation-episodes 0"
    credit = "--grpo.turn-credit.enabled true --grpo.turn-credit.microbatch.row-length 512 --mesh.fsdp 2"
    words = ["--config", CONFIG, "--run-dir", run, *f"{SIZES} {small} {ROWS} {credit}".split(), "--json"]
    job = launch(compile_cache, log, 2, 1, "train", *words)
    assert job.wait() == 0, log.read_text()[-4000:]
    said = log.read_text()
    assert "trace-jax export --run-dir" in said and sum(line.startswith("{") for line in said.splitlines()) == 1
    assert {p.stem for p in (run / "evaluation").glob("*.json")} == {"untrained", "explorer", "solver", "sft", "grpo"}
    stages = [r["stage"] for r in figures(run)]
    assert stages == ["sft"] * (len(stages) - 1) + ["grpo"] and (run / "report.html").is_file()
    assert all(len(t.probes) for t in read_parquet(run / "trajectories" / "grpo-000001.parquet"))
    alone(compile_cache, 1, "export", "--run-dir", run)
    assert (run / "export" / "model.safetensors").is_file()
