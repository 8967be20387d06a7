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

from trace_jax.config import ConfigError, GRPOConfig, MeshConfig, OptimizerConfig
from trace_jax.learner import checkpoint, multihost, sharding
from trace_jax.learner.checkpoint import CheckpointStore
from trace_jax.learner.objectives import grpo_objective
from trace_jax.learner.packing import Sequence, pack
from trace_jax.learner.step import Learner
from trace_jax.recipes.interrupt import Interrupt, Interrupted

AXES = {"matrix": ("embed", "vocab"), "gain": ("embed",), "table": ("vocab", "embed")}
VOCAB, WIDTH = 4, 8


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"matrix": (WIDTH, VOCAB), "gain": (WIDTH,), "table": (VOCAB, WIDTH)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def logprob_fn(params, batch):
    """The smallest policy: a token from the one before it."""
    hidden = params["table"][jnp.roll(batch.ids, 1, axis=1)] * params["gain"]
    scores = jax.nn.log_softmax(hidden @ params["matrix"])
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    return jnp.take_along_axis(scores, batch.ids[..., None], axis=-1)[..., 0], entropy


def learner_on(mesh):
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=0)
    return Learner(logprob_fn, grpo_objective(GRPOConfig()), optimizer, 10, mesh, AXES)


def batches(step):
    """Two micro-batches of four rows, a function of the step."""
    rng = np.random.default_rng([1, step])
    ids = rng.integers(0, VOCAB, (8, 10))
    return pack([Sequence(row, np.arange(10) > 2, float(rng.normal()), -1.4) for row in ids], 10, 4)


def leaves_of(state):
    return [np.array(a) for a in jax.tree.leaves((state.params, state.opt_state))]


def host(tree):
    """This process's shards of every array: {leaf and index: values}; some array must be spread over the processes."""
    leaves = jax.tree.leaves(tree)
    assert any(not a.is_fully_addressable and not a.is_fully_replicated for a in leaves)
    return {(i, str(s.index)): np.array(s.data) for i, a in enumerate(leaves) for s in a.addressable_shards}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def error_to(tree, expected):
    """Largest difference of this process's shards to whole arrays, in order of leaves."""
    pairs = zip(jax.tree.leaves(tree), expected, strict=True)
    return max(float(np.abs(s.data - e[s.index]).max()) for a, e in pairs for s in a.addressable_shards)


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
        multihost.part()
        os._exit(0)


def check(directory, process, interrupt):
    cubes = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    out = {"process": multihost.index(), "devices": len(jax.devices())}

    # one device -> 2 x 2 x 2 over two processes, and on from there
    learner = learner_on(cubes)
    state, extra = checkpoint.restore_state(CheckpointStore(directory / "one"), learner, parameters())
    single = np.load(directory / "single.npz")  # of one device: the state that was saved, and three steps later
    count = len(single) // 2
    out["restored_one"] = error_to((state.params, state.opt_state), [single[f"begin{i}"] for i in range(count)])
    out["extra"] = extra

    # saves in the background, while the devices of both processes work together on the donated state
    store = CheckpointStore(directory / "two", keep=1, keep_best=1, background=True)
    were = []
    for score in (2.0, 1.0, 1.5):
        were.append(host(state))
        files = {"rollouts": f"of process {process} at {score}".encode()}
        sampler = {"sampler": {"matrix": state.params["matrix"]}}
        checkpoint.save_state(store, state, {"score": score}, score=score, items=sampler, files=files)
        state, metrics = learner.step(state, batches(int(state.step)))
    out["trained"] = error_to((state.params, state.opt_state), [single[f"end{i}"] for i in range(count)])
    out["loss"] = metrics["loss"]
    out["steps"], out["best"] = store.steps(), store.best()
    out["restored_two"] = same(host(checkpoint.restore_state(store, learner, parameters())[0]), were[2])
    flat = learner_on(sharding.make_mesh(MeshConfig(fsdp=4, data=2)))
    again, _ = checkpoint.restore_state(store, flat, parameters())
    back = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), again, state)
    out["restored_flat"] = same(host(back), were[2]) and again.params["gain"].sharding != back.params["gain"].sharding
    whole = {"matrix": jax.ShapeDtypeStruct(state.params["matrix"].shape, jnp.float32)}  # on one device of each process
    best, _ = store.restore(1, {"sampler": whole})
    out["restored_item"] = error_to(best, [single["begin1"]])

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
