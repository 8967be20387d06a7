"""The device mesh, and the one table that maps logical axes of arrays to its axes.

Everything is placed through the mesh even when it is one device, so that a laptop runs the program a pod runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from trace_jax.config import ConfigError, MeshConfig
from trace_jax.policy import kernels
from trace_jax.policy.placement import ANYWHERE, Placement

MESH_AXES = ("data", "fsdp", "tensor", "expert")

# Logical axis of a parameter -> mesh axis (None: every device has all of it). Rows of a batch go over data and fsdp.
RULES: Mapping[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "experts": "expert",
    "rank": None,
    "": None,
}
ROWS = ("data", "fsdp")  # mesh axes over which the rows of a batch are split
# Platforms on which tokens of a row are divided between the parts of a layer. XLA's CPU backend begins collectives that
# do not need each other in any order, and with two groups of devices in one program some then wait for each other for
# ever (jaxlib 0.10.2: seen with fsdp 2 x tensor 2).
DIVIDES_TOKENS = {"tpu", "gpu", "cuda", "rocm"}
BATCH_SPEC = PartitionSpec(ROWS, None)  # [rows, time]
# The same for arrays in a training pass, see `policy.placement`: weights are gathered over fsdp.
IN_USE: Mapping[str, Any] = {
    **RULES,
    "embed": None,
    "rows": ROWS,
    "tokens": (*ROWS, "tensor", "expert"),
    "copies": (*ROWS, "expert"),
    "replica": "data",
    "split": "fsdp",
    "": None,
}


@dataclass(frozen=True)
class MeshPlacement(Placement):
    """Placement of the arrays of a training pass on a mesh by `RULES` and `IN_USE`."""

    mesh: AbstractMesh | None = None

    def used(self, array, axes):
        if axes[0] == "tokens" and (len(array) % self.mesh.size or kernels.platform() not in DIVIDES_TOKENS):
            axes = ("rows", *axes[1:])
        return self._on(array, [IN_USE[a] for a in axes])

    def stored(self, array, axes):
        return self._on(array, [RULES[a] for a in axes])

    def over_experts(self, function, arrays, axes, out_axes):
        stored = {**IN_USE, **RULES}

        def shard(*arrays):
            out = function(jax.lax.axis_index("expert"), *arrays)
            return _by_axes(lambda names, array: _summed(array, [stored[a] for a in names]), out_axes, out)

        takes = _by_axes(lambda names: PartitionSpec(*(IN_USE[a] for a in names)), axes)
        gives = _by_axes(lambda names: PartitionSpec(*(stored[a] for a in names)), out_axes)
        mapped = jax.shard_map(shard, mesh=self.mesh, in_specs=takes, out_specs=gives, check_vma=False)
        return mapped(*arrays)

    def over_heads(self, function, q, k, v, segments):
        ways, heads, keys = self.mesh.shape["tensor"], q.shape[2], k.shape[2]
        split = None if heads % ways else "tensor"
        if split and keys % ways:  # too few keys for all devices: neighbours have the same
            k, v = (jnp.repeat(x, lcm(keys, ways) // keys, axis=2) for x in (k, v))
        array, row = PartitionSpec(ROWS, None, split, None), PartitionSpec(ROWS, None)
        specs = (array, array, array, row)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=array, check_vma=False)
        return mapped(q, k, v, segments)

    def _on(self, array, entries):
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(*entries)))


def _by_axes(function, axes, *trees):
    """A function of the logical axes of every array of a tree."""

    def is_axes(node):
        return isinstance(node, tuple) and all(isinstance(name, str) for name in node)

    return jax.tree.map(function, axes, *trees, is_leaf=is_axes)


def _summed(array, entries):
    """Inside a shard: the sum over devices of an array of which each keeps the share that mesh axes give it."""
    split = {axis for entry in entries if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
    if "fsdp" in entries:  # each device made all of it, of its rows
        array = jax.lax.psum_scatter(array, "fsdp", scatter_dimension=entries.index("fsdp"), tiled=True)
    return jax.lax.psum(array, tuple(axis for axis in MESH_AXES if axis not in split))


def placement() -> Placement:
    """Placement on the mesh that a function is traced for (`jax.sharding.use_abstract_mesh`)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return ANYWHERE
    return MeshPlacement(blocks=prod(mesh.shape[a] for a in ROWS), mesh=mesh)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh `data x fsdp x tensor x expert` over all devices (or the given ones).

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    fixed = config.fsdp * config.tensor * config.expert
    data = len(devices) // fixed if config.data == -1 else config.data
    if data < 1 or data * fixed != len(devices):
        raise ConfigError(
            f"mesh data x fsdp x tensor x expert = {config.data} x {config.fsdp} x {config.tensor} x {config.expert} "
            f"does not cover {len(devices)} devices: the product must equal their number (data: -1 takes the rest)"
        )
    shape = (data, config.fsdp, config.tensor, config.expert)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(
    axes: Sequence[str], shape: Sequence[int], mesh: Mesh, rules: Mapping[str, str | None] = RULES
) -> PartitionSpec:
    """Partition of one array from its logical axes.

    Raises:
        ConfigError: an axis without a rule, two axes on one mesh axis, or a length the mesh axis does not divide.
    """
    if len(axes) != len(shape):
        raise ConfigError(f"an array of shape {tuple(shape)} declares {len(axes)} logical axes {tuple(axes)}")
    if unknown := [a for a in axes if a not in rules]:
        raise ConfigError(f"logical axis `{unknown[0]}` has no rule: add it to learner.sharding.RULES")
    entries = [rules[a] for a in axes]
    used = [e for e in entries if e is not None]
    if len(set(used)) != len(used):
        raise ConfigError(f"logical axes {tuple(axes)} map twice to one mesh axis: {tuple(entries)}")
    for axis, entry, length in zip(axes, entries, shape, strict=True):
        if entry is not None and length % mesh.shape[entry]:
            raise ConfigError(
                f"axis `{axis}` of length {length} does not split over mesh.{entry}={mesh.shape[entry]}: "
                f"change that size or mesh.{entry}"
            )
    return PartitionSpec(*entries)


