"""The scaling model against cases that are known by hand."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("scaling", ROOT / "bench" / "scaling.py")
scaling = importlib.util.module_from_spec(spec)
sys.modules["scaling"] = scaling  # dataclasses look their module up
spec.loader.exec_module(scaling)

REPORT = {
    "mesh": {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1},
    "chip": {
        "name": "x", "flops": 1e12, "hbm_bandwidth": 100.0, "link_bandwidth": 10.0, "network_bandwidth": 5.0,
        "source": "",
    },
    "counts": {"sequences": 64, "context": 100, "slots_per_lane": 8},
    "microbatch": [4, 100],
    "memory": {"parameters": 50, "sampler_parameters": 200, "kv_cache": 800},
    "flops": 1e12,
    "programs": {
        "accumulate": {"seconds": {"compute": 3.0, "memory": 1.0, "links": 2.0, "network": 0.0}},
        "apply": {"roofline_s": 0.5},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def measured():
    return json.loads(scaling.MEASURED.read_text())


def test_rows_of_a_lane_decode_together():
    """Two rows of ten tokens: ten steps, each of which reads the weights once and two caches."""
    ends, busy = scaling.rollout([np.array([10]), np.array([10])], 8, weights=100, cache=50, bandwidth=100, tool=1.0)
    assert ends == busy == 10 * (100 + 2 * 50) / 100


def test_a_row_waits_for_its_slot_and_for_its_tool():
    rows = [np.array([10, 10])]
    ends, busy = scaling.rollout(rows, 1, weights=100, cache=0, bandwidth=100, tool=5.0)
    assert busy == 20 and ends == 25
    ends, busy = scaling.rollout(rows * 3, 1, weights=100, cache=0, bandwidth=100, tool=5.0)
    assert busy == 60 and ends == 75  # a slot is kept while its tool runs


def test_a_tool_is_hidden_behind_other_rows():
    """While one row is at its tool the other goes on: 20 steps together at most, and never idle."""
    ends, busy = scaling.rollout([np.array([2, 8]), np.array([30])], 8, weights=100, cache=0, bandwidth=100, tool=3.0)
    assert ends == busy == 30


def test_drawn_trajectories_keep_the_assumed_means(measured):
    assumed = scaling.Assumed(sampled=4000, turns=12)
    drawn = scaling.trajectories(measured, assumed, 4000, np.random.default_rng(0))
    assert np.mean([len(t) for t in drawn]) == pytest.approx(12, rel=0.03)
    assert np.mean([t.sum() for t in drawn]) == pytest.approx(4000, rel=0.05)


def test_learning_halves_until_there_is_a_row_a_chip(measured):
    """64 sequences of 100 tokens are 64 rows; four rows a micro-batch on eight chips."""
    assumed = scaling.Assumed(tokens=100, sampled=10, turns=2, reach=1.0, tool_seconds=0.0)
    at = {n: scaling.step_time(REPORT, n, measured, assumed) for n in (8, 16, 128, 256)}
    assert at[8]["learn"] == 16 * 3.0 + 0.5 and at[8]["between_slices"] == 0
    between = 2 * 50 / 5.0 / 2  # two slices
    assert at[16]["learn"] == pytest.approx(8 * 3.0 + 0.5 + between)
    assert at[128]["micro_batches"] == at[256]["micro_batches"] == 1
    assert at[256]["fill"] == 0.5  # chips without a row
    assert at[256]["tokens_per_s"] < 1.2 * at[128]["tokens_per_s"]
