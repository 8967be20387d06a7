"""Virtual CPU devices and another default generator; started by test_simulator_devices.py, prints one JSON object."""

import hashlib
import json
import sys

import jax
import numpy as np

from trace_jax.config import SimulatorConfig
from trace_jax.simulator import difficulty, stream
from trace_jax.simulator.causes import CAUSE_INDEX
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.params import SimulatorParams

# The default sizes, which other tests compile programs of, too.
SHAPE = {name: getattr(SimulatorConfig(), name) for name in ("days", "segments", "siblings")}
STRATA = list(stream.paper_composition(1000))


def episodes(rows, params=SimulatorParams(), devices=None, batch=None):
    """Episodes and verdicts of the proposals `rows`, of all strata in turn; `batch` at a time, or all at once."""
    rows = np.asarray(rows, np.int32)
    if batch:
        parts = [episodes(rows[i : i + batch], params, devices) for i in range(0, len(rows), batch)]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    causes = np.array([CAUSE_INDEX[STRATA[r % len(STRATA)][0]] for r in rows], np.int32)
    dimensions = np.array([STRATA[r % len(STRATA)][1] for r in rows], np.int32)
    key = stream.stream_key(12, "devices")
    out = stream.simulate(key, rows, causes, dimensions, params, OracleParams(), **SHAPE, devices=devices)
    return jax.tree.map(np.asarray, out)


def digest(tree, rows=slice(None)):
    """Of every bit of the given rows."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(leaf[rows]).tobytes())
    return found.hexdigest()


def compiled(devices):
    return stream._program(tuple(devices), *SHAPE.values(), "threefry2x32")._cache_size()


def main():
    devices = jax.devices()
    width = stream.rows_multiple(devices)
    everything = episodes(range(width), devices=devices)
    for name in difficulty.PRESETS:
        config = SimulatorConfig(difficulty=name, strength=1.1, noise=0.5, onset=(1, 0, 2))
        episodes(range(width), difficulty.params_of(config), devices)
    episodes(range(width), SimulatorParams(), devices)
    out = {
        "devices": len(devices),
        "default generator": jax.config.jax_default_prng_impl,
        "width": width,
        "all": digest(everything),
        "verdicts": digest(everything[1]),
        "accepted": everything[1].accept.astype(int).tolist(),
        "compiled": compiled(devices),
    }
    print(json.dumps(out))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    jax.config.update("jax_default_prng_impl", "rbg")
    main()
