"""How base, adapters and routed adapters do inside each world: does an adapter improve its own and spoil no other?

Episodes are those that the search for the world's difficulty saw (validation), never ones that adapters trained on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.capability import routing as choice
from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import form
from trace_jax.recipes import routing
from trace_jax.recipes.adapter_runs import targeted
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, write_text
from trace_jax.recipes.workspace import Workspace
from trace_jax.recipes.worlds import of_world
from trace_jax.rollout.collect import collect
from trace_jax.rollout.sampling import Sampling

FILE = "in-worlds.json"
EPISODES, SAMPLES = 64, 4
_PLAYED = {"about": {}, "agents": {str: {str: {"success": float, "reward": float}}}}


def command(
    run_dir: Path,
    config: RunConfig,
    levels: Mapping[str, float],
    *,
    out: Path,
    episodes: int = EPISODES,
    samples: int = SAMPLES,
) -> dict[str, dict[str, dict[str, float]]]:
    """Plays every world with the base, each adapter, and the adapter that the base chooses; writes `in-worlds.json`.

    Args:
        config: the base's run's.
        levels: difficulty by world.
        out: directory with `adapters/`.

    Returns:
        `success` and `reward`, means over `samples` attempts at each of `episodes`, by agent and world. What is in the
        file for the same adapters is not played again.

    Raises:
        ConfigError: no finished adapter. Interrupted: finished agents are saved.
    """
    with RunDirectory.open(run_dir, lock=False) as run, Interrupt() as interrupt:
        work = Workspace(run, Progress(), interrupt)
        names = routing.finished(out, config)
        if not names:
            raise ConfigError(f"{out / 'adapters'} has no finished adapter: run `trace-jax capability train` first")
        held = routing.Adapters(work, out, names)
        path = out / FILE
        about = {"levels": dict(levels), "adapters": held.steps, "episodes": episodes, "samples": samples}
        about = json.loads(json.dumps(about))
        known = form.read(path, _PLAYED) if path.exists() else {}
        found = known["agents"] if known.get("about") == about else {}
        for world, level in levels.items():
            environment = _environment(work, config, world, level, episodes)
            for agent in ("base", *names, routing.ROUTED):
                if world in found.get(agent, {}):
                    continue
                adapters = _adapters(work, out, names, agent, environment)
                found.setdefault(agent, {})[world] = _play(work, held, environment, adapters, samples, agent, world)
                write_text(path, json.dumps({"about": about, "agents": found}, indent=1) + "\n")
    return found


def _environment(work: Workspace, config: RunConfig, world: str, level: float, episodes: int) -> Any:
    inside = of_world(config, world, level)
    inside = inside.replace(data=dataclasses.replace(inside.data, validation=episodes))
    return domain_of(inside).split(inside, "validation", work.run.folder("data"), work.interrupt.check)


def _adapters(work: Workspace, out: Path, names: list[str], agent: str, environment: Any) -> list[int]:
    """Which adapter samples each episode."""
    if agent == routing.ROUTED:
        single = targeted(names)
        chosen = choice.choose(routing.scores(work, environment, single))
        return [choice.BASE if i == choice.BASE else names.index(single[i]) for i in chosen]
    return [choice.BASE if agent == "base" else names.index(agent)] * len(environment)


def _play(
    work: Workspace,
    held: routing.Adapters,
    environment: Any,
    adapters: list[int],
    samples: int,
    agent: str,
    world: str,
) -> dict[str, float]:
    held.engine.set_params(held.all, 0)
    with work.progress.bar(f"{agent} in {world}", len(environment)) as bar:

        def report(ended: int, _: int) -> None:
            bar.update(ended // samples)
            work.interrupt.check()

        found = collect(
            held.engine,
            held.chat,
            environment,
            range(len(environment)),
            group=samples,
            config=work.config.rollout,
            seed=work.config.seed,
            step=0,
            sampling=Sampling.of(work.config.rollout),
            progress=report,
            adapters=adapters,
        )
    work.interrupt.check()  # the last rollouts before a signal may be spoilt
    success = [t.status == "finished" and bool(t.info.get("success")) for t in found]
    return {"success": float(np.mean(success)), "reward": float(np.mean([t.reward for t in found]))}


def markdown(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Success in each world by agent, with the difference to the base in points."""
    worlds = list(found["base"])
    lines = ["| success in the world of | " + " | ".join(worlds) + " |", "|---" * (len(worlds) + 1) + "|"]
    for agent, row in found.items():
        cells = []
        for w in worlds:
            gain = 100 * (row[w]["success"] - found["base"][w]["success"])
            cells.append(f"{row[w]['success']:.3f}" + ("" if agent == "base" else f" ({gain:+.1f})"))
        lines.append(f"| {agent} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
