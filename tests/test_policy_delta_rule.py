"""The gated delta rule: chunks against tokens one by one in NumPy, float64; packing, branches, gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.policy import delta_rule
from trace_jax.policy.attention import Branches

D, E = 6, 5  # width of a key and of a value


def inputs(rng, rows, time, key_heads, group):
    """q, k, v, g, beta. Keys have a direction in common, so that tokens read what others wrote."""
    q, k = (rng.normal(size=(rows, time, key_heads, D)) + 0.7 for _ in range(2))
    heads = key_heads * group
    v, g = rng.normal(size=(rows, time, heads, E)), -rng.exponential(0.3, size=(rows, time, heads))
    return tuple(x.astype(np.float32) for x in (q, k, v, g, rng.uniform(0.0, 1.0, size=(rows, time, heads))))


def reference(q, k, v, g, beta, before, state=None):
    """Outputs of every token and the states after them, float64.

    Args:
        before: index of the token before each in its own sequence, -1 for none, -2 for padding.
        state: before the first tokens.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    group = v.shape[2] // q.shape[2]
    q, k = (np.repeat(x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6), group, axis=2) for x in (q, k))
    out = np.zeros(v.shape)
    states = np.zeros((*v.shape[:3], q.shape[3], v.shape[3]))
    for row, t, head in np.ndindex(v.shape[:3]):
        last = before[row, t]
        if last == -2:
            continue
        old = (
            states[row, last, head] if last >= 0 else np.zeros(states.shape[3:]) if state is None else state[row, head]
        )
        old = np.exp(g[row, t, head]) * old
        update = beta[row, t, head] * (v[row, t, head] - old.T @ k[row, t, head])
        states[row, t, head] = old + np.outer(k[row, t, head], update)
        out[row, t, head] = states[row, t, head].T @ q[row, t, head] / np.sqrt(q.shape[3])
    return out, states


def predecessors(segments, positions, number=None, start=None):
    """`before` of `reference`, by search."""
    number = np.zeros_like(segments) if number is None else number
    start = np.full_like(segments, segments.shape[1]) if start is None else start
    before = np.full(segments.shape, -1)
    for row, t in np.ndindex(segments.shape):
        if segments[row, t] == 0:
            before[row, t] = -2
            continue
        owner = number[row, t] if positions[row, t] > start[row, t] else 0
        for s in range(t):
            follows = segments[row, s] == segments[row, t] and positions[row, s] == positions[row, t] - 1
            if follows and number[row, s] == owner:
                before[row, t] = s
    return before


def chain(segments):
    """`before` of `reference` for packed rows."""
    before = np.where(np.diff(segments, axis=1, prepend=0) != 0, -1, np.arange(segments.shape[1]) - 1)
    return np.where(segments > 0, before, -2)


def packed(lengths, time):
    """Segments of a row; a negative length is padding."""
    numbers = [np.full(abs(length), n if length > 0 else 0) for n, length in enumerate(lengths, 1)]
    return np.pad(np.concatenate(numbers), (0, time))[:time].astype(np.int32)


# Programs run once or a few times here: compiling them well takes longer than running them.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def rule(tensors, segments, state=None, chunk=64):
    return delta_rule.chunked(*tensors, delta_rule.layout(segments, chunk=chunk), state)


@jit
def single(q, k, v, g, beta, segments):
    """`recurrent` of packed rows."""
    first = jnp.diff(segments, axis=1, prepend=0) != 0
    g = jnp.where(first[..., None], -1e4, g)  # a decay to exactly nothing is a new sequence
    state = jnp.zeros((len(q), v.shape[2], D, E))
    return jax.vjp(lambda *x: delta_rule.recurrent(*x, state, segments > 0), q, k, v, g, beta)


def test_spans_of_a_long_row_are_the_row(monkeypatch):
    """What chunks need exists for a span at a time: sequences across spans, padding in between, a state before."""
    rng, time = np.random.default_rng(5), 64
    tensors = inputs(rng, 3, time, 1, 2)
    segments = np.stack([packed([40, 24], time), packed([20, -22, 22], time), packed([7, 9, 11, -21], time)])
    state = jnp.asarray(rng.normal(size=(3, 2, D, E)), jnp.float32)
    d = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (tensors[2].shape, state.shape)]

    def run(state):
        @jit
        def run(*given):
            made = delta_rule.layout(segments, chunk=8)
            result, back = jax.vjp(lambda *x: delta_rule.chunked(*x[:5], made, *x[5:]), *given)
            return result, back(tuple(d))

        return run(*tensors, *state)

    expected = [run(()), run((state,))]
    monkeypatch.setattr(delta_rule, "SPAN", 16)
    for old, new in zip(expected, [run(()), run((state,))], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), new, old)


