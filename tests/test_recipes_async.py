"""GRPO with sampling one step ahead: exact resume, and what it logs."""

import os
import signal

import numpy as np
import pytest
from recipes_helpers import (
    compile_cache,
    figures,
    final_state,
    finished_smoke,
    reached,
    records,
    smoke,
    start,
    wait_until,
)

from trace_jax import cli
from trace_jax.learner.checkpoint import CheckpointStore
from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures


@pytest.mark.slow
@pytest.mark.xdist_group("async")
def test_interrupted_ahead_of_learning(smoke, compile_cache, tmp_path):
    """Case 8 of trainer with pending rollouts: 6 steps, against the same ones ended by SIGTERM in a step, resumed,
    killed in a save, and resumed again. Two optimizer steps a collection; parameters, moments, trajectories and figures
    are equal, bit for bit."""
    source, _ = smoke
    argv = ["grpo", "--init", source, "--grpo.steps", 6, "--grpo.staleness", 1, "--run-dir"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main([str(a) for a in [*argv, whole]]) == 0
    rows = [r for r in records(whole) if r["stage"] == "grpo"]
    assert [r["staleness"] for r in rows] == [0.0] + [1.0] * 5
    # Two of its steps lie between the policy that sampled and the one that learns, except at first.
    gaps = [r["mismatch_gap"] for r in rows]
    assert gaps[0] is None or gaps[0] < 1e-4
    assert max(g for g in gaps[1:] if g is not None) > 1e-4

    process = start(*argv, cut, cache=compile_cache)
    wait_until(process, lambda: reached(cut, "grpo", 1))
    os.killpg(process.pid, signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "--resume" in stderr
    saves = cut / "checkpoints" / "grpo"
    store = CheckpointStore(str(saves))
    newest = store.latest()
    left = store.extra(newest)["grpo_step"]
    held = f"version_{left - 1}" in store.items(newest) or f"pending-{left:06d}.parquet" in store.files(newest)
    assert 1 <= left < 6 and held

    process = start("grpo", "--run-dir", cut, "--resume", cache=compile_cache)
    wait_until(process, lambda: any(p.name.startswith(".partial") for p in saves.iterdir()))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert cli.main(["grpo", "--run-dir", str(cut), "--resume"]) == 0

    (expected, extra), (actual, resumed_extra) = final_state(whole), final_state(cut)
    assert extra == resumed_extra and extra["pending"] == {} and expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    assert figures(cut) == figures(whole)
    for step in range(1, 7):
        name = f"trajectories/grpo-{step:06d}.parquet"
        for a, b in zip(read_parquet(whole / name), read_parquet(cut / name), strict=True):
            assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs)
            assert a.versions == b.versions
