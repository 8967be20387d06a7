"""Runs on 8 virtual CPU devices, started by test_learner_devices.py; prints one JSON object."""

import json
from dataclasses import replace

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from trace_jax.config import ConfigError, GRPOConfig, MeshConfig, OptimizerConfig, PolicyConfig  # noqa: E402
from trace_jax.learner import sharding  # noqa: E402
from trace_jax.learner.objectives import grpo_objective  # noqa: E402
from trace_jax.learner.packing import Sequence, pack, unpack  # noqa: E402
from trace_jax.learner.step import Learner, transformer_logprobs  # noqa: E402
from trace_jax.policy.transformer import Transformer, logical_axes  # noqa: E402

MESHES = {
    "one": (1, MeshConfig()),
    "data2": (2, MeshConfig()),
    "fsdp2": (2, MeshConfig(fsdp=2)),
    "tensor2": (2, MeshConfig(tensor=2)),
    "all8": (8, MeshConfig(data=2, fsdp=2, tensor=2)),
}


def main():
    config = PolicyConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=64)
    model = Transformer(config, 64, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    axes = logical_axes(model)
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 30, 13).tolist()
    sequences = [
        Sequence(rng.integers(0, 64, n), np.arange(n) >= 3, float(rng.normal()), -4.0 - 0.2 * rng.random(n))
        for n in lengths
    ]
    for i in range(0, len(sequences), 2):  # these were sampled from 7 ids a token
        others = rng.integers(0, 64, (lengths[i], 6))
        sequences[i] = replace(sequences[i], kept=np.concatenate([sequences[i].ids[:, None], others], axis=1))
    batches = pack(sequences, 32, 4, top_k=7)
    out = {}
    reference = None
    for name, (devices, mesh_config) in MESHES.items():
        mesh = sharding.make_mesh(mesh_config, jax.devices()[:devices])
        optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=0, eps=1.0)
        aggregation = GRPOConfig(aggregation="seq_mean_token_mean", entropy_coefficient=0.01)
        learner = Learner(transformer_logprobs(graphdef), grpo_objective(aggregation), optimizer, 10, mesh, axes)
        state = learner.init(params)
        scores = np.concatenate(unpack(learner.logprobs(state.params, batches), lengths, 32))
        state, metrics = learner.step(state, batches)
        state, metrics = learner.step(state, batches)
        leaves = [np.asarray(x) for x in jax.tree.leaves(state.params)]
        moments = jax.tree.leaves(state.opt_state)
        result = {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "compilations": learner.compilations(),
            "query": [str(state.params["query"][...].sharding.spec), list(local(state.params["query"][...]))],
            "moments_split": sum(x.ndim > 1 and local(x) != x.shape for x in moments),
        }
        if reference is None:
            reference = (scores, leaves)
        result["logprob_error"] = float(np.abs(scores - reference[0]).max())
        result["param_error"] = max(float(np.abs(a - b).max()) for a, b in zip(leaves, reference[1], strict=True))
        out[name] = result
    try:
        sharding.place_batch(batches[0], sharding.make_mesh(MeshConfig()))
    except ConfigError as error:
        out["rows_error"] = str(error)
    try:
        sharding.shardings(params, axes, sharding.make_mesh(MeshConfig(fsdp=2, tensor=3), jax.devices()[:6]))
    except ConfigError as error:
        out["split_error"] = str(error)
    print(json.dumps(out))


def local(array):
    return array.addressable_shards[0].data.shape


if __name__ == "__main__":
    main()
