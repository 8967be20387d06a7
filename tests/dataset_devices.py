"""Writes a data set on 8 virtual CPU devices; started by test_warehouse_dataset_bytes.py with the directory."""

import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from trace_jax.config import DataConfig, RunConfig, SimulatorConfig  # noqa: E402
from trace_jax.recipes.simulate import simulate  # noqa: E402

if __name__ == "__main__":
    assert jax.device_count() == 8
    config = RunConfig(simulator=SimulatorConfig(batch=512), data=DataConfig(seed=7))
    simulate(config, Path(sys.argv[1]), episodes=40, chunk=16)
