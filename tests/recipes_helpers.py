"""One finished smoke run, shared by all tests and test processes of a session, and ways to start others from it."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from trace_jax.learner.checkpoint import CheckpointStore

CONFIG = Path(__file__).parent.parent / "configs" / "smoke.yaml"


def start(*argv, cache: Path):
    """The command line in a process group of its own, like a job of a terminal."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"} | os.environ
    command = [sys.executable, "-m", "trace_jax.cli", *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def wait_until(process, condition, seconds=300):
    """Polls tightly until the condition holds while the process runs."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the process ended or stalled first: {process.communicate()}")
        time.sleep(0.002)


def records(run: Path):
    """Complete lines of the metrics file."""
    with contextlib.suppress(FileNotFoundError):
        text = (run / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return []


def reached(run: Path, stage: str, step: int) -> bool:
    return any(r["stage"] == stage and r["step"] >= step for r in records(run))


def unfinished_copy(run: Path, target: Path) -> Path:
    """The run as it was after its teacher set: configuration, transcripts, splits, tokenizer."""
    target.mkdir()
    for name in ("config.yaml", "tokenizer.model"):
        shutil.copy(run / name, target / name)
    shutil.copytree(run / "data", target / "data")
    return target


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory):
    """Compiled programs, shared by the processes of a session: most of a smoke run's time is compilation."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = shared / "jax-cache"
    folder.mkdir(exist_ok=True)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return folder


@pytest.fixture(scope="session")
def finished_smoke(compile_cache):
    """(run directory, stdout) of `trace-jax train --config configs/smoke.yaml --json`, uninterrupted."""
    run, out = compile_cache.parent / "smoke", compile_cache.parent / "smoke.out"
    with open(compile_cache.parent / "smoke.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            begun = time.monotonic()
            process = start("train", "--config", CONFIG, "--run-dir", run, "--json", cache=compile_cache)
            stdout, stderr = process.communicate()
            assert process.returncode == 0, stderr
            out.write_text(json.dumps({"stdout": stdout, "seconds": time.monotonic() - begun}))
    return run, json.loads(out.read_text())


@pytest.fixture
def smoke(finished_smoke, tmp_path):
    """The finished run in a copy of the test's own: test processes share the original, and commands lock a run."""
    run, done = finished_smoke
    copy = tmp_path / "smoke"
    shutil.copytree(run, copy)
    return copy, done


def final_state(run):
    """Every array of the last GRPO checkpoint: parameters, moments, counts."""
    store = CheckpointStore(str(run / "checkpoints" / "grpo"))
    step = store.latest()
    described = json.loads((run / "checkpoints" / "grpo" / f"{step:08d}" / "checkpoint.json").read_text())["arrays"]
    items = {
        item: {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in arrays.items()}
        for item, arrays in described.items()
    }
    restored, extra = store.restore(step, items)
    return {f"{item}/{k}": np.asarray(v) for item, arrays in restored.items() for k, v in arrays.items()}, extra


def figures(run):
    """What was logged, without wall-clock times and what follows from them: which rows met in a call of the engine."""
    timed = ("second", "engine/", "memory/")
    rows = [r for r in records(run) if r["stage"] != "teacher"]
    return [{k: v for k, v in r.items() if not any(word in k for word in timed)} for r in rows]
