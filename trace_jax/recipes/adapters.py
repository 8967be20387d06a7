"""`trace-jax capability train`: one adapter for each capability, by GRPO in its world on one frozen base; on demand a
gate over these (`gating`).

Every adapter is an ordinary run in `adapters/<name>`: it can be continued, evaluated, inspected and exported like any
other. All of them train in one process, with one copy of the base on the devices and one set of compiled programs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trace_jax import config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.recipes import gating, places, records, train, worlds
from trace_jax.recipes.adapter_runs import GATE, GATE_MIX, GATES, MIX, TARGET, finished, targeted
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.rundir import RunDirectory, refuse_changes, stored_config, write_text
from trace_jax.recipes.workspace import Workspace

# What adapters are trained with unless the command says otherwise (arXiv 2604.05336).
DEFAULTS = {
    "lora.rank": "16",
    "lora.alpha": "16",
    "grpo.group": "16",
    "grpo.kl_coefficient": "0",
    "grpo.constant_groups": "resample",
    "grpo.resample_limit": "3",
    "grpo.hints": "0.25",
    "grpo.optimizer.learning_rate": "1e-5",
}
MAY_CHANGE = ("seed", "grpo.", "lora.", "rollout.", "evaluation.", "data.train", "data.validation")


def command(
    run_dir: Path | None,
    config: RunConfig,
    overrides: Iterable[tuple[str, str]],
    *,
    names: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Trains the adapters, or goes on with those that are not finished.

    Args:
        config: of the base's run with `overrides`, which are also given alone: what they name is not set by `DEFAULTS`.
        names: capabilities, "mix", "target", and "gate" or "gate_mix", which come last, since they mix the adapters of
            capabilities; empty: all accepted worlds of `worlds.json`.
        out: directory with `worlds.json`, where `adapters/` goes; None: `capability` of the run directory.

    Returns:
        The content of `adapters.json`: of each adapter its run directory, worlds, rollouts, seconds and last reward.

    Raises:
        ConfigError: bad input. Interrupted: everything is saved.
    """
    base = stored_config(run_dir or Path())
    _check(base, config)
    with RunDirectory.open(run_dir, lock=False) as run:
        source, out = run.path, run.path / "capability" if out is None else _given(out, names)
    overrides = list(overrides)
    planned = {n: _config(config, overrides, entries, n) for n, entries in _worlds(out, names).items()}
    planned = {n: c for gate in (False, True) for n, c in planned.items() if (n in GATES) == gate}
    for c in planned.values():
        if not c.lora.rank:
            raise ConfigError("`lora.rank` 0 is no adapter: give a rank, or leave the field out")
        train.check(c)
    result: dict[str, Any] = {"base": str(source), "adapters": {}}
    begun_with: list[Workspace] = []

    def share(work: Workspace) -> None:
        gate = bool(work.config.lora.gate)
        if begun_with:
            work.share(begun_with[0], adapters=not gate)
        elif not gate:
            begun_with.append(work)
        if gate:
            gating.take(work, out)

    for number, (name, c) in enumerate(planned.items()):
        print(f"adapter {number + 1} of {len(planned)}: {name}", flush=True)
        path = out / "adapters" / name
        if name in GATES:
            c = gating.over(c, overrides, out, targeted(finished(out, config)))
        begun = (path / "config.yaml").exists()
        if begun and (changed := config_io.differences(stored_config(path), c)):
            raise ConfigError(
                f"{path} was trained with other settings (`{changed[0]}` differs): remove it, or give the old ones"
            )
        try:
            train.command("grpo", path, c, resume=begun, source=None if begun else source, prepare=share)
        except Interrupted as stop:
            raise Interrupted(stop.status) from None  # what continues is this command
        result["adapters"][name] = _figures(path, c)
        write_text(out / "adapters.json", json.dumps(result, indent=1) + "\n")
    print(markdown(result), end="")
    return result


def _given(out: Path, names: Sequence[str]) -> Path:
    """Only `target` alone needs nothing from the directory."""
    return places.folder(out) if set(names) == {TARGET} else places.existing(out)


def _on_the_task(names: Sequence[str]) -> bool:
    """Whether none of these needs a world."""
    return bool(names) and set(names) <= {TARGET, GATE}


def _check(base: RunConfig, config: RunConfig) -> None:
    refuse_changes(base, config, MAY_CHANGE, "capability train")
    if base.lora.rank:
        raise ConfigError("the run trains an adapter itself: `trace-jax export` and `import` make a base of it")
    if config.lora.gate:
        raise ConfigError("`lora.gate` is what `--capabilities gate` sets: leave the field out")
    if base.environment.worlds:
        raise ConfigError("the run trains in a world itself: give one of the task")


def _worlds(out: Path, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Entries of `environment.worlds` for each adapter."""
    path = out / worlds.FILE
    if not path.exists() and not _on_the_task(names):
        raise ConfigError(f"{path} is missing: run `trace-jax capability worlds` first")
    found = worlds.read(path)["worlds"] if path.exists() else {}
    accepted = {n: (f"{n}@{w['level']:g}",) for n, w in found.items() if w["accepted"]}
    if not accepted and not _on_the_task(names):
        raise ConfigError(f"{path} has no accepted world: there is nothing to train in")
    everywhere = tuple(e for entries in accepted.values() for e in entries)
    every = {**accepted, MIX: everywhere, TARGET: (), GATE: (), GATE_MIX: everywhere}
    for name in names:
        if name not in every:
            mend = "its world was refused" if name in found else f"choose from {', '.join(every)}"
            raise ConfigError(f"--capabilities {name}: {mend}")
    return {n: every[n] for n in (names or accepted)}


def _config(
    config: RunConfig, overrides: Iterable[tuple[str, str]], entries: tuple[str, ...], name: str = ""
) -> RunConfig:
    given = {field for field, _ in overrides}
    wanted = DEFAULTS | (dict([gating.LEARNING_RATE]) if name in GATES else {})
    defaults = {n: v for n, v in wanted.items() if n not in given}
    if not entries:
        defaults.pop("grpo.hints", None)  # the task itself has none
    environment = dataclasses.replace(config.environment, worlds=entries)
    return config_io.override(config.replace(environment=environment), list(defaults.items()))


def _figures(path: Path, config: RunConfig) -> dict[str, Any]:
    steps = records.steps(path, ("trajectories",))
    return {
        "run_dir": str(path),
        "worlds": list(config.environment.worlds),
        "steps": len(steps),
        "rollouts": int(sum(r["trajectories"] for r in steps)),
        "seconds": steps[-1]["seconds"] - steps[0]["seconds"] if len(steps) > 1 else None,
        "first_reward": steps[0]["reward"] if steps else None,
        "last_reward": steps[-1]["reward"] if steps else None,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table for people."""
    lines = ["| adapter | worlds | steps | rollouts | reward of the first step | of the last |", "|---" * 6 + "|"]
    for name, a in result["adapters"].items():
        rewards = [f"{a[k]:.3f}" if a[k] is not None else "-" for k in ("first_reward", "last_reward")]
        lines.append(
            f"| {name} | {', '.join(a['worlds']) or 'the task'} | {a['steps']} | {a['rollouts']} | "
            f"{' | '.join(rewards)} |"
        )
    return "\n".join(lines) + "\n"
