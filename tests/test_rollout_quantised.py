"""Matrices of a sampler in 8 bits: how they are rounded, and that the rounded policy is what is sampled from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import HYBRID, LORA, adapters
from helpers_rollout import CONFIG, STOP, VOCABULARY, live, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.learner.packing import Sequence, pack, unpack
from trace_jax.learner.step import transformer_logprobs
from trace_jax.policy import lora, parameters
from trace_jax.policy.quantised import LARGE, Quantised, in_use, quantise
from trace_jax.policy.transformer import Transformer
from trace_jax.rollout.engine import Engine

ROWS = 8
POLICY = dataclasses.replace(HYBRID, layers=2)
MODEL = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
INT8 = dataclasses.replace(CONFIG, slots=ROWS, weights="int8")


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([(1, 3, 5), (2, 7, 1), (2, 3, 4, 6)]), st.floats(1e-6, 1e4))
def test_rounding_is_at_most_half_a_step(seed, shape, size):
    weight = size * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    weight[..., 0] = 0  # a column of zeros stays one
    found = quantise(jnp.asarray(weight))
    entries, scale = np.asarray(found.entries), np.asarray(found.scale)
    assert entries.dtype == np.int8 and scale.shape == (*shape[:-2], 1, shape[-1])
    back = np.asarray(found.astype("float32"))
    assert np.all(np.abs(back - weight) <= 0.5001 * scale + 1e-12) and not back[..., 0].any()
    np.testing.assert_allclose(scale[..., 1:], np.abs(weight).max(-2, keepdims=True)[..., 1:] / 127, rtol=1e-5)


def rounded(params):
    """The policy with rounded matrices, as an ordinary policy in float32."""
    return jax.tree.map(
        lambda x: x.astype("float32") if isinstance(x, Quantised) else x,
        in_use(params, "float32", "int8"),
        is_leaf=lambda x: isinstance(x, Quantised),
    )


def test_what_is_large_is_rounded_and_nothing_else():
    params = nnx.state(MODEL, nnx.Param)
    held = in_use(params, "bfloat16", "int8")
    large = [name for name in params if isinstance(held[name].get_value(), Quantised)]
    assert set(large) == {name for name in params if name in LARGE} and "expert_down" in large and "query" in large
    assert {str(x.dtype) for name in ("embedding", "router") for x in jax.tree.leaves(held[name])} == {"bfloat16"}
    declared = parameters.declare(POLICY, VOCABULARY)
    assert all(declared[name].axes[0] == "layers" and len(declared[name].shape) > 2 for name in large)
    size = sum(x.nbytes for name in large for x in jax.tree.leaves(held[name]))
    # a byte for each entry, and a scale for each column of 16 or more
    assert size <= sum(params[name].get_value().size for name in large) * (1 + 4 / 16)


def scores(model_params, lives):
    """Log-probabilities of the training pass in float32."""
    items = []
    for life in lives:
        mask = np.zeros(len(life.ids), bool)
        mask[[at for at, _ in life.sampled]] = True
        items.append(Sequence(np.array(life.ids), mask))
    batch = pack(items, CONFIG.context, ROWS)
    score = transformer_logprobs(nnx.graphdef(MODEL))
    found = [jax.jit(score)(model_params, row)[0] for row in batch]
    return items, unpack([np.asarray(x) for x in found], [len(s) for s in items], CONFIG.context)


@pytest.mark.parametrize("with_adapters", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampled_from_the_rounded_policy(with_adapters):
    """The training pass over the rounded matrices, written out in float32, gives each token the sampler's probability:
    layers with attention, with a delta net and with experts, alone or under adapters. The exact policy does not."""
    params = nnx.state(MODEL, nnx.Param)
    if with_adapters:
        frozen, pairs = lora.Frozen(params, lora.scale(LORA)), adapters(POLICY)
        engine = Engine(nnx.eval_shape(lambda: MODEL), INT8, STOP, lanes=1, frozen=frozen)
        engine.set_params(pairs, 1)
        exact, changed = (pairs, frozen), (pairs, frozen._replace(base=rounded(params)))
    else:
        engine = Engine(MODEL, INT8, STOP, lanes=1)
        exact, changed = params, rounded(params)
    lives = live(engine, prompts_of(ROWS), range(ROWS), turns=2)
    sampled = np.concatenate([[x for _, x in life.sampled] for life in lives])

    def of(p):
        items, got = scores(p, lives)
        return np.concatenate([g[np.asarray(s.loss_mask)] for s, g in zip(items, got, strict=True)])

    np.testing.assert_allclose(of(changed), sampled, atol=1e-4)
    assert 1e-3 < np.median(np.abs(of(exact) - sampled)) < 0.05  # the largest is of a token that had another expert
