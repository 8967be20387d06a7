"""A policy with delta layers, experts and adapters against itself in other layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers_hybrid import HYBRID, LORA, adapters

from trace_jax.config import ConfigError, LoraConfig
from trace_jax.policy import cache as kv_cache
from trace_jax.policy import lora
from trace_jax.policy.transformer import Transformer, logical_axes

VOCAB, LENGTH = 61, 48
ROUNDING = 2e-4  # delta layers divide by the length of short vectors, which makes it larger
MODEL = Transformer(HYBRID, VOCAB, rngs=nnx.Rngs(0))
GRAPH, PARAMS = nnx.split(MODEL, nnx.Param)
PAIRS = adapters(count=2)
SCALE = lora.scale(LORA, 2)


@jax.jit
def full(params, ids, positions, segments, chosen, pairs=PAIRS):
    model = nnx.merge(GRAPH, params)
    return model(ids, positions, segments, adapters=lora.Adapters(pairs, SCALE, chosen))


def tokens(length, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def row(*pieces):
    """Ids, positions, segments and adapters of one row; a piece is (ids, segment, adapter)."""
    rest = LENGTH - sum(len(ids) for ids, _, _ in pieces)
    pieces = [*pieces, (np.zeros(rest, int), 0, 1)]
    streams = [(ids, np.arange(len(ids)), np.full(len(ids), s), np.full(len(ids), a)) for ids, s, a in pieces]
    return tuple(np.concatenate(stream)[None] for stream in zip(*streams, strict=True))


S, T = tokens(13, 1), tokens(17, 2)
ALONE = {adapter: full(PARAMS, *row((S, 1, adapter)))[0, : len(S)] for adapter in (-1, 0, 1)}


@pytest.mark.parametrize("adapter", [-1, 0, 1])
@pytest.mark.parametrize("neighbour", [-1, 0])
def test_a_sequence_does_not_depend_on_its_row_or_on_its_neighbours_adapter(adapter, neighbour):
    start = len(T)
    got = full(PARAMS, *row((T, 1, neighbour), (S, 2, adapter)))[0, start : start + len(S)]
    np.testing.assert_allclose(got, ALONE[adapter], atol=ROUNDING)


def test_adapters_differ_and_those_without_effect_change_nothing():
    assert all(np.abs(ALONE[a] - ALONE[b]).max() > 1e-2 for a, b in ((-1, 0), (-1, 1), (0, 1)))
    fresh = lora.init(HYBRID, LORA, jax.random.key(5), 2)
    off = full(PARAMS, *row((S, 1, 0)), fresh)[0, : len(S)]
    assert np.array_equal(off, ALONE[-1])  # to the last bit: what is added is zero


@pytest.mark.parametrize("adapter", [0, 1])
def test_merged_weights_do_what_the_adapter_does(adapter):
    whole = lora.merged(nnx.to_pure_dict(PARAMS), PAIRS, LORA.alpha / LORA.rank, adapter)
    params = jax.tree.map(lambda x: x, PARAMS)
    nnx.replace_by_pure_dict(params, whole)
    np.testing.assert_allclose(full(params, *row((S, 1, -1)))[0, : len(S)], ALONE[adapter], atol=ROUNDING)


def test_a_base_in_bfloat16_is_not_trained_and_adapters_are():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)

    @jax.jit
    def gradient(pairs, base):
        return jax.grad(lambda p: jnp.sum(jnp.square(full(base, *row((S, 1, 1)), p))))(pairs)

    found = gradient(PAIRS, half)
    for name, pair in found.items():
        for factor in pair:
            assert factor.dtype == jnp.float32
            assert not np.any(factor[:, 0]), name  # nobody used adapter 0
            assert np.all(np.isfinite(factor)) and np.any(factor[:, 1]), name


@jax.jit
def step(params, ids, positions, valid, cache, chosen):
    model = nnx.merge(GRAPH, params)
    return model.decode(ids, positions, valid, cache, adapters=lora.Adapters(PAIRS, SCALE, chosen))


def test_decoding_equals_the_training_pass_and_its_experts_replay_it():
    """Rows of three adapters, chunks of which one row has less, then token by token; the second row begins late."""
    ids = np.stack([S, S, T[: len(S)]])
    chosen = np.array([-1, 1, 0])
    cache = kv_cache.new(HYBRID, 3, 64, block=16)
    hidden, experts = np.zeros((3, len(S), HYBRID.width)), np.zeros((HYBRID.layers, 3, len(S), 2), int)
    fed = np.zeros(3, int)
    for width, counts in ((8, (8, 0, 5)), (8, (1, 8, 3)), *((1, (1, 1, 1)),) * 9):
        counts = np.minimum(counts, len(S) - fed)
        offsets = np.arange(width)
        at = np.minimum(fed[:, None] + offsets, len(S) - 1)
        valid = offsets < counts[:, None]
        h, cache, routes, _ = step(PARAMS, np.take_along_axis(ids, at, 1), fed[:, None] + offsets, valid, cache, chosen)
        for i in range(3):
            hidden[i, fed[i] : fed[i] + counts[i]] = h[i, : counts[i]]
            experts[:, i, fed[i] : fed[i] + counts[i]] = routes[:, i, : counts[i]]
        fed += counts
    assert np.all(fed == len(S))
    streams = [np.concatenate(x) for x in zip(*(row((i, 1, c)) for i, c in zip(ids, chosen, strict=True)), strict=True)]
    want = full(PARAMS, *streams)[:, : len(S)]
    np.testing.assert_allclose(hidden, want, atol=ROUNDING)

    def passed(experts):
        padded = np.full((HYBRID.layers, 3, LENGTH, 2), -1)
        padded[:, :, : len(S)] = experts
        streams_of = lora.Adapters(PAIRS, SCALE, jnp.asarray(streams[3]))
        return nnx.jit(lambda m, e: m.run(*streams[:3], adapters=streams_of, experts=e))(MODEL, padded)

    replayed, load = passed(experts)
    np.testing.assert_allclose(replayed[:, : len(S)], want, atol=ROUNDING)
    counts = np.stack([np.bincount(e.reshape(-1), minlength=HYBRID.experts) for e in experts])
    np.testing.assert_array_equal(load, counts)
    assert np.abs(passed((experts + 1) % HYBRID.experts).hidden[:, : len(S)] - want).max() > 1e-2


def test_axes_fit_the_parameters_and_the_adapters():
    seen = []
    jax.tree.map(lambda p, names: seen.append(p.ndim == len(names)), PARAMS, logical_axes(MODEL))
    jax.tree.map(lambda p, names: seen.append(p.ndim == len(names)), PAIRS, lora.axes(HYBRID, LORA))
    assert all(seen) and len(seen) == len(jax.tree.leaves((PARAMS, PAIRS)))


def test_adapters_that_do_not_fit_together():
    one, other = adapters(), adapters(config=LoraConfig(rank=2, targets=("query",)))
    both = lora.stacked([one, adapters(seed=2)])
    assert both["query"].a.shape[1] == 2 and np.array_equal(both["query"].b[:, 0], one["query"].b[:, 0])
    with pytest.raises(ConfigError, match="different targets or ranks"):
        lora.stacked([one, other])
