"""Compute type, memory and work of the gradient of a transformer policy."""

import re
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trace_jax.config import GRPOConfig, MeshConfig, OptimizerConfig, PolicyConfig
from trace_jax.learner import sharding
from trace_jax.learner.objectives import grpo_objective
from trace_jax.learner.packing import Sequence, pack
from trace_jax.learner.step import Learner, transformer_logprobs
from trace_jax.policy import transformer
from trace_jax.policy.placement import Placement
from trace_jax.policy.transformer import Transformer, logical_axes, token_logprobs

TINY = PolicyConfig(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=48)
VOCABULARY = 64


class Head:
    """A policy without a body."""

    def __init__(self, matrix):
        self.output_matrix = lambda: matrix


def learner_of(config):
    model = Transformer(config, VOCABULARY, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    objective = grpo_objective(GRPOConfig(clip_low=0.9, clip_high=9.0))  # a clip near a ratio would magnify rounding
    optimizer = OptimizerConfig(warmup_steps=0)
    return Learner(transformer_logprobs(graphdef), objective, optimizer, 10, mesh, logical_axes(model)), params


def batches(row_length=32, rows=2, count=6):
    rng = np.random.default_rng(0)
    return pack(
        [
            Sequence(rng.integers(0, VOCABULARY, n), np.arange(n) >= 3, float(rng.normal()), -4.0)
            for n in rng.integers(6, 30, count)
        ],
        row_length,
        rows,
    )


def test_bfloat16_computes_and_float32_keeps():
    """Case 3 of trainer, bfloat16: parameters, moments and accumulated gradients are float32 and no wider than what
    bfloat16 activations make of them."""
    exact, params = learner_of(TINY)
    rough, _ = learner_of(replace(TINY, dtype="bfloat16"))
    state = rough.init(params)
    accumulated = rough.gradients(state.params, batches())
    want = exact.gradients(exact.place(params), batches())
    differ = False
    for got, reference in zip(jax.tree.leaves(accumulated), jax.tree.leaves(want), strict=True):
        assert got.dtype == jnp.float32
        differ |= not np.array_equal(got, reference)
        assert np.linalg.norm(got - reference) < 0.05 * np.linalg.norm(reference)
        # not bfloat16 numbers in wide storage: sums of products were kept in float32
        assert np.mean(np.asarray(got.astype(jnp.bfloat16).astype(jnp.float32) == got)) < 0.5
    assert differ
    state, metrics = rough.step(state, batches())
    assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim} == {jnp.dtype("float32")}
    _, expected = exact.step(exact.init(params), batches())
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_only_wanted_tokens_are_scored(blocks, share):
    """Values and gradients are those of scoring everything; wanted tokens fill none, some or more than all of the
    chunks whose scores are stored, and lie unevenly over the blocks."""
    rng = np.random.default_rng(1)
    hidden, matrix = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 19, 8), (VOCABULARY, 8)))
    targets, mix = rng.integers(0, VOCABULARY, (4, 19)), rng.normal(size=(2, 4, 19)).astype(np.float32)
    wanted = rng.random((4, 19)) < share
    wanted[0] &= share == 1.0

    def loss(hidden, matrix, **kwargs):
        scored = jnp.stack(token_logprobs(Head(matrix), hidden, targets, 0.7, 8, **kwargs))
        return jnp.sum(jnp.where(wanted, mix * scored, 0.0)), scored

    run = jax.jit(
        lambda hidden, matrix: [
            jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, matrix, **kwargs)
            for kwargs in ({}, {"wanted": wanted, "placement": Placement(blocks)})
        ]
    )
    ((_, every), gradients), ((_, some), got) = run(hidden, matrix)
    np.testing.assert_allclose(some, np.where(wanted, every, 0.0), atol=1e-5)
    for a, b in zip(got, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_peak_memory_of_chunked_logprobs():
    """8k tokens over 32k ids: the gradient needs a fraction of what scores of all tokens at once need, and no array of
    that size is in the program."""
    tokens, width, vocabulary = 8192, 256, 32768

    def chunked(hidden, matrix, targets):
        return sum(jnp.sum(x) for x in token_logprobs(Head(matrix), hidden, targets, wanted=targets > 5))

    def full(hidden, matrix, targets):
        logp = jax.nn.log_softmax(hidden @ matrix.T)
        chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)
        return jnp.sum(chosen) - jnp.sum(jnp.exp(logp) * logp)

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((16, 512, width), "float32"), ((vocabulary, width), "float32"), ((16, 512), "int32"))
    ]
    compiled = [jax.jit(jax.grad(f, (0, 1))).lower(*shapes).compile() for f in (chunked, full)]
    memory = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    assert memory[1] > 4 * tokens * vocabulary and memory[0] < memory[1] / 4
    largest = [max(prod(map(int, s.split(","))) for s in re.findall(r"f32\[([\d,]+)\]", c.as_text())) for c in compiled]
    assert largest[1] >= tokens * vocabulary and largest[0] <= tokens * vocabulary / 8


@pytest.mark.slow
def test_remat_trades_memory(monkeypatch):
    """Less is kept of every layer: "full" below "dots" below "none" (values: test_policy_transformer)."""
    monkeypatch.setattr(transformer, "UNROLL", 0)
    memory = {}
    for remat in ("none", "dots", "full"):
        learner, params = learner_of(replace(TINY, layers=6, remat=remat))
        compiled = learner.lowered(learner.place(params), batches(64, 32)[0]).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
    assert memory["full"] < 0.7 * memory["dots"] < 0.6 * memory["none"]
