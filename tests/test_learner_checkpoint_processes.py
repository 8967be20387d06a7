"""Checkpoints of several processes, and of another mesh; the decision to stop."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from checkpoint_processes import STEPS_BETWEEN, after, learner_on, parameters

from trace_jax.config import MeshConfig
from trace_jax.learner import checkpoint, sharding
from trace_jax.learner.checkpoint import CheckpointStore

SCRIPT = Path(__file__).with_name("checkpoint_processes.py")


def test_two_processes_save_restore_and_stop_together(tmp_path):
    """Case 8 of trainer on 1 -> 2 x 2 x 2 devices in two processes -> 1, values equal; failures reach both processes.

    One test: the processes take most of the time.
    """
    learner = learner_on(sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    state = learner.init(parameters())
    checkpoint.save_state(CheckpointStore(tmp_path / "one"), state, {"k": 7})

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
        for what in ("restored_one", "trained", "restored_two", "restored_flat", "restored_item"):
            assert got[what] is True, (process, what)
        # the best and the newest of scores 2, 1, 1.5 survive
        assert (got["steps"], got["best"]) == ([0, 2 * STEPS_BETWEEN], 0)
        assert "no space left on device" in got["failed"] and "\n" not in got["failed"]
        assert got["steps_after_failure"] == got["steps"]
        assert "of process 1 is not that of process 0" in got["apart"]
        assert "processes see different checkpoints" in got["apart_restore"]
        assert got["stopped"] == [3, 143]  # the signal went to process 1

    store = CheckpointStore(tmp_path / "two")
    newest, extra = checkpoint.restore_state(store, learner, parameters())
    for a, b in zip(jax.tree.leaves(newest), jax.tree.leaves(after(state, 2 * STEPS_BETWEEN)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert extra == {"score": 1.5} and int(newest.step) == 2 * STEPS_BETWEEN
    assert store.restore_file(int(newest.step), "rollouts").read_bytes() == b"of process 0 at 1.5"
