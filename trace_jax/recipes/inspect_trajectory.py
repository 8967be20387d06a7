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
from trace_jax.rollout.trajectory import Trajectory, read_parquet, stored

SHOWN_LINES = 12  # of an observation


@dataclass(frozen=True)
class Seen:
    """One turn: what the policy wrote, what it read, and what that was worth.

    Attributes:
        value: V after the turn, None for a turn without a result.
        delta: change of V over the turn. credit: its average over the look-ahead.
        advantage: of each of its tokens; None where the trajectory's group is not known.
    """

    turn: Turn
    observation: str | None
    value: float | None
    delta: float | None
    credit: float | None
    advantage: float | None


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
            params = reference(work, work.start_params)
            [t], _ = TurnProbe(work, params)([t], work.environment("train" if collected else split))
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
                "delta": s.delta,
                "credit": s.credit,
                "advantage": s.advantage,
            }
            for s in seen
        ],
    }


def turns(t: Trajectory, work: Workspace, outcome: float | None) -> list[Seen]:
    """The turns of a probed trajectory."""
    config = work.config.grpo.turn_credit
    values = turn_credit.values(np.array(t.probes), config.epsilon)
    deltas = turn_credit.FORMS[config.form](turn_credit.gaps(np.array(t.probes), config.epsilon))
    credits = turn_credit.turn_credits(np.array(t.probes), config)
    advantages = None
    if outcome is not None and not config.pays:
        advantages = np.full(len(t.ids), outcome)  # training used the outcome alone
    elif outcome is not None:
        advantages = turn_credit.token_advantages(t.turn_index, t.loss_mask, t.probes, outcome, config)
    result = []
    for k in range(int(t.turn_index.max(initial=-1)) + 1):
        mine = t.turn_index == k
        sampled, read = t.ids[mine & t.loss_mask], t.ids[mine & ~t.loss_mask]
        paid = k < len(credits)
        result.append(
            Seen(
                work.chat.parse_turn(sampled.tolist()),
                "".join(text for _, text in work.chat.given(read.tolist())) if len(read) else None,
                float(values[k + 1]) if paid else None,
                float(deltas[k]) if paid else None,
                float(credits[k]) if paid else None,
                None if advantages is None else float(advantages[mine & t.loss_mask][0]),
            )
        )
    return result


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
    for number, s in enumerate(seen, 1):
        worth = "" if s.value is None else f"value {s.value:+.3f} ({s.delta:+.3f}), credit {s.credit:+.3f}"
        worth += "" if s.advantage is None else f"{', ' if worth else ''}advantage {s.advantage:+.3f}"
        best = s.credit is not None and s.credit > 0 and s.credit == max(o.credit for o in seen if o.credit is not None)
        cut_off = number == len(seen) and t.status in ("truncated", "timed_out") and s.turn.kind == "malformed"
        yield (
            f"turn {number:<6d} {'cut off' if cut_off else s.turn.kind}: {worth}" + ("   <- paid most" if best else ""),
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
