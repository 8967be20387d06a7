"""Which devices learn and which sample.

By default both roles share all devices. With `mesh.rollout_devices` the last devices of every process sample and the
others learn, so that the two overlap without sharing a queue.
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
        ConfigError: no device is left to learn, sizes that do not cover the devices, `rollout_tensor` without devices
            of its own.
    """
    devices = list(jax.devices() if devices is None else devices)
    apart, tensor = config.rollout_devices, config.rollout_tensor
    if not apart:
        if tensor != 1:
            raise ConfigError(
                f"`mesh.rollout_tensor` is {tensor} without `mesh.rollout_devices`: sampling then has the learner's "
                "mesh, set mesh.tensor, or set devices aside"
            )
        mesh = make_mesh(config, devices)
        return mesh, mesh
    if apart % tensor:
        raise ConfigError(
            f"`mesh.rollout_devices` ({apart}) is not a multiple of `mesh.rollout_tensor` ({tensor}): change one"
        )
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
    shape = (len(sampling) // tensor, 1, tensor, 1)
    sampler = Mesh(np.array(sampling).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    return make_mesh(config, learning), sampler
