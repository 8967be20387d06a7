"""Run directories, interrupts and progress without a model."""

import dataclasses
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig, SFTConfig
from trace_jax.recipes import teacher
from trace_jax.recipes.interrupt import Break, Interrupt, Interrupted
from trace_jax.recipes.pool import ProcessPool, WorkerDied, wait
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import STAGES, RunDirectory, first_used, stored_config


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
        run.truncate("sft", 2)  # the other stages keep theirs, and half a line is nothing to warn about
        assert [(r["stage"], r["step"]) for r in records(run)] == [("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2)]


def test_a_pool_is_left_when_the_first_results_are_enough():
    """The fewest results in order that will do, whatever else is done by then; nothing more is begun."""
    with ProcessPool(2) as pool:
        jobs = [pool.submit(divmod, n, 7) for n in range(200)]
        found = wait(jobs, lambda: None, lambda _: None, lambda first: sum(q for q, _ in first) >= 3)
        assert found == [divmod(n, 7) for n in range(10)]
        assert wait(jobs[:3], lambda: None, lambda _: None) == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("wanted", [1, 30, 31, 47, 90])
def test_a_teacher_ends_with_its_last_lesson(wanted, tmp_path, monkeypatch):
    """The lessons are the first ones that are right, whole chunks or not; tasks after them are not worked on."""

    def tried(config, chunk, start, tasks):
        return [
            f"wrong {n}" if n % 4 == 0 else teacher.Lesson("", "", (), f"{chunk}-{n}", "mix")
            for n in range(start, start + 8)
        ]

    monkeypatch.setattr(teacher, "_investigate", tried)
    monkeypatch.setattr(teacher, "size_of_chunks", lambda config: 40)
    monkeypatch.setattr(teacher._Chunks, "_slices", lambda self, chunk: [(start, None) for start in range(0, 40, 8)])
    sizes = {"sft.trajectories": str(wanted), "sft.teacher_workers": "1", "sft.batch": "1", "sft.epochs": "1"}
    with RunDirectory.create(tmp_path / "run", config_io.load(None, sizes.items())) as run, Interrupt() as interrupt:
        lessons = teacher.build(run, Progress(), interrupt)
        worked_on = [sum(teacher._read(f)[1].values()) for f in sorted((run.path / "data" / "teacher").iterdir())]
        assert teacher.build(run, Progress(), interrupt) == lessons
    right = [f"{chunk}-{n}" for chunk in range(4) for n in range(40) if n % 4]
    assert [lesson.answer for lesson in lessons] == right[:wanted]
    whole, rest = divmod(wanted, 30)
    assert worked_on == [40] * whole + ([8 * -(-rest // 6)] if rest else [])


def test_runs_of_earlier_versions_are_read(tmp_path):
    """A configuration that an earlier version wrote: fields that came later have their defaults, so that each new one
    has to be in `rundir.ADDED`; one that was always there is missed."""
    text = (Path(__file__).parent / "golden" / "run_config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text)
    found = stored_config(tmp_path)
    assert found.policy.width == 128 and found.sft.trajectories == 2400 and found.sft.searches == SFTConfig().searches
    (tmp_path / "config.yaml").write_text(text.replace("  max_turns: 8\n", "", 1))
    with pytest.raises(ConfigError, match="`rollout.max_turns` is missing"):
        stored_config(tmp_path)


def test_damaged_records_are_left_out_with_a_warning(tmp_path):
    with RunDirectory.create(tmp_path / "r", RunConfig()) as run:
        good = b'{"stage": "sft", "step": 1}\n'
        for line in (b"\xff\xfe\n", b"[1]\n", b'{"stage": "sft"}\n', b"3\n", b'{"stage": "sft", "step": "x"}\n'):
            (run.path / "metrics.jsonl").write_bytes(good + line + good)
            with pytest.warns(UserWarning, match="line 2 is damaged"):
                run.truncate("grpo", 0)
            assert (run.path / "metrics.jsonl").read_bytes() == good * 2


def test_what_no_stage_has_used_may_change(tmp_path):
    """The advice to raise a limit can be followed without losing the teacher's work."""
    config = RunConfig()

    def changed(section, **fields):
        return config.replace(**{section: dataclasses.replace(getattr(config, section), **fields)})

    path = tmp_path / "r"
    RunDirectory.create(path, config).__exit__()
    (path / "data" / "teacher").mkdir(parents=True)
    (path / "data" / "teacher" / "00000.parquet").touch()
    (path / "tokenizer.model").touch()
    for new in (changed("rollout", max_turn_tokens=90), changed("policy", layers=2), changed("sft", epochs=1)):
        with RunDirectory.open(path, new):
            assert stored_config(path) == new
    with pytest.raises(ConfigError, match="`simulator.days` cannot change any more: teacher"):
        RunDirectory.open(path, changed("simulator", days=56))
    RunDirectory.open(path, config).__exit__()
    (path / "checkpoints" / "sft" / "00000002").mkdir(parents=True)
    (path / "checkpoints" / "grpo" / "00000000").mkdir(parents=True)  # stopped before the first step
    for new in (changed("grpo", steps=3), changed("evaluation", samples=2), config):
        RunDirectory.open(path, new).__exit__()
    with pytest.raises(ConfigError, match="`policy.layers`"):
        RunDirectory.open(path, changed("policy", layers=2))
    (path / "checkpoints" / "grpo" / "00000002").mkdir(parents=True)
    for new in (changed("grpo", steps=3), changed("evaluation", samples=2)):
        with pytest.raises(ConfigError, match="cannot change any more: grpo"):
            RunDirectory.open(path, new)
    with RunDirectory.open(path, changed("rollout", tool_workers=5)) as run:
        assert run.config.rollout.tool_workers == 5


def test_every_field_has_a_first_use():
    for name, _ in config_io.flatten(RunConfig()):
        assert first_used(name) in ("", *STAGES), name


@pytest.mark.parametrize("text", ["", "name: nano\n", "name: [", "name: nano\nseed: 0\nsimulator: {days: 28"])
def test_a_cut_configuration_is_damage_not_defaults(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="config.yaml is damaged"):
        RunDirectory.open(tmp_path)


def test_a_run_of_an_earlier_version_opens(tmp_path):
    """Fields that came later have the values that did what it did."""
    stored = Path(__file__).parent / "data" / "config_of_an_earlier_version.yaml"
    shutil.copy(stored, tmp_path / "config.yaml")
    assert stored_config(tmp_path) == config_io.load(stored)


def test_reading_takes_no_lock(tmp_path):
    with RunDirectory.create(tmp_path / "r", RunConfig()), RunDirectory.open(tmp_path / "r", lock=False) as reader:
        assert reader.path.is_dir()


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_break_ends_the_process_where_an_exception_would_be_forgotten(number, tmp_path):
    code = """
        import gc, os, pathlib, signal, sys, tempfile
        from trace_jax.recipes.interrupt import Break
        from trace_jax.warehouse import files
        with Break("interrupted; start again"):
            folder = tempfile.mkdtemp()
            print(os.path.dirname(folder), flush=True)
            held = files.unfinished(pathlib.Path(os.environ["TMPDIR"], "mine"), ".wal")
            partial = held.__enter__()
            partial.write_text("half"), partial.with_name(partial.name + ".wal").write_text("half")
            gc.callbacks.append(lambda phase, info: os.kill(os.getpid(), int(sys.argv[1])))
            gc.collect()  # what is raised in a callback is printed, and the program goes on
            print("not here", flush=True)
    """
    asked = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(int(number))], **asked)
    folder = Path(done.stdout.strip())
    assert (done.returncode, done.stderr) == (128 + number, "\ninterrupted; start again\n")
    assert folder.parent == tmp_path and not list(tmp_path.iterdir())


def test_a_break_puts_everything_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), tempfile.tempdir
    with Break("interrupted"):
        folder = Path(tempfile.mkdtemp())
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), tempfile.tempdir) == before
    assert not folder.exists()


def test_the_handler_raises_nothing_and_callbacks_do():
    """An exception out of a signal handler would be swallowed by event loops and break compilations."""
    with Interrupt() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with Interrupt() as inner, pytest.raises(Interrupted) as caught:  # begun after the signal: heard all the same
            inner.check(3, 12)
    assert outer.requested and caught.value.status == 143


def test_waiting_for_workers_ends_at_a_signal_and_workers_with_it():
    with ProcessPool(2) as pool:
        done = []
        assert wait([pool.submit(abs, -k) for k in range(5)], lambda: None, done.append) == list(range(5))
        assert done and done == sorted(done) and done[-1] <= 5
        with pytest.raises(TypeError):
            wait([pool.submit(abs, "x")], lambda: None, abs)
        begun = time.monotonic()
        with Interrupt() as interrupt, pytest.raises(Interrupted):
            jobs = [pool.submit(time.sleep, 60) for _ in range(4)]
            os.kill(os.getpid(), signal.SIGINT)
            wait(jobs, interrupt.check, abs)
    assert time.monotonic() - begun < 10
    assert not multiprocessing.active_children()


def test_a_dead_worker_is_reported():
    with ProcessPool(1) as pool, pytest.raises(WorkerDied):
        wait([pool.submit(os._exit, 1)], lambda: None, abs)


def test_plain_progress_is_sparse_and_shows_figures():
    out = io.StringIO()
    progress = Progress(Console(file=out), interval=1000.0)
    with progress.bar("sft", 5) as bar:
        for step in range(1, 6):
            bar.update(step, loss=0.25)
    assert out.getvalue() == "sft 5/5  loss 0.25  eta 0s\n"