@pytest.mark.parametrize(("time", "group"), [(1, 2), (63, 4), (64, 1), (65, 2), (130, 4)])
def test_chunks_equal_single_tokens_forward_and_backward(time, group):
    rng = np.random.default_rng(time)
    tensors = inputs(rng, 2, time, 4 // group, group)
    cuts = np.sort(rng.integers(0, time + 1, size=(2, 3)))
    segments = 1 + np.sum(np.arange(time)[None, :, None] >= cuts[:, None], axis=-1).astype(np.int32)
    segments[0, -1] = 0 if time > 1 else 1
    d_out, d_state = rng.normal(size=tensors[2].shape), rng.normal(size=(2, 4, D, E))
    d_out = np.float32(np.where(segments[..., None, None] > 0, d_out, 0.0))

    @jit
    def chunks(*tensors):
        result, back = jax.vjp(lambda *x: rule(x, segments), *tensors)
        return result, back((d_out, jnp.float32(d_state)))

    (out, state), gradient = jax.tree.map(np.asarray, chunks(*tensors))
    # one program for all lengths and groups: padded, and every value head with a key head of its own
    q, k, v, g, beta, longer = (
        np.pad(x, ((0, 0), (0, 130 - time)) + ((0, 0),) * (x.ndim - 2)) for x in (*tensors, segments)
    )
    (out_single, state_single), back = single(np.repeat(q, group, 2), np.repeat(k, group, 2), v, g, beta, longer)
    padded = np.pad(d_out, ((0, 0), (0, 130 - time), (0, 0), (0, 0)))
    gradient_single = [np.asarray(x)[:, :time] for x in back((padded, np.float32(d_state)))]
    for i in range(2):
        gradient_single[i] = gradient_single[i].reshape(2, time, -1, group, D).sum(3)

    real = segments > 0
    expected, _ = reference(*tensors, chain(segments))
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(out[real], np.asarray(out_single)[:, :time][real], atol=2e-6)
    np.testing.assert_allclose(state, state_single, atol=2e-6)
    for name, a, b in zip(["q", "k", "v", "g", "beta"], gradient, gradient_single, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def test_state_is_continued_and_padding_is_neutral():
    rng = np.random.default_rng(1)
    tensors = inputs(rng, 3, 24, 1, 2)
    start = rng.normal(size=(3, 2, D, E)).astype(np.float32)
    count = np.array([24, 13, 0])
    segments = (np.arange(24) < count[:, None]).astype(np.int32)
    out, state = map(np.asarray, jit(partial(rule, chunk=8))(tensors, segments, start))
    expected, states = reference(*tensors, chain(segments), start)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(state[:2], states[[0, 1], count[:2] - 1], atol=2e-6)
    np.testing.assert_array_equal(state[2], start[2])
    assert not np.any(out[segments == 0])


ONE = np.ones((1, 64), np.int32)
one_sequence = jit(jax.value_and_grad(lambda x: (lambda out: (jnp.sum(out), out))(rule(x, ONE)[0]), has_aux=True))


def test_strong_decays_stay_exact_and_finite():
    rng = np.random.default_rng(2)
    q, k, v, g, beta = inputs(rng, 1, 64, 1, 1)
    g = np.where(rng.uniform(size=g.shape) < 0.3, -300.0, -1e-4).astype(np.float32)
    (_, out), gradient = one_sequence((q, k, v, g, beta))
    np.testing.assert_allclose(out, reference(q, k, v, g, beta, chain(ONE))[0], atol=1e-6)
    assert all(np.all(np.isfinite(x)) for x in gradient)


def test_equal_keys_do_not_blow_up():
    rng = np.random.default_rng(3)
    q, k, v, g, beta = inputs(rng, 1, 64, 1, 1)
    k, g, beta = np.repeat(k[:, :1], 64, axis=1), 0.0 * g, 0.0 * beta + np.float32(0.99)
    (_, out), gradient = one_sequence((q, k, v, g, beta))
    np.testing.assert_allclose(out, reference(q, k, v, g, beta, chain(ONE))[0], atol=5e-6)
    assert all(np.all(np.isfinite(x)) for x in gradient)


packed_rule = jax.jit(lambda tensors, segments: rule(tensors, segments, chunk=16)[0])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.lists(st.integers(-9, 30), min_size=1, max_size=12))
def test_packed_rows_equal_sequences_alone(seed, lengths):
    tensors = inputs(np.random.default_rng(seed), 1, 48, 1, 2)
    segments = packed(lengths, 48)
    out = np.asarray(packed_rule(tensors, segments[None]))
    for n in np.unique(segments[segments > 0]):
        where = segments == n
        count = np.sum(where)
        alone = [np.zeros_like(x) for x in tensors]
        for a, x in zip(alone, tensors, strict=True):
            a[:, :count] = x[:, where]
        separate = np.asarray(packed_rule(tuple(alone), (np.arange(48) < count).astype(np.int32)[None]))
        np.testing.assert_allclose(out[:, where], separate[:, :count], atol=2e-6)


def with_branches(time, sequences):
    """A row: of each sequence its length and [(start, length) of its branches]."""
    row = {name: np.zeros(time, np.int32) for name in ("segments", "positions", "number")}
    row["start"], at = np.full(time, time, np.int32), 0
    for n, (trunk, branches) in enumerate(sequences, 1):
        for number, (start, length) in enumerate([(0, trunk), *branches]):
            where = slice(at, min(at + length, time))
            if at + length > time:
                break
            row["segments"][where], row["number"][where] = n, number
            row["positions"][where] = start + np.arange(length)
            row["start"][where] = start if number else time
            at += length
    return row


def branched(tensors, row, chunk):
    branches = Branches(row["number"], row["start"])
    return delta_rule.chunked(*tensors, delta_rule.layout(row["segments"], row["positions"], branches, 0, chunk))[0]


branched_8 = jax.jit(partial(branched, chunk=8))

ROWS = [
    # from nothing, a chunk's end, inside a chunk, just behind a chunk's begin, all of it; over several chunks
    [(20, [(0, 3), (8, 4), (11, 2), (9, 1), (20, 5), (16, 20), (0, 9)])],
    [(3, [(1, 2), (3, 2)]), (17, [(16, 1), (0, 1), (5, 9)]), (9, []), (2, [(2, 12)])],
]


def stack(rows):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_branches_continue_their_sequence():
    rng = np.random.default_rng(4)
    row, tensors = stack([with_branches(64, sequences) for sequences in ROWS]), inputs(rng, 2, 64, 2, 2)
    np.testing.assert_allclose(branched_8(tensors, row), reference(*tensors, predecessors(**row))[0], atol=3e-6)


SEQUENCES = st.lists(
    st.integers(1, 20).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n), st.integers(1, 12)), max_size=4))
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), SEQUENCES, SEQUENCES)
def test_branches_anywhere(seed, first, second):
    row = stack([with_branches(64, first), with_branches(64, second)])
    tensors = inputs(np.random.default_rng(seed), 2, 64, 2, 2)
    np.testing.assert_allclose(branched_8(tensors, row), reference(*tensors, predecessors(**row))[0], atol=3e-6)


