"""Tokens divided over the devices that work on the same rows, as on accelerators: the numbers of one device."""

import json
import os
import subprocess
import sys

import numpy as np


def numbers():
    import jax
    import jax.numpy as jnp
    from flax import nnx

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)

    from trace_jax.config import MeshConfig, PolicyConfig
    from trace_jax.learner import sharding
    from trace_jax.policy.transformer import Transformer, logical_axes

    sharding.DIVIDES_TOKENS.add("cpu")  # one group of devices: nothing can wait for another one
    policy = PolicyConfig(layers=2, width=16, heads=2, kv_heads=2, head_dim=8, mlp_width=24, remat="full")
    model = Transformer(policy, 32, rngs=nnx.Rngs(0))
    structure, params = nnx.split(model)
    rng = np.random.default_rng(0)
    ids, wanted = rng.integers(0, 32, (2, 12)), jnp.asarray(rng.normal(size=(2, 12, 16)), jnp.float32)
    positions, segments = np.tile(np.arange(12), (2, 1)), np.ones((2, 12), np.int32)

    def loss(params):
        hidden = nnx.merge(structure, params)(ids, positions, segments, sharding.placement())
        return jnp.sum(hidden * wanted)

    one = jax.value_and_grad(loss)(params)
    mesh = sharding.make_mesh(MeshConfig(tensor=2), jax.devices())
    placed = jax.device_put(params, sharding.shardings(params, logical_axes(model), mesh))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(jax.value_and_grad(loss)).lower(placed).compile()
    two = program(placed)

    def relative(a, b):
        return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max())

    apart = jax.tree.map(relative, one, two)
    print(json.dumps({"apart": max(jax.tree.leaves(apart)), "split": "f32[12,16]" in program.as_text()}))


def test_divided_tokens_have_the_numbers_of_one_device():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["apart"] < 1e-5 and found["split"]  # 24 tokens, 12 on each device between the parts of a layer


if __name__ == "__main__":
    numbers()
