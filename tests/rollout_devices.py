"""Runs on 8 virtual CPU devices, started by test_rollout_devices.py; prints one JSON object.

With arguments (process id, address): one of two processes with four devices each, which share a mesh of eight.
"""

import gc
import json
import os
import sys

import jax

jax.config.update("jax_platforms", "cpu")
if len(sys.argv) > 1:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))
else:
    jax.config.update("jax_num_cpu_devices", 8)

import dataclasses  # noqa: E402

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from helpers_rollout import CONFIG, POLICY, STOP, VOCABULARY, live, prompts_of  # noqa: E402

from trace_jax.config import ConfigError, MeshConfig  # noqa: E402
from trace_jax.learner import multihost, sharding  # noqa: E402
from trace_jax.learner.roles import role_meshes  # noqa: E402
from trace_jax.learner.stream import Stream  # noqa: E402
from trace_jax.policy.transformer import Transformer, logical_axes  # noqa: E402
from trace_jax.recipes import processes  # noqa: E402
from trace_jax.rollout import programs  # noqa: E402
from trace_jax.rollout.engine import Engine  # noqa: E402

# Every lane compiles for its own devices: few lanes. Two processes share a mesh of eight devices, in four lanes.
MESHES = {
    "data2": (2, MeshConfig()),
    "fsdp2 tensor2": (4, MeshConfig(fsdp=2, tensor=2)),
    "fsdp4, lanes of tensor2": (4, MeshConfig(fsdp=4, rollout_tensor=2)),
}
ROWS = 24
programs.CPU_CHUNKS = programs.CPU_CHUNKS[-1:]  # one shape of prefill
CONFIG = dataclasses.replace(CONFIG, slots=16)
POLICY = dataclasses.replace(POLICY, layers=1)  # compiles in half the time, and every layer is placed alike


def engine_on(model, devices, mesh_config, params, config=CONFIG):
    """An engine on a mesh that was given its parameters by a learner on that mesh."""
    axes = logical_axes(model)
    devices = jax.devices()[:devices] if isinstance(devices, int) else devices
    mesh, lanes = role_meshes(mesh_config, devices)
    processes.introduce(mesh)
    engine = built(model, lanes, config)
    placed = sharding.place(params, sharding.shardings(params, axes, mesh))
    engine.set_params(placed, 3)
    return engine


def built(model, mesh, config):
    axes = logical_axes(model)
    return Engine(
        model,
        config,
        STOP,
        mesh=mesh,
        specs=lambda m: sharding.shardings(nnx.state(model, nnx.Param), axes, m),
        channel=lambda place: Stream(f"lane-{place.lane}", place.processes),
    )


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def summary(lives):
    return [[life.ids, [x for _, x in life.sampled]] for life in lives]


def main():
    model = Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(0))
    other = nnx.state(Transformer(POLICY, VOCABULARY, rngs=nnx.Rngs(7)), nnx.Param)
    prompts, out = prompts_of(ROWS), {}
    if len(sys.argv) > 1:
        rows = range(int(sys.argv[1]), ROWS, 2)  # each process samples its share
        name = "fsdp2 tensor2"
        engine = engine_on(model, 8, MESHES[name][1], other)
        out[name] = summary(live(engine, [prompts[r] for r in rows], list(rows), turns=2))
        # two lanes with a device of each process: the first process leads both
        first, second = jax.devices()[:4], jax.devices()[4:]
        across = [first[0], second[0], first[1], second[1]]
        engine = engine_on(model, across, MESHES[name][1], other)
        out["share"] = engine.share
        for collection in range(2):  # the second begins with other parameters and empty caches
            engine.follow()
            if engine.share is not None:
                lives = live(engine, prompts, range(ROWS), turns=2, disorder=1)
                out[f"across {collection}"] = summary(lives)
                out["versions"] = sorted({turn.version for life in lives for turn in life.turns})
            engine.followed()
            engine.free()
            mesh = sharding.make_mesh(MESHES[name][1], across)
            engine.set_params(sharding.place(other, sharding.shardings(other, logical_axes(model), mesh)), 4)
        if engine.share is not None:
            try:
                built(model, mesh, dataclasses.replace(CONFIG, slots=1))
            except ConfigError as error:
                out["refused"] = str(error)
    else:
        alone = Engine(model, CONFIG, STOP, lanes=1)
        alone.set_params(other, 3)
        out["one"] = summary(live(alone, prompts, range(ROWS), turns=2))
        for name, (devices, mesh) in MESHES.items():
            begun = live_bytes()
            engine = engine_on(model, devices, mesh, other)
            lives = live(engine, prompts, range(ROWS), turns=2, disorder=1)
            out[name] = summary(lives)
            cache = [c for lane in engine._lanes for c in lane.calls.caches.values()]
            out[f"{name}/heads"] = sorted({tuple(x.addressable_shards[0].data.shape)[1] for c in cache for x in c.k})
            out[f"{name}/devices"] = len({d for c in cache for x in c.k for d in x.sharding.device_set})
            assert {turn.version for life in lives for turn in life.turns} == {3}
            del cache
            held = live_bytes() - begun
            engine.free()
            out[f"{name}/held"] = held, live_bytes() - begun
        # in 8 bits: rounded where the learner has them, then gathered
        rounded = dataclasses.replace(CONFIG, weights="int8")
        alone = Engine(model, rounded, STOP, lanes=1)
        alone.set_params(other, 3)
        out["int8 one"] = summary(live(alone, prompts[:8], range(8), turns=1))
        engine = engine_on(model, 4, MESHES["fsdp2 tensor2"][1], other, rounded)
        out["int8"] = summary(live(engine, prompts[:8], range(8), turns=1))
        held = [x for x in jax.tree.leaves(engine._lanes[0].weights[0]) if x.dtype == "int8"]
        out["int8/shapes"] = sorted({(x.shape, x.sharding.shard_shape(x.shape)) for x in held})
    print(json.dumps(out, default=np.ndarray.tolist))
    if len(sys.argv) > 1:
        sys.stdout.flush()
        multihost.part()
        os._exit(0)


if __name__ == "__main__":
    main()
