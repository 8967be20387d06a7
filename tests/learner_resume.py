"""A small training process for test_learner_checkpoint.py:

    learner_resume.py DIRECTORY UNTIL [background [kill|interrupt]]

Prints a digest of everything that must be equal after a resume. Shuffle, two optimizer steps per batch, two
micro-batches each, an epoch boundary inside; every batch is a function of (seed, cursor).
"""

import hashlib
import json
import os
import signal
import sys

import jax

jax.config.update("jax_platforms", "cpu")

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

from trace_jax.config import GRPOConfig, MeshConfig, OptimizerConfig, PolicyConfig  # noqa: E402
from trace_jax.learner import checkpoint, sharding  # noqa: E402
from trace_jax.learner.objectives import grpo_objective  # noqa: E402
from trace_jax.learner.packing import Sequence, pack  # noqa: E402
from trace_jax.learner.step import Learner, transformer_logprobs  # noqa: E402
from trace_jax.policy.transformer import Transformer, logical_axes  # noqa: E402

SEED, PROMPTS, TAKE, ITERATIONS = 5, 5, 2, 2


def batch(cursor):
    """Sequences of the prompts cursor, cursor + 1, ... of the endlessly reshuffled set."""
    out = []
    for i in range(cursor, cursor + TAKE):
        prompt = np.random.default_rng([SEED, i // PROMPTS]).permutation(PROMPTS)[i % PROMPTS]
        rng = np.random.default_rng([SEED, 1, i])
        ids = np.concatenate([[prompt], rng.integers(0, 64, 9 + i % 3)])
        out.append(Sequence(ids, np.arange(len(ids)) > 3, float(rng.normal()), -4.0))
    return out


def main(directory, until, how=None, trouble=None):
    config = PolicyConfig(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=64)
    model = Transformer(config, 64, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    learner = Learner(
        transformer_logprobs(graphdef),
        grpo_objective(GRPOConfig(clip_low=0.9, clip_high=9.0)),  # wide: every step has a gradient
        OptimizerConfig(schedule="cosine", warmup_steps=2),
        6,
        sharding.make_mesh(MeshConfig(), jax.devices()[:1]),
        logical_axes(model),
    )
    store = checkpoint.CheckpointStore(directory, background=how == "background")
    restored = checkpoint.restore_state(store, learner, params)
    state, extra = restored or (learner.init(params), {"cursor": 0, "iteration": 0, "consumed": []})
    metrics = {}
    while int(state.step) < until:
        sequences = batch(extra["cursor"])
        state, metrics = learner.step(state, pack(sequences, 16, 1))
        last = extra["iteration"] == ITERATIONS - 1
        extra = {
            "cursor": extra["cursor"] + TAKE * last,
            "iteration": 0 if last else extra["iteration"] + 1,
            "consumed": extra["consumed"] + [int(s.ids[0]) for s in sequences] * last,
        }
        if int(state.step) == until:
            trouble_during_save(store, trouble)
        if store.background or int(state.step) == until:  # in the background: the next step donates what is written
            checkpoint.save_state(store, state, extra)
    store.close()
    leaves = [np.asarray(x) for x in jax.tree.leaves((state.step, state.params, state.opt_state))]
    digest = hashlib.sha256(b"".join(x.tobytes() for x in leaves)).hexdigest()
    print(json.dumps({"digest": digest, "extra": extra, "metrics": metrics, "step": int(state.step)}))


def trouble_during_save(store, trouble):
    """Kills this process, or interrupts it twice, between the first file and the manifest."""
    if trouble is None:
        return
    original = store._orbax.save

    def save(*args, **kwargs):
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL if trouble == "kill" else signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    store._orbax.save = save


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
