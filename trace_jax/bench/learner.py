"""Learner throughput: tokens a second of whole optimizer steps, and the share of the measured matmul peak."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from trace_jax.bench import measure
from trace_jax.config import PolicyConfig, RunConfig
from trace_jax.learner import objectives, packing, sharding
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy.transformer import Transformer, logical_axes

MICROBATCHES = 2  # in one optimizer step: accumulation is part of what is measured


def flops_per_token(policy: PolicyConfig, vocab_size: int, attended: float) -> float:
    """Model FLOPs of one token in training: forward, and twice that for the backward pass.

    Two per weight and token in every matmul, plus scores and values over the tokens attended. Recomputation (remat,
    chunked logits), masked-out attention and padding are the implementation's own cost and are not counted.

    Args:
        attended: mean number of tokens a token attends to, itself included.
    """
    query, shared = policy.heads * policy.head_dim, policy.kv_heads * policy.head_dim
    layer = policy.width * (2 * query + 2 * shared) + 3 * policy.width * policy.mlp_width
    weights = policy.layers * layer + policy.width * vocab_size
    attention = policy.layers * 2 * query * attended
    return 3 * 2 * (weights + attention)


def _sequences(row_length: int, rows: int, vocab_size: int) -> list[packing.Sequence]:
    """Random sequences a tenth to a half of a row long, as many as fit `rows` rows."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while True:
        lengths.append(int(rng.integers(max(row_length // 10, 2), row_length // 2 + 1)))
        if max(row for row, _ in packing.layout(lengths, row_length)) >= rows:
            break
    result = []
    for length in lengths[:-1]:
        mask = rng.random(length) < 0.4
        mask[0] = False
        result.append(
            packing.Sequence(
                ids=rng.integers(0, vocab_size, length).astype(np.int32),
                loss_mask=mask,
                advantages=np.full(length, rng.standard_normal(), np.float32),
                old_logprobs=np.full(length, -np.log(vocab_size), np.float32),
            )
        )
    return result


def run(config: RunConfig, repeats: int) -> dict[str, Any]:
    """GRPO optimizer steps at the configured shapes, on random tokens (speed does not depend on their values)."""
    policy, shape, vocab_size = config.policy, config.grpo.microbatch, config.tokenizer.vocab_size
    mesh = sharding.make_mesh(config.mesh)
    model = Transformer(policy, vocab_size, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    learner = Learner(
        transformer_logprobs(graphdef, config.rollout.temperature),
        objectives.grpo_objective(config.grpo),
        config.grpo.optimizer,
        total_steps=1000,
        mesh=mesh,
        axes=logical_axes(model),
    )
    sequences = _sequences(shape.row_length, shape.rows * MICROBATCHES, vocab_size)
    batches = packing.pack(sequences, shape.row_length, shape.rows)
    lengths = np.array([len(s) for s in sequences])
    tokens = int(lengths.sum())
    attended = float((lengths * (lengths + 1) / 2).sum() / tokens)
    state = learner.init(params)

    start = time.perf_counter()
    state, _ = learner.step(state, batches)
    compile_seconds = time.perf_counter() - start

    def work():
        nonlocal state
        state, _ = learner.step(state, batches)
        return jax.tree.leaves(state.params)

    taken = measure.spread(measure.seconds(work, repeats))
    floor = measure.matmul_peak(policy.dtype, repeats)
    each = flops_per_token(policy, vocab_size, attended)
    rate = tokens / taken["median"]
    positions = len(batches) * shape.rows * shape.row_length
    return {
        "sizes": {
            "parameters": sum(p.size for p in jax.tree.leaves(state.params)),
            "vocab_size": vocab_size,
            "rows": shape.rows,
            "row_length": shape.row_length,
            "microbatches": len(batches),
            "sequences": len(sequences),
            "mean_length": float(lengths.mean()),
            "padding": 1 - tokens / positions,
        },
        "floor": floor,  # of one device
        "measured": {
            "seconds": taken,
            "first_step_seconds": compile_seconds,
            "tokens_per_second": rate,
            "flops_per_token": each,
            "gflops": rate * each / 1e9,
            "programs": learner.compilations(),
        },
        "share": {"of_matmul_peak": rate * each / 1e9 / (floor["matmul_gflops"] * mesh.size)},
    }
