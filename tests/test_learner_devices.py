"""Results do not depend on the number of devices or on how parameters are sharded (8 virtual devices, own process)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_sharded_equals_single():
    """Cases 3h and 5 of trainer: log-probs, loss, gradient norm and updated parameters on fake devices.

    One test, not one per mesh: the process with the devices takes most of the time.
    """
    script = Path(__file__).with_name("learner_devices.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])

    one = results["one"]
    for mesh in ("data2", "fsdp2", "tensor2", "all8"):
        got = results[mesh]
        assert got["logprob_error"] < 1e-5, mesh
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6), mesh
        assert got["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5), mesh
        assert got["param_error"] < 1e-6, mesh
        assert got["compilations"] == 3, mesh

    # parameters and moments are really split
    assert one["query"][1] == [2, 32, 32] and one["moments_split"] == 0
    assert results["fsdp2"]["query"][1] == [2, 16, 32]
    assert results["tensor2"]["query"][1] == [2, 32, 16]
    assert results["all8"]["query"][1] == [2, 16, 16]
    assert results["all8"]["moments_split"] > 10

    # sizes that do not split are named
    assert "microbatch.rows 4" in results["rows_error"] and "multiple of 8" in results["rows_error"]
    assert "mesh.tensor=3" in results["split_error"]
