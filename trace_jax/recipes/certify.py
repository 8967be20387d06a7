"""`trace-jax certify`: the evidence that labels deserve trust, measured anew and written as a note with a figure."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trace_jax.config import ConfigError, RunConfig, SimulatorConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.evaluation.baselines import evaluate_analyst
from trace_jax.evaluation.ceiling import Diagnosis, diagnose
from trace_jax.evaluation.ceiling_table import correct, quiet, table
from trace_jax.evaluation.metrics import EvalRecord
from trace_jax.recipes import certify_note
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSES, NO_SIGNAL
from trace_jax.simulator.difficulty import PRESETS, params_of
from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.stream import composition_for, simulate_rows, stream_key
from trace_jax.warehouse import files
from trace_jax.warehouse.splits import EpisodeSet

STREAM = "certify"  # no split of a run draws from it
EPISODES = 1200  # proposals at each setting
SHARE = 5  # one accepted episode for the analyst to this many proposals
SMALLEST = 100
PATIENCE = 40  # proposals for an accepted episode, before a setting is left without
SWEEPS: dict[str, tuple[float, ...]] = {
    "strength": (0.3, 0.5, 0.75, 1.0, 1.5),
    "noise": (0.5, 1.0, 1.5, 2.0, 3.0),
    "confounder_strength": (0.0, 1.0, 2.0, 4.0),
}
CHECKS = ("detectability", "confounder", "rival_cause", "rival_slice")
_VERSIONS = ("trace-jax", "jax", "numpy", "duckdb")
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Measured:
    """One setting: proposals with verdicts and diagnoses, and answers on sets of the paper's mix of causes."""

    batch: EpisodeBatch  # labels only
    verdict: Verdict
    diagnosis: Diagnosis
    ceiling: np.ndarray  # FullAttr on the accepted set, in its order
    analyst: list[EvalRecord]
    analyst_all: list[EvalRecord]  # on proposals, whatever the oracle says of them


def share(right: np.ndarray) -> dict[str, Any]:
    """A share of successes with Wilson's 95 % interval, which stays honest near 0 and 1. No trials: None."""
    n = len(right)
    if n == 0:
        return {"value": None, "low": None, "high": None, "episodes": 0}
    p, z2 = float(np.mean(right)), 1.96**2
    centre, spread = p + z2 / (2 * n), 1.96 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + z2 / n) for sign in (-1, 1))
    return {"value": p, "low": min(max(low, 0.0), p), "high": max(min(high, 1.0), p), "episodes": n}


def certify(config: RunConfig, out: Path, episodes: int = EPISODES) -> dict[str, Any]:
    """Measures acceptance, ceiling and the analyst, and writes certificate.md, certificate.json and difficulty.svg.

    Everything but the date and the versions is a function of the configuration and `episodes`.

    Args:
        out: directory of the three files.
        episodes: proposals at each setting; the analyst gets a fifth as many, and as many accepted episodes.
    Raises:
        ConfigError: too few episodes, a knob that this command turns itself, or `out` cannot be written.
    """
    base = config.simulator
    for knob, neutral in {"difficulty": "paper", **dict.fromkeys(SWEEPS, 1.0)}.items():
        if getattr(base, knob) != neutral:
            raise ConfigError(f"certify turns simulator.{knob} itself: leave it at {neutral}")
    if episodes < SMALLEST:
        raise ConfigError(f"--episodes {episodes}: use {SMALLEST} or more, so that every cause is proposed")
    with files.disk(out, "choose another directory with --out"):
        out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ConfigError(f"cannot write to {out}: choose another directory with --out")
    scored = episodes // SHARE
    points = _points(base)
    progress, measured = Progress(), {}
    with Interrupt() as interrupt:
        for i, (key, setting) in enumerate(points.items(), 1):
            name = f"{i}/{len(points)} {' '.join(str(k) for k in key)}"
            with progress.bar(name, 2 * episodes + 4 * scored) as bar:
                report = _Steps(lambda done, b=bar: (b.update(done), interrupt.check()))
                measured[key] = _measure(config, setting, episodes, scored, report)
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {**{name: metadata.version(name) for name in _VERSIONS}, "python": platform.python_version()},
        "device": jax.default_backend(),
        "seed": config.data.seed,
        "proposals": episodes,
        "accepted": scored,
        "shape": {k: getattr(base, k) for k in ("days", "segments", "siblings", "two_attribute_share", "rng")},
        "presets": {name: _preset(measured["difficulty", name]) for name in PRESETS},
        "sweeps": _sweeps(measured),
    }
    result["headline"] = _headline(measured["difficulty", "paper"])
    content = {
        "certificate.md": certify_note.markdown(result),
        "certificate.json": json.dumps(result, indent=1) + "\n",
        "difficulty.svg": certify_note.svg(result),
    }
    with files.disk(out):
        for name, text in content.items():
            files.replace(out / name, text.encode())
    print(f"{out / 'certificate.md'}: {certify_note.summary(result['headline'])}")
    return {"out": str(out), **result}


