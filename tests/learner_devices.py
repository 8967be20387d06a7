"""Runs on 8 virtual CPU devices, started by test_learner_devices.py; prints one JSON object.

Arguments: a file for the numbers of one device, written here; with a process id and an address it is read, by one of
two processes with four devices each, which share a mesh of eight.
"""

import json
import os
import pickle
import re
import sys
from dataclasses import replace

import jax

jax.config.update("jax_platforms", "cpu")
if len(sys.argv) > 2:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=int(sys.argv[2]))
else:
    jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from trace_jax.config import ConfigError, GRPOConfig, MeshConfig, OptimizerConfig, PolicyConfig  # noqa: E402
from trace_jax.learner import multihost, sharding  # noqa: E402
from trace_jax.learner.objectives import grpo_objective  # noqa: E402
from trace_jax.learner.packing import Sequence, pack, unpack  # noqa: E402
from trace_jax.learner.step import Learner, transformer_logprobs  # noqa: E402
from trace_jax.policy.transformer import Transformer, logical_axes  # noqa: E402

MESHES = {
    "data8": MeshConfig(),
    "fsdp8": MeshConfig(fsdp=8),
    "tensor2": MeshConfig(tensor=2),
    "expert4": MeshConfig(expert=4),
    "mixed": MeshConfig(data=2, fsdp=2, tensor=2),
}
CONFIG = PolicyConfig(layers=3, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
VOCABULARY, LENGTH, ROWS = 64, 40, 8


def sequences():
    rng = np.random.default_rng(0)
    out = []
    for i, n in enumerate(rng.integers(6, 40, 26)):
        mask = np.arange(n) >= 3
        s = Sequence(rng.integers(0, VOCABULARY, n), mask, float(rng.normal()), -4.0 - 0.2 * rng.random(n))
        if i % 2:  # these were sampled from 7 ids a token
            others = rng.integers(0, VOCABULARY, (n, 6))
            s = replace(s, kept=np.concatenate([s.ids[:, None], others], axis=1))
        out.append(s)
    return out


def learner_on(model, mesh):
    objective = GRPOConfig(aggregation="seq_mean_token_mean", entropy_coefficient=0.01)
    optimizer = OptimizerConfig(learning_rate=0.1, warmup_steps=0, eps=1.0)
    logprobs = transformer_logprobs(nnx.graphdef(model), chunk=16)  # a device has up to 80 tokens: further chunks too
    return Learner(logprobs, grpo_objective(objective), optimizer, 10, mesh, logical_axes(model))


def whole(tree, mesh):
    """Arrays of all devices of all processes on this host."""
    replicated = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return [np.asarray(x) for x in jax.tree.leaves(replicated)]


def trained(model, mesh):
    """Log-probs, gradients, losses of three steps and the parameters after them; the learner, its last state, and the
    compiled text of the gradient."""
    batches = pack(sequences(), LENGTH, ROWS, top_k=7)
    learner = learner_on(model, mesh)
    state = learner.init(nnx.state(model, nnx.Param))
    numbers = {"scores": learner.with_old(state.params, batches)[0].old_logprobs}
    accumulate = learner.lowered(state.params, batches[0]).compile()
    zeros, _, apply = learner._programs
    learner._programs = zeros, accumulate, apply  # compiled once, for its text and for its numbers
    numbers["gradients"] = whole(learner.gradients(state.params, batches), mesh)
    numbers["losses"] = []
    for _ in range(3):
        state, metrics = learner.step(state, batches)
        numbers["losses"] += [metrics["loss"], metrics["grad_norm"], metrics["entropy"]]
    numbers["params"] = whole(state.params, mesh)
    return numbers, learner, state, accumulate.as_text()


def differences(got, want):
    """Largest difference of each kind of number, relative to the largest of an array."""

    def one(a, b):
        return float(np.abs(np.asarray(a) - b).max() / max(np.abs(b).max(), 1e-3))

    out = {k: max(one(a, b) for a, b in zip(got[k], want[k], strict=True)) for k in ("gradients", "params", "losses")}
    return out | {"scores": one(got["scores"], want["scores"])}


def collectives(text):
    """(kind, shapes of its results, whether it is in a loop over layers or chunks) of every collective of a program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = []
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line):
            shapes = [(t, [int(n) for n in d.split(",") if n]) for t, d in re.findall(r"(\w+)\[([\d,]*)\]", match[1])]
            found.append((match[2], shapes, "/while/body/" in line))
    return found


def on_one_process(model):
    out = {}
    want, *_ = trained(model, sharding.make_mesh(MeshConfig(), jax.devices()[:1]))
    out["moved"] = moved(model, want["params"])
    with open(sys.argv[1], "wb") as file:
        pickle.dump(want, file)
    for name, config in MESHES.items():
        mesh = sharding.make_mesh(config)
        got, learner, state, text = trained(model, mesh)
        out[name] = differences(got, want) | {
            "collectives": collectives(text),
            "query": local(state.params["query"][...]),
            "moments_split": sum(x.ndim > 1 and local(x) != x.shape for x in jax.tree.leaves(state.opt_state)),
        }
    half = Transformer(replace(CONFIG, dtype="bfloat16"), VOCABULARY, rngs=nnx.Rngs(0))
    learner, batch = learner_on(half, mesh), pack(sequences(), LENGTH, ROWS, top_k=7)[0]
    out["half"] = re.findall(
        r"sharding_constraint \S+ <@mesh, \[(.*?)\]> : tensor<(.*?)>", learner.lowered(state.params, batch).as_text()
    )
    try:
        sharding.place_batch(pack(sequences(), LENGTH, 4, top_k=7)[0], sharding.make_mesh(MeshConfig()))
    except ConfigError as error:
        out["rows_error"] = str(error)
    try:
        sharding.shardings(
            nnx.state(model, nnx.Param),
            logical_axes(model),
            sharding.make_mesh(MeshConfig(fsdp=2, tensor=3), jax.devices()[:6]),
        )
    except ConfigError as error:
        out["split_error"] = str(error)
    return out


def on_two_processes(model):
    with open(sys.argv[1], "rb") as file:
        want = pickle.load(file)
    got, learner, state, _ = trained(model, sharding.make_mesh(MESHES["mixed"]))
    batches = pack(sequences(), LENGTH, ROWS, top_k=7)
    lengths = [len(s) for s in sequences()]
    everywhere = np.concatenate(unpack(learner.logprobs(state.params, batches), lengths, LENGTH))
    return differences(got, want) | {
        "losses_seen": got["losses"],
        "processes": len({d.process_index for d in state.params["query"][...].sharding.device_set}),
        "scored": int(np.count_nonzero(everywhere)),
        "tokens": sum(n - 1 for n in lengths),
    }


def moved(model, params):
    """How far three steps went: what is compared must not be where it began."""
    start = jax.tree.leaves(nnx.state(model, nnx.Param))
    return min(float(np.abs(a - np.asarray(b)).max()) for a, b in zip(params, start, strict=True))


def local(array):
    return array.addressable_shards[0].data.shape


def main():
    model = Transformer(CONFIG, VOCABULARY, rngs=nnx.Rngs(0))
    out = on_two_processes(model) if len(sys.argv) > 2 else on_one_process(model)
    print(json.dumps(out))
    if len(sys.argv) > 2:
        sys.stdout.flush()
        multihost.part()
        os._exit(0)


if __name__ == "__main__":
    main()