def shardings(arrays: Any, axes: Any, mesh: Mesh) -> Any:
    """Sharding of every array of a tree; `axes` has the same structure with a tuple of names at each leaf."""
    return jax.tree.map(lambda a, names: NamedSharding(mesh, spec(names, a.shape, mesh)), arrays, axes)


def like_params(state: Any, params: Any, param_shardings: Any, mesh: Mesh) -> Any:
    """Shardings of an optimizer state: its copies of the parameter tree as the parameters, the rest on every device."""
    structure = jax.tree.structure(params)

    def is_params(node):
        return jax.tree.structure(node) == structure

    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda node: param_shardings if is_params(node) else replicated, state, is_leaf=is_params)


def place(tree: Any, target: Any) -> Any:
    """Copies arrays onto their shardings; the result never shares a buffer with the input, so it may be donated.

    The explicit copy is needed: `device_put(may_alias=False)` still shares the local shard of a replicated array.
    """
    return jax.tree.map(lambda a, s: jax.device_put(jnp.array(a, copy=True), s), tree, target)


def batch_like(batch: Any, mesh: Mesh) -> Any:
    """Shapes, types and shardings of a micro-batch that `place_batch` would put on the mesh."""
    _check_rows(batch, mesh)
    target = NamedSharding(mesh, BATCH_SPEC)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=target), batch)


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts the `[rows, time]` arrays of a micro-batch on the mesh, rows split over data and fsdp.

    With several processes each of them passes the same whole micro-batch and takes the rows of its devices from it: the
    batch is small, and packing is a function of the sequences, so that nothing depends on how many processes there are.

    Raises:
        ConfigError: the rows do not split evenly.
    """
    _check_rows(batch, mesh)
    target = NamedSharding(mesh, BATCH_SPEC)
    if target.is_fully_addressable:
        return jax.device_put(batch, target)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, target, lambda at: np.asarray(a)[at]), batch)


def _check_rows(batch: Any, mesh: Mesh) -> None:
    ways = prod(mesh.shape[a] for a in ROWS)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % ways:
        raise ConfigError(
            f"microbatch.rows {rows} does not split over mesh data x fsdp = {ways} devices: use a multiple of {ways}"
        )
