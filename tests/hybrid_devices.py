"""A policy with delta layers, experts and adapters on 8 virtual CPU devices; prints one JSON object. Started by
test_learner_hybrid.py."""

import json

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from helpers_hybrid import HYBRID, LORA, adapters  # noqa: E402

from trace_jax.config import BatchConfig, MeshConfig, OptimizerConfig  # noqa: E402
from trace_jax.learner import sharding  # noqa: E402
from trace_jax.learner.objectives import sft_objective  # noqa: E402
from trace_jax.learner.packing import Sequence, pack  # noqa: E402
from trace_jax.learner.probe import Probe, Question, transformer_scores  # noqa: E402
from trace_jax.learner.step import Learner, transformer_logprobs  # noqa: E402
from trace_jax.policy import lora  # noqa: E402
from trace_jax.policy.transformer import Transformer, logical_axes  # noqa: E402

VOCABULARY, LENGTH, ROWS = 64, 40, 4
RNG = np.random.default_rng(0)
SEQUENCES = [Sequence(RNG.integers(0, VOCABULARY, n), np.arange(n) >= 2) for n in RNG.integers(6, LENGTH, 7)]
QUESTIONS = [Question(RNG.integers(0, VOCABULARY, n), [1, 7, n - 2, n], [5], [7, 8]) for n in (20, 12, 15, 17)]


def on(mesh, model, pairs):
    """Gradients and loss of all parameters, those of adapters alone, and the probe's values, on a mesh."""
    graph, base = nnx.split(model, nnx.Param)
    axes = logical_axes(model)
    batches = pack(SEQUENCES, LENGTH, ROWS)
    out = {}
    placed = sharding.place(base, sharding.shardings(base, axes, mesh))
    frozen = lora.Frozen(placed, lora.scale(LORA))
    for name, params, names, fixed in (
        ("all", base, axes, None),
        ("adapters", pairs, lora.axes(HYBRID, LORA), frozen),
    ):
        learner = Learner(transformer_logprobs(graph), sft_objective(), OptimizerConfig(), 2, mesh, names, fixed)
        params = learner.place(params)
        out[name] = [np.asarray(x) for x in jax.tree.leaves(learner.gradients(params, batches))]
    probe = Probe(transformer_scores(graph), pairs, mesh, lora.axes(HYBRID, LORA), BatchConfig(LENGTH, ROWS), frozen)
    out["probe"] = probe(QUESTIONS)
    return out


def main():
    model, pairs = Transformer(HYBRID, VOCABULARY, rngs=nnx.Rngs(0)), adapters()
    want = on(sharding.make_mesh(MeshConfig(), jax.devices()[:1]), model, pairs)
    got = on(sharding.make_mesh(MeshConfig(fsdp=2, tensor=2, expert=2)), model, pairs)
    print(
        json.dumps(
            {
                name: max(
                    float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3))
                    for a, b in zip(got[name], want[name], strict=True)
                )
                for name in want
            }
            | {"moved": min(float(np.abs(x).max()) for x in want["all"])}
        )
    )


if __name__ == "__main__":
    main()