class _Steps:
    """Turns the progress of consecutive stages into one count."""

    def __init__(self, show: Callable[[int], Any]):
        self._show, self._before = show, 0

    def stage(self, size: int) -> Report:
        before, self._before = self._before, self._before + size
        return lambda done, _: self._show(before + done)


def _points(base: SimulatorConfig) -> dict[tuple[str, Any], SimulatorConfig]:
    """All settings, by (knob, value): the presets, and one knob at a time around "paper"."""
    points: dict[tuple[str, Any], SimulatorConfig] = {
        ("difficulty", name): dataclasses.replace(base, difficulty=name) for name in PRESETS
    }
    for knob, values in SWEEPS.items():
        points |= {(knob, v): dataclasses.replace(base, **{knob: v}) for v in values if v != 1.0}
    return points


def _measure(config: RunConfig, setting: SimulatorConfig, episodes: int, scored: int, report: _Steps) -> Measured:
    seed, params = config.data.seed, params_of(setting)
    strata = composition_for(setting, episodes)
    done = report.stage(episodes)
    causes = np.repeat([CAUSE_INDEX[cause] for cause, _ in strata], list(strata.values()))
    dimensions = np.repeat([d for _, d in strata], list(strata.values()))
    indices = np.concatenate([np.arange(n) for n in strata.values()])
    batch, verdict = simulate_rows(setting, stream_key(seed, STREAM), causes, dimensions, indices, params)
    done(episodes, episodes)
    wanted = composition_for(setting, scored)
    some = indices < np.repeat([wanted.get(stratum, 0) for stratum in strata], list(strata.values()))
    diagnosis = diagnose(batch, params, report.stage(episodes))
    everything = _analyst(config, *jax.tree.map(lambda x: x[some], (batch, verdict)), report.stage(int(some.sum())))
    batch = _labels(batch)
    found, solved, answered = report.stage(scored), report.stage(scored), report.stage(scored)
    try:
        accepted = accepted_episodes(setting, seed, f"{STREAM}-set", wanted, params, None, found, PATIENCE)
    except ConfigError:  # hardly anything is accepted at this setting; its acceptance says so
        return Measured(batch, verdict, diagnosis, np.zeros(0, bool), [], everything)
    ceiling = correct(diagnose(accepted[0], params, solved), accepted[0])
    return Measured(batch, verdict, diagnosis, ceiling, _analyst(config, *accepted, answered), everything)


def _analyst(config: RunConfig, batch: EpisodeBatch, verdict: Verdict, report: Report) -> list[EvalRecord]:
    """Its answers in the order of the episodes."""
    environment = AdsEnvironment(EpisodeSet(batch, verdict, STREAM), config.environment)
    indices = range(len(environment))
    return evaluate_analyst(environment, indices, config.environment, seed=config.data.seed, on_progress=report)


