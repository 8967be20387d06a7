"""The runs in `adapters/` of a capability directory, by name."""

from __future__ import annotations

from pathlib import Path

from trace_jax.config import RunConfig
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace

MIX, TARGET = "mix", "target"  # one adapter for all worlds; one for the task itself
GATE, GATE_MIX = GATES = ("gate", "gate_mix")  # a gate over the capabilities' adapters, trained on the same two


def finished(out: Path, config: RunConfig) -> list[str]:
    """Adapters that have made their last step, by name. Says which directories it leaves out: copies and other runs,
    whose names are none of an adapter's.

    Args:
        config: of the base's run, which says what capabilities there are.
    """
    known = {MIX, TARGET, *(c.name for c in domain_of(config).capabilities)}
    found = []
    for path in sorted((out / "adapters").glob("*/config.yaml")):
        if path.parent.name not in known:
            if path.parent.name not in GATES:
                print(f"note: {path.parent} is left out: its name is no capability's, nor {MIX} or {TARGET}")
        elif _is_finished(path.parent):
            found.append(path.parent.name)
    return found


def finished_gates(out: Path) -> list[str]:
    """Gates that have made their last step, by name."""
    paths = {name: out / "adapters" / name for name in GATES}
    return [name for name, path in paths.items() if (path / "config.yaml").exists() and _is_finished(path)]


def targeted(names: list[str]) -> list[str]:
    """Those of them that are of one capability."""
    return [n for n in names if n not in (MIX, TARGET)]


def _is_finished(path: Path) -> bool:
    with RunDirectory.open(path, lock=False) as run:
        return Workspace(run, Progress(), Interrupt()).is_finished("grpo")
