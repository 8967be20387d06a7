"""How much of a GRPO step the probe of turn credit takes, with the policy, the tasks and the shapes of a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError
from trace_jax.recipes import adoption, grpo
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace

WARM_STEPS = 2  # they compile


def check(run_dir: Path) -> None:
    """Refuses what `measure` would, before anything is measured.

    Raises:
        ConfigError: no run, or its SFT is not finished.
    """
    with RunDirectory.open(run_dir, lock=False) as source:
        if not Workspace(source, Progress(), Interrupt()).is_finished("sft"):
            raise ConfigError(
                f"SFT of {run_dir} is not finished: run `trace-jax sft --run-dir {run_dir} --resume` first"
            )


def measure(run_dir: Path, repeats: int) -> dict[str, Any]:
    """Some GRPO steps with turn credit from a run's SFT policy, in a directory that is thrown away.

    Returns:
        `step_share`: median over steps of the seconds of the probe over those of the whole step; `step`: both.

    Raises:
        ConfigError: no run, or its SFT is not finished.
    """
    check(run_dir)
    with RunDirectory.open(run_dir, lock=False) as source, tempfile.TemporaryDirectory() as folder:
        credit = dataclasses.replace(source.config.grpo.turn_credit, enabled=True)
        steps = WARM_STEPS + repeats
        config = source.config.replace(
            grpo=dataclasses.replace(
                source.config.grpo,
                turn_credit=credit,
                steps=steps,
                validation_episodes=0,
                keep_best=0,
                save_every=steps,
            )
        )
        run = RunDirectory.create(Path(folder) / "run", config)
        adoption.adopt(source.path, run)
        shutil.copytree(source.path / "data", run.path / "data", dirs_exist_ok=True)
        with run, Interrupt() as interrupt:
            grpo.train(Workspace(run, Progress(), interrupt))
            lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [r for r in map(json.loads, lines) if r["stage"] == grpo.STAGE][WARM_STEPS - 1 :]
    seconds = [b["seconds"] - a["seconds"] for a, b in zip(rows, rows[1:], strict=False)]
    probes = [r["seconds/probe"] for r in rows[1:]]
    return {
        "step_share": statistics.median(p / s for p, s in zip(probes, seconds, strict=True)),
        "step": {"seconds": statistics.median(seconds), "probe_seconds": statistics.median(probes)},
    }
