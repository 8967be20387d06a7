"""`trace-jax capability worlds`: for each capability the difficulty at which the policy can learn it, or none.

A level is tried with the policy that adapters will be trained on, sampled as in training. Every try is kept in
`worlds.json`, so that an interrupted search goes on with the same command.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax import config_io
from trace_jax.capability import worlds
from trace_jax.capability.worlds import Statistics, Try, Window
from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import form
from trace_jax.recipes import places
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory, refuse_changes, write_text
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.collect import collect
from trace_jax.rollout.sampling import Sampling

FILE = "worlds.json"
FEW = 400  # attempts of a try: fewer are said to be few
WINDOW = Window()
_PLAYED = {"level": float, **dict.fromkeys(Statistics.__dataclass_fields__, float)}
_REFUSED = {"level": float, "faults": [str]}
_WORLD = {"accepted": bool, "level": form.NUMBER, "tries": [{}]}
_CONTRAST = {"kept": [str], "settings?": {"stage?": str}}


def command(
    run_dir: Path | None,
    config: RunConfig,
    *,
    names: Sequence[str] = (),
    seeds: int | None = None,
    rollouts: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Searches the difficulty of each capability's world; writes `worlds.json` and `worlds.md`.

    Args:
        config: the run's.
        names: of capabilities; empty: those that the newest contrast of the run kept.
        seeds, rollouts: episodes of each try and attempts at each; None: 100 and 16.
        out: None: `capability` of the run directory.

    Returns:
        The content of `worlds.json`.

    Raises:
        ConfigError: bad input. Interrupted: finished tries are saved.
    """
    if config.environment.worlds:
        raise ConfigError(f"the run in {run_dir} trains in a world itself: give one of the task")
    with RunDirectory.open(run_dir) as run, Interrupt() as interrupt:
        refuse_changes(run.config, config, (), "capability worlds")
        work = Workspace(run, Progress(), interrupt)
        out = run.folder("capability") if out is None else places.folder(out)
        names = chosen(run, config, names)
        size = (seeds or worlds.SEEDS, rollouts or worlds.ROLLOUTS)
        found = _Search(work, out, size)
        for name in names:
            found.search(name)
        print(markdown(found.result()), end="")
        return found.result()


