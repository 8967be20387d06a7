"""Mixture-of-experts feed-forward against NumPy in float64, `transformers`, and a dense program under autodiff."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import PolicyConfig
from trace_jax.policy import grouped, moe
from trace_jax.policy.lora import Adapters, Pair

GOLDEN = Path(__file__).parent / "golden"
D, F, FS = 12, 8, 10
N, E, K = 37, 6, 3  # of most tests
RESIDENT, RANK = 3, 2


def draw(rng, *shape, scale=1.0):
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


def weights_of(rng, e=E, shared=False):
    w = {
        "router": draw(rng, D, e),
        "expert_gate": draw(rng, e, D, F, scale=0.4),
        "expert_up": draw(rng, e, D, F, scale=0.4),
        "expert_down": draw(rng, e, F, D, scale=0.4),
    }
    if shared:
        w |= {"shared_gate": draw(rng, D, FS), "shared_up": draw(rng, D, FS), "shared_down": draw(rng, FS, D)}
        w["shared_share"] = draw(rng, D)
    return w


def config(e=E, k=K, renormalise=True, shared=False):
    return PolicyConfig(
        width=D,
        mlp_width=0,
        experts=e,
        experts_per_token=k,
        expert_width=F,
        norm_topk_prob=renormalise,
        shared_expert_width=FS if shared else 0,
    )


@partial(jax.jit, static_argnums=2)
def block(h, weights, cfg, chosen=None):
    return moe.feed_forward(h, weights, cfg, lambda x, name: x @ weights[name], chosen=chosen)


@partial(jax.jit, static_argnums=2)
def gradients(h, weights, cfg, cotangent):
    """Output, routes, and gradients of `sum(output * cotangent)`; of N tokens, so that few programs are compiled."""

    def loss(h, weights):
        y, routes = moe.feed_forward(h, weights, cfg, lambda x, name: x @ weights[name])
        return jnp.sum(y * cotangent), (y, routes)

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(h, weights)
    return *out, *grads


def per_token(h, w, cfg):
    """The block token by token, float64."""
    h, w = np.asarray(h, np.float64), {name: np.asarray(value, np.float64) for name, value in w.items()}

    def swiglu(x, gate, up, down):
        g = x @ gate
        return (g / (1 + np.exp(-g)) * (x @ up)) @ down

    out = []
    for x in h:
        scores = x @ w["router"]
        share = np.exp(scores - scores.max())
        share /= share.sum()
        best = np.argsort(-share, kind="stable")[: cfg.experts_per_token]
        total = share[best].sum() if cfg.norm_topk_prob else 1.0
        y = sum(
            share[e] / total * swiglu(x, *(w[f"expert_{name}"][e] for name in ("gate", "up", "down"))) for e in best
        )
        if cfg.shared_expert_width:
            y = y + swiglu(x, w["shared_gate"], w["shared_up"], w["shared_down"]) / (1 + np.exp(-x @ w["shared_share"]))
        out.append(y)
    return np.array(out)


@pytest.mark.parametrize(("n", "e", "k", "renormalise", "shared"), [(9, 5, 1, True, False), (7, 4, 4, False, True)])
def test_block_is_the_sum_over_each_tokens_experts(n, e, k, renormalise, shared):
    rng, cfg = np.random.default_rng(n), config(e, k, renormalise, shared)
    w, h = weights_of(rng, e, shared), draw(rng, n, D)
    y, routes = block(h, w, cfg)
    np.testing.assert_allclose(y, per_token(h, w, cfg), atol=1e-5, rtol=1e-5)
    assert routes.experts.shape == routes.weights.shape == (n, k)
    if k == e:  # in another order
        again, replayed = block(h, w, cfg, routes.experts[:, ::-1])
        np.testing.assert_array_equal(replayed.experts, routes.experts[:, ::-1])
        np.testing.assert_allclose(again, y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["moe_qwen3", "moe_qwen3_plain", "moe_qwen3_5"])
def test_block_equals_transformers(name):
    """Output and gradients of the blocks of Qwen3-MoE (with and without renormalising) and Qwen3.5-MoE."""
    golden = np.load(GOLDEN / f"{name}.npz")
    shared = name == "moe_qwen3_5"

    def ours(kind):
        """Arrays as stored on disk, by our names, [out, in] turned and gate and up taken apart."""
        disk = {key.removeprefix(f"{kind}."): golden[key] for key in golden.files if key.startswith(kind)}
        both = np.swapaxes(disk["experts.gate_up_proj"], 1, 2)
        out = {"router": disk["gate.weight"].T, "expert_gate": both[..., :F], "expert_up": both[..., F:]}
        out["expert_down"] = np.swapaxes(disk["experts.down_proj"], 1, 2)
        if shared:
            out |= {f"shared_{k}": disk[f"shared_expert.{k}_proj.weight"].T for k in ("gate", "up", "down")}
            out["shared_share"] = disk["shared_expert_gate.weight"][0]
        return out

    cfg = config(renormalise=name != "moe_qwen3_plain", shared=shared)
    y, _, d_x, d_w = gradients(golden["x"], ours("weight"), cfg, golden["cotangent"])
    np.testing.assert_allclose(y, golden["y"], atol=1e-4)
    np.testing.assert_allclose(d_x, golden["d_x"], atol=1e-3, rtol=1e-4)
    expected = ours("grad")
    assert d_w.keys() == expected.keys()
    for key, value in d_w.items():
        np.testing.assert_allclose(value, expected[key], atol=1e-3, rtol=1e-4, err_msg=key)


def adapters_of(rng):
    sizes = {"expert_gate": (D, F), "expert_up": (D, F), "expert_down": (F, D)}
    return {
        name: Pair(draw(rng, RESIDENT, E, a, RANK, scale=0.4), draw(rng, RESIDENT, E, RANK, b, scale=0.4))
        for name, (a, b) in sizes.items()
    }


SCALE = jnp.asarray([1.0, 2.0, 0.5])


@jax.jit
def adapted(x, logits, w, pairs, which, cotangent):
    """Output, and gradients of `sum(output * cotangent)` with respect to all but the last two."""

    def loss(x, logits, w, pairs):
        y = of_experts(x, logits, w, Adapters(pairs, SCALE, which))
        return jnp.sum(y * cotangent), y

    grads, y = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, logits, w, pairs)
    return y, grads


def of_experts(x, logits, w, adapters=None):
    return moe.experts(x, moe.route(logits, K, True), *(w[name] for name in moe.NAMES), adapters=adapters)


def dense(x, logits, w, pairs, which):
    """All experts on all tokens."""
    adapter = jnp.where(which[:, None] == jnp.arange(RESIDENT), SCALE, 0.0)

    def project(x, name):
        pair = pairs[name]
        return jnp.einsum("nei,eio->neo", x, w[name]) + jnp.einsum("nj,nei,jeir,jero->neo", adapter, x, *pair)

    best = jnp.argsort(-logits, axis=-1)[:, :K]
    share = jax.nn.softmax(logits, axis=-1)
    share = jnp.where(jnp.any(best[:, :, None] == jnp.arange(E), axis=1), share, 0.0)
    share = share / jnp.sum(share, axis=-1, keepdims=True)
    x = jnp.broadcast_to(x[:, None], (len(x), E, D))
    hidden = jax.nn.silu(project(x, "expert_gate")) * project(x, "expert_up")
    return jnp.einsum("ne,neo->no", share, project(hidden, "expert_down"))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(1)
    w = weights_of(rng)
    del w["router"]
    which = jnp.asarray(rng.integers(-1, RESIDENT, N), jnp.int32)
    return draw(rng, N, D), draw(rng, N, E), w, adapters_of(rng), which, draw(rng, N, D)


def test_gradients_equal_those_of_the_dense_program(case):
    *arrays, which, cotangent = case
    y, grads = adapted(*case)

    @jax.jit
    def expected(*arrays):
        y, back = jax.vjp(lambda *arrays: dense(*arrays, which), *arrays)
        return y, back(cotangent)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), (y, grads), expected(*arrays))


def test_tokens_worked_on_in_parts_are_the_same_tokens(case, monkeypatch):
    """Copies of a long row never exist together; 36 tokens are 4 parts of 9."""
    cut = [a[:36] if len(a) == N else a for a in case[:2]], [a[:36] for a in case[4:]]
    case = (*cut[0], *case[2:4], *cut[1])
    together = adapted(*case)
    monkeypatch.setattr(moe, "TOKENS", 10)
    jax.clear_caches()  # what was traced knows nothing of it
    assert moe._parts(36) == 4
    program = jax.make_jaxpr(adapted.__wrapped__)(*case)
    parts = jax.jit(lambda *case: adapted.__wrapped__(*case))(*case)  # traced anew
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), parts, together)
    assert f"{36 * K},{D}]" not in str(program).replace(" ", "")
    assert f"{9 * K},{D}]" in str(program).replace(" ", "")


def test_parts_are_equal_or_there_is_one():
    for tokens in (1, 8192, 8193, 3 * 8192, 32768, 5 * 4999, 99991):
        parts = moe._parts(tokens)
        assert tokens % parts == 0 and (parts == 1 or moe.TOKENS / 4 < tokens // parts <= moe.TOKENS)
    assert [moe._parts(n) for n in (8192, 32768, 98304, 99991)] == [1, 4, 12, 1]


def test_adapters_with_zero_b_change_nothing(case):
    x, logits, w, pairs, which, cotangent = case
    zero = {name: Pair(pair.a, jnp.zeros_like(pair.b)) for name, pair in pairs.items()}
    base, grads = adapted(x, logits, w, pairs, jnp.full(N, -1, jnp.int32), cotangent)
    assert not any(np.any(a) for a in jax.tree.leaves(grads[3]))
    np.testing.assert_allclose(adapted(x, logits, w, zero, which, cotangent)[0], base, atol=1e-6)
    changed = np.abs(adapted(*case)[0] - base).max(axis=1) > 0.01
    np.testing.assert_array_equal(changed, which >= 0)


def test_a_batch_that_mixes_adapters_equals_separate_batches(case):
    x, logits, w, pairs, which, cotangent = case
    mixed, _ = adapted(*case)
    for adapter in range(-1, RESIDENT):
        alone, _ = adapted(x, logits, w, pairs, jnp.full(N, adapter, jnp.int32), cotangent)
        np.testing.assert_allclose(mixed[which == adapter], alone[which == adapter], atol=1e-6)


def test_without_a_choice_all_tokens_have_the_only_adapter(case):
    x, logits, w, pairs, _, cotangent = case
    only = {"expert_down": Pair(*(array[1:2] for array in pairs["expert_down"]))}
    y = jax.jit(of_experts)(x, logits, w, Adapters(only, SCALE[1:2]))
    others = {name: pair._replace(b=jnp.zeros_like(pair.b)) for name, pair in pairs.items()}
    same = others | {"expert_down": pairs["expert_down"]}
    expected, _ = adapted(x, logits, w, same, jnp.full(N, 1, jnp.int32), cotangent)
    np.testing.assert_allclose(y, expected, atol=1e-6)


def test_an_adapter_without_a_token_has_exactly_no_gradient(case):
    x, logits, w, pairs, which, cotangent = case
    _, grads = adapted(x, logits, w, pairs, jnp.where(which == 1, -1, which), cotangent)
    for pair in grads[3].values():
        for array in pair:
            assert not np.any(array[1])
            assert np.any(array[0]) and np.any(array[2])


def test_a_token_does_not_depend_on_the_others():
    """Alone, and beside padding that all goes to the same experts."""
    rng, cfg = np.random.default_rng(3), config()
    w, h = weights_of(rng), draw(rng, N, D)
    together, routes, *_ = gradients(h, w, cfg, jnp.zeros_like(h))
    np.testing.assert_allclose(together, per_token(h, w, cfg), atol=1e-5, rtol=1e-5)
    for token in (0, 7, N - 1):
        alone, same = block(h[token : token + 1], w, cfg)
        np.testing.assert_allclose(alone[0], together[token], atol=1e-6, rtol=1e-6)
        np.testing.assert_array_equal(same.experts[0], routes.experts[token])
    padded = jnp.full((N, D), 1e4).at[::3].set(h[::3]).at[1].set(0.0)
    np.testing.assert_allclose(
        gradients(padded, w, cfg, jnp.zeros_like(h))[0][::3], together[::3], atol=1e-6, rtol=1e-6
    )


def test_experts_without_a_token_have_no_gradient():
    rng, cfg = np.random.default_rng(4), config()
    w, h = weights_of(rng), jnp.abs(draw(rng, N, D))
    w["router"] = w["router"].at[:, 2].set(-50.0).at[:, 4].set(-50.0)
    y, routes, _, grads = gradients(h, w, cfg, draw(rng, N, D))
    assert set(np.unique(routes.experts)) == {0, 1, 3, 5}
    np.testing.assert_allclose(y, per_token(h, w, cfg), atol=1e-5, rtol=1e-5)
    for name in moe.NAMES:
        assert np.isfinite(grads[name]).all() and np.any(grads[name][0])
        assert not np.any(grads[name][2]) and not np.any(grads[name][4])


def test_equal_scores_go_to_the_lower_numbers():
    routes = moe.route(jnp.asarray([[1.0, 3.0, 1.0, 3.0, 1.0], [0.0] * 5]), 3, True)
    np.testing.assert_array_equal(routes.experts, [[1, 3, 0], [0, 1, 2]])
    np.testing.assert_allclose(routes.weights[1], 1 / 3, atol=1e-7)


@pytest.mark.parametrize("renormalise", [True, False])
def test_replayed_experts_have_the_weights_and_gradients_of_the_present_scores(renormalise):
    logits = draw(np.random.default_rng(5), 4, E)
    chosen = jnp.asarray([[5, 0, 2], [-1, -1, -1], [3, 4, 1], [0, -1, 1]], jnp.int32)
    fresh, routes = moe.route(logits, K, renormalise), moe.route(logits, K, renormalise, chosen)
    recorded = np.array([True, False, True, False])
    np.testing.assert_array_equal(routes.experts[recorded], chosen[recorded])
    np.testing.assert_array_equal(routes.experts[~recorded], fresh.experts[~recorded])

    def expected(logits):
        share = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), routes.experts, axis=-1)
        return share / jnp.sum(share, axis=-1, keepdims=True) if renormalise else share

    np.testing.assert_allclose(routes.weights, expected(logits), atol=1e-6)
    factor = jnp.arange(12.0).reshape(4, 3)
    grads = [
        jax.jit(jax.grad(lambda z, weights=weights: jnp.sum(factor * weights(z))))(logits)
        for weights in (lambda z: moe.route(z, K, renormalise, chosen).weights, expected)
    ]
    np.testing.assert_allclose(*grads, atol=1e-5)
    assert np.all(np.any(grads[0] != 0, axis=1))


def test_replayed_experts_that_the_router_has_left_have_finite_weights():
    weights = moe.route(jnp.asarray([[0.0, -200.0, -200.0, 0.0]]), 2, True, jnp.asarray([[1, 2]])).weights
    np.testing.assert_allclose(weights, 0.5)


GROUPS = {
    "even": [4, 4, 4, 4, 4],
    "holes": [0, 11, 0, 9, 0],
    "one": [0, 0, 20, 0, 0],
    "rest": [3, 0, 8, 1, 2],
    "none": [0, 0, 0, 0, 0],
}


def every_way(product, outer):
    """One program: rows times matrices, times transposed ones, and sums of outer products, alone and onto others."""
    return jax.jit(
        lambda x, y, w, sizes: (
            product(x, w, sizes),
            product(y, w, sizes, transposed=True),
            outer(x, y, sizes),
            outer(x, y, sizes, jnp.ones_like(w)),
        )
    )


KERNEL = partial(grouped.outer_kernel, interpret=True)
WAYS = [every_way(grouped.ragged, KERNEL), every_way(partial(grouped.padded, most=20), KERNEL)]
WAYS += [  # blocks smaller and larger than groups
    every_way(partial(grouped.blocks, largest=b), partial(grouped.outer_blocks, largest=b)) for b in (2, 64)
]


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_every_way_to_multiply_groups_is_the_same(sizes):
    """Also where rows are left after the last group."""
    rng, sizes = np.random.default_rng(7), np.asarray(sizes)
    x, y, w = rng.normal(size=(20, 6)), rng.normal(size=(20, 9)), rng.normal(size=(5, 6, 9))
    group = np.repeat(np.arange(5), sizes)
    used = len(group)
    product, back, total = np.zeros((20, 9)), np.zeros((20, 6)), np.zeros((5, 6, 9))
    for row, g in enumerate(group):
        product[row], back[row] = x[row] @ w[g], w[g] @ y[row]
        total[g] += np.outer(x[row], y[row])
    x[used:], y[used:] = np.inf, np.inf  # never looked at
    x, y, w, sizes = (jnp.asarray(a, jnp.int32 if a is sizes else jnp.float32) for a in (x, y, w, sizes))
    for way in WAYS:
        for got, expected in zip(way(x, y, w, sizes), (product, back, total, total + 1), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(("platform", "kernel", "loop"), [("tpu", True, False), ("cpu", False, True)])
def test_the_platform_compiled_for_decides_how_groups_are_multiplied(platform, kernel, loop):
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((32, D), "float32"), ((E, D, F), "float32"), ((E,), "int32"))]
    text = jax.jit(partial(grouped.matmul, most=16)).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_dot" in text) == kernel and ("stablehlo.while" in text) == loop


def test_the_sum_of_outer_products_is_a_kernel_on_tpu():
    """`ragged_dot` would multiply every row for every group there."""
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((300, D), "bfloat16"), ((300, F), "bfloat16"), ((E,), "int32"))]
    text = jax.jit(grouped.outer).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and "ragged_dot" not in text


def test_a_jax_without_the_kernel_sums_by_blocks(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.tpu.megablox.gmm", None)  # importing it fails
    x, y, sizes = jnp.arange(12.0).reshape(6, 2), jnp.ones((6, 3)), jnp.asarray([4, 2], jnp.int32)
    total = grouped.outer_kernel(x, y, sizes)
    np.testing.assert_array_equal(total[:, :, 0], [[12, 16], [18, 20]])


def test_gradients_of_weights_are_summed_in_float32():
    """4,096 ones: a sum in bfloat16 stops at 256."""
    ones = jnp.ones((4096, 2), jnp.bfloat16)
    for way in (KERNEL, partial(grouped.outer_blocks, largest=64)):
        total = way(ones, ones, jnp.asarray([4000, 96], jnp.int32))
        assert total.dtype == jnp.float32
        np.testing.assert_array_equal(total[:, 0, 0], [4000, 96])


def test_half_precision_stays_near(case):
    x, logits, w, pairs, _, cotangent = case

    @jax.jit
    def run(x):
        y, back = jax.vjp(lambda w: of_experts(x, logits, w), w)
        return y, back(cotangent.astype(x.dtype))[0]

    y, grads = run(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    _, (_, _, exact, _) = adapted(x, logits, w, pairs, jnp.full(N, -1, jnp.int32), cotangent)
    for name, grad in grads.items():
        assert grad.dtype == jnp.float32
        assert np.abs(grad - exact[name]).max() < 0.03 * np.abs(exact[name]).max()


def test_gradients_have_the_types_of_what_is_stored(case):
    x, logits, w, pairs, which, _ = case
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)

    def loss(w, pairs):
        return jnp.sum(of_experts(x.astype(jnp.bfloat16), logits, w, Adapters(pairs, SCALE, which)))

    assert jax.eval_shape(jax.grad(loss, argnums=(0, 1)), half, pairs) == jax.eval_shape(lambda *a: a, half, pairs)


def test_load_counts_the_copies_of_wanted_tokens():
    routes = moe.Routes(jnp.asarray([[0, 2], [2, 1], [0, 2]]), jnp.ones((3, 2)))
    np.testing.assert_array_equal(moe.load(routes, jnp.asarray([True, False, True]), 4)["experts"], [2, 0, 2, 0])


def test_load_figures():
    even = moe.load_figures(np.full((3, 8), 5.0))
    assert even == pytest.approx({"experts/max_share": 1 / 8, "experts/idle": 0, "experts/entropy": 1})
    collapsed = moe.load_figures(np.array([9.0, 0, 0, 0]))
    assert collapsed == pytest.approx({"experts/max_share": 1, "experts/idle": 0.75, "experts/entropy": 0})
    both = moe.load_figures(np.array([[9.0, 0, 0, 0], [3, 3, 3, 3]]))
    assert both == pytest.approx({"experts/max_share": 1, "experts/idle": 0.375, "experts/entropy": 0.5})
    assert moe.load_figures(np.zeros(4)) == {}
    assert moe.load_figures(np.array([7.0]))["experts/max_share"] == 1
