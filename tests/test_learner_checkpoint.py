"""Checkpoints: exact resume, and what happens when something goes wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError
from trace_jax.learner.checkpoint import MANIFEST, CheckpointStore

SCRIPT = Path(__file__).with_name("learner_resume.py")


def tree(value=0.0):
    return {"a": jnp.arange(6.0).reshape(2, 3) + value, "b": [jnp.int32(7), jnp.zeros((4,), jnp.bfloat16)]}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def refused(word):
    return pytest.raises(ConfigError, match=f"^[^\\n]*{word}[^\\n]*$")


def test_relative_directory(tmp_path, monkeypatch):
    """A run directory is usually given relative to where one stands; it stays where it was when one moves."""
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("runs/x/checkpoints", keep=2)
    store.save(1, {"params": tree()}, {"k": 1})
    again = CheckpointStore("runs/x/checkpoints")
    monkeypatch.chdir("/")
    assert_same(again.restore(1, {"params": tree()})[0]["params"], tree())
    assert (tmp_path / "runs/x/checkpoints/00000001").is_dir()


def test_round_trip_and_keep(tmp_path):
    store = CheckpointStore(tmp_path / "c", keep=2)
    assert store.latest() is None
    for step in (1, 2, 3):
        store.save(step, {"params": tree(step), "optimizer": tree(-step)}, {"cursor": step, "seeds": [1, 2]})
    assert store.steps() == [2, 3]
    got, extra = store.restore(3, {"params": tree()})  # one item without the other
    assert_same(got["params"], tree(3))
    assert extra == {"cursor": 3, "seeds": [1, 2]} == store.extra(3)
    store.save(3, {"params": tree(9)}, {})  # the same step again replaces
    assert_same(store.restore(3, {"params": tree()})[0]["params"], tree(9))
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"00000002", "00000003"}


def test_partial_directory_is_skipped(tmp_path):
    """Case 8 of trainer: an incomplete checkpoint is skipped with a warning, the previous one is used."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": tree()}, {})
    store.save(2, {"params": tree()}, {})
    (tmp_path / "00000002" / MANIFEST).unlink()
    (tmp_path / ".partial-00000003" / "params").mkdir(parents=True)
    with pytest.warns(UserWarning, match="incomplete checkpoint") as caught:
        assert store.latest() == 1
    assert len(caught) == 2
    with refused("incomplete or damaged"):
        store.restore(2, {"params": tree()})
    # a copy that stopped half way has its manifest but not its bytes
    store.save(2, {"params": tree()}, {})
    max((tmp_path / "00000002").glob("params/**/d/*"), key=lambda p: p.stat().st_size).write_bytes(b"")
    with pytest.warns(UserWarning):
        assert store.latest() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save(2, {"params": tree()}, {})
        assert store.latest() == 2


