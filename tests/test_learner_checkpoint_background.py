"""Saving beside the training: what is copied when, whose error is raised where; scores, files and further items."""

import errno
import math
import os
import resource
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import ConfigError
from trace_jax.learner import checkpoint
from trace_jax.learner.checkpoint import CheckpointStore


def tree(value=0.0):
    return {"a": jnp.arange(6.0).reshape(2, 3) + value, "b": [jnp.int32(7), jnp.zeros((4,), jnp.bfloat16)]}


def refused(word):
    return pytest.raises(ConfigError, match=f"^[^\\n]*{word}[^\\n]*$")


@pytest.fixture
def held(monkeypatch):
    """Commits wait until this event is set."""
    go, commit = threading.Event(), CheckpointStore._commit
    monkeypatch.setattr(CheckpointStore, "_commit", lambda *args: (go.wait(60), commit(*args))[1])
    yield go
    go.set()


def test_save_returns_before_it_is_written_and_owns_what_it_was_given(tmp_path, held):
    """Arrays are donated or overwritten, files and JSON changed, right after `save`."""
    store = CheckpointStore(tmp_path, background=True)
    big = jnp.arange(1 << 18, dtype=jnp.float32)
    numpy, extra, file = np.arange(5), {"k": [1]}, tmp_path / "rollouts"
    file.write_bytes(b"as it was")
    store.save(1, {"params": {"big": big}, "other": {"n": numpy}}, extra, files={"rollouts": file, "note": b"text"})
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(3):
        big = add(big)
    numpy += 100
    extra["k"].append(2)
    file.unlink()
    assert not (tmp_path / "00000001").exists()
    held.set()
    store.wait()
    assert (tmp_path / "00000001").is_dir()
    got, stored = store.restore(1, {"params": {"big": big}, "other": {"n": np.zeros(5, int)}})
    np.testing.assert_array_equal(got["params"]["big"], np.arange(1 << 18, dtype=np.float32))
    np.testing.assert_array_equal(got["other"]["n"], np.arange(5))
    assert stored == {"k": [1]}
    assert store.restore_file(1, "rollouts").read_bytes() == b"as it was"


def test_the_next_save_and_every_reader_wait(tmp_path, held):
    store = CheckpointStore(tmp_path, background=True)
    store.save(1, {"params": tree(1)}, {})
    threading.Timer(0.2, held.set).start()
    assert store.latest() == 1  # waited, and took its own unfinished save for nothing incomplete
    held.clear()
    store.save(2, {"params": tree(2)}, {})
    threading.Timer(0.2, held.set).start()
    store.save(3, {"params": tree(3)}, {})
    assert (tmp_path / "00000002").is_dir()
    with store:
        pass
    assert {p.name for p in tmp_path.iterdir()} == {"00000001", "00000002", "00000003"}


def limited(size):
    """The operating system refuses files beyond a size, like a quota, in every thread of this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("who", ["wait", "save", "latest", "block"])
def test_an_error_in_the_background_is_one_line_for_the_next_caller(tmp_path, who):
    store = CheckpointStore(tmp_path, background=True)
    store.save(1, {"params": tree()}, {})
    store.wait()
    big = {"params": {"a": jax.random.normal(jax.random.key(0), (1 << 18,))}}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lift = limited(100_000)
    try:
        with refused("could not be written .*file too large.*--resume"):
            store.save(2, big, {})
            store._pending._thread.join()
            if who == "block":
                store.__exit__(None)
            else:
                {"wait": store.wait, "latest": store.latest, "save": lambda: store.save(3, big, {})}[who]()
    finally:
        lift()
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    store.wait()  # told once
    store.save(2, big, {})
    assert store.steps() == [1, 2]


def test_a_block_that_fails_keeps_its_own_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointStore, "_commit", refuse)
    with (
        pytest.raises(KeyError),
        pytest.warns(UserWarning, match="no space left on device"),
        CheckpointStore(tmp_path, background=True) as store,
    ):
        store.save(1, {"params": tree()}, {})
        raise KeyError


def test_interrupt_while_waiting_is_delivered_afterwards(tmp_path, held):
    store = CheckpointStore(tmp_path, background=True)
    store.save(1, {"params": tree()}, {})

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        held.set()

    threading.Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        store.wait()
    assert (tmp_path / "00000001").is_dir()


def test_newest_and_best_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_best=2)
    assert store.best() is None
    scores = [0.1, 0.9, None, 0.9, math.nan, 0.5, 0.2, 0.3]
    kept = [[1], [1, 2], [1, 2, 3], [2, 3, 4], [2, 4, 5], [2, 4, 5, 6], [2, 4, 6, 7], [2, 4, 7, 8]]
    for step, (score, expected) in enumerate(zip(scores, kept, strict=True), 1):
        store.save(step, {"params": {"a": jnp.zeros(1)}}, {}, score=score)
        assert store.steps() == expected, step
    assert store.best() == 4  # of equal ones the newest
    assert CheckpointStore(tmp_path).best() == 4
    # a store that keeps one and its best never deletes the newest
    one = CheckpointStore(tmp_path, keep=1, keep_best=1)
    one.save(9, {"params": {"a": jnp.zeros(1)}}, {}, score=-math.inf)
    assert one.steps() == [4, 9]


def test_files_and_items_are_listed_and_verified(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"params": tree()}, {})
    store.save(2, {"params": tree(), "sampler": tree(1)}, {}, files={"pending.parquet": b"x" * 1000})
    assert (store.items(1), store.files(1)) == (["params"], [])
    assert (store.items(2), store.files(2)) == (["params", "sampler"], ["pending.parquet"])
    with refused("has no file `pending.parquet`, only none"):
        store.restore_file(1, "pending.parquet")
    path = store.restore_file(2, "pending.parquet")
    path.write_bytes(b"x" * 999 + b"y")
    with refused("damaged .*pending.parquet changed"):
        store.restore_file(2, "pending.parquet")
    store.restore(2, {"params": tree()})  # what is not asked for is not read
    path.write_bytes(b"x")
    with pytest.warns(UserWarning, match="incomplete"):
        assert store.latest() == 1
    for name in ("../x", "", ".x", "files", "checkpoint.json"):
        with pytest.raises(ValueError, match="cannot hold"):
            store.save(3, {"params": tree()}, {}, files={name: b""})


def test_state_with_further_items_and_files(tmp_path):
    """What an asynchronous recipe saves: the sampler's older parameters and the rollouts nobody has trained on."""
    state = checkpoint.TrainState(step=jnp.int32(5), params=tree(), opt_state=(tree(1),))
    store = CheckpointStore(tmp_path)
    checkpoint.save_state(store, state, {}, score=1.0, items={"sampler": tree(-1)}, files={"pending": b"rows"})
    assert store.items(5) == ["optimizer", "params", "sampler"] and store.best() == 5
    got, _ = store.restore(5, {"sampler": tree()})
    np.testing.assert_array_equal(got["sampler"]["a"], tree(-1)["a"])
    assert store.restore_file(5, "pending").read_bytes() == b"rows"
