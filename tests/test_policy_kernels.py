"""Attention kernels, interpreted, against attention with a bias; and what programs for TPUs and GPUs hold of them.

The file runs itself, in a process with 8 virtual devices, and in one that compiles for a TPU.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from trace_jax.config import PolicyConfig
from trace_jax.learner import sharding
from trace_jax.policy import attention, kernels
from trace_jax.policy.transformer import Transformer

KINDS = {"tpu": "TPU v5 lite", "gpu": "NVIDIA H200"}
LONG = 8192


def arrays(time, heads, kv_heads, width=16, rows=2, dtype="float32"):
    """Queries, keys, values and a weight for every output; rows with several segments, padding, and one segment."""
    rng = np.random.default_rng(time + heads)
    shapes = [(rows, time, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    segments = np.sort(rng.integers(1, 5, (rows, time)), axis=1)
    segments[0, -37:] = 0
    segments[1] = 1
    return q, k, v, weight, jnp.asarray(segments)


def with_bias(q, k, v, segments):
    return attention.packed_attention(q, k, v, attention.packed_bias(segments))


def both_ways(function, q, k, v, weight):
    """Output and gradients."""
    out, back = jax.vjp(function, q, k, v)
    return out, *back(weight)


def check(kernel, time, heads, kv_heads, width=16):
    q, k, v, weight, segments = arrays(time, heads, kv_heads, width)
    got, want = (
        jax.jit(lambda *a, f=f: both_ways(f, *a))(q, k, v, weight)
        for f in (lambda *a: kernel(*a, segments, interpret=True), lambda *a: with_bias(*a, segments))
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)  # padding, too: it is a segment


@pytest.mark.parametrize(("time", "heads", "kv_heads"), [(128, 4, 1), (256, 2, 1)])
def test_splash(time, heads, kv_heads):
    check(kernels.splash, time, heads, kv_heads)


def test_flash():
    check(kernels.flash, 256, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [kernels.splash, kernels.flash])
@pytest.mark.parametrize(
    ("time", "heads", "kv_heads", "width"), [(128, 2, 2, 64), (256, 4, 4, 16), (384, 4, 2, 32), (1024, 2, 1, 16)]
)
def test_more_shapes(kernel, time, heads, kv_heads, width):
    check(kernel, time, heads, kv_heads, width)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [kernels.splash, kernels.flash])
def test_16_bits(kernel):
    """As near to 32 bits as attention with a bias in 16 bits is, and of the type it was given."""
    q, k, v, weight, segments = arrays(128, 2, 1, 64, dtype="bfloat16")

    def run(function, *given):
        return jax.jit(lambda *a: both_ways(lambda *b: function(*b, segments), *a))(*given)

    exact = run(with_bias, *(x.astype(jnp.float32) for x in (q, k, v, weight)))
    got, other = run(lambda *a: kernel(*a, interpret=True), q, k, v, weight), run(with_bias, q, k, v, weight)
    for a, b, c in zip(got, other, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        near, bound = (float(jnp.linalg.norm(x.astype(jnp.float32) - c)) for x in (a, b))
        assert near < 2 * bound


def test_choice():
    """By platform, row length, head width and type."""
    assert kernels.choose("tpu", 256, 80, "float32") is kernels.splash
    assert kernels.choose("gpu", 256, 64, "bfloat16") is kernels.flash
    none = [("cpu", 256, 64, "bfloat16"), ("tpu", 200, 64, "bfloat16"), ("gpu", 192, 64, "bfloat16")]
    none += [("gpu", 256, 64, "float32"), ("gpu", 256, 80, "bfloat16"), ("gpu", 256, 512, "bfloat16")]
    assert not any(kernels.choose(*case) for case in none)
    assert kernels.platform() == jax.default_backend()


def model(dtype="float32", **settings):
    sizes = dict(width=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=32, max_length=512, remat="dots")
    return Transformer(PolicyConfig(**sizes | settings, dtype=dtype), 64, rngs=nnx.Rngs(0))


def tokens(time, rows=2):
    segments = arrays(time, 1, 1)[4]
    positions = jnp.arange(time)[None] - jax.vmap(lambda s: jnp.searchsorted(s, s))(
        jnp.where(segments > 0, segments, 9)
    )
    return jnp.arange(rows * time).reshape(rows, time) % 64, positions, segments


def lowered(target, length, branches=False):
    """The training pass and its gradient as a program for devices that this machine does not have."""
    policy = model("bfloat16")
    graph, params = nnx.split(policy)
    ids, positions, segments = tokens(length)
    tree = attention.Branches(jnp.zeros_like(ids), jnp.full_like(ids, length)) if branches else None
    device = AbstractDevice(device_kind=KINDS[target], num_cores=1, platform=target)
    mesh = AbstractMesh((1,) * 4, sharding.MESH_AXES, abstract_device=device)

    def gradient(params):
        with jax.sharding.use_abstract_mesh(mesh):

            def loss(params):
                hidden = nnx.merge(graph, params)(ids, positions, segments, sharding.placement(), tree)
                return hidden.astype(jnp.float32).sum()

            return jax.grad(loss)(params)

    platform = {"tpu": "tpu", "gpu": "cuda"}[target]
    return jax.jit(gradient).trace(params).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("target", "call"), [("tpu", "@tpu_custom_call"), ("gpu", "__gpu$xla.gpu.triton")])
def test_programs_for_accelerators_hold_no_scores(target, call):
    """Forward and backward by kernels, and no array of queries by keys; rows of another length and branches have it."""
    program = lowered(target, 384)
    assert program.count(call) >= 3 and "384x384x" not in program
    assert call not in lowered(target, 384, branches=True)
    other = lowered(target, 200)
    assert call not in other and "200x200x" in other


def test_a_kernel_takes_the_place_of_the_bias(monkeypatch):
    """The value and its gradients are the same with a kernel; branches do not use it."""
    graph, params = nnx.split(model(layers=1, remat="none"))
    batch, used = tokens(128), []

    def kernel(q, k, v, segments):
        used.append(q.shape)
        return jax.nn.dot_product_attention(q, k, v, mask=attention.packed_bias(segments)[:, None] == 0)

    def value(params, branches=None):
        return jnp.sum(jnp.sin(nnx.merge(graph, params)(*batch, branches=branches)))

    want = jax.jit(jax.value_and_grad(value))(params)
    monkeypatch.setattr(kernels, "choose", lambda *_: kernel)
    got = jax.jit(jax.value_and_grad(value))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)
    assert used == [(2, 128, 4, 16)]
    alone = attention.Branches(jnp.zeros_like(batch[0]), jnp.full_like(batch[0], 128))
    jax.eval_shape(value, params, alone)
    assert len(used) == 1


# mesh -> heads and keys that a device has of 8 and 2
MESHES = {
    "data2 tensor4": ({"data": 2, "tensor": 4}, (2, 1)),  # 2 keys, each on 2 devices
    "fsdp2 tensor2 expert2": ({"fsdp": 2, "tensor": 2, "expert": 2}, (4, 1)),
    "data2 tensor3": ({"data": 2, "tensor": 3}, (8, 2)),  # heads that do not split are whole
}


def on_devices():
    """By mesh: what a device has, and differences from one device."""
    from trace_jax.config import MeshConfig

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    q, k, v, weight, segments = arrays(24, 8, 2, 4, rows=4)
    want = both_ways(lambda *a: with_bias(*a, segments), q, k, v, weight)
    found = {}
    for name, (sizes, _) in MESHES.items():
        config = MeshConfig(**{"data": 1, **sizes})
        count = config.data * config.fsdp * config.tensor * config.expert
        mesh = sharding.make_mesh(config, jax.devices()[:count])
        seen = []

        def shard(*share, seen=seen):
            seen.append([x.shape for x in share])
            return with_bias(*share)

        @jax.jit
        def run(q, k, v, weight, segments, mesh=mesh, shard=shard):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                placement = sharding.placement()
                return both_ways(lambda q, k, v: placement.over_heads(shard, q, k, v, segments), q, k, v, weight)

        got = run(*sharding.place_batch((q, k, v, weight, segments), mesh))
        differences = [float(jnp.abs(jax.device_get(a) - b).max()) for a, b in zip(got, want, strict=True)]
        found[name] = {"differences": differences, "shares": seen[0]}
    return found


def for_tpu():
    """Kernel calls and peak bytes of a device: attention in long rows, forward and backward, on chips and meshes."""
    # no chip, so nobody to ask about it and nothing to lock
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    from jax.experimental import topologies

    from trace_jax.config import MeshConfig

    found = {}
    for topology in ("v5e:2x2", "v5p:2x2x1"):
        devices = list(topologies.get_topology_desc(topology, "tpu").devices)
        for sizes in ({}, {"fsdp": 2, "tensor": 2}):
            config = MeshConfig(**{"data": 1, **sizes})
            mesh = sharding.make_mesh(config, devices[: config.fsdp * config.tensor])
            rows = config.fsdp
            spec = jax.NamedSharding(mesh, sharding.BATCH_SPEC)
            shapes = [((rows, LONG, n, 128), jnp.bfloat16) for n in (4, 2, 2, 4)] + [((rows, LONG), jnp.int32)]
            given = [jax.ShapeDtypeStruct(shape, dtype, sharding=spec) for shape, dtype in shapes]
            cfg = PolicyConfig(heads=4, kv_heads=2, head_dim=128, dtype="bfloat16")

            def run(q, k, v, weight, segments, mesh=mesh, cfg=cfg):
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    attend = kernels.packed(cfg, segments, segments, sharding.placement(), None)
                    return both_ways(attend, q, k, v, weight)

            compiled = jax.jit(run).lower(*given).compile()
            calls = compiled.as_text().count("tpu_custom_call")
            found[f"{topology} {sizes}"] = [calls, compiled.memory_analysis().peak_memory_in_bytes]
    return found


def started(kind):
    done = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_over_devices():
    """Output and gradients are those of one device, on which device ever a head and its key are."""
    for name, result in started("devices").items():
        sizes, (heads, keys) = MESHES[name]
        rows = 4 // (sizes.get("data", 1) * sizes.get("fsdp", 1))
        assert result["shares"] == [[rows, 24, n, 4] for n in (heads, keys, keys)] + [[rows, 24]], name
        assert max(result["differences"]) < 1e-5, (name, result)


@pytest.mark.slow
def test_compiled_for_tpu():
    """By the compiler of the `tpu` extra: three kernels, and in all not half of what a bias alone would take."""
    pytest.importorskip("libtpu")
    results = started("tpu")
    assert len(results) == 4
    for calls, peak in results.values():
        assert calls >= 3 and peak < 4 * LONG * LONG / 2


if __name__ == "__main__":
    print(json.dumps({"devices": on_devices, "tpu": for_tpu}[sys.argv[1]]()))