def chosen(run: RunDirectory, config: RunConfig, names: Sequence[str]) -> list[str]:
    """The capabilities to work on.

    Raises:
        ConfigError: unknown ones, none named and no contrast to take them from, or one that kept none.
    """
    known = [c.name for c in domain_of(config).capabilities]
    for name in names:
        if name not in known:
            meant = config_io.nearest(name, known)
            raise ConfigError(
                f"--capabilities {name}: no such capability, "
                + (f"did you mean {meant}?" if meant else f"choose from {', '.join(known)}")
            )
    if names:
        return list(dict.fromkeys(names))
    files = sorted(run.path.glob("capability/contrast-*/contrast.json"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise ConfigError(
            f"{run.path} has no contrast: run `trace-jax capability contrast --run-dir {run.path}` first, or name "
            "--capabilities"
        )
    newest = form.read(files[-1], _CONTRAST, "run `trace-jax capability contrast` again")
    kept = newest["kept"]
    if not kept:
        raise ConfigError(f"{files[-1]} kept no capability: name --capabilities to train one all the same")
    if unknown := [name for name in kept if name not in known]:
        raise ConfigError(f"{files[-1]} is damaged (no capability {unknown[0]!r}): run the contrast again")
    print(f"capabilities of {files[-1].parent.name}: {', '.join(kept)}")
    if (stage := newest.get("settings", {}).get("stage")) in ("grpo", "best"):
        print(f"note: that contrast is of the policy {stage}, adapters begin from sft: contrast that with --stage sft")
    return kept


def read(path: Path) -> dict[str, Any]:
    """The content of a `worlds.json`.

    Raises:
        ConfigError: it is damaged.
    """
    found = form.read(path, {"settings?": {}, "worlds": {str: _WORLD}})
    for name, world in found["worlds"].items():
        why = f"worlds.{name} is accepted and has no level" if world["accepted"] and world["level"] is None else ""
        for i, tried in enumerate(world["tries"]):
            kind = _PLAYED if "reward" in tried else _REFUSED
            why = why or form.fault(tried, kind, f"worlds.{name}.tries[{i}]")
            if not why and kind is _REFUSED and not tried["faults"]:
                why = f"worlds.{name}.tries[{i}] says no reason"
        if why:
            raise ConfigError(f"{path} is damaged ({why}): {form.AGAIN}")
    return found


class _Search:
    """The tries of all worlds, and where they are kept."""

    def __init__(self, work: Workspace, out: Path, size: tuple[int, int]):
        self.work, self.out, self.size = work, out, size
        self.params = work.start_params
        self.settings = {"seeds": size[0], "rollouts": size[1], "seed": work.config.seed}
        self.tries: dict[str, list[Try]] = {}
        path = out / FILE
        if path.exists():
            before = read(path)
            if before.get("settings") != self.settings:
                raise ConfigError(
                    f"{path} was searched with other settings ({before.get('settings')}): remove it or choose another "
                    "--out"
                )
            known = [c.name for c in domain_of(work.config).capabilities]
            for name, world in before["worlds"].items():
                if name not in known:
                    raise ConfigError(f"{path} is damaged (no capability {name!r}): {form.AGAIN}")
                self.tries[name] = [Try.from_json(t) for t in world["tries"]]

    def search(self, name: str) -> None:
        """Tries levels until one is accepted or none is left."""
        tried = self.tries.setdefault(name, [])
        while (level := worlds.next_level(tried, WINDOW)) is not None:
            tried.append(self._try(name, level, len(tried)))
            write_text(self.out / FILE, json.dumps(self.result(), indent=1) + "\n")
            write_text(self.out / "worlds.md", markdown(self.result()))
        write_text(self.out / FILE, json.dumps(self.result(), indent=1) + "\n")

    def result(self) -> dict[str, Any]:
        """What `worlds.json` holds."""
        found = {}
        for name, tried in self.tries.items():
            good = next((t for t in tried if t.accepted(WINDOW)), None)
            found[name] = {
                "accepted": good is not None,
                "level": None if good is None else good.level,
                "tries": [t.as_json(WINDOW) for t in tried],
            }
        return {"settings": self.settings, "window": dataclasses.asdict(WINDOW), "worlds": found}

    def _try(self, name: str, level: float, number: int) -> Try:
        seeds, rollouts = self.size
        config = of_world(self.work.config, name, level)
        config = config.replace(data=dataclasses.replace(config.data, validation=seeds))
        work = self.work
        try:
            environment = domain_of(config).split(config, "validation", work.run.folder("data"), work.interrupt.check)
        except ConfigError as refused:
            return Try(level, None, str(refused))
        with work.progress.bar(f"{name}, level {level:g} (try {number + 1} of {worlds.TRIES})", seeds) as bar:

            def report(ended: int, _: int) -> None:
                bar.update(ended // rollouts)
                work.interrupt.check()

            work.engine.set_params(self.params, 0)
            found = collect(
                work.engine,
                work.chat,
                environment,
                range(seeds),
                group=rollouts,
                config=config.rollout,
                seed=config.seed,
                step=0,
                sampling=Sampling.of(config.rollout),
                progress=report,
            )
        work.interrupt.check()  # the last rollouts before a signal may be spoilt
        rewards = np.array([t.reward for t in found]).reshape(seeds, rollouts)
        success = np.array([t.status == "finished" and bool(t.info.get("success")) for t in found])
        return Try(level, Statistics.of(rewards, success.reshape(seeds, rollouts)))


def of_world(config: RunConfig, name: str, level: float) -> RunConfig:
    """The configuration of a run in a world."""
    return config.replace(environment=dataclasses.replace(config.environment, worlds=(f"{name}@{level:g}",)))


def rollouts(result: dict[str, Any]) -> int:
    """How many trajectories the tries of `worlds.json` sampled: none where the simulator refused the level."""
    tried = sum("success" in t for w in result["worlds"].values() for t in w["tries"])
    return tried * result["settings"]["seeds"] * result["settings"]["rollouts"]


def markdown(result: dict[str, Any]) -> str:
    """The table for people: every try."""
    lines = ["| world | level | reward | success | std | all succeed | all zero | |", "|---" * 8 + "|"]
    for name, world in result["worlds"].items():
        for t in world["tries"]:
            verdict = "**accepted**" if t["accepted"] else "; ".join(t["faults"])
            figures = " | ".join(f"{t[k]:.2f}" if k in t else "-" for k in Statistics.__dataclass_fields__)
            lines.append(f"| {name} | {t['level']:+g} | {figures} | {verdict} |")
        if not world["accepted"]:
            lines.append(f"| {name} | refused: no level was accepted | | | | | | |")
    s = result["settings"]
    lines.append(f"\n{s['seeds']} episodes x {s['rollouts']} rollouts a try; every two levels halve the effects.\n")
    if (attempts := s["seeds"] * s["rollouts"]) < FEW:
        lines.append(f"{attempts} attempts are few: a share is known to +-{0.98 / attempts**0.5:.2f} at best (95 %).\n")
    return "\n".join(lines)
