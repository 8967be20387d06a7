"""Checkpoints on a mesh of several devices: each reads its share; what is written from there is the same file."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
sys.path.insert(0, sys.argv[1])
from helpers_models import checkpoint, golden
from trace_jax.config import MeshConfig
from trace_jax.learner import sharding
from trace_jax.policy import hf, hf_files
from trace_jax.policy.hf_read import read, resolve
from trace_jax.policy.hf_write import params_of, planned
from trace_jax.policy.transformer import logical_axes

def content(params, model, origin):
    tensors = planned(params, model.cfg, model.vocab_size, origin)
    return {name: bytes(np.ascontiguousarray(t.make()).reshape(-1).view(np.uint8)) for name, t in tensors.items()}

for name in ("qwen3_moe", "qwen3_5_moe"):
    directory = checkpoint(golden(name), Path(sys.argv[2]) / name)
    model = hf.load_model(directory)
    source = hf_files.SafetensorFiles(directory)
    found = resolve(source, model.cfg, model.vocab_size)
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=1, expert=2))
    placed = nnx.to_pure_dict(sharding.shardings(nnx.state(model, nnx.Param), logical_axes(model), mesh))
    params = read(source, found, model.cfg, model.vocab_size, placed)
    assert all(params[n].sharding == placed[n] for n in placed)
    half = params["expert_up"].addressable_shards[0].data.shape
    assert half[1] * 2 == model.cfg.experts and half[2] * 2 == model.cfg.width
    alone = params_of(model)
    assert all(np.array_equal(params[n], alone[n]) for n in alone)
    assert content(params, model, found.origin) == content(alone, model, found.origin)
print("done")
"""


def test_every_device_has_its_share(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr[-2000:]