def _labels(batch: EpisodeBatch) -> EpisodeBatch:
    """The batch without its tables, which are most of it."""
    kept = ("cause", "slice_attributes", "slice_values", "profile", "strength", "onset")
    drop = [f.name for f in dataclasses.fields(batch) if f.name not in kept]
    return batch.replace(**dict.fromkeys(drop, np.zeros(0)))


def _preset(m: Measured) -> dict[str, Any]:
    return {"acceptance": _acceptance(m), "ceiling": table(m.batch, m.verdict.accept, m.diagnosis)}


def _acceptance(m: Measured) -> list[dict[str, Any]]:
    """Proposals, accepted ones and the check that failed most, by cause and number of slice attributes."""
    cause, accept = np.asarray(m.batch.cause), np.asarray(m.verdict.accept)
    dimensions = (np.asarray(m.batch.slice_attributes) >= 0).sum(1)
    rows = []
    for code, d in sorted(set(zip(cause.tolist(), dimensions.tolist(), strict=True))):
        of = (cause == code) & (dimensions == d)
        rejected = of & ~accept
        fails = {check: np.asarray(getattr(m.verdict, check))[rejected] <= 0 for check in CHECKS}
        fails["unnamed"] = ~np.any(list(fails.values()), axis=0)  # a mix cause whose slice does not stand out
        failed = Counter({check: int(of_check.sum()) for check, of_check in fails.items()})
        worst, count = failed.most_common(1)[0]
        rows.append(
            {
                "cause": CAUSES[code].name,
                "dimensions": d,
                "proposals": int(of.sum()),
                "accepted": int((of & accept).sum()),
                "failed_most": worst if count else None,
                "failed": dict(failed),
            }
        )
    return rows


def _full(records: list[EvalRecord], kind: str | None = None) -> dict[str, Any]:
    return share(np.array([r.full_right for r in records if kind in (None, r.type)]))


def _headline(m: Measured) -> dict[str, Any]:
    right, accept = correct(m.diagnosis, m.batch), np.asarray(m.verdict.accept)
    silent = accept & (np.asarray(m.batch.cause) == CAUSE_INDEX[NO_SIGNAL])
    return {
        "acceptance": share(accept),
        "accepted": share(right[accept]),
        "rejected": share(right[~accept]),
        "no_signal_quiet": share(quiet(m.diagnosis)[silent]),
        "ceiling_set": share(m.ceiling),
        "ceiling_all": share(right),
        "analyst": _full(m.analyst),
        "analyst_all": _full(m.analyst_all),
    }


def _sweeps(measured: dict[tuple[str, Any], Measured]) -> dict[str, list[dict[str, Any]]]:
    """The headline numbers at every value of every knob, and by number of slice attributes at "paper"."""
    paper = measured["difficulty", "paper"]
    sweeps = {"difficulty": [{"value": name, **_headline(measured["difficulty", name])} for name in PRESETS]}
    for knob, values in SWEEPS.items():
        sweeps[knob] = [{"value": v, **_headline(paper if v == 1.0 else measured[knob, v])} for v in values]
    kinds = np.array([r.type for r in paper.analyst])
    accept, right = np.asarray(paper.verdict.accept), correct(paper.diagnosis, paper.batch)
    dimensions = (np.asarray(paper.batch.slice_attributes) >= 0).sum(1)
    local = np.array([c.level == "segment" for c in CAUSES])[np.asarray(paper.batch.cause)]
    sweeps["slice_attributes"] = [
        {
            "value": d,
            "acceptance": share(accept[local & (dimensions == d)]),
            "accepted": share(right[local & (dimensions == d) & accept]),
            "rejected": share(right[local & (dimensions == d) & ~accept]),
            "ceiling_set": share(paper.ceiling[kinds == kind]),
            "ceiling_all": share(right[local & (dimensions == d)]),
            "analyst": _full(paper.analyst, kind),
            "analyst_all": _full(paper.analyst_all, kind),
        }
        for d, kind in ((1, "segment_1d"), (2, "segment_2d"))
    ]
    return sweeps