def test_gradient_through_branches_is_the_slope_of_the_reference():
    rng = np.random.default_rng(6)
    row = stack([with_branches(36, [(11, [(4, 5), (8, 3), (0, 2), (11, 4)]), (6, [(3, 2)])])])
    tensors, direction = inputs(rng, 1, 36, 1, 2), inputs(rng, 1, 36, 1, 2)
    weight = rng.normal(size=tensors[2].shape).astype(np.float32)
    before = predecessors(**row)

    def along(step):
        moved = [np.float64(x) + step * d for x, d in zip(tensors, direction, strict=True)]
        return np.sum(weight * reference(*moved, before)[0])

    gradient = jit(jax.grad(lambda x: jnp.sum(branched(x, row, 8) * weight)))(tensors)
    slope = sum(np.sum(np.float64(a) * b) for a, b in zip(gradient, direction, strict=True))
    assert slope == pytest.approx((along(1e-4) - along(-1e-4)) / 2e-4, rel=1e-5)


def test_branches_from_a_state_are_refused():
    tokens = jnp.ones((1, 8), int)
    made = delta_rule.Layout(lineage=tokens, parent=tokens, before=tokens[None], chunk=8)
    with pytest.raises(ValueError, match="not a state"):
        delta_rule.chunked(*inputs(np.random.default_rng(7), 1, 8, 1, 1), made, jnp.zeros((1, 1, D, E)))
