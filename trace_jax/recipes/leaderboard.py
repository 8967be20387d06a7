"""`trace-jax eval --table RUN...`: the one table of all agents, from what run directories hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import leaderboard, paper, store, table
from trace_jax.evaluation.kinds import KINDS, kind_of
from trace_jax.evaluation.leaderboard import Entry
from trace_jax.recipes import study_place
from trace_jax.recipes.rundir import write_text

_KIND = KINDS["ads"]
# Agents that are no run's own: one answer to the episodes is everybody's.
_FIXED = (*(name for name in _KIND.rivals if name != "ceiling"), *_KIND.agents, "ceiling")
_STAGES = ("untrained", "sft", "grpo")


def command(runs: Sequence[Path], out: Path | None, config: EvaluationConfig, seed: int) -> dict[str, Any]:
    """Prints the table of all agents of some runs; with `out`, writes `table.json` and `table.md` there.

    Args:
        runs: run directories; agents without a policy come from the first that has them.
        config: resamples and confidence of the tests.

    Returns:
        The content of `table.json`: `benchmark`, `agents` (results by label), `paper`, `tests`, `missing`.

    Raises:
        ConfigError: no results, or results on different episodes; something else lies in `out`.
    """
    if out is not None:
        out = study_place.for_table(out)
    entries, policies = _entries(runs, config.set)
    benchmark = leaderboard.check(entries)
    shown = leaderboard.table(entries, benchmark)
    rivals = [e for e in entries if e.label in leaderboard.RIVALS]
    tests = leaderboard.tests(policies, rivals, config, seed)
    missing = [name for name in _FIXED if name not in {e.label for e in entries}]
    tables = [shown, *([leaderboard.tests_table(tests)] if tests else [])]
    for part in tables:
        table.show(part)
        print()
    if missing:
        adds = f"`trace-jax eval --run-dir {runs[0]}{_flag(config.set)} --agent NAME` adds one"
        print(f"not evaluated: {', '.join(missing)}; {adds}")
    result = {
        "benchmark": benchmark,
        "agents": {e.label: dict(e.summary) for e in entries},
        "paper": paper.ROWS,
        "tests": tests,
        "missing": missing,
    }
    if out is not None:
        write_text(out / "table.json", json.dumps(result, indent=1) + "\n")
        write_text(out / "table.md", "\n".join(map(table.markdown, tables)))
    return result


def _flag(under: str) -> str:
    return f" --set {under}" if under else ""


def _entries(runs: Sequence[Path], under: str) -> tuple[list[Entry], list[Entry]]:
    """All agents in the order of the table, and of each run the most advanced policy that was trained."""
    if len({run.resolve() for run in runs}) != len(runs):
        raise ConfigError(f"--table {' '.join(map(str, runs))} names a run twice: leave one out")
    fixed: dict[str, Entry] = {}
    own: list[Entry] = []
    policies: list[Entry] = []
    for run in runs:
        known = store.load_summaries(run, under)
        if not known:
            of = f" on the {under} set" if under else ""
            raise ConfigError(f"{run} holds no results{of}: run `trace-jax eval --run-dir {run}{_flag(under)}` first")
        if kind_of(known) is not _KIND:
            raise ConfigError(f"{run} holds results of `environment.name` search: --table is for those of ads")
        prefix = f"{run.resolve().name}: " if len(runs) > 1 else ""
        order = [*_STAGES, *(name for name in known if name not in (*_FIXED, *_STAGES))]
        for name in [*_FIXED, *order]:
            if name not in known:
                continue
            records = store.load_records(run, name, under=under)
            if name in _FIXED:
                fixed.setdefault(name, Entry(name, known[name], str(run), records))
                continue
            entry = Entry(prefix + table.LABELS.get(name, name), known[name], str(run), records)
            own.append(entry)
        trained = [prefix + table.LABELS[name] for name in ("grpo", "sft") if name in known]
        policies += [e for e in own if e.label in trained[:1]]
    return [*(fixed[name] for name in _FIXED if name in fixed), *own], policies
