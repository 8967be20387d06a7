"""Golden models, see tests/parity/model_goldens.py, and the interpreter that has `transformers`."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trace_jax.policy import hf
from trace_jax.policy.hf_write import params_of, planned

GOLDEN = Path(__file__).parent / "golden"
SCRIPT = Path(__file__).parent / "parity" / "model_goldens.py"
NAMES = tuple(sorted(path.stem.removeprefix("model_") for path in GOLDEN.glob("model_*.npz")))


def golden(name: str):
    """What `transformers` made of one model."""
    return np.load(GOLDEN / f"model_{name}.npz")


def checkpoint(stored, directory: Path) -> Path:
    """The checkpoint that a golden file holds, as a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for key in stored.files:
        if key.startswith("file."):
            (directory / key.removeprefix("file.")).write_bytes(stored[key].tobytes())
    return directory


def logits(model, ids) -> jax.Array:
    positions = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    return model.logits(model(ids, positions, jnp.ones_like(ids)))


# Compiled once and run once: quick to compile is what counts.
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _with_gradient(graph, params, ids):
    def loss(params):
        scores = logits(nnx.merge(graph, params), ids)
        logp = jax.nn.log_softmax(scores[:, :-1])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1).mean(), scores

    gradient, scores = jax.grad(loss, has_aux=True)(params)
    return scores, gradient


@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _scores(graph, params, ids):
    return logits(nnx.merge(graph, params), ids)


def logits_at_once(model, ids) -> np.ndarray:
    """`logits` by one program."""
    graph, params = nnx.split(model)
    return np.asarray(_scores(graph, params, ids))


def agree(stored, directory: Path) -> None:
    """Logits to 1e-4 and the watched gradient to 1e-3 of those of `transformers`."""
    model = hf.load_model(directory)
    model.cfg = dataclasses.replace(model.cfg, dtype="float32")  # as the reference computed, whatever it stored
    graph, params = nnx.split(model)
    scores, gradient = _with_gradient(graph, params, stored["ids"])
    np.testing.assert_allclose(scores, stored["logits"], atol=1e-4, rtol=1e-4)
    found = params_of(nnx.merge(graph, gradient))
    origin = hf.Origin(fused=True)
    ours = planned(found, model.cfg, model.vocab_size, origin)[str(stored["watched"])].make()
    assert np.abs(stored["gradient"]).max() > 1e-4
    np.testing.assert_allclose(ours, stored["gradient"], atol=1e-3 * np.abs(stored["gradient"]).max(), rtol=1e-3)


def reference(*words) -> None:
    """Runs the parity script where `transformers` is: in TRACE_JAX_PARITY_PYTHON, or here; skips where it is not."""
    python = os.environ.get("TRACE_JAX_PARITY_PYTHON")
    if python is None:
        if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
            pytest.skip("needs torch and transformers, here or in TRACE_JAX_PARITY_PYTHON")
        python = sys.executable
    done = subprocess.run([python, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
