"""One of two processes with 4 virtual devices each, started by test_learner_checkpoint_processes.py.

`checkpoint_processes.py DIRECTORY PORT PROCESS`: `DIRECTORY/one` was written by one process with one device;
`DIRECTORY/two` is written here. Prints one JSON object.
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.config import ConfigError, MeshConfig, OptimizerConfig
from trace_jax.learner import checkpoint, multihost, sharding
from trace_jax.learner.checkpoint import CheckpointStore
from trace_jax.learner.step import Learner, TrainState
from trace_jax.recipes.interrupt import Interrupt, Interrupted

AXES = {"matrix": ("embed", "mlp"), "gain": ("embed",), "table": ("vocab", "embed")}
STEPS_BETWEEN = 20


def parameters():
    """Small binary fractions: adding one to them is exact."""
    rng = np.random.default_rng(0)
    shapes = {"matrix": (8, 6), "gain": (8,), "table": (4, 8)}
    return {name: jnp.asarray(rng.integers(0, 1000, shape) / 64, jnp.float32) for name, shape in shapes.items()}


def learner_on(mesh):
    """For its states only: it makes no step."""
    return Learner(None, None, OptimizerConfig(), 6, mesh, AXES)


def after(state, steps):
    """What `advance` makes of a state, with NumPy."""
    return TrainState(
        step=np.asarray(state.step) + steps,
        params={k: np.asarray(v) + np.float32(steps) for k, v in state.params.items()},
        opt_state=jax.tree.map(np.asarray, state.opt_state),
    )


def make_advance(state):
    """A step whose collectives cross the processes and which donates the state."""

    def advance(state):
        # the sum over all devices is finite, so this adds one; XLA cannot know
        one = jnp.where(jnp.isfinite(sum(jnp.sum(p) for p in state.params.values())), 1, 0)
        return TrainState(state.step + one, jax.tree.map(lambda p: p + one, state.params), state.opt_state)

    return jax.jit(advance, donate_argnums=0, out_shardings=jax.tree.map(lambda a: a.sharding, state))


def same(tree, expected):
    """Whether this process's shards are those of the expected arrays, and are not the whole of them."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True))
    equal = all(np.array_equal(s.data, np.asarray(e)[s.index]) for a, e in pairs for s in a.addressable_shards)
    return equal and any(not a.is_fully_addressable and not a.is_fully_replicated for a, _ in pairs)


def error_of(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def main(directory, port, process):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with Interrupt() as interrupt:  # before JAX puts a handler of its own: the signal must be heard all the same
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
        print(json.dumps(check(directory, process, interrupt)), flush=True)


def check(directory, process, interrupt):
    cubes = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    out = {"process": multihost.index(), "devices": len(jax.devices())}

    # one device -> 2 x 2 x 2 over two processes
    learner = learner_on(cubes)
    one = CheckpointStore(directory / "one")
    state, extra = checkpoint.restore_state(one, learner, parameters())
    origin = after(learner_on(sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])).init(parameters()), 0)
    out["restored_one"] = same(state, origin) and extra == {"k": 7}

    # saves in the background, while the devices of both processes work together on the donated state
    advance = make_advance(state)
    store = CheckpointStore(directory / "two", keep=1, keep_best=1, background=True)
    for score in (2.0, 1.0, 1.5):
        files = {"rollouts": f"of process {process} at {score}".encode()}
        sampler = {"sampler": {"matrix": state.params["matrix"]}}
        checkpoint.save_state(store, state, {"score": score}, score=score, items=sampler, files=files)
        for _ in range(STEPS_BETWEEN):
            state = advance(state)
    out["trained"] = same(state, after(origin, 3 * STEPS_BETWEEN))
    out["steps"], out["best"] = store.steps(), store.best()
    newest = after(origin, 2 * STEPS_BETWEEN)
    out["restored_two"] = same(checkpoint.restore_state(store, learner, parameters())[0], newest)
    flat = learner_on(sharding.make_mesh(MeshConfig(fsdp=4, data=2)))
    out["restored_flat"] = same(checkpoint.restore_state(store, flat, parameters())[0], newest)
    sampler, _ = store.restore(0, {"sampler": {"matrix": state.params["matrix"]}})
    out["restored_item"] = same(sampler["sampler"], {"matrix": origin.params["matrix"]})

    # one process cannot write: nobody has a new checkpoint and both say why
    fingerprint = checkpoint.fingerprint
    if process == 1:

        def refuse(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpoint.fingerprint = refuse
    checkpoint.save_state(store, state, {})
    out["failed"] = error_of(store.wait)
    out["steps_after_failure"] = store.steps()
    checkpoint.fingerprint = fingerprint
    store.close()

    # directories that are not one
    apart = CheckpointStore(directory / f"apart{process}" / "grpo")
    out["apart"] = error_of(lambda: checkpoint.save_state(apart, state, {}))
    seen = CheckpointStore(directory / "one" if process else directory / "apart0" / "one")
    out["apart_restore"] = error_of(lambda: checkpoint.restore_state(seen, learner, parameters()))

    # a signal to one process stops both after the same step
    begun, step = time.monotonic(), 0
    try:
        while True:
            if process == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            interrupt.agree()
            interrupt.check()
            step += 1
    except Interrupted as stop:
        out["stopped"] = [step, stop.status]
    out["agree_ms"] = 1000 * (time.monotonic() - begun) / (step + 1)
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
