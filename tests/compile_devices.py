"""Programs on eight virtual devices whose collectives are known: run by test_compile_hlo.py."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trace_jax.recipes.ahead import hlo

LAYERS, WIDTH, ROWS = 5, 64, 16
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


def shape(*sizes, spec):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


@jax.shard_map(
    mesh=mesh,
    in_specs=(PartitionSpec("fsdp", None), PartitionSpec(None, "fsdp", "tensor")),
    out_specs=PartitionSpec("fsdp", None),
    check_vma=False,
)
def forward(x, weights):
    """A weight is gathered over fsdp in each layer, its product summed over tensor."""

    def layer(x, shard):
        weight = jax.lax.all_gather(shard, "fsdp", axis=0, tiled=True)  # [width, width / 2]
        return jax.lax.psum(jnp.tanh(x @ weight) @ weight.T, "tensor"), None

    return jax.lax.scan(layer, x, weights)[0]


text = (
    jax.jit(forward)
    .lower(shape(ROWS, WIDTH, spec=("fsdp", None)), shape(LAYERS, WIDTH, WIDTH, spec=(None, "fsdp", "tensor")))
    .compile()
    .as_text()
)
found = hlo.collectives(text, dict(mesh.shape))
gathers = [c for c in found if c.kind == "all-gather"]
sums = [c for c in found if c.kind == "all-reduce"]
weight = WIDTH * WIDTH // 2 * 4
assert sum(c.runs for c in gathers) == LAYERS, gathers
assert {(c.axes, c.ways, c.bytes, c.moved, c.in_loop, c.known) for c in gathers} == {
    ("fsdp", 4, weight, weight * 3 / 4, True, True)
}
part = ROWS // 4 * WIDTH * 4
assert {(c.axes, c.ways, c.bytes, c.moved) for c in sums} == {("tensor", 2, part, part)}, sums
assert sum(c.runs for c in sums) == LAYERS

one = jax.jit(lambda x: jnp.sum(x), out_shardings=NamedSharding(mesh, PartitionSpec()))
found = hlo.collectives(one.lower(shape(8, spec=(("fsdp", "tensor"),))).compile().as_text(), dict(mesh.shape))
assert [(c.kind, c.axes, c.ways, c.bytes) for c in found] == [("all-reduce", "fsdp+tensor", 8, 4)], found
