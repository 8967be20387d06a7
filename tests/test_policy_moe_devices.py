"""Experts over devices equal experts on one. The file runs itself, in a process with 8 virtual devices."""

import json
import os
import subprocess
import sys

import pytest

# sizes, and what is recomputed
MESHES = {
    "data2 fsdp2 expert2": ({"data": 2, "fsdp": 2, "expert": 2}, "full"),
    "expert4 tensor2": ({"expert": 4, "tensor": 2}, "dots"),
}
MORE = {
    "fsdp2 tensor2 expert2": ({"fsdp": 2, "tensor": 2, "expert": 2}, "none"),
    "expert8": ({"expert": 8}, "full"),
    "data2 tensor4": ({"data": 2, "tensor": 4}, "dots"),
}


def numbers(meshes):
    """Differences from one device by mesh and array, relative to the largest entry; the share of a gradient."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.ad_checkpoint import checkpoint_name

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    from trace_jax.config import MeshConfig, PolicyConfig
    from trace_jax.learner import sharding
    from trace_jax.policy import layers, moe
    from trace_jax.policy.lora import Adapters, Pair

    cfg = PolicyConfig(
        width=16, mlp_width=0, experts=8, experts_per_token=3, expert_width=24, shared_expert_width=8, layers=2
    )
    n, depth, d, f, fs, e, adapters, rank = 48, cfg.layers, 16, 24, 8, 8, 2, 4
    rng = np.random.default_rng(0)

    def draw(*shape, scale=0.15):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    weights = {
        "router": draw(depth, d, e, scale=0.5),
        "shared_gate": draw(depth, d, fs),
        "shared_up": draw(depth, d, fs),
        "shared_down": draw(depth, fs, d),
        "shared_share": draw(depth, d),
        "expert_gate": draw(depth, e, d, f),
        "expert_up": draw(depth, e, d, f),
        "expert_down": draw(depth, e, f, d),
    }
    axes = {
        "router": ("embed", ""),
        "shared_gate": ("embed", "mlp"),
        "shared_up": ("embed", "mlp"),
        "shared_down": ("mlp", "embed"),
        "shared_share": ("embed",),
        "expert_gate": ("experts", "embed", "mlp"),
        "expert_up": ("experts", "embed", "mlp"),
        "expert_down": ("experts", "mlp", "embed"),
    }
    inner = {"expert_gate": (d, f), "expert_down": (f, d)}
    pairs = {
        name: Pair(draw(depth, adapters, e, a, rank), draw(depth, adapters, e, rank, b))
        for name, (a, b) in inner.items()
    }
    pair_axes = {
        name: Pair(("layers", "", "experts", a, "rank"), ("layers", "", "experts", "rank", b))
        for name, (_, a, b) in ((name, axes[name]) for name in inner)
    }
    chosen = jnp.asarray(rng.integers(-1, adapters, n), jnp.int32)
    scale = jnp.asarray([1.0, 0.5])
    x, target = draw(n, d, scale=1.0), draw(n, d, scale=1.0)
    remat = {
        "full": jax.checkpoint,
        "dots": lambda g: jax.checkpoint(g, policy=jax.checkpoint_policies.save_only_these_names("matmul")),
        "none": lambda g: g,
    }

    def program(keep):
        def loss(x, weights, pairs):
            placement = sharding.placement()

            def layer(x, slices):
                weights, pairs = slices

                def linear(h, name):
                    return checkpoint_name(layers.linear(h, weights[name], axes[name], placement), "matmul")

                used = Adapters(pairs, scale, chosen)
                y, routes = moe.feed_forward(x, weights, cfg, linear, placement, adapters=used)
                x = placement.used(x + y, ("rows", ""))
                return x, moe.load(routes, jnp.arange(n) < n - 5, e)["experts"]

            y, counts = jax.lax.scan(remat[keep](layer), x, (weights, pairs))
            return jnp.sum(jnp.sin(y) * target), (y, counts)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)

    names = {name: ("layers", *a) for name, a in axes.items()}
    expected = jax.jit(program("none"))(x, weights, pairs)
    found = {}
    for mesh_name, (sizes, keep) in meshes.items():
        mesh = sharding.make_mesh(MeshConfig(**{"data": 1, **sizes}))
        placed = [sharding.place(t, sharding.shardings(t, a, mesh)) for t, a in ((weights, names), (pairs, pair_axes))]
        rows = jax.device_put(x, jax.NamedSharding(mesh, sharding.BATCH_SPEC))

        @jax.jit
        def run(*arguments, mesh=mesh, keep=keep):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return program(keep)(*arguments)

        compiled = run.lower(rows, *placed).compile()
        got = compiled(rows, *placed)
        paths = jax.tree_util.tree_leaves_with_path(expected)
        differences = {
            jax.tree_util.keystr(path): float(np.abs(np.asarray(a) - b).max() / np.abs(b).max())
            for (path, b), a in zip(paths, jax.tree.leaves(got), strict=True)
        }
        down = got[1][1]["expert_down"].sharding.shard_shape((depth, e, f, d))
        found[mesh_name] = {"differences": differences, "down": list(down)}
    return found


def started(kind):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles in half the time
    done = subprocess.run(
        [sys.executable, __file__, kind], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["few", pytest.param("more", marks=pytest.mark.slow)])
def test_sharded_equals_single(kind):
    """Output, counts and gradients of two scanned layers with a shared expert and adapters of the experts; gradients
    are split as weights are."""
    results = started(kind)
    for mesh, result in results.items():
        sizes = {"expert": 1, "tensor": 1, "fsdp": 1} | ({**MESHES, **MORE}[mesh][0])
        differences = result["differences"]
        assert len(differences) == 16
        assert max(differences.values()) < 1e-5, (mesh, differences)
        assert result["down"] == [2, 8 // sizes["expert"], 24 // sizes["tensor"], 16 // sizes["fsdp"]]
    assert results.keys() == (MESHES if kind == "few" else MORE).keys()


if __name__ == "__main__":
    print(json.dumps(numbers(MESHES if sys.argv[1] == "few" else MORE)))
