"""The figures of a run by step and by time, and where the time of its steps goes: what `metrics.jsonl` holds."""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trace_jax.report import svg
from trace_jax.report.packed import finite

_NOT_CURVES = {"stage", "step", "seconds"}
_DRAWABLE = 1e100  # beyond it the arithmetic of a chart overflows
# Where to look first, see docs/metrics.md.
_FIRST = (
    *("reward", "full_right", "loss", "kept", "status/truncated", "constant_groups", "entropy", "approx_kl"),
    *("mismatch_gap", "grad_norm", "learning_rate"),
)
# Phases of `recipes.phases.PHASES`: what the learner's thread does one after another, and what goes on beside it or
# while it waits. Advantages, packing and old log-probabilities are booked under the sampler's `reward` and `probe`.
LEARNER = ("wait", "learn", "sync", "validate", "save")
SAMPLER = ("generate", "tools", "reward", "probe")


@dataclass
class Curve:
    """One figure: steps, seconds of work since the run began, values (NaN: not known)."""

    steps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def points(self) -> list[tuple[float, float]]:
        """By step."""
        return list(zip(self.steps, self.values, strict=True))

    @property
    def last(self) -> float | None:
        """The newest value that is known."""
        return next((v for v in reversed(self.values) if math.isfinite(v)), None)

    def thinned(self) -> dict[str, list[float | None]]:
        """As a page keeps it."""
        columns = ("step", self.steps), ("time", self.times)
        drawn = {name: svg.thin(list(zip(xs, self.values, strict=True))) for name, xs in columns}
        found = {name: [finite(x, 7) for x, _ in points] for name, points in drawn.items()}
        return found | {"value": [finite(y) for _, y in drawn["step"]]}


@dataclass(frozen=True)
class Phase:
    """One phase of the steps of a stage: seconds in all, a step in the median, share of the time that passed."""

    name: str
    total: float
    median: float
    share: float


@dataclass(frozen=True)
class Phases:
    """Where the time went between the first and the last record of a stage.

    Attributes:
        steps: between records, that the times are of.
        elapsed: seconds that passed. median: of a step.
        learner: phases of `LEARNER`, one after another. rest: seconds in none of them.
        sampler: phases of `SAMPLER`, which overlap each other and the learner's.
    """

    stage: str
    steps: int
    elapsed: float
    median: float
    learner: tuple[Phase, ...]
    rest: float
    sampler: tuple[Phase, ...]


@dataclass(frozen=True)
class Metrics:
    """What a run logged.

    Attributes:
        stages: curves by name, by stage in the order in which they begin.
        phases: of each stage that says.
        note: about lines that are no records, empty when there are none.
    """

    stages: dict[str, dict[str, Curve]]
    phases: tuple[Phases, ...]
    note: str

    def drawn(self) -> dict[str, dict[str, Curve]]:
        """Those with more than one point, of which one is finite; the first ones of `_FIRST` in front."""
        found = {}
        for stage, named in self.stages.items():
            shown = {n: c for n, c in named.items() if len(c.values) > 1 and c.last is not None}
            front = [n for n in _FIRST if n in shown]
            if shown:
                found[stage] = {n: shown[n] for n in (*front, *(n for n in shown if n not in front))}
        return found


def family(name: str) -> str:
    """What a figure is shown under: empty for those to look at first."""
    if name in _FIRST:
        return ""
    head, slash, _ = name.partition("/")
    return head if slash else next((p for p in ("mismatch", "kept") if name.startswith(f"{p}_")), "more")


def read(path: Path) -> Metrics:
    """Every record of a file, of which lines may be damaged; none of a file that is not there."""
    curves: dict[str, dict[str, Curve]] = defaultdict(lambda: defaultdict(Curve))
    records: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    data = path.read_bytes() if path.is_file() else b""
    broken, clock = [], _Clock()
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            stage, step = str(record["stage"]), float(record["step"])
            if not abs(step) < 2**53:
                raise ValueError("step")
            figures = _flatten({k: v for k, v in record.items() if k not in _NOT_CURVES})
            now = clock.at(record.get("seconds"))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            if line.strip() and (number < len(lines) or data.endswith(b"\n")):  # else: cut short by a crash
                broken.append(number)
            continue
        records[stage].append((now, figures))
        for name, value in figures.items():
            curve = curves[stage][name]
            curve.steps.append(step)
            curve.times.append(now)
            curve.values.append(value)
    note = ""
    if broken:
        note = f"skipped {len(broken)} lines of {path.name} that are no records (the first is line {broken[0]})"
        warnings.warn(note, stacklevel=3)
    phases = tuple(p for stage, found in records.items() if (p := _phases(stage, found)) is not None)
    return Metrics({stage: dict(named) for stage, named in curves.items()}, phases, note)


class _Clock:
    """Seconds of work since the run began, from those since a command began: a resumed run starts from 0 again."""

    def __init__(self) -> None:
        self._before, self._last = 0.0, 0.0

    def at(self, seconds: Any) -> float:
        """NaN where a record does not say."""
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < 1e12:
            return math.nan
        if seconds < self._last:
            self._before += self._last
        self._last = float(seconds)
        return self._before + self._last


def _flatten(record: dict, prefix: str = "") -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + key] = float(value) if abs(value) < _DRAWABLE else math.nan
        elif value is None:
            flat[prefix + key] = math.nan  # a gap, not a missing curve
    return flat


def _phases(stage: str, records: list[tuple[float, dict[str, float]]]) -> Phases | None:
    """Of all steps but the first, which compiles and whose beginning nothing says; None of a stage without phases."""
    spans = [(b[0] - a[0], b[1]) for a, b in zip(records, records[1:], strict=False) if b[0] > a[0]]
    elapsed = sum(span for span, _ in spans)

    def found(names: tuple[str, ...]) -> tuple[Phase, ...]:
        rows = []
        for name in names:
            spent = [s for _, f in spans if math.isfinite(s := f.get(f"seconds/{name}", 0.0)) and s >= 0]
            if sum(spent) > 0:
                rows.append(Phase(name, sum(spent), statistics.median(spent), sum(spent) / elapsed))
        return tuple(rows)

    learner = found(LEARNER)
    if not learner:
        return None
    rest = max(elapsed - sum(row.total for row in learner), 0.0)
    median = statistics.median(span for span, _ in spans)
    return Phases(stage, len(spans), elapsed, median, learner, rest, found(SAMPLER))
