"""Which devices learn and which sample: shapes and refusals (the engine on them: test_rollout_devices.py)."""

from contextlib import nullcontext

import pytest

from trace_jax.config import ConfigError, MeshConfig
from trace_jax.learner.roles import role_meshes, set_apart
from trace_jax.rollout.placement import check_compiled


def on(count, **fields):
    """Meshes of virtual devices, four to a process."""
    return role_meshes(MeshConfig(**fields), list(map(_Device, range(count))), lambda device: device.id // 4)


class _Device:
    process_index = 0

    def __init__(self, number):
        self.id = number


def test_both_roles_share_a_mesh_unless_told_otherwise():
    learning, sampling = on(8, fsdp=4, tensor=2)
    assert sampling is learning and not set_apart(learning, sampling)


def test_lanes_may_have_a_shape_of_their_own_on_the_same_devices():
    learning, sampling = on(16, fsdp=4, tensor=4, rollout_tensor=2, rollout_expert=4)
    assert learning.devices.shape == (1, 4, 4, 1) and sampling.devices.shape == (2, 1, 2, 4)
    assert sampling.devices.flat[:].tolist() == learning.devices.flat[:].tolist()  # or nothing could be gathered
    assert not set_apart(learning, sampling)


def test_devices_set_apart():
    learning, sampling = on(8, rollout_devices=2, rollout_expert=2)
    assert [d.id for d in sampling.devices.flat] == [2, 3, 6, 7] and sampling.devices.shape == (2, 1, 1, 2)
    assert [d.id for d in learning.devices.flat] == [0, 1, 4, 5] and set_apart(learning, sampling)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rollout_tensor": 3}, r"\(3 x 1\) does not divide the 8 devices"),
        ({"rollout_devices": 3, "rollout_expert": 2}, r"\(3\) is not a multiple of .* \(1 x 2\)"),
        ({"rollout_devices": 4}, "leaves none of the 4 devices"),
    ],
)
def test_what_cannot_be(fields, says):
    with pytest.raises(ConfigError, match=says):
        on(8, **fields)


class _Chip(_Device):
    def __init__(self, number, kind, slices=1):
        super().__init__(number)
        self.device_kind, self.slice_index = kind, number % slices


@pytest.mark.parametrize(
    ("kind", "chips", "slices", "together", "refused"),
    [
        ("TPU v5 lite", 16, 1, 4, False),
        ("TPU v5 lite", 32, 1, 4, True),
        ("TPU v5 lite", 32, 1, 32, False),
        ("TPU v5 lite", 32, 1, 1, False),
        ("TPU v5 lite", 32, 2, 4, False),  # two slices of 16
        ("TPU v5", 256, 1, 4, False),
    ],
)
def test_parts_of_large_v5e_slices_have_no_programs(kind, chips, slices, together, refused):
    devices = [_Chip(i, kind, slices) for i in range(chips)]
    with pytest.raises(ConfigError, match="4 of the 32 chips") if refused else nullcontext():
        check_compiled(together, "a sampling lane", "set `tensor` to 1", devices)
