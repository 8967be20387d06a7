"""An episode is the same bits alone, in any batch, on one device or eight, and after a restart."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import simulator_devices
from simulator_devices import SHAPE, compiled, digest, episodes

from trace_jax.config import SimulatorConfig
from trace_jax.simulator import difficulty, stream
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.params import SimulatorParams


@pytest.fixture(scope="module")
def sharded():
    """Another process with 8 virtual devices."""
    done = subprocess.run(
        [sys.executable, simulator_devices.__file__, "8"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


BATCH = 128  # on one device; two blocks


@pytest.fixture(scope="module")
def here(sharded):
    return episodes(range(sharded["width"]), devices=jax.devices()[:1], batch=BATCH)


def test_devices_restarts_and_default_generator_do_not_matter(sharded, here):
    """Sharded over 8 devices in a process whose default generator is rbg, or on one device in this one (case 21 of
    data: streams name their generator)."""
    assert sharded["devices"] == 8 and sharded["width"] == 8 * stream.block()
    assert sharded["default generator"] == "rbg" != jax.config.jax_default_prng_impl
    assert sharded["all"] == digest(here)


def test_batches_and_positions_do_not_matter(here):
    """Case 21 of data: a single block, and rows in another order beside other neighbours."""
    one = jax.devices()[:1]
    assert digest(episodes(range(64), devices=one)) == digest(here, slice(0, 64))
    order = np.random.default_rng(0).permutation(len(here[1].accept))
    assert digest(episodes(order, devices=one, batch=BATCH)) == digest(here, order)
    alone = episodes(np.full(64, 37), devices=one)
    for row in (0, 1, 63):
        assert digest(alone, [row]) == digest(here, [37])


def test_accept_masks_are_those_of_any_batch(sharded, here):
    """Case 24 of data: the verdict on an episode, with every margin, does not depend on the batch size."""
    accepted = here[1].accept.astype(int).tolist()
    assert accepted == sharded["accepted"] and 0 < sum(accepted) < len(accepted)
    assert digest(here[1]) == sharded["verdicts"]
    for start in (0, 64, 192):
        _, verdict = episodes(range(start, start + 64), devices=jax.devices()[:1])
        assert digest(verdict) == digest(here[1], slice(start, start + 64))


def test_one_compilation_per_shape(sharded, here):
    """Difficulty, knobs, seeds and causes are data: they never compile again."""
    assert sharded["compiled"] == 1
    one, before = jax.devices()[:1], compiled(jax.devices()[:1])
    for name in difficulty.PRESETS:
        config = SimulatorConfig(difficulty=name, strength=2, noise=0.3, onset=(1, 2, 3))
        changed = episodes(range(BATCH), difficulty.params_of(config), one)
        assert digest(changed) != digest(here, slice(0, BATCH))
    assert compiled(one) == before


def test_keys_of_other_generators_are_refused():
    """Case 21 of data: rbg draws differ between a row of a batch and the single run."""
    key, rows = jax.random.key(0, impl="rbg"), np.zeros(64, np.int32)
    with pytest.raises(ValueError, match="threefry2x32 key, not rbg"):
        stream.simulate(key, rows, rows, rows, SimulatorParams(), OracleParams(), **SHAPE)
