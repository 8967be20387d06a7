"""Memory of a learner's gradient with log-probs in chunks, and with scores of all tokens at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trace_jax.bench.learner_batches import Shape
from trace_jax.config import GRPOConfig, PolicyConfig
from trace_jax.learner import objectives, packing
from trace_jax.learner.step import LogprobFn, transformer_logprobs
from trace_jax.policy.transformer import Transformer

SHAPE = Shape(rows=16, row_length=512)  # 8k tokens


def peak_bytes(policy: PolicyConfig, vocab_size: int) -> dict[str, int]:
    """What the compiled gradient of one micro-batch of `SHAPE` needs, by way of taking log-probs: parameters, gradients
    and everything in between. Nothing is run.

    Returns:
        `chunked`: as the learner does; `full`: with the [rows, time, vocabulary] array.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(policy, vocab_size, rngs=nnx.Rngs(0))), nnx.Param)
    ways = {"chunked": transformer_logprobs(graphdef), "full": full_logprobs(graphdef)}
    return {name: _bytes(way, params) for name, way in ways.items()}


def full_logprobs(graphdef: nnx.GraphDef) -> LogprobFn:
    """The same numbers as `transformer_logprobs`, from the scores of all tokens at once."""

    def logprob_fn(params, batch):
        model = nnx.merge(graphdef, params)
        logp = jax.nn.log_softmax(model.logits(model(batch.ids, batch.positions, batch.segments)))
        chosen = jnp.take_along_axis(logp, jnp.roll(batch.ids, -1, axis=1)[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        chosen, entropy = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (chosen, entropy))
        inside = (batch.segments > 0) & (batch.positions > 0)
        return jnp.where(inside, chosen, 0.0), jnp.where(inside, entropy, 0.0)

    return logprob_fn


def _bytes(logprob_fn: LogprobFn, params: Any) -> int:
    objective = objectives.grpo_objective(GRPOConfig())

    def loss(params, batch):
        return objective(*logprob_fn(params, batch), batch)[0]

    batch = packing.empty_batch(SHAPE.row_length, SHAPE.rows)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, batch))
    memory = jax.jit(jax.value_and_grad(loss)).lower(*shapes).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
