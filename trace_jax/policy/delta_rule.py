"""The gated delta rule (arXiv 2412.06464): a memory of one matrix a head, read and written by every token, float32.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T      u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)      o_t = S_t^T q_t

with q and k of unit length and q scaled by 1/sqrt(d). `recurrent` is these lines. `chunked` handles C tokens at a time:
inside a chunk the u_t solve a unit lower triangular system (arXiv 2406.06484), so that all but one small state a chunk
is plain matmuls.

Axes: B rows, T tokens, Hk key heads of width d, Hv = Hk * G value heads of width e (G consecutive ones share a key
head), N chunks of C tokens. State [B, Hv, d, e].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from trace_jax.policy.attention import Branches

CHUNK = 64  # tokens; a power of two
SUBSTITUTED = 8  # rows of a triangular block that is inverted row by row
SPAN = 4096  # tokens of a row whose chunks exist at a time
READ = 16  # tokens whose branches' states exist at a time
EPS = 1e-6  # of the length of queries and keys, as in transformers
EXACT = jax.lax.Precision.HIGHEST  # accelerators round the operands of float32 matmuls unless told not to


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layout:
    """Which tokens of packed rows follow which; made once a pass by `layout`.

    Attributes:
        lineage: a number of its own for every sequence and every branch of a row; 0 is padding.
        parent: index in the row of the last token that a branch continues, on all tokens of the branch; -1 elsewhere
            and where a branch begins from nothing. None: there are no branches.
        before: of the token, 1, 2, .. tokens before each in its own sequence: whether it exists (at that distance in
            the row), or with branches its index in the row, -1 for none.
        chunk: tokens of a chunk.
    """

    lineage: Int[Array, "B T"]
    parent: Int[Array, "B T"] | None
    before: Bool[Array, "reach B T"] | Int[Array, "reach B T"]
    chunk: int = field(metadata={"static": True})


def layout(
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    branches: Branches | None = None,
    reach: int = 0,
    chunk: int = CHUNK,
) -> Layout:
    """The layout of packed rows.

    Args:
        segments: sequence number of each token in its row, from 1; 0 is padding. Tokens of a sequence are contiguous.
        positions: of each token in its sequence, from 0; used with branches only.
        branches: continuations, behind their sequence and each contiguous.
        reach: how many tokens back a convolution looks.
        chunk: tokens of a chunk, a power of two.
    """
    rows, time = segments.shape
    chunk = min(chunk, 1 << (time - 1).bit_length())
    index = jnp.arange(time)
    back = [(n, jnp.pad(segments, ((0, 0), (n, 0)))[:, :time]) for n in range(1, reach + 1)]
    if branches is None:
        before = [(segments > 0) & (segments == earlier) for _, earlier in back]
        return Layout(segments, None, jnp.array(before, bool).reshape(reach, rows, time), chunk)
    number, start = branches
    lineage = jnp.where(segments > 0, segments * (time + 1) + number, 0)
    changed = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :time] != segments
    begin = jax.lax.cummax(jnp.where(changed, index, 0), axis=1)  # of the sequence in its row
    on_branch = (segments > 0) & (number > 0)
    parent = jnp.where(on_branch & (start > 0), begin + start - 1, -1)

    def predecessor(distance):
        place = positions - distance
        own = jnp.where(on_branch & (place < start), begin + place, index - distance)
        return jnp.where((segments > 0) & (place >= 0), own, -1)

    before = [predecessor(n) for n in range(1, reach + 1)]
    return Layout(lineage, parent, jnp.array(before, jnp.int32).reshape(reach, rows, time), chunk)


def recurrent(
    q: Float[Array, "B T Hk d"],
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hv e"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv d e"],
    valid: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T Hv e"], Float[Array, "B Hv d e"]]:
    """The rule token by token, for decoding.

    Args:
        g: logarithm of the decay, at most 0.
        beta: share of a value that is replaced, 0 to 1.
        valid: False for tokens that leave the state as it is, bit for bit; their output means nothing. None: all are.
    """
    group = v.shape[2] // q.shape[2]
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
    valid = jnp.ones(q.shape[:2], bool) if valid is None else valid

    def step(state, token):
        q, k, v, g, beta, valid = token
        decayed = state * jnp.exp(g)[..., None, None]
        update = beta[..., None] * (v - jnp.sum(decayed * k[..., None], axis=2))
        new = jnp.where(valid[:, None, None, None], decayed + k[..., None] * update[..., None, :], state)
        return new, jnp.sum(new * q[..., None], axis=2)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, *map(_wide, (v, g, beta)), valid))
    state, out = jax.lax.scan(step, _wide(state), tokens)
    return jnp.moveaxis(out, 0, 1), state


def chunked(
    q: Float[Array, "B T Hk d"],
    k: Float[Array, "B T Hk d"],
    v: Float[Array, "B T Hv e"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    layout: Layout,
    state: Float[Array, "B Hv d e"] | None = None,
) -> tuple[Float[Array, "B T Hv e"], Float[Array, "B Hv d e"]]:
    """The rule over packed rows, for training and prefill. Padding has output 0 and changes nothing.

    Branches begin from the state of their sequence at their boundary. The rule is linear in the state, so a branch is
    run from nothing with what its boundary state answers to its keys taken from its values, and what that state answers
    to its queries is added to its outputs.

    Args:
        state: that the first token of a row continues; None: every sequence begins with nothing.

    Returns:
        outputs, and the state after the last token of each row (with branches of no meaning).

    Raises:
        ValueError: branches together with a state.
    """
    if layout.parent is not None and state is not None:
        raise ValueError("branches continue sequences of their own row, not a state")
    time = v.shape[1]
    first = jnp.zeros_like(layout.lineage[:, 0]) if state is None else layout.lineage[:, 0]
    if layout.parent is None:
        return _in_spans(q, k, v, g, beta, layout, first, state)
    chunks, _ = _chunks(q, k, g, beta, layout.lineage, layout.chunk, first)
    values = _split(_wide(v), layout.chunk, chunks.group)
    _, (_, starts, updates) = _scan(chunks, values, None, record=True)
    of_key, of_query = _answers(chunks, starts, updates, layout)
    decay = jnp.exp(_since_begin(g, layout))[..., None]
    state, (out,) = _scan(chunks, _split(_wide(v) - decay * of_key, layout.chunk, chunks.group), None)
    return _joined(out)[:, :time] + decay * of_query, state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Chunks:
    """What the rule needs of every chunk besides values and state."""

    keyed: Float[Array, "N B Hk 2C d"]  # keys, then queries
    within: Float[Array, "N B Hk G C C"]  # decay from a token (last axis) to one not before it; 0 across sequences
    enter: Float[Array, "N B Hk G C"]  # decay of the state before the chunk, 0 for tokens that do not continue it
    leave: Float[Array, "N B Hk G C"]  # decay of a token's update until the chunk ends, 0 if its sequence ends before
    keep: Float[Array, "N B Hk G"]  # decay of the state over the whole chunk
    solve: Float[Array, "N B Hk G C C"]  # updates u of the differences v - S^T k
    scores: Float[Array, "N B Hk G C C"]  # outputs of updates

    @property
    def group(self) -> int:
        return self.within.shape[3]


def _in_spans(q, k, v, g, beta, layout, first, state):
    """`chunked` without branches. What a chunk needs takes several times the memory of its tokens, so of a long row
    only a span at a time has it, in the backward pass too, where it is computed again from the state before the span.

    Args:
        first: lineage of `state`.
    """
    rows, time = layout.lineage.shape
    depth, heads, width = q.shape[-1], v.shape[2], v.shape[3]

    def span(before, tokens):
        state, first = before
        q, k, v, g, beta, lineage = tokens
        chunks, after = _chunks(q, k, g, beta, lineage, layout.chunk, first)
        state, (out,) = _scan(chunks, _split(_wide(v), layout.chunk, chunks.group), state)
        return (state, after), _joined(out)[:, : lineage.shape[1]]

    state = jnp.zeros((rows, heads, depth, width)) if state is None else _wide(state)
    tokens = (q, k, v, g, beta, layout.lineage)
    if time <= SPAN or time % SPAN or SPAN % layout.chunk:
        (state, _), out = span((state, first), tokens)
        return out, state
    spans = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(rows, -1, SPAN, *x.shape[2:]), 1, 0), tokens)
    (state, _), out = jax.lax.scan(jax.checkpoint(span), (state, first), spans)
    return jnp.moveaxis(out, 0, 1).reshape(rows, time, heads, width), state


def _chunks(q, k, g, beta, lineage, size, first) -> tuple[_Chunks, Int[Array, " B"]]:
    """Also the lineage of the state after the last token; `first`: of the state before the first one."""
    group = g.shape[2] // q.shape[2]
    of_token, real = lineage, (lineage > 0)[..., None]
    keys, queries = (_split(x, size)[:, :, :, 0] for x in (_unit(k), _unit(q) * q.shape[-1] ** -0.5))
    g, beta = (_split(jnp.where(real, _wide(x), 0.0)[..., None], size, group)[..., 0] for x in (g, beta))
    lineage = _split(of_token[..., None, None], size)[:, :, 0, 0, :, 0]  # N B C

    place = jnp.arange(size)
    # Lineage of the state around each chunk: that of the last real token so far.
    index = jnp.arange(len(lineage))[:, None, None] * size + place
    seen = jax.lax.cummax(jnp.max(jnp.where(lineage > 0, index + 1, 0), axis=-1), axis=0)  # N B
    last = jnp.take_along_axis(of_token, jnp.maximum(seen - 1, 0).T, axis=1).T
    after = jnp.where(seen > 0, last, first)
    before = jnp.concatenate([first[None], after[:-1]])

    def heads(x):  # N B .. -> N B 1 1 ..
        return x[:, :, None, None]

    def decay(where, logarithm):  # a decay from a later token would overflow, hence masked before and after
        return jnp.where(where, jnp.exp(jnp.where(where, logarithm, 0.0)), 0.0)

    ordered, earlier = place[:, None] >= place, place[:, None] > place
    same = (lineage[..., :, None] == lineage[..., None, :]) & (lineage > 0)[..., None] & ordered
    # The sum of g over (j, i] for every pair: differences of sums from the chunk's begin would lose digits to strong
    # decays before j.
    steps = jnp.where(earlier, g[..., :, None], 0.0)
    between = jnp.matmul(ordered.astype(jnp.float32), steps, precision=EXACT)
    total = jnp.cumsum(g, axis=-1)
    within = decay(heads(same), between)
    enter = decay(heads((lineage == before[..., None]) & (lineage > 0)), total)
    leave = decay(heads((lineage == after[..., None]) & (lineage > 0)), between[..., -1, :])
    keep = decay(heads(before == after), total[..., -1])

    keyed = jnp.concatenate([keys, queries], axis=3)
    products = jnp.einsum("nbhid,nbhjd->nbhij", keyed, keys, precision=EXACT)
    of_keys, of_queries = jnp.split(products[:, :, :, None], 2, axis=4)
    system = jnp.where(earlier, beta[..., None] * within * of_keys, 0.0)
    solve = _unit_inverse(system) * beta[..., None, :]
    return _Chunks(keyed, within, enter, leave, keep, solve, within * of_queries), after[-1]


def _scan(chunks: _Chunks, values: Float[Array, "N B Hk G C e"], state: Float[Array, "B Hv d e"] | None, record=False):
    """The state after the last chunk; outputs and, if recorded, the state before each chunk and the updates u."""
    _, rows, kv_heads, group, _, width = values.shape
    depth = chunks.keyed.shape[-1]
    state = jnp.zeros((rows, kv_heads * group, depth, width)) if state is None else _wide(state)

    def step(state, chunk):
        c, v = chunk
        answers = jnp.einsum("bhcd,bhgde->bhgce", c.keyed, state, precision=EXACT)
        of_keys, of_queries = jnp.split(answers, 2, axis=3)
        enter = c.enter[..., None]
        update = jnp.matmul(c.solve, v - enter * of_keys, precision=EXACT)
        out = enter * of_queries + jnp.matmul(c.scores, update, precision=EXACT)
        keys = c.keyed[:, :, : v.shape[3]]
        written = jnp.einsum("bhcd,bhgce->bhgde", keys, c.leave[..., None] * update, precision=EXACT)
        return c.keep[..., None, None] * state + written, (out, state, update) if record else (out,)

    state, outputs = jax.lax.scan(step, state.reshape(rows, kv_heads, group, depth, width), (chunks, values))
    return state.reshape(rows, -1, depth, width), outputs


def _answers(chunks: _Chunks, starts, updates, layout: Layout):
    """What the state at the boundary of each token's branch answers to its key and its query, `[B, T, Hv, e]` each; 0
    off branches.

    The state after a token is that before its chunk, decayed, and what the chunk's tokens up to it wrote. It is put
    together for each token on a branch, a few tokens at a time, where there are any.
    """
    (rows, time), size = layout.lineage.shape, layout.chunk
    kv_heads, group, _, width = updates.shape[2:]
    keys = chunks.keyed[:, :, :, :size]
    padded = len(starts) * size
    asked = jnp.stack([keys, chunks.keyed[:, :, :, size:]], axis=3)  # N B Hk 2 C d
    asked = asked.transpose(1, 0, 4, 2, 3, 5).reshape(rows, padded, *asked.shape[2:4], -1)
    parent = jnp.pad(layout.parent, ((0, 0), (0, padded - time)), constant_values=-1)
    block = min(READ, size)

    def answer(asked, parent, row):  # asked: Hk 2 d
        starts, updates, keys, enter, within = row
        n, at = parent // size, parent % size
        found = jnp.einsum("hxd,hgde->xhge", asked, starts[n], precision=EXACT)
        found *= enter[n, :, :, at][..., None]
        near = jnp.einsum("hxd,hcd->hxc", asked, keys[n], precision=EXACT)
        near = near[:, None] * within[n, :, :, at][:, :, None]
        found += jnp.einsum("hgxc,hgce->xhge", near, updates[n], precision=EXACT)
        return jnp.where(parent >= 0, found, 0.0)

    # rows are mapped, not indexed, so that a compiler can divide them over devices
    several = jax.vmap(jax.vmap(answer, (0, 0, None)), (1, 1, 1), 1)

    def some(part):
        return several(*part, (starts, updates, keys, chunks.enter, chunks.within))

    def none(part):
        return jnp.zeros((block, rows, 2, kv_heads, group, width))

    def blocks(x):
        return jnp.moveaxis(x, 1, 0).reshape(-1, block, rows, *x.shape[2:])

    found = jax.lax.map(lambda x: jax.lax.cond(jnp.any(x[1] >= 0), some, none, x), (blocks(asked), blocks(parent)))
    found = jnp.moveaxis(found.reshape(padded, rows, 2, kv_heads * group, width), 0, 1)[:, :time]
    return found[:, :, 0], found[:, :, 1]


def _since_begin(g: Float[Array, "B T Hv"], layout: Layout) -> Float[Array, "B T Hv"]:
    """Sum of g over the tokens of a lineage so far, the token's own included."""
    lineage = layout.lineage
    begins = jnp.pad(lineage, ((0, 0), (1, 0)))[:, : lineage.shape[1]] != lineage

    def join(left, right):
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    g = jnp.where((lineage > 0)[..., None], _wide(g), 0.0)
    return jax.lax.associative_scan(join, (g, jnp.broadcast_to(begins[..., None], g.shape)), axis=1)[0]


