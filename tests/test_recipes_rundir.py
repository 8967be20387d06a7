"""Run directories, interrupts and progress without a model."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from rich.console import Console

from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes.interrupt import Interrupt, Interrupted
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory


def records(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_create_open_and_refusals(tmp_path):
    path, config = tmp_path / "runs" / "a", RunConfig()
    with RunDirectory.create(path, config), pytest.raises(ConfigError, match="in use"):
        RunDirectory.open(path)
    with RunDirectory.open(path, config) as run:
        assert run.config == config
    with pytest.raises(ConfigError, match="already holds a run: add --resume"):
        RunDirectory.create(path, config)
    with pytest.raises(ConfigError, match="seed"):
        RunDirectory.open(path, config.replace(seed=1))
    with pytest.raises(ConfigError, match="no run in"):
        RunDirectory.open(tmp_path / "b")
    (tmp_path / "file").write_text("")
    for occupied in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="not a directory"):
            RunDirectory.create(occupied, config)


def test_metrics_are_cut_at_the_checkpointed_step(tmp_path):
    with RunDirectory.create(tmp_path / "r", RunConfig()) as run:
        for step in (1, 2, 3):
            run.log("sft", step, {"loss": 1 / step})
        for step in (1, 2, 3):
            run.log("grpo", step, {"reward": float("nan")})
        assert records(run)[-1]["reward"] is None  # JSON has no NaN
        run.truncate("grpo", 1)
        run.log("grpo", 2, {"reward": 0.5})
        assert [(r["stage"], r["step"]) for r in records(run)] == [
            ("sft", 1), ("sft", 2), ("sft", 3), ("grpo", 1), ("grpo", 2),
        ]  # fmt: skip
        with open(run.path / "metrics.jsonl", "a") as file:
            file.write('{"stage": "grpo", "st')  # a crash in the middle of a line
        run.truncate("sft", 2)
        assert [r["step"] for r in records(run)] == [1, 2]


def test_first_signal_asks_and_second_ends():
    with Interrupt() as interrupt:
        interrupt.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(Interrupted) as caught:
            interrupt.check()
    assert caught.value.status == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    code = """
        import os, signal, time
        from trace_jax.recipes.interrupt import Interrupt
        with Interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            print("still here", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            print("not here", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "still here\n")


def test_abortable_work_ends_at_once():
    with Interrupt() as interrupt, pytest.raises(Interrupted), interrupt.abortable():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on after the signal")
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as caught, interrupt.abortable():
            raise AssertionError("began after the signal")
    assert caught.value.status == 143


def test_plain_progress_is_sparse_and_shows_figures():
    out = io.StringIO()
    progress = Progress(Console(file=out), interval=1000.0)
    with progress.bar("sft", 5) as bar:
        for step in range(1, 6):
            bar.update(step, loss=0.25)
    assert out.getvalue() == "sft 5/5  loss 0.25  eta 0s\n"
