"""`trace-jax eval --compare A B`: paired tests between two agents that were evaluated on the same episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_jax.config import ConfigError, EvaluationConfig
from trace_jax.evaluation import compare, store, table
from trace_jax.evaluation.kinds import KINDS, kind_of

_STAGES = ("grpo", "sft", "untrained")  # the most advanced one speaks for a run


def command(names: tuple[str, str], run_dir: Path | None, config: EvaluationConfig, seed: int) -> dict[str, Any]:
    """Compares two agents and prints the table.

    Args:
        names: of each, a run directory (its most advanced agent), RUN:AGENT, or an agent of `run_dir`.
        config: resamples and confidence.

    Raises:
        ConfigError: no such results, or results on different episodes.
    """
    sides = [_find(name, run_dir, config.set) for name in names]
    summaries = [_summary(run, agent, config.set) for run, agent in sides]
    if kind_of(dict(enumerate(summaries))) is not KINDS["ads"]:
        raise ConfigError(
            "--compare is for results of `environment.name` ads: the report compares the agents of search"
        )
    verified = compare.check_benchmark(*summaries)
    records = [store.load_records(run, agent, under=config.set) for run, agent in sides]
    result = {**compare.compare(*records, config, seed=seed), "verified": verified}
    labels = _labels(sides)
    table.show(compare.table(result, labels))
    return {"compare": list(labels), **result}


def _find(name: str, run_dir: Path | None, under: str) -> tuple[Path, str]:
    """Run directory and agent that a name stands for."""
    run, _, agent = name.rpartition(":")
    if run and Path(run).is_dir():
        return Path(run), agent
    if run_dir is not None and name in store.load_summaries(run_dir, under):
        return run_dir, name
    if Path(name).is_dir():
        known = store.load_summaries(name, under)
        found = next((stage for stage in _STAGES if stage in known), next(iter(known), None))
        if found is None:
            flag, of = (f" --set {under}", f" on the {under} set") if under else ("", "")
            raise ConfigError(f"{name} holds no results{of}: run `trace-jax eval --run-dir {name}{flag}` first")
        return Path(name), found
    has = None if run_dir is None else ", ".join(store.load_summaries(run_dir, under)) or "no results"
    of = f" on the {under} set" if under else ""
    own = "" if has is None else f" ({run_dir} has {has}{of})"
    raise ConfigError(
        f"--compare {name}: neither a run directory, nor RUN:AGENT, nor an agent of --run-dir that was evaluated{own}"
    )


def _summary(run: Path, agent: str, under: str) -> dict[str, Any]:
    known = store.load_summaries(run, under)
    if agent not in known:
        flag, of = (f" --set {under}", f" on the {under} set") if under else ("", "")
        raise ConfigError(
            f"{run} has no results of {agent}{of}: it has {', '.join(known) or 'none'}; run `trace-jax eval "
            f"--run-dir {run}{flag} --agent {agent}`"
        )
    return known[agent]


def _labels(sides: list[tuple[Path, str]]) -> tuple[str, str]:
    """Agents of one run by their names, of two runs with their directories."""
    one_run = sides[0][0].resolve() == sides[1][0].resolve()
    first, second = (agent if one_run else f"{run.name or run}:{agent}" for run, agent in sides)
    return first, second
