"""Held-out evaluation of a run's policy and of the baselines, and the table that compares them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from trace_jax.config import RunConfig
from trace_jax.evaluation import store, table
from trace_jax.evaluation.baselines import evaluate_analyst
from trace_jax.evaluation.evaluate import evaluate_policy, records_of
from trace_jax.evaluation.metrics import summarise
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import write_parquet

AGENTS = ("untrained", "analyst", "sft", "grpo")


def command(run_dir: Path | None, config: RunConfig, *, agent: str, split: str) -> dict[str, Any]:
    """Scores an agent and prints the table of all that were scored; returns its results.

    Args:
        run_dir: the run; without one only the analyst can be scored, and nothing is kept.
        config: the run's configuration with changes to evaluation, rollout or data.
        agent: one of `AGENTS`, or "latest": the most advanced stage.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if run_dir is None:
            run = RunDirectory.create(Path(scratch) / "run", config)
        else:
            run = RunDirectory.open(run_dir)
            run.config = config
        with run, Interrupt() as interrupt:
            work = Workspace(run, Progress(), interrupt)
            agent = work.latest_stage() if agent == "latest" else agent
            result = evaluate(work, agent, split, again=True)
            show(run.path, {name_of(agent, split): result})
    return result


def name_of(agent: str, split: str) -> str:
    """Name of the result: the agent, with the split when it is not the test split."""
    return agent if split == "test" else f"{agent}-{split}"


def evaluate(work: Workspace, agent: str, split: str, *, again: bool = False) -> dict[str, Any]:
    """Results of an agent on a split (`evaluation.metrics.summarise`), kept in the run directory.

    Args:
        again: score it even when the run directory holds results.
    """
    config, name = work.config, name_of(agent, split)
    known = store.load_summaries(work.run.path)
    if name in known and not again:
        return known[name]
    environment = work.environment(split)
    indices = range(len(environment))
    with work.interrupt.abortable(), work.progress.bar(f"evaluate {name}", len(environment)) as bar:
        if agent == "analyst":
            records = evaluate_analyst(
                environment, indices, config.environment, seed=config.seed, on_progress=lambda n, _: bar.update(n)
            )
        else:
            params = work.initial_params if agent == "untrained" else work.trained_params(agent)
            work.engine.set_params(params, 0)
            trajectories = evaluate_policy(
                work.engine,
                work.chat,
                environment,
                indices,
                config.evaluation,
                config.rollout,
                seed=config.seed,
                on_progress=lambda n, _: bar.update(n),
            )
            records = records_of(trajectories)
            write_parquet(work.run.folder("trajectories") / f"{name}.parquet", trajectories)
        result = summarise(records, config.evaluation, seed=config.seed)
    store.save(work.run.path, name, result, records)
    return result


def show(run_dir: Path, results: dict[str, Any] | None = None) -> None:
    """Prints the table of everything scored in a run (plain text when stdout is not a terminal)."""
    results = store.load_summaries(run_dir) | (results or {})
    built, console = table.build(results), Console()
    if console.is_terminal:
        console.print(table.rich_table(built))
    else:
        print(table.plain_text(built))
