"""`trace-jax inspect --trajectory`: an investigation of a policy, turn by turn, with what each turn was worth."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from trace_jax.config import ConfigError
from trace_jax.learner import turn_credit
from trace_jax.learner.credit import outcome_advantages
from trace_jax.policy.chat import Turn
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.turn_probe import TurnProbe, reference
from trace_jax.recipes.workspace import Workspace
from trace_jax.report.turns import Worth, steps, worth
from trace_jax.rollout.trajectory import Trajectory, read_parquet, stored

SHOWN_LINES = 12  # of an observation


@dataclass(frozen=True)
class Seen:
    """One turn: what the policy wrote, what it read, and what that was worth."""

    turn: Turn
    observation: str | None
    worth: Worth


def show(path: Path, index: int | None, split: str) -> dict[str, Any]:
    """Prints trajectory `index` of a file in a run's `trajectories/`, or of the newest of a run directory.

    Args:
        split: whose tasks they are; what GRPO collected is always of the training split.

    Returns:
        What `--json` prints.

    Raises:
        ConfigError: no such file or row, or its run is not there.
    """
    path = _file(path)
    rows = read_parquet(path)
    index = index or 0
    if not rows:
        raise ConfigError(f"{path} holds no trajectory: name another file")
    if not 0 <= index < len(rows):
        raise ConfigError(f"--index {index}: {path} has trajectories 0 to {len(rows) - 1}")
    collected = path.parent.name == "trajectories" and path.name.startswith("grpo-")
    run_path = next((p.parent for p in path.parents if p.name == "trajectories"), path.parent)
    with RunDirectory.open(run_path, lock=False, flag="--trajectory") as run:
        work = Workspace(run, Progress(), Interrupt())
        t = rows[index]
        task = work.environment("train" if collected else split).task(t.task_index)
        if stored(dict(task.labels)) != t.labels:
            other = "" if collected else "; name the right --split"
            raise ConfigError(f"{path} is not of the {'train' if collected else split} episodes of this run{other}")
        if not t.probes:
            # questions say no prompt to a gate: what it was trained on, the base alone, is asked in its place
            gated = bool(run.config.lora.gate)
            params = None if gated else reference(work, work.start_params)
            [t], _ = TurnProbe(work, params, shared=gated)([t], work.environment("train" if collected else split))
        outcome = None
        if collected:
            outcome = float(outcome_advantages(rows, run.config.grpo, run.config.rollout.context, True).values[index])
        seen = turns(t, work, outcome)
        console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        for text, style in _lines(t, task.user, task.gold_answer, seen, path, index, outcome):
            console.print(Text(text, style=style))
    return {
        "file": str(path),
        "index": index,
        "status": t.status,
        "reward": t.reward,
        "outcome_advantage": outcome,
        "gold_answer": task.gold_answer,
        "logprobs": list(t.probes),
        "values": [float(v) for v in turn_credit.values(np.array(t.probes), run.config.grpo.turn_credit.epsilon)],
        "turns": [
            {
                "kind": s.turn.kind,
                "text": s.turn.text,
                "observation": s.observation,
                "delta": s.worth.delta,
                "credit": s.worth.credit,
                "advantage": s.worth.advantage,
            }
            for s in seen
        ],
    }


def turns(t: Trajectory, work: Workspace, outcome: float | None) -> list[Seen]:
    """The turns of a probed trajectory."""
    found = zip(steps(t, work.chat), worth(t, work.config.grpo.turn_credit, outcome), strict=True)
    return [Seen(step.turn, step.observation, value) for step, value in found]


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob("trajectories/grpo-*.parquet"))
    if not found:
        raise ConfigError(f"{path} has no trajectories/grpo-*.parquet: name a file, or a run that has begun GRPO")
    return found[-1]


def _lines(t: Trajectory, user: str, gold: str, seen: list[Seen], path: Path, index: int, outcome: float | None):
    yield f"{path.name} {index}: task {t.task_index}, group {t.group}, sample {t.sample}", "bold"
    for line in user.splitlines():
        yield f"  {line}", ""
    yield f"truth       {gold}", ""
    yield (
        (
            f"outcome     {t.status}, reward {t.reward:.3f}"
            + ("" if outcome is None else f", advantage in its group {outcome:+.3f}")
        ),
        "",
    )
    yield f"at first    log-probability of the truth {t.probes[0]:.3f} a token", ""
    most = max((s.worth.credit for s in seen if s.worth.credit is not None), default=0.0)
    for number, s in enumerate(seen, 1):
        w = s.worth
        told = "" if w.value is None else f"value {w.value:+.3f} ({w.delta:+.3f}), credit {w.credit:+.3f}"
        told += "" if w.advantage is None else f"{', ' if told else ''}advantage {w.advantage:+.3f}"
        best = w.credit is not None and w.credit == most > 0
        cut_off = number == len(seen) and t.status in ("truncated", "timed_out") and s.turn.kind == "malformed"
        yield (
            f"turn {number:<6d} {'cut off' if cut_off else s.turn.kind}: {told}" + ("   <- paid most" if best else ""),
            "bold green" if best else "bold",
        )
        for line in s.turn.text.splitlines():
            yield f"  {line}", "cyan"
        if s.observation is not None:
            lines = s.observation.splitlines() or ["(empty)"]
            for line in lines[:SHOWN_LINES]:
                yield f"    {line}", ""
            if len(lines) > SHOWN_LINES:
                yield f"    ... {len(lines) - SHOWN_LINES} more lines", "dim"
