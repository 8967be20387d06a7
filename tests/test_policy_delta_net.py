"""A gated delta net layer against transformers; packing, branches, prefill and decoding against whole runs."""

import json
from functools import partial
from importlib import util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config import PolicyConfig
from trace_jax.policy import delta_net, delta_rule
from trace_jax.policy.attention import Branches

HERE = Path(__file__).parent
GOLDEN = dict(np.load(HERE / "golden" / "delta_layer.npz"))
SIZES = json.loads(str(GOLDEN["sizes"]))
PROJECTIONS = ("query", "key", "value", "gate", "beta", "decay")

# Programs run a few times: compiling them well takes longer than running them.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def config(sizes):
    return PolicyConfig(
        width=sizes["hidden_size"],
        norm_eps=sizes["rms_norm_eps"],
        delta_key_heads=sizes["linear_num_key_heads"],
        delta_value_heads=sizes["linear_num_value_heads"],
        delta_key_dim=sizes["linear_key_head_dim"],
        delta_value_dim=sizes["linear_value_head_dim"],
        conv_width=sizes["linear_conv_kernel_dim"],
    )


def from_disk(tensors, cfg):
    """A layer's weights from tensors by their names on disk."""
    keys = cfg.delta_key_heads * cfg.delta_key_dim
    weights = {}
    for prefix, name in (("delta_", "in_proj_qkv.weight"), ("conv_", "conv1d.weight")):
        parts = np.split(tensors[name], [keys, 2 * keys])
        weights |= {prefix + part: x for part, x in zip(("query", "key", "value"), parts, strict=True)}
    for part in ("query", "key", "value"):
        weights["delta_" + part] = weights["delta_" + part].T
        weights["conv_" + part] = weights["conv_" + part][:, 0]
    for ours, theirs in (("gate", "in_proj_z"), ("beta", "in_proj_b"), ("decay", "in_proj_a"), ("output", "out_proj")):
        weights["delta_" + ours] = tensors[theirs + ".weight"].T
    return weights | {
        "decay_rate": tensors["A_log"],
        "decay_bias": tensors["dt_bias"],
        "delta_norm": tensors["norm.weight"],
    }


CFG = config(SIZES)
WEIGHTS = from_disk({name[7:]: x for name, x in GOLDEN.items() if name.startswith("weight/")}, CFG)


def apply(x, weights, cfg, layout):
    mixed = delta_net.mix(x, weights, cfg, layout, lambda h, name: h @ weights[name])
    return mixed @ weights["delta_output"]


@jit
def advance(x, state, valid, fresh):
    linear = lambda h, name: h @ WEIGHTS[name]  # noqa: E731
    mixed, state = delta_net.step(x, WEIGHTS, CFG, state, valid, fresh, linear)
    return mixed @ WEIGHTS["delta_output"], state


@jit
def whole(x):
    return apply(x, WEIGHTS, CFG, one_sequence(x))


def one_sequence(x):
    return delta_rule.layout(jnp.ones(x.shape[:2], jnp.int32), reach=SIZES["linear_conv_kernel_dim"] - 1)


def assert_equals_transformers(golden, cfg):
    """Output and gradients of a file of tests/parity/delta_goldens.py."""
    weights, slopes = (
        from_disk({name.split("/")[1]: x for name, x in golden.items() if name.startswith(kind)}, cfg)
        for kind in ("weight/", "gradient/")
    )
    layout = delta_rule.layout(np.ones(golden["x"].shape[:2], np.int32), reach=cfg.conv_width - 1)

    @jit
    def run(x, weights):
        out, back = jax.vjp(lambda x, weights: apply(x, weights, cfg, layout), x, weights)
        return out, back(golden["d_out"])

    out, (d_x, d_weights) = run(golden["x"], weights)
    np.testing.assert_allclose(out, golden["out"], atol=1e-5)
    np.testing.assert_allclose(d_x, golden["d_x"], rtol=1e-4, atol=1e-4)
    assert d_weights.keys() == slopes.keys()
    for name, expected in slopes.items():
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(d_weights[name] / scale, expected / scale, atol=1e-5, err_msg=name)


def test_layer_equals_transformers():
    assert_equals_transformers(GOLDEN, CFG)


@pytest.mark.parity
@pytest.mark.parametrize("sizes", [{}, {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}])
def test_layer_equals_transformers_live(sizes):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    spec = util.spec_from_file_location("delta_goldens", HERE / "parity" / "delta_goldens.py")
    script = util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert_equals_transformers(script.arrays(1, **sizes), config(SIZES | sizes))


