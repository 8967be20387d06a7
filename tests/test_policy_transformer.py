"""The decoder against itself in other layouts: packed, padded, cached, chunked (sharded: test_learner_devices)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.policy import cache as kv_cache
from trace_jax.policy.transformer import Transformer, logical_axes, token_logprobs

CFG = PolicyConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=48, max_length=64)
VOCAB = 61
PROMPT, RESPONSE = 7, 9


def build(**changes) -> Transformer:
    return Transformer(dataclasses.replace(CFG, **changes), VOCAB, rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build()


def tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


S = tokens(PROMPT + RESPONSE, 1)


def layout(pieces: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row of (tokens, segment) pieces; segment 0 is padding. Longer rows are padded to 128: one compilation."""
    length = sum(len(piece) for piece, _ in pieces)
    if length > len(S):
        pieces = [*pieces, (np.zeros(128 - length, int), 0)]
    ids = np.concatenate([piece for piece, _ in pieces])
    positions = np.concatenate([np.arange(len(piece)) for piece, _ in pieces])
    segments = np.concatenate([np.full(len(piece), segment) for piece, segment in pieces])
    return ids[None], positions[None], segments[None]


@nnx.jit
def row_logprobs(model, ids, positions, segments):
    hidden = model(ids, positions, segments)
    return token_logprobs(model, hidden, jnp.roll(ids, -1, axis=1))[0]


def response_logprobs(model, pieces, start: int) -> np.ndarray:
    """Log-probabilities of S's response when S starts at column `start`."""
    first = start + PROMPT - 1
    return np.asarray(row_logprobs(model, *layout(pieces)))[0, first : first + RESPONSE]


PADDING = tokens(64, 9)
T = tokens(21, 2)
PLACES = {
    "left padded by 1": ([(PADDING[:1], 0), (S, 1)], 1),
    "left padded by 5": ([(PADDING[:5], 0), (S, 1)], 5),
    "left padded by 64": ([(PADDING[:64], 0), (S, 1)], 64),
    "right padded": ([(S, 1), (PADDING[:40], 0)], 0),
    "packed after": ([(T, 1), (S, 2)], len(T)),
    "packed before": ([(S, 1), (T, 2)], 0),
    "between, over blocks": ([(tokens(60, 5), 1), (S, 2), (T, 3)], 60),
}


@pytest.mark.parametrize("place", PLACES)
def test_logprobs_do_not_depend_on_the_place_in_the_row(model, place):
    """Case 3 of trainer, (a) against (b), (c), (d), (e)."""
    alone = response_logprobs(model, [(S, 1)], 0)
    np.testing.assert_allclose(response_logprobs(model, *PLACES[place]), alone, atol=1e-5)


@pytest.mark.parametrize("other", [tokens(21, 7), np.zeros(21, int)])
def test_a_neighbour_changes_nothing_at_all(model, other):
    """Case 3 of trainer: replacing T leaves S's log-probabilities bitwise unchanged."""
    for order in ((0, 1), (1, 0)):
        rows = []
        for neighbour in (T, other):
            pieces = [(S, 1), (neighbour, 2)]
            start = 0 if order == (0, 1) else len(neighbour)
            rows.append(response_logprobs(model, [pieces[i] for i in order], start))
        assert np.array_equal(*rows)


def test_gradients_packed_equal_alone(model):
    """Case 3 of trainer: parameter gradients of the masked loss, (a) against (d)."""
    graph, params = nnx.split(model, nnx.Param)

    @jax.jit
    def gradient(params, ids, positions, segments, mask):
        def loss(params):
            logprob = row_logprobs(nnx.merge(graph, params), ids, positions, segments)
            return -jnp.sum(jnp.where(mask, logprob, 0.0))

        return jax.grad(loss)(params)

    def of(pieces, start):
        mask = np.zeros(layout(pieces)[0].shape, bool)
        mask[0, start + PROMPT - 1 : start + PROMPT - 1 + RESPONSE] = True
        return gradient(params, *layout(pieces), mask)

    alone, packed = of([(S, 1)], 0), of([(T, 1), (S, 2), (PADDING, 0)], len(T))
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(packed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(a).max()))


decode = nnx.jit(Transformer.decode, static_argnames="attend", donate_argnames="cache")


def decode_all(model, chunks: list[int], length: int = 48, grow_at: int | None = None) -> np.ndarray:
    """Teacher-forced log-probabilities of S's tokens from the second, fed in chunks; a second row is shorter."""
    cache = kv_cache.new(model.cfg, 2, length, block=8)
    hidden, at = [], 0
    for size in chunks:
        ids = np.stack([S[at : at + size], PADDING[at : at + size]])
        positions = np.tile(np.arange(at, at + size), (2, 1))
        valid = np.stack([np.ones(size, bool), np.arange(at, at + size) < 5])
        if grow_at is not None and at + size > cache.length:
            cache = cache.grow(grow_at)
        h, cache, *_ = decode(model, ids, positions, valid, cache, attend=min(cache.length, 16))
        hidden.append(h[0])
        at += size
    logp = jax.nn.log_softmax(model.logits(jnp.concatenate(hidden)))
    return np.take_along_axis(np.asarray(logp)[:-1], S[1:, None], 1)[:, 0]