def test_flipped_bit_is_found(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": tree()}, {})
    victim = max(tmp_path.glob("00000001/params/**/d/*"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with refused("damaged .*delete"):
        store.restore(1, {"params": tree()})
    assert victim.read_bytes() == bytes(data)  # refusing deletes nothing


def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path):
    """Damage that keeps sizes is only found by reading; without any whole one a run must not begin anew."""

    def flip(step):
        victim = max(tmp_path.glob(f"{step:08d}/params/**/d/*"), key=lambda p: p.stat().st_size)
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)

    assert CheckpointStore(tmp_path).newest_whole() is None
    writer = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        writer.save(step, {"params": tree(step)}, {"k": step})
    assert CheckpointStore(tmp_path).newest_whole() == 3
    flip(3)
    store = CheckpointStore(tmp_path)
    with pytest.warns(UserWarning, match=r"00000003 is damaged .*going on from the one before it"):
        assert store.newest_whole() == 2
    assert_same(store.restore(2, {"params": tree()})[0]["params"], tree(2))
    store.save(3, {"params": tree(9)}, {})  # made again
    assert CheckpointStore(tmp_path).newest_whole() == 3
    for step in (1, 2, 3):
        flip(step)
    with pytest.warns(UserWarning), refused("00000003 is damaged .*delete"):
        CheckpointStore(tmp_path).newest_whole()


def test_other_arrays_are_named(tmp_path):
    """Case 8 of trainer: restoring one kind of checkpoint into another is a clear error."""
    store = CheckpointStore(tmp_path)
    store.save(4, {"params": tree()}, {})
    with refused("not `optimizer`"):
        store.restore(4, {"optimizer": tree()})
    with refused(r"params\.a is float32\[2,3\], the config asks for float32\[2,5\]"):
        store.restore(4, {"params": tree() | {"a": jnp.zeros((2, 5))}})
    with refused(r"params\.a is float32\[2,3\], the config asks for bfloat16\[2,3\]"):
        store.restore(4, {"params": tree() | {"a": jnp.zeros((2, 3), jnp.bfloat16)}})
    with refused(r"no array params\.c"):
        store.restore(4, {"params": tree() | {"c": jnp.zeros(1)}})
    with refused(r"params\.b\.0, which the config does not"):
        store.restore(4, {"params": {"a": tree()["a"]}})
    with refused(r"no checkpoint .*00000005.*\[4\]"):
        store.restore(5, {"params": tree()})


def test_full_disk_keeps_the_previous(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": tree()}, {})
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with refused("no space .*--resume"):
        store.save(2, {"params": tree()}, {})
    assert store.steps() == [1] and len(list(tmp_path.iterdir())) == 1


def test_failing_writes_keep_the_previous(tmp_path):
    """The operating system refuses the bytes in the middle of a save (file size limit, like a quota)."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": tree()}, {})
    big = {"params": {"a": jax.random.normal(jax.random.key(0), (1 << 18,))}}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with refused("could not be written"):
            store.save(2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.steps() == [1]
    store.save(2, big, {})
    assert store.steps() == [1, 2]


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("could not be written"):
        CheckpointStore(tmp_path / "file" / "c").save(1, {"params": tree()}, {})
    assert (tmp_path / "file").is_file()


def run(directory, until, how=()):
    """One process; those of a test share what they compile."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(directory.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "always", str(SCRIPT), str(directory), str(until), *how],
        capture_output=True, text=True, timeout=300,
        env={"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"} | cache | os.environ,
    )  # fmt: skip
    out = done.stdout.strip().splitlines()
    return done.returncode, json.loads(out[-1]) if out else None, done.stderr


def test_resume_is_exact(tmp_path):
    """Case 8 of trainer: 6 steps in one process = 3 steps, two saves that fail, a new process, 3 more; bit for bit.

    The run that is interrupted and killed saves in the background after every step.
    """
    code, uninterrupted, stderr = run(tmp_path / "whole", 6)
    assert code == 0, stderr[-2000:]

    directory = tmp_path / "parts"
    code, middle, stderr = run(directory, 3, ["background"])
    assert code == 0, stderr[-2000:]
    # two steps a batch: one batch consumed, half of the next one done
    assert middle["extra"]["cursor"] == 2 and middle["extra"]["iteration"] == 1

    # Ctrl-C twice: the first is held back, the second ends the process in the middle of its save
    code, _, stderr = run(directory, 4, ["background", "interrupt"])
    assert code != 0 and "KeyboardInterrupt" in stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert CheckpointStore(directory).steps() == [1, 2, 3]

    code, _, _ = run(directory, 5, ["background", "kill"])
    assert code == -signal.SIGKILL and list(directory.glob(".partial-00000005*"))

    code, end, stderr = run(directory, 6, ["background"])
    assert code == 0, stderr[-2000:]
    assert "skipping incomplete checkpoint" in stderr
    assert end == uninterrupted and end["metrics"]["grad_norm"] > 0
    assert end["extra"]["cursor"] == 6 and len(end["extra"]["consumed"]) == 6


def test_one_interrupt_is_delivered_after_the_save(tmp_path):
    store = CheckpointStore(tmp_path)
    original = store._orbax.save

    def save(*args, **kwargs):
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)

    store._orbax.save = save
    with pytest.raises(KeyboardInterrupt):
        store.save(1, {"params": tree()}, {})
    assert store.steps() == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("change", ["format", "extra", "arrays", "files", "list", "nested", "shapes"])
def test_manifest_of_another_form_is_skipped(tmp_path, change):
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": tree()}, {})
    store.save(2, {"params": tree()}, {})
    path = tmp_path / "00000002" / MANIFEST
    manifest = json.loads(path.read_text())
    other = {"list": [], "nested": manifest | {"extra": []}, "shapes": manifest | {"arrays": {"params": {"a": 1}}}}
    path.write_text(json.dumps(other.get(change, {k: v for k, v in manifest.items() if k != change})))
    with pytest.warns(UserWarning, match="files of it are missing or not as they were saved"):
        assert store.latest() == 1
    with refused("incomplete or damaged"):
        store.extra(2)


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "grpo").write_text("")
    store = CheckpointStore(tmp_path / "grpo")
    for call in (store.latest, lambda: store.save(1, {"params": tree()}, {}), lambda: store.extra(1)):
        with refused("grpo .*move what is there away|no checkpoint"):
            call()
