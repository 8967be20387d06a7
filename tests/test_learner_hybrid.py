"""Delta layers, experts, adapters and the probe on a mesh (virtual devices, own process)."""

import pytest
from test_learner_devices import result, started


@pytest.mark.slow
def test_a_hybrid_policy_with_adapters_on_a_mesh_equals_one_device():
    """fsdp x tensor x expert: gradients of all parameters, those of adapters on a frozen base, values of the probe."""
    found = result(started(script="hybrid_devices.py"))
    assert found["moved"] > 1e-6  # every parameter has a gradient
    assert found["probe"] < 1e-5
    # delta layers divide queries and keys by their length, which makes rounding of short ones ten times larger
    assert found["all"] < 3e-4 and found["adapters"] < 3e-4
