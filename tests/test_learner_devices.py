"""Results do not depend on the number of devices or on how parameters are sharded (virtual devices, own processes)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("learner on devices")
SCRIPT = Path(__file__).with_name("learner_devices.py")
MESHES = ("data8", "fsdp8", "tensor2", "expert4", "mixed")
VOCABULARY, WIDTH, LAYERS = 64, 32, 3
LAYER = [[32, 32], [32, 16], [32, 48], [48, 32]]  # query and output, key and value, gate and up, down


def started(*args, script=SCRIPT.name):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles in half the time
    return subprocess.Popen(
        [sys.executable, str(SCRIPT.with_name(script)), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def result(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Where the numbers of one device are."""
    return str(tmp_path_factory.mktemp("learner") / "one.pickle")


@pytest.fixture(scope="module")
def results(reference):
    return result(started(reference))


@pytest.mark.parametrize("mesh", MESHES)
def test_sharded_equals_single(results, mesh):
    """Cases 3h and 5 of trainer: log-probs, gradients, losses, gradient norms and parameters of three optimizer steps
    on eight devices equal those on one."""
    got = results[mesh]
    for what in ("scores", "gradients", "losses", "params"):
        assert got[what] < 1e-5, what
    assert results["moved"] > 1e-4


def test_parameters_and_moments_are_split(results):
    assert results["data8"]["query"] == results["expert4"]["query"] == [LAYERS, 32, 32]
    assert results["fsdp8"]["query"] == [LAYERS, 4, 32]
    assert results["tensor2"]["query"] == [LAYERS, 32, 16]
    assert results["mixed"]["query"] == [LAYERS, 16, 16]
    assert not [c for c in results["data8"]["collectives"] if c[0] == "all-gather" and _size(c[1][0][1]) > WIDTH]
    assert results["data8"]["moments_split"] == 0 and results["mixed"]["moments_split"] > 10


@pytest.mark.parametrize(("mesh", "tensor"), [("fsdp8", 1), ("mixed", 2)])
def test_collectives(results, mesh, tensor):
    """No gather holds more than one layer's matrix (or the vocabulary's), nothing gathers hidden states or scores, and
    gradients are summed layer by layer."""
    found = results[mesh]["collectives"]
    gathered = [shape for kind, shapes, _ in found if kind == "all-gather" for t, shape in shapes if t[0] in "fb"]
    assert not [s for s in gathered if s[0] == LAYERS and len(s) > 1]
    assert max(_size(s) for s in gathered) == VOCABULARY * WIDTH // tensor
    in_loop = [s for kind, shapes, loop in found if kind == "all-gather" and loop for _, s in shapes]
    whole = [sorted(_split(s, tensor)) for s in LAYER]
    assert all(w in [sorted(n for n in s if n > 1) for s in in_loop] for w in whole)

    summed = [s for kind, shapes, loop in found if kind in ("all-reduce", "reduce-scatter") for _, s in shapes]
    assert not [s for s in summed if s and s[0] == LAYERS]
    assert all(w in [sorted(s) for s in summed] for w in whole)
    # the vocabulary matmul's gradient: once, not in every chunk
    chunked = [s for kind, shapes, loop in found if loop and kind == "all-reduce" for _, s in shapes]
    assert [VOCABULARY // tensor, WIDTH] in [s[-2:] for s in summed]
    assert [VOCABULARY // tensor, WIDTH] not in [s[-2:] for s in chunked] or tensor == 2  # there it is a query's shape


def test_weights_are_cast_before_they_are_gathered(results):
    """bfloat16 compute: what is gathered is bfloat16, what is summed over devices and stored is float32."""
    used, stored = [], []
    for axes, tensor in results["half"]:
        *shape, kind = tensor.split("x")
        if [int(n) for n in shape] in LAYER or shape == [str(VOCABULARY), str(WIDTH)]:
            (stored if "fsdp" in axes else used).append(kind)
    assert len(used) >= 16 and set(used) == {"bf16"}
    assert len(stored) >= 8 and set(stored) == {"f32"}


def test_what_does_not_split_is_named(results):
    assert "microbatch.rows 4" in results["rows_error"] and "multiple of 8" in results["rows_error"]
    assert "mesh.tensor=3" in results["split_error"]


def test_two_processes_equal_one_device(results, reference):
    """Two processes with four devices each on one mesh (gloo): every process is given the whole batch; the numbers are
    those of one device in both."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    parts = [result(process) for process in [started(reference, str(i), address) for i in range(2)]]
    for part in parts:
        for what in ("scores", "gradients", "losses", "params"):
            assert part[what] < 1e-5, what
        assert part["processes"] == 2 and part["scored"] == part["tokens"]
    assert parts[0]["losses_seen"] == parts[1]["losses_seen"]


def _size(shape):
    size = 1
    for n in shape:
        size *= n
    return size


def _split(shape, ways):
    """A layer's matrix on one of `ways` tensor-parallel devices: the axis that is not the model width is split."""
    at = 0 if shape == [48, 32] else 1
    return [n // ways if i == at else n for i, n in enumerate(shape)]
