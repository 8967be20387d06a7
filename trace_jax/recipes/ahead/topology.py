"""Devices to compile for, which need not be there."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from trace_jax.config import ConfigError
from trace_jax.recipes.ahead.chips import CHIPS, Chip

_EXAMPLES = "v5e:4x4, v5p:4x4x8, h100x8 or h200x16"
_TPU, _GPU = re.compile(r"(v5e|v5p):(\d+(?:x\d+)+)"), re.compile(r"(h100|h200)x(\d+)")
_DIMENSIONS = {"v5e": 2, "v5p": 3}


@dataclass(frozen=True)
class Topology:
    """Devices of one kind.

    Attributes:
        name: as given.
        chip: what each of them is.
        devices: to build meshes of. estimate: they are virtual CPU devices that stand in for GPUs.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]
    estimate: bool

    @property
    def hosts(self) -> int:
        """Processes of a run on it."""
        return len({self.host_of(d) for d in self.devices})

    def host_of(self, device: Any) -> int:
        """The process that has a device."""
        return device.id // self.chip.per_host if self.estimate else device.process_index


def parse(name: str) -> Topology:
    """A topology by name: `v5e:ROWSxCOLUMNS`, `v5p:XxYxZ`, `h100xN`, `h200xN`.

    Starts the CPU backend with as many devices as a GPU topology names, and no other one.

    Raises:
        ConfigError: an unknown name or shape, or no libtpu for a TPU.
    """
    tpu, gpu = _TPU.fullmatch(name), _GPU.fullmatch(name)
    if tpu is None and gpu is None:
        raise ConfigError(f"--topology {name} is unknown: give one such as {_EXAMPLES}")
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has is not asked
    if gpu is not None:
        return _virtual(name, CHIPS[gpu[1]], int(gpu[2]))
    shape = [int(n) for n in tpu[2].split("x")]
    if len(shape) != _DIMENSIONS[tpu[1]]:
        raise ConfigError(
            f"--topology {name}: {tpu[1]} has {_DIMENSIONS[tpu[1]]} dimensions, give one such as {_EXAMPLES}"
        )
    if prod(shape) > 8960:
        raise ConfigError(f"--topology {name} has {prod(shape)} chips: a pod has at most 8960")
    return Topology(name, CHIPS[tpu[1]], _described(name, shape), estimate=False)


def _described(name: str, shape: Sequence[int]) -> Sequence[Any]:
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {name} needs the TPU compiler: pip install 'trace-jax[tpu]' (libtpu, which needs no TPU)"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # this need not be a machine of Google's cloud
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # one host has all eight chips of the smallest v5e slices, otherwise four
    options = {"chips_per_host_bounds": (2, 4, 1)} if name == "v5e:2x4" else {}
    try:
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)
    except Exception as error:
        raise ConfigError(f"--topology {name} is no slice: {str(error).splitlines()[0]}") from None


def _virtual(name: str, chip: Chip, count: int) -> Topology:
    if not 1 <= count <= 4096:
        raise ConfigError(f"--topology {name}: give 1 to 4096 GPUs, such as {chip.name}x8")
    if count > chip.per_host and count % chip.per_host:
        raise ConfigError(f"--topology {name}: nodes have {chip.per_host} GPUs, give a multiple of it")
    with contextlib.suppress(RuntimeError):  # the backend runs already, perhaps with enough of them
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"--topology {name} needs a process of its own: run trace-jax compile by itself")
    return Topology(name, chip, devices[:count], estimate=True)
