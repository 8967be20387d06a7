"""GRPO with devices of its own for each role, sampling one step ahead, against the same run on one device."""

import numpy as np
import pytest
from recipes_helpers import compile_cache, figures, final_state, finished_smoke, smoke, start

from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures


@pytest.mark.slow
def test_two_devices_learn_while_two_sample(smoke, compile_cache, tmp_path, monkeypatch):
    """The same investigations, and parameters equal to 1e-5, after two steps and one more in a resumed process."""
    source, _ = smoke
    argv = ["grpo", "--init", source, "--grpo.steps", 3, "--grpo.staleness", 1, "--grpo.save_every", 2]
    roles = ["--mesh.rollout_devices", 2]
    one, apart = tmp_path / "one", tmp_path / "apart"
    processes = [start(*argv, "--run-dir", one, cache=compile_cache)]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    processes.append(start(*argv, *roles, "--run-dir", apart, cache=compile_cache))
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr

    for step in (1, 2, 3):
        name = f"trajectories/grpo-{step:06d}.parquet"
        for a, b in zip(read_parquet(one / name), read_parquet(apart / name), strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            assert a.versions == b.versions and a.reward == b.reward
    assert [r["staleness"] for r in figures(apart) if r["stage"] == "grpo"] == [0.0, 1.0, 1.0]
    (expected, _), (actual, _) = final_state(one), final_state(apart)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, atol=1e-5, err_msg=name)