def test_prefill_and_decoding_equal_transformers():
    x, state, outputs = GOLDEN["x"], delta_net.new_state(CFG, 2), []
    for start, count, size in [(0, 3, 8), *((t, 1, 1) for t in range(3, 9))]:
        valid = np.broadcast_to(np.arange(size) < count, (2, size))
        out, state = advance(x[:, start : start + size], state, valid, np.full(2, start == 0))
        outputs.append(np.asarray(out)[:, :count])
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), GOLDEN["decoded"], atol=1e-5)


def test_any_chunking_equals_the_training_pass():
    """Rows of a batch go on at their own pace, pause, and are taken over by another sequence."""
    rng = np.random.default_rng(0)
    sequences = np.concatenate([GOLDEN["x"], GOLDEN["x"][:, ::-1]])[:3, :40]
    expected, outputs = np.asarray(whole(sequences)), np.zeros(sequences.shape)
    state = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), delta_net.new_state(CFG, 2))  # of others
    owner, done, paused = np.array([0, 1]), np.zeros(2, int), 0
    for size in [8, 1, 8, 1, 1, 8, 8, 1, 8, 8, 1, 1, 8, 8, 8, 8, 8, 8]:
        if owner[1] == 1 and done[1] >= 20:  # the rest of it is never asked for
            last, owner[1], done[1] = done[1], 2, 0
        count = np.minimum(rng.integers(0, size + 1, size=2), 40 - done)
        x = rng.normal(size=(2, size, sequences.shape[2])).astype(np.float32)
        for row in range(2):
            x[row, : count[row]] = sequences[owner[row], done[row] : done[row] + count[row]]
        out, new = jax.tree.map(np.asarray, advance(x, state, np.arange(size) < count[:, None], done == 0))
        for row in range(2):
            outputs[owner[row], done[row] : done[row] + count[row]] = out[row, : count[row]]
            if count[row] == 0:
                paused += 1
                np.testing.assert_array_equal(new.conv[row], state.conv[row])
                np.testing.assert_array_equal(new.rule[row], state.rule[row])
        state, done = new, done + count
    assert paused > 4 and done.min() > 20
    for n, reached in enumerate((done[0], last, done[1])):
        np.testing.assert_allclose(outputs[n, :reached], expected[n, :reached], atol=1e-5)


def test_packed_sequences_and_branches_equal_whole_runs():
    rng = np.random.default_rng(1)
    time, width = 72, SIZES["hidden_size"]
    x = rng.normal(size=(1, time, width)).astype(np.float32)
    streams = {name: np.zeros((1, time), np.int32) for name in ("segments", "positions", "number", "start")}
    runs, at = [], 0  # places in the row of each whole run, and how many of them are its own
    for n, (trunk, branches) in enumerate(
        [(19, [(0, 3), (2, 6), (19, 4), (16, 2), (17, 9)]), (5, [(1, 2), (4, 12)])], 1
    ):
        begin = at
        for number, (start, length) in enumerate([(time, trunk), *branches]):
            places = slice(at, at + length)
            streams["segments"][0, places], streams["number"][0, places] = n, number
            streams["positions"][0, places] = np.arange(length) + (start if number else 0)
            streams["start"][0, places] = start
            before = range(begin, begin + start) if number else []
            runs.append(([*before, *range(at, at + length)], length))
            at += length
    branches = Branches(streams["number"], streams["start"])

    @jit
    def packed(x):
        layout = delta_rule.layout(streams["segments"], streams["positions"], branches, CFG.conv_width - 1, chunk=16)
        return apply(x, WEIGHTS, CFG, layout)

    out = np.asarray(packed(x))[0]
    alone = np.stack([np.pad(x[0, places], ((0, 40 - len(places)), (0, 0))) for places, _ in runs])
    separate = np.asarray(whole(alone))
    for n, (places, own) in enumerate(runs):
        got = out[np.array(places[-own:])]
        np.testing.assert_allclose(got, separate[n, len(places) - own : len(places)], atol=1e-5, err_msg=str(n))


def test_half_precision_keeps_types():
    x, state = jnp.zeros((2, 3, SIZES["hidden_size"]), jnp.bfloat16), delta_net.new_state(CFG, 2, "bfloat16")
    there, linear = jnp.ones((2, 3), bool), lambda h, name: h @ WEIGHTS[name].astype(h.dtype)
    mixed = jax.eval_shape(lambda x: delta_net.mix(x, WEIGHTS, CFG, one_sequence(x), linear), x)
    stepped, new = jax.eval_shape(lambda x, s: delta_net.step(x, WEIGHTS, CFG, s, there, there[:, 0], linear), x, state)
    assert mixed.dtype == stepped.dtype == jnp.bfloat16
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
