"""`trace-jax fit-rules`: thresholds of the baselines' shared rules, from the training split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import sets
from trace_jax.evaluation.finders import agents, rules
from trace_jax.evaluation.finders.agents import FINDERS
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import writing
from trace_jax.warehouse.splits import EpisodeSet, load_split, settings_of

FEWEST = 50  # episodes: with fewer, most causes would have one or two


def fit_rules(
    config: RunConfig, out: Path, *, episodes: int | None = None, run_dir: Path | None = None
) -> dict[str, Any]:
    """Fits the rules of every finder and writes them to `out`.

    Args:
        episodes: so many, evenly spaced in the training split; None: all.
        run_dir: a run that keeps the training split already.

    Raises:
        ConfigError: too few episodes, or a file that cannot be written.
    """
    config = sets.applied(config)
    size = config.data.train if episodes is None else episodes
    if not FEWEST <= size <= config.data.train:
        raise ConfigError(
            f"fit-rules: {size} of the {config.data.train} episodes of `data.train` will not do: take at least {FEWEST}"
        )
    progress = Progress()
    with Interrupt() as interrupt:
        cache = None if run_dir is None else run_dir / "data"
        with progress.bar("training split", config.data.train) as bar:

            def simulated(done: int, _: int) -> None:
                bar.update(done)
                interrupt.check()

            split = load_split(config, "train", cache, on_progress=simulated)
        chosen = split.take(np.linspace(0, len(split) - 1, size).round().astype(np.int64))
        with progress.bar("read episodes", size) as bar, duckdb.connect() as connection:

            def read(done: int, _: int) -> None:
                bar.update(done)
                interrupt.check()

            truths = [(record.cause, record.driver) for record in chosen]
            found, own = agents.examples(truths, lambda i: _query(connection, chosen, i), read)
        fitted = {}
        for name in FINDERS:
            thresholds, share = rules.fit(found[name])
            interrupt.check()
            fitted[name] = {"full_attr_on_training": round(share, 4), "thresholds": {**own[name], **thresholds}}
            print(f"{name:14s}FullAttr on {size} training episodes {share:.3f}")
    result = {"fitted": _how(config, size), "agents": fitted}
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _query(connection: duckdb.DuckDBPyConnection, episodes: EpisodeSet, i: int) -> agents.Query:
    """Runs SQL on the agent-visible tables of one episode; without fences, since only our own SQL runs here."""
    for name, table in episodes[i].visible().items():
        connection.register(name, table)
    return lambda sql: connection.execute(sql).fetchall()


def _how(config: RunConfig, size: int) -> dict[str, Any]:
    settings = settings_of(config)
    return {
        "by": "trace-jax fit-rules",
        "split": "train",
        "episodes": size,
        "of": config.data.train,
        "data_seed": config.data.seed,
        "set": config.evaluation.set,
        "difficulty": config.simulator.difficulty,
        "simulator_code": settings["code"],
        "objective": "most fully right answers; coordinate ascent, thresholds to the middle of their best stretch",
    }
