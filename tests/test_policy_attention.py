"""Attention against the formula written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.policy import attention


def reference(q, k, v, segments):
    """softmax(q k / sqrt(h)) v over the allowed keys, one query at a time."""
    rows, time, heads, width = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape)
    for b in range(rows):
        for t in range(time):
            keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
            for h in range(heads):
                score = k[b, keys, h // group] @ q[b, t, h] / np.sqrt(width)
                weight = np.exp(score - score.max())
                out[b, t, h] = weight @ v[b, keys, h // group] / weight.sum()
    return out


def arrays(time, heads=4, kv_heads=2, width=8, rows=2, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(rows, time, n, width)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    segments = np.sort(rng.integers(1, 4, (rows, time)), axis=1)
    segments[0, -3:] = 0
    return q, k, v, segments


@pytest.mark.parametrize(("time", "heads", "kv_heads"), [(5, 4, 2), (64, 2, 2), (100, 4, 1), (150, 2, 1)])
def test_packed_attention_is_the_formula(time, heads, kv_heads):
    q, k, v, segments = arrays(time, heads, kv_heads)
    got = attention.packed_attention(q, k, v, attention.packed_bias(segments))
    np.testing.assert_allclose(got, reference(q, k, v, segments), atol=1e-5)


@pytest.mark.parametrize(("time", "rows", "at_once"), [(7, 1, None), (130, 1, 1), (600, 1, None), (130, 6, 2)])
def test_hand_written_gradient_equals_automatic(time, rows, at_once):
    q, k, v, segments = arrays(time, width=4, rows=rows)
    bias = attention.packed_bias(segments)

    def ours(q, k, v):
        return jnp.sum(jnp.sin(attention.packed_attention(q, k, v, bias, at_once)))

    def plain(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, mask=bias[:, None] == 0)
        return jnp.sum(jnp.sin(out))

    got, want = (jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (ours, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_rows_at_a_time():
    """As many as the cache holds, in equal parts; the result is that of all together."""
    assert [attention.rows_in_cache(rows, 512, 4) for rows in (1, 2, 3, 32)] == [1, 2, 1, 2]
    assert attention.rows_in_cache(8, 256, 4) == 4 and attention.rows_in_cache(4, 8192, 64) == 1
    q, k, v, segments = arrays(70, rows=6)
    bias = attention.packed_bias(segments)
    want = attention.packed_attention(q, k, v, bias)
    for rows in (1, 3, 6):
        np.testing.assert_allclose(attention.packed_attention(q, k, v, bias, rows), want, atol=1e-6)


def test_large_scores_stay_finite():
    q, k, v, segments = arrays(70)
    value, gradient = jax.value_and_grad(
        lambda q: attention.packed_attention(q, k, v, attention.packed_bias(segments)).sum()
    )(200 * q)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def in_blocks(k, v, blocks, block=8):
    """Keys and values [B, S, K, h] as the cache holds them; what lies beyond S is arbitrary."""
    beyond = ((0, 0), (0, blocks * block - k.shape[1]), (0, 0), (0, 0))
    k, v = (np.pad(x, beyond, constant_values=7.0).reshape(len(x), blocks, block, *x.shape[2:]) for x in (k, v))
    return k.transpose(0, 3, 1, 4, 2), v.transpose(0, 3, 1, 2, 4)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 1, 16), (4, 2, 32), (4, 2, 64), (16, 8, 128)])
@pytest.mark.parametrize("time", [1, 16])
def test_numbers_do_not_depend_on_the_length_of_the_cache(heads, kv_heads, width, time):
    """Bit for bit: what a row samples must not change because a longer row is decoded beside it."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(8, time, heads, width)).astype(np.float32)
    k, v = rng.normal(size=(2, 8, 100, kv_heads, width)).astype(np.float32)
    positions = np.tile(np.arange(100 - time, 100), (8, 1))
    attend = jax.jit(attention.cache_attention)
    results = [np.asarray(attend(q, *in_blocks(k, v, blocks, 64), positions)) for blocks in (2, 3, 4, 8, 14)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_long_chunks_attend_a_part_at_a_time(monkeypatch):
    """Equal to the whole chunk, whatever the length of the cache to the last bit, and no scores of all of it."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 16, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, 3, 40, 2, 8)).astype(np.float32)
    positions = np.tile(np.arange(24, 40), (3, 1))
    whole = attention.cache_attention(q, *in_blocks(k, v, 5), positions)
    monkeypatch.setattr(attention, "QUERIES", 4)
    short, long = (jax.jit(attention.cache_attention)(q, *in_blocks(k, v, n), positions) for n in (5, 9))
    np.testing.assert_allclose(short, whole, atol=1e-6)
    np.testing.assert_array_equal(short, long)
    text = str(jax.make_jaxpr(attention.cache_attention)(q, *in_blocks(k, v, 5), positions))
    assert "f32[1,2,5,8,8]" in text and "f32[3,2,5,32,8]" not in text  # rows, heads of keys, blocks, queries, positions


def test_cache_attention_sees_the_cache_up_to_the_query():
    q, k, v, _ = arrays(20)
    k_cache, v_cache = in_blocks(k, v, 3)
    want = reference(q, k, v, np.ones((2, 20), int))
    got = attention.cache_attention(q[:, 5:9], k_cache, v_cache, np.tile(np.arange(5, 9), (2, 1)))
    np.testing.assert_allclose(got, want[:, 5:9], atol=1e-5)
    one = attention.cache_attention(q[:, 12:13], k_cache, v_cache, np.full((2, 1), 12))
    np.testing.assert_allclose(one, want[:, 12:13], atol=1e-5)


def test_rotation_depends_on_relative_position_only():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def product(i, j):
        rotated = [
            attention.rotate(z, *attention.rope_table(np.array([[p]]), 16, 10000.0)) for z, p in ((x, i), (y, j))
        ]
        return float(np.sum(np.asarray(rotated[0]) * np.asarray(rotated[1])))

    assert product(5, 2) == pytest.approx(product(105, 102), abs=1e-4)
    assert abs(product(5, 2) - product(5, 3)) > 1e-3
