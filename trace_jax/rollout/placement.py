"""Which devices a sampling lane has, and how the learner's parameters get there.

A lane is one `tensor x expert` block of the mesh: its devices split the heads of every row, the lanes split the rows
(axes `data` and `fsdp`). Lanes share nothing, so they may run different numbers of steps. A lane that lies in one
process needs no other, whatever those do. The devices of a large policy's lane lie in several: the first of these
processes leads the lane, and the others do on their devices what it tells them (`spanning`). Only new parameters need
all processes: what the learner shards over `fsdp` is gathered by one program on the whole mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax.config import ConfigError
from trace_jax.policy.quantised import in_use, layout_in_use


@dataclass(frozen=True)
class Place:
    """Where a lane's arrays lie.

    Attributes:
      device: the device of a lane that has one, else its first.
      params: sharding of every parameter over the lane's devices; None on one device.
      heads: sharding of a cache's heads (axis 1 of keys and values) over them; None on one device.
      frozen: sharding of what adapters work on; None on one device and without adapters.
      lane: which block of the mesh it is, from 0.
      processes: that have its devices, ascending; the first leads. Empty for a lane of this process alone.
    """

    device: jax.Device
    params: Any = None
    heads: NamedSharding | None = None
    frozen: Any = None
    lane: int = 0
    processes: tuple[int, ...] = ()

    @property
    def spans(self) -> bool:
        """Whether its devices lie in several processes."""
        return len(self.processes) > 1

    @property
    def leads(self) -> bool:
        """Whether this process decides what the lane does."""
        return not self.spans or self.processes[0] == jax.process_index()


HostOf = Callable[[jax.Device], int]
# Chips of the largest slice for whose parts there are programs of several chips, by kind of device. Of a larger one XLA
# (libtpu 0.0.42) compiles programs of one chip and of all: "on platforms with limited ICI routing device assignment
# should include all slice devices".
LARGEST_DIVIDED = {"TPU v5 lite": 16}
LANE_MEND = (
    "set mesh.rollout_tensor and mesh.rollout_expert to 1, and mesh.tensor and mesh.expert where lanes have those"
)


def process_of(device: jax.Device) -> int:
    """The process of this job that has a device."""
    return device.process_index


def _blocks(mesh: Mesh) -> np.ndarray:
    """The devices of every lane."""
    return mesh.devices.reshape(-1, mesh.shape["tensor"], mesh.shape["expert"])


def owners(mesh: Mesh, host_of: HostOf = process_of) -> list[tuple[int, ...]]:
    """The processes, ascending, that have devices of each lane of a mesh; the first of them leads it.

    Args:
      host_of: the process that has a device.
    """
    return [tuple(sorted({host_of(device) for device in devices.flat})) for devices in _blocks(mesh)]


def check_compiled(together: int, what: str, mend: str, devices: Sequence[jax.Device]) -> None:
    """Refuses programs that the compiler of a TPU does not make.

    Args:
      together: chips that work on one program. what: the role that they have. mend: fields that change it.
      devices: of the whole job.

    Raises:
      ConfigError: several chips of a slice that is larger than `LARGEST_DIVIDED`, and not all of them.
    """
    kind, own = getattr(devices[0], "device_kind", ""), getattr(devices[0], "slice_index", None)
    most, chips = LARGEST_DIVIDED.get(kind), sum(getattr(d, "slice_index", None) == own for d in devices)
    if most is not None and chips > most and 1 < together < chips:
        raise ConfigError(
            f"{what} has {together} of the {chips} chips of a {kind} slice, and for slices of more than {most} its "
            f"compiler makes programs of one chip or of all: {mend}, or take slices of {most} chips, v5p or v6e"
        )


def lane_places(
    mesh: Mesh,
    layout: Any,
    kv_heads: int,
    around: Any = None,
    host_of: HostOf = process_of,
    devices: Sequence[jax.Device] | None = None,
) -> list[Place]:
    """One place for each block of `tensor x expert` devices of the mesh of which this process owns some.

    Args:
      layout: sharding of every parameter on the mesh; needed when a lane has several devices.
      around: the same of what adapters work on.
      host_of: the process that has a device.
      devices: of the whole job; by default all there are.

    Raises:
      ConfigError: the heads do not split, no device of a lane is in this process, or as `check_compiled`.
    """
    lane = mesh.shape["tensor"] * mesh.shape["expert"]
    check_compiled(lane, "a sampling lane", LANE_MEND, devices or jax.devices())
    tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
    places = []
    for number, (devices, found) in enumerate(zip(_blocks(mesh), owners(mesh, host_of), strict=True)):
        if jax.process_index() not in found:
            continue
        if devices.size == 1:
            places.append(Place(devices.flat[0], lane=number))
            continue
        if kv_heads % tensor:
            raise ConfigError(
                f"policy.kv_heads {kv_heads} does not split over the {tensor} devices that share the heads of a "
                "sampling lane (mesh.tensor, or mesh.rollout_tensor where lanes have their own shape): change one"
            )
        lane = Mesh(devices.reshape(1, 1, tensor, expert), mesh.axis_names, axis_types=mesh.axis_types)
        params, frozen = jax.tree.map(lambda s, lane=lane: NamedSharding(lane, _without_rows(s.spec)), (layout, around))
        heads = NamedSharding(lane, PartitionSpec(None, "tensor"))
        processes = found if len(found) > 1 else ()
        places.append(Place(devices.flat[0], params, heads, frozen, number, processes))
    if not places:
        raise ConfigError("no device of the mesh belongs to this process: give every process a part of the mesh")
    return places


class Weights:
    """Brings parameters onto the devices of lanes."""

    def __init__(self, mesh: Mesh | None, layout: Any, dtype: str = "float32", weights: str = "compute"):
        """
        Args:
          layout: sharding of every parameter on the mesh.
          dtype: that matrices are used in: what is gathered is gathered in it.
          weights: `rollout.weights`.
        """
        self._mesh = mesh
        self._held = partial(in_use, dtype=dtype, weights=weights)
        self._round = jax.jit(self._held) if weights == "int8" else None
        wanted = layout_in_use(layout, weights)
        self._gathered = jax.tree.map(lambda s: NamedSharding(mesh, _without_rows(s.spec)), wanted)
        self._layout = layout
        self._gathers: dict[Mesh, Callable[[Any], Any]] = {}

    def place(self, params: Any, places: Sequence[Place], copy: bool) -> list[Any]:
        """The parameters on the devices of each place.

        Args:
          params: on the mesh, on another one of the same devices in the same order, or anywhere on the devices of this
            process.
          copy: make sure that no memory is shared with `params`.
        """
        mesh = self._mesh_of(params)
        on_mesh = mesh is not None
        if on_mesh:
            params = self._gather(mesh, params)
        else:
            if self._round is not None:
                params, copy = self._round(params), False
        done: dict[int, Any] = {}
        for place in places:
            if id(place) in done:
                continue
            if on_mesh:
                mine = _pieces(params, place)
            elif place.params is None and all(x.sharding.device_set == {place.device} for x in jax.tree.leaves(params)):
                mine = params
            elif place.spans:
                mine = jax.tree.map(_own_pieces, params, place.params)
            else:
                mine = jax.device_put(params, place.device if place.params is None else place.params)
            done[id(place)] = jax.tree.map(lambda x: x.copy(), mine) if copy else mine
        return [done[id(place)] for place in places]

    def _mesh_of(self, params: Any) -> Mesh | None:
        """The mesh that parameters lie on and can be gathered from; None for any other place."""
        if self._layout is None or self._mesh.size == 1:
            return None
        found = {getattr(x.sharding, "mesh", None) for x in jax.tree.leaves(params)}
        mesh = found.pop() if len(found) == 1 else None
        same = (
            mesh is not None and not mesh.empty and mesh.devices.flat[:].tolist() == self._mesh.devices.flat[:].tolist()
        )
        return mesh if same else None

    def _gather(self, mesh: Mesh, params: Any) -> Any:
        """One program on all devices: rounded or cast where it lies, then gathered for every lane."""
        if mesh not in self._gathers:
            layout = self._layout if mesh == self._mesh else jax.tree.map(lambda x: x.sharding, params)
            self._gathers[mesh] = jax.jit(partial(self._held, layout=layout), out_shardings=self._gathered)
        return self._gathers[mesh](params)


def _pieces(params: Any, place: Place) -> Any:
    """What a place's devices hold of parameters that are whole on every block of the mesh: nothing moves."""

    def on_device(x: jax.Array, device: jax.Device) -> jax.Array:
        return next(shard.data for shard in x.addressable_shards if shard.device == device)

    if place.params is None:
        return jax.tree.map(lambda x: on_device(x, place.device), params)
    return jax.tree.map(
        lambda x, where: jax.make_array_from_single_device_arrays(
            x.shape,
            where,
            [on_device(x, device) for device in where.mesh.devices.flat if device in where.addressable_devices],
        ),
        params,
        place.params,
    )


def _own_pieces(x: jax.Array, where: NamedSharding) -> jax.Array:
    """An array that every process of a lane has whole, over its devices: each process puts what its own devices hold.
    `device_put` would compare the values in all processes of the job, of which some may have no part in the lane."""
    return jax.make_array_from_callback(x.shape, where, lambda at: x[at])


def _without_rows(spec: PartitionSpec) -> PartitionSpec:
    """A parameter's partition without the axes that a sampling lane does not have."""
    return PartitionSpec(*(None if axis in ("data", "fsdp") else axis for axis in spec))