@jax.custom_vjp
def _unit_inverse(a: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """(I + a)^-1 of strictly lower triangular matrices, by halves.

    Twice as fast as `jax.lax.linalg.triangular_solve` on CPU, and of matmuls only, which a compiler can divide over
    devices; as exact, which a power series of a is not where many keys are alike.
    """
    size = a.shape[-1]
    if size <= SUBSTITUTED:
        return _substituted(a)
    half = size // 2
    top, bottom = _unit_inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -jnp.matmul(bottom, jnp.matmul(a[..., half:, :half], top, precision=EXACT), precision=EXACT)
    above = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)


def _substituted(a):
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    rows = [jnp.broadcast_to(eye[0], a.shape[:-1])]
    for i in range(1, a.shape[-1]):
        rows.append(eye[i] - jnp.sum(a[..., i, :i, None] * jnp.stack(rows, axis=-2), axis=-2))
    return jnp.stack(rows, axis=-2)


def _unit_inverse_forward(a):
    inverse = _unit_inverse(a)
    return inverse, inverse


def _unit_inverse_backward(inverse, d):
    turned = inverse.swapaxes(-1, -2)
    d = -jnp.matmul(turned, jnp.matmul(d, turned, precision=EXACT), precision=EXACT)
    return (jnp.tril(d, -1),)


_unit_inverse.defvjp(_unit_inverse_forward, _unit_inverse_backward)


def _wide(x: Array) -> Array:
    return x.astype(jnp.float32)


def _unit(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    x = _wide(x)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def _split(x: Float[Array, "B T H e"], size: int, group: int = 1) -> Float[Array, "N B Hk G C e"]:
    """Chunks in front, heads before tokens; the last chunk is filled up with zeros."""
    rows, time, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -time % size), (0, 0), (0, 0)))
    return x.reshape(rows, -1, size, heads // group, group, width).transpose(1, 0, 3, 4, 2, 5)


def _joined(x: Float[Array, "N B Hk G C e"]) -> Float[Array, "B T Hv e"]:
    rows, width = x.shape[1], x.shape[-1]
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, x.shape[0] * x.shape[4], -1, width)
