"""A softmax gate over the base and the adapters of capabilities (`policy.mixture`), trained by GRPO with all of these
frozen, as one more run in `adapters/`, and how its episodes were mixed.

The run has a copy of the adapters among its checkpoints, so that it can be continued and evaluated whatever becomes of
theirs; what it copied is told from what they are now by the sums of their checkpoints' files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Float

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.learner.checkpoint_files import Folder
from trace_jax.policy import lora
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import ADAPTERS, RunDirectory, stored_config, write_text
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import Trajectory

# Of the gate alone: it begins uniform, and steps of an adapter's size would leave it there.
LEARNING_RATE = ("grpo.optimizer.learning_rate", "1e-3")


def over(config: RunConfig, overrides: Iterable[tuple[str, str]], out: Path, names: Sequence[str]) -> RunConfig:
    """The configuration of a gate's run from that of an adapter's.

    Args:
        overrides: of the command; what they say of `lora` must be what the adapters have.
        out: directory with `adapters/`. names: of those to mix.

    Raises:
        ConfigError: no adapter, adapters that cannot be resident together, or an override that is not theirs.
    """
    if not names:
        raise ConfigError(f"{out / 'adapters'} has no finished adapter of a capability for a gate to mix: train one")
    theirs = {name: stored_config(out / "adapters" / name).lora for name in names}
    first = theirs[names[0]]
    if other := next((name for name, cfg in theirs.items() if cfg != first), None):
        raise ConfigError(
            f"adapters {names[0]} and {other} differ in `lora` and cannot be resident together: train them with one"
        )
    said = [field for field, _ in overrides if field.startswith("lora.")]
    asked = dataclasses.replace(config.lora, gate=())
    if said and asked != first:
        raise ConfigError(f"`{said[0]}` is not that of the adapters in {out / 'adapters'}, which a gate only mixes")
    found = config.replace(lora=dataclasses.replace(first, gate=tuple(names)))
    return config_io.override(found, [])  # checks it


def take(work: Workspace, out: Path) -> None:
    """Copies the adapters that the run's gate is to mix among its checkpoints, or sees that they are what it copied.

    Raises:
        ConfigError: they have changed since.
    """
    store, names = work.store(ADAPTERS), work.config.lora.gate
    now = {name: _identity(out, name) for name in names}
    if store.latest() is not None:
        _refuse_changed(work.run.path, store.extra(store.latest())["adapters"], now)
        return
    trained = []
    for name in names:
        with RunDirectory.open(out / "adapters" / name, lock=False) as run:
            trained.append(Workspace(run, work.progress, work.interrupt).trained_params("grpo"))
    with store:
        store.save(0, {"params": lora.stacked(trained)}, {"total_steps": 0, "adapters": now})


def unchanged(out: Path, name: str) -> dict[str, Any]:
    """What the gate of a run in `adapters/` mixes, by adapter; `ConfigError`: these have changed since."""
    path = out / "adapters" / name
    with RunDirectory.open(path, lock=False) as run:
        work = Workspace(run, Progress(), Interrupt())
        store, names = work.store(ADAPTERS), work.config.lora.gate
        copied = store.extra(store.latest())["adapters"]
    _refuse_changed(path, copied, {n: _identity(out, n) for n in names if (out / "adapters" / n).exists()})
    return copied


def _refuse_changed(path: Path, copied: dict[str, Any], now: dict[str, Any]) -> None:
    if changed := next((n for n in now if copied.get(n) != now[n]), None):
        raise ConfigError(
            f"the gate in {path} mixes adapter {changed} as it was before it was trained anew: remove the directory "
            "and train the gate again"
        )


def _identity(out: Path, name: str) -> dict[str, Any]:
    """Step of an adapter's newest checkpoint, and a digest of the sums of its files."""
    with RunDirectory.open(out / "adapters" / name, lock=False) as run:
        store = Workspace(run, Progress(), Interrupt()).store("grpo")
        step = store.latest()
        files = Folder(epath.Path(run.checkpoints("grpo"))).manifest(step)["files"]
    return {"step": step, "sha256": hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()}


# How episodes were mixed


def mixtures(trajectories: Sequence[Trajectory], names: Sequence[str]) -> dict[str, Any]:
    """Weights that a gate gave to adapters and base.

    Args:
        names: of the adapters.

    Returns:
        `adapters`: the names, the base's last; `by_layer`: means over episodes; `episodes`: of each task its number and
        its weights, means over layers and samples.
    """
    called = [*names, "base"]
    known = [(t.task_index, np.array(t.info["gate"])) for t in trajectories if "gate" in t.info]
    by_task: dict[int, list[np.ndarray]] = {}
    for task, weights in known:
        by_task.setdefault(int(task), []).append(weights)
    return {
        "adapters": called,
        "by_layer": _rounded(np.mean([w for _, w in known], axis=0)) if known else [],
        "episodes": [
            {"task": task, "weights": _rounded(np.mean(found, axis=(0, 1)))} for task, found in by_task.items()
        ],
    }


def write(path: Path, trajectories: Sequence[Trajectory], names: Sequence[str]) -> None:
    """Writes `mixtures` and prints their table."""
    found = mixtures(trajectories, names)
    write_text(path, json.dumps(found, indent=1) + "\n")
    print(markdown(found), end="")


def markdown(found: dict[str, Any]) -> str:
    """The table for people: mean weights by layer, how they spread over episodes, how often each is the largest."""
    names = found["adapters"]
    lines = ["| weights of the gate | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for number, row in enumerate(found["by_layer"]):
        lines.append(f"| layer {number + 1} | " + " | ".join(f"{x:.3f}" for x in row) + " |")
    if found["episodes"]:
        of = np.array([e["weights"] for e in found["episodes"]])
        largest = np.bincount(of.argmax(1), minlength=len(names)) / len(of)
        for what, row in (("all layers", of.mean(0)), ("deviation over episodes", of.std(0))):
            lines.append(f"| {what} | " + " | ".join(f"{x:.3f}" for x in row) + " |")
        lines.append("| the largest, share of episodes | " + " | ".join(f"{x:.0%}" for x in largest) + " |")
    return "\n".join(lines) + "\n"


def figures(trajectories: Sequence[Trajectory], names: Sequence[str]) -> dict[str, float]:
    """Of a training step: `gate/NAME`, mean weight over layers and trajectories; nothing without a gate."""
    known = [t.info["gate"] for t in trajectories if "gate" in t.info]
    if not known:
        return {}
    means = np.mean(known, axis=(0, 1))
    return {f"gate/{name}": float(x) for name, x in zip((*names, "base"), means, strict=True)}


def _rounded(values: Float[np.ndarray, ...]) -> list:
    return np.round(values, 4).tolist()