@pytest.mark.parametrize(
    ("chunks", "grow_at"),
    [([PROMPT] + [1] * RESPONSE, None), ([PROMPT, 1, 1, 4, 1, 1, 1], None), ([PROMPT, 1, 3, 1, 4], 16)],
    ids=["prefill and token by token", "turns that keep the cache", "cache grown between turns"],
)
def test_cached_decoding_equals_the_training_pass(model, chunks, grow_at):
    """Case 3 of trainer, (a) against (f) and (g)."""
    got = decode_all(model, chunks, length=8 if grow_at else 48, grow_at=grow_at)
    np.testing.assert_allclose(got[PROMPT - 1 :], response_logprobs(model, [(S, 1)], 0), atol=1e-5)


def test_tokens_that_are_not_there_write_nothing_and_rows_are_independent(model):
    cache = kv_cache.new(CFG, 3, 16, block=4)
    ids, positions = np.stack([S[:4], T[:4], S[:4]]), np.tile(np.arange(4), (3, 1))
    valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], bool)
    hidden, cache, *_ = decode(model, ids, positions, valid, cache)
    for k, v in zip(cache.k, cache.v, strict=True):
        assert not np.any(k[2]) and not np.any(v[2]) and not np.any(k[1, :, 0, :, 2:]) and not np.any(k[1, :, 1:])
        assert np.all(np.any(k[0, :, 0], (0, 1)))
    # One row of the batch, through its index, gives the same as the whole batch; the other rows stay as they were.
    empty = kv_cache.new(CFG, 3, 16, block=4)
    one, touched, *_ = decode(model, ids[1:2], positions[:1], valid[1:2], empty, rows=jnp.array([1]))
    np.testing.assert_allclose(one[0, :2], hidden[1, :2], atol=1e-6)
    assert not np.any(touched.k[0][0])
    moved = kv_cache.new(CFG, 4, 20, block=4).put(jnp.array([3, 9]), cache.take(jnp.array([1, 0])))
    assert np.array_equal(moved.k[1][3, :, :4], cache.k[1][1]) and not np.any(moved.v[0][:3])
    assert np.array_equal(moved.first(16).v[0][3], cache.v[0][1]) and moved.grow(22).length == 24


def test_a_decoding_step_updates_its_cache_in_place(model):
    cache = kv_cache.new(CFG, 2, 32)
    step = jax.jit(lambda ids, at, cache: model.decode(ids, at, ids == ids, cache), donate_argnums=2)
    compiled = step.lower(np.zeros((2, 1), int), np.zeros((2, 1), int), cache).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_variants_and_logical_axes(qk_norm, tied):
    model = build(qk_norm=qk_norm, tie_embeddings=tied)
    params = nnx.state(model, nnx.Param)
    seen = []
    jax.tree.map(lambda array, names: seen.append(array.ndim == len(names)), params, logical_axes(model))
    assert all(seen) and len(seen) == 11 + 2 * qk_norm + (not tied)
    assert np.all(np.isfinite(row_logprobs(model, *layout([(S, 1), (PADDING[:5], 0)]))))


def test_remat_and_depth_of_the_unrolled_loop_change_nothing(model, monkeypatch):
    def loss_gradient(model):
        graph, params = nnx.split(model, nnx.Param)
        return jax.jit(jax.grad(lambda p: row_logprobs(nnx.merge(graph, p), *layout([(S, 1)])).sum()))(params)

    want = jax.tree.leaves(loss_gradient(model))
    again = [jax.tree.leaves(loss_gradient(build(remat=kind))) for kind in ("dots", "full")]
    monkeypatch.setattr("trace_jax.policy.transformer.UNROLL", 0)
    looped = jax.tree.leaves(loss_gradient(build(norm_eps=1.0000001e-6)))  # another config: another trace
    for other in (*again, looped):
        for a, b in zip(want, other, strict=True):
            np.testing.assert_allclose(b, a, atol=2e-5)


def test_token_logprobs_are_the_tempered_softmax_in_any_chunking(model):
    hidden = jax.random.normal(jax.random.key(0), (3, 7, CFG.width))
    targets = tokens(21, 4).reshape(3, 7)

    def direct(hidden):
        logp = np.asarray(jax.nn.log_softmax(model.logits(hidden) / 0.5), np.float64)
        return np.take_along_axis(logp, targets[..., None], -1)[..., 0], -(np.exp(logp) * logp).sum(-1)

    for chunk in (4, 21, 1024):
        logprob, entropy = token_logprobs(model, hidden, targets, temperature=0.5, chunk=chunk)
        np.testing.assert_allclose(logprob, direct(hidden)[0], atol=1e-5)
        np.testing.assert_allclose(entropy, direct(hidden)[1], atol=1e-5)
    gradients = [
        jax.grad(lambda h, c=chunk: jnp.sin(token_logprobs(model, h, targets, chunk=c)[0]).sum())(hidden)
        for chunk in (4, 1024)
    ]
    np.testing.assert_allclose(*gradients, atol=1e-5)


def test_bfloat16_stays_near_float32():
    """Case 3 of trainer: bfloat16 has a noise floor, reported here as a bound on the mean absolute difference."""
    exact, rough = build(), build(dtype="bfloat16")
    pieces = [(T, 1), (S, 2)]
    difference = np.abs(response_logprobs(exact, pieces, 21) - response_logprobs(rough, pieces, 21))
    assert difference.mean() < 0.05


@pytest.mark.parametrize(
    ("change", "word"), [({"kv_heads": 3}, "kv_heads"), ({"head_dim": 7}, "head_dim"), ({"dtype": "half"}, "dtype")]
)
def test_sizes_that_do_not_fit_are_refused(change, word):
    with pytest.raises(ConfigError, match=word):
        build(**change)
