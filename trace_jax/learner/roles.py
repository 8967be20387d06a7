"""Which devices learn and which sample.

By default both roles share all devices, and a sampling lane is a `tensor x expert` block of the learner's mesh. With
`mesh.rollout_tensor` and `mesh.rollout_expert` lanes have a shape of their own: more chips hold the weights of a lane
than a learner wants to split its matmuls over. With `mesh.rollout_devices` the last devices of every process sample and
the others learn, so that the two overlap without sharing a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from trace_jax.config import ConfigError, MeshConfig
from trace_jax.learner.sharding import MESH_AXES, make_mesh


def role_meshes(
    config: MeshConfig,
    devices: Sequence[jax.Device] | None = None,
    host_of: Callable[[jax.Device], int] = lambda device: device.process_index,
) -> tuple[Mesh, Mesh]:
    """The learner's mesh, and the sampler's: the same one, or one of other devices.

    Args:
        host_of: the process that has a device.

    Raises:
        ConfigError: no device is left to learn, sizes that do not cover the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    apart, tensor, expert = config.rollout_devices, config.rollout_tensor, config.rollout_expert
    lane, fields = tensor * expert, f"`mesh.rollout_tensor` x `mesh.rollout_expert` ({tensor} x {expert})"
    if not apart:
        mesh = make_mesh(config, devices)
        if lane == 1:
            return mesh, mesh
        if mesh.size % lane:
            raise ConfigError(f"{fields} does not divide the {mesh.size} devices into lanes: change one")
        return mesh, _of_lanes(devices, tensor, expert)
    if apart % lane:
        raise ConfigError(f"`mesh.rollout_devices` ({apart}) is not a multiple of {fields}: change one")
    learning, sampling = [], []
    for process in sorted({host_of(d) for d in devices}):
        mine = [d for d in devices if host_of(d) == process]
        if len(mine) <= apart:
            raise ConfigError(
                f"`mesh.rollout_devices` ({apart}) leaves none of the {len(mine)} devices of a process to learn on: "
                "lower it (0: both share all)"
            )
        learning += mine[:-apart]
        sampling += mine[-apart:]
    return make_mesh(config, learning), _of_lanes(sampling, tensor, expert)


def set_apart(learning: Mesh, sampling: Mesh) -> bool:
    """Whether the roles have devices of their own."""
    return set(learning.devices.flat) != set(sampling.devices.flat)


def _of_lanes(devices: Sequence[jax.Device], tensor: int, expert: int) -> Mesh:
    """Devices in their order, so many of which in a row are a lane."""
    shape = (len(devices) // (tensor * expert), 1, tensor, expert)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
