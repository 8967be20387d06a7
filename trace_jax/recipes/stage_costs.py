"""What the stages of a long study cost, over all the times it was interrupted and continued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trace_jax.evaluation import form
from trace_jax.recipes.rundir import write_text

FILE = "costs.json"
_COSTS = {str: {"seconds": float, "rollouts?": (int, None)}}


class StageCosts:
    """Wall time and rollouts by stage, kept in `costs.json` of a folder.

    Args:
        folder: made when the first stage ends.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._seconds: dict[str, float] = {}
        self._rollouts: dict[str, int] = {}
        if self._path.exists():
            for name, cost in form.read(self._path, _COSTS).items():
                self._seconds[name] = cost["seconds"]
                if cost.get("rollouts") is not None:
                    self._rollouts[name] = cost["rollouts"]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds inside to those of the stage, also where it is interrupted."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - begun
            self._keep()

    def played(self, stage: str, rollouts: int) -> None:
        """Says how many trajectories the stage has sampled in all."""
        self._rollouts[stage] = rollouts
        self._keep()

    def result(self) -> dict[str, dict[str, float | int | None]]:
        """By stage in the order of their beginning: `seconds` of wall time, and `rollouts` (None: not said)."""
        return {n: {"seconds": s, "rollouts": self._rollouts.get(n)} for n, s in self._seconds.items()}

    def _keep(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps(self.result(), indent=1) + "\n")


def markdown(costs: Mapping[str, Mapping[str, float | int | None]]) -> str:
    """The table for people."""
    lines = ["| stage | rollouts | wall time, s |", "|---|---|---|"]
    for name, cost in costs.items():
        rollouts = "-" if cost.get("rollouts") is None else f"{cost['rollouts']:,}"
        lines.append(f"| {name} | {rollouts} | {cost['seconds']:,.0f} |")
    return "\n".join(lines) + "\n"
