"""The engine over meshes of virtual devices, in one process and in two, against one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group("engine on devices")
SCRIPT = Path(__file__).parent / "rollout_devices.py"


def started(*args):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def result(process):
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def single_process():
    return result(started())


def assert_same(got, want):
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    for (_, logprobs), (_, expected) in zip(got, want, strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_sharded_equals_single(single_process):
    """Slots over data and fsdp, heads over tensor: the same tokens for the same seeds; log-probabilities to 1e-5."""
    for name, devices in (("data2", 2), ("fsdp2 tensor2", 4), ("fsdp4, lanes of tensor2", 4)):
        assert_same(single_process[name], single_process["one"])
        assert single_process[f"{name}/devices"] == devices
        held, left = single_process[f"{name}/held"]  # bytes of parameters and caches, before and after `Engine.free`
        assert held > 50_000 and left == 0
        assert single_process[f"{name}/heads"] == ([1] if "tensor2" in name else [2])


def test_rounded_matrices_on_a_mesh(single_process):
    """Rounded where they are sharded and gathered as bytes: as on one device; each device of a lane has its heads."""
    assert_same(single_process["int8"], single_process["int8 one"])
    assert single_process["int8 one"] != single_process["one"]
    shapes = single_process["int8/shapes"]
    assert shapes and all(np.prod(whole) == 2 * np.prod(mine) for whole, mine in shapes)


def test_two_processes_sample_their_shares(single_process):
    """Two processes with four devices each on one mesh: each samples with its own devices; together as one device.
    Then every lane has a device of each: the first process samples all rows, the other makes the same calls."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    parts = [result(process) for process in [started(str(i), address) for i in range(2)]]
    for i, part in enumerate(parts):
        assert_same(part["fsdp2 tensor2"], single_process["one"][i::2])
    lead, follow = parts
    assert (lead["share"], follow["share"]) == ([0, 1], None) and lead["versions"] == [4]
    for collection in range(2):
        assert_same(lead[f"across {collection}"], single_process["one"])
    assert "1 slots for the 2 sampling lanes" in lead["refused"]
