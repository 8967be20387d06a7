"""Checkpoints of several processes, and of another mesh; the decision to stop."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_processes import batches, learner_on, leaves_of, parameters

from trace_jax.config import MeshConfig
from trace_jax.learner import checkpoint, sharding
from trace_jax.learner.checkpoint import CheckpointStore

SCRIPT = Path(__file__).with_name("checkpoint_processes.py")


def test_two_processes_save_restore_and_stop_together(tmp_path):
    """Case 8 of trainer: 1 -> 2 x 2 x 2 devices in two processes -> 1, values equal and training goes on as on one.

    Failures and signals reach both processes. One test: the processes take most of the time.
    """
    learner = learner_on(sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    state, _ = learner.step(learner.init(parameters()), batches(0))
    checkpoint.save_state(CheckpointStore(tmp_path / "one"), state, {"k": 7})
    known = [leaves_of(state)]
    for step in (1, 2, 3):
        state, metrics = learner.step(state, batches(step))
        known.append(leaves_of(state))
    named = {
        f"{name}{i}": a for name, arrays in (("begin", known[0]), ("end", known[-1])) for i, a in enumerate(arrays)
    }
    np.savez(tmp_path / "single.npz", **named)

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(port)]
    started = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for i in (0, 1)
    ]
    try:
        ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [code for *_, code in ended] == [0, 0], "\n".join(err[-2000:] for _, err, _ in ended)
    both = [json.loads(out.splitlines()[-1]) for out, *_ in ended]

    for process, got in enumerate(both):
        assert (got["process"], got["devices"]) == (process, 8)
        assert got["restored_one"] == 0 and got["extra"] == {"k": 7}
        assert got["trained"] < 1e-5 and got["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-6)
        assert got["restored_two"] is True and got["restored_flat"] is True and got["restored_item"] == 0
        # the best and the newest of scores 2, 1, 1.5 survive
        assert (got["steps"], got["best"]) == ([1, 3], 1)
        assert "no space left on device" in got["failed"] and "\n" not in got["failed"]
        assert got["steps_after_failure"] == [1, 3]
        assert "of process 1 is not that of process 0" in got["apart"]
        assert "processes see different checkpoints" in got["apart_restore"]
        assert got["stopped"] == [3, 143]  # the signal went to process 1

    store = CheckpointStore(tmp_path / "two")
    newest, extra = checkpoint.restore_state(store, learner, parameters())
    assert extra == {"score": 1.5} and int(newest.step) == 3
    for a, b in zip(leaves_of(newest), known[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert store.restore_file(3, "rollouts").read_bytes() == b"of process 0 at 1.5"
