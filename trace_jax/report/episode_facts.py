"""What there is to know about one episode, for people: series, mix and rate, margins, confounders, why it is rejected.

Reads hidden fields; nothing here may reach an agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from trace_jax.environments.ads.decompose import RATIOS, Decomposition, decompose, per_day
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSE_NAMES, CAUSES, CHANNELS, LEVELS
from trace_jax.simulator.confounders import CONFOUNDERS
from trace_jax.simulator.episode import NOT_COMPARED
from trace_jax.simulator.oracle import OracleParams
from trace_jax.simulator.slices import slice_name
from trace_jax.simulator.statistics import SLICE_FEATURES, statistics
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES, DRIVER_ATTRIBUTES
from trace_jax.warehouse.materialize import EVIDENCE_METRICS, day
from trace_jax.warehouse.splits import EpisodeRecord

COUNTS = ("impressions", "clicks", "orders", "spend")
KINDS = ("check", "rival cause", "rival slice")
RIVAL_SLICES = 10  # shown: those nearest to the label's
Series = Mapping[str, Float[np.ndarray, " T"]]  # by metric; NaN: no such day, or nothing to divide by


@dataclass(frozen=True)
class Margin:
    """One check of the oracle. It passes while `value` is above `needed`."""

    kind: str  # one of KINDS
    name: str
    value: float
    unit: str  # "z" or "log-likelihood"
    needed: float = 0.0

    @property
    def passed(self) -> bool:
        return self.value > self.needed

    @property
    def slack(self) -> float:
        """How much is left, negative when the check fails."""
        return self.value - self.needed


@dataclass(frozen=True)
class Confounder:
    name: str
    size: float  # as `EpisodeBatch.confounders` has it
    shown: str  # the same in words
    description: str


@dataclass(frozen=True)
class Breakdown:
    """Mix and rate parts of a metric's change by the values of an attribute."""

    attribute: str
    values: tuple[str, ...]
    denominator: tuple[np.ndarray, np.ndarray]  # by window, e.g. impressions
    numerator: tuple[np.ndarray, np.ndarray]
    parts: Decomposition


@dataclass(frozen=True)
class Facts:
    """Everything a view shows. Axes: T days. Series of `groups`: "campaign", "siblings" (all of them together) and,
    if the label has a slice, "slice" and "rest" of the campaign."""

    record: EpisodeRecord
    present: Bool[np.ndarray, " T"]
    groups: dict[str, Series]
    margins: tuple[Margin, ...]  # weakest first within a kind
    failing: tuple[str, ...]  # checks that reject it, empty if accepted
    confounders: tuple[Confounder, ...]
    evidence: tuple[tuple[str, float, float, str], ...]  # metric, relative change, z, what the signature wants of it
    effects: dict[str, float]  # multiplier at full onset, of the channels that the cause uses

    @property
    def days(self) -> int:
        return len(self.present)

    @property
    def half(self) -> int:
        """First day of the intervention window."""
        return self.days // 2

    @property
    def accepted(self) -> bool:
        return bool(self.record.verdict.accept[self.record.position])

    @property
    def slice(self) -> str:
        """The label's slice in words, empty if it has none."""
        return " & ".join(f"{a}={v}" for a, v in self.record.driver)

    def date(self, t: int) -> str:
        """Calendar day `t`."""
        return day(self.record.batch, self.record.position, t).isoformat()

    def level(self, group: str, metric: str) -> tuple[float, float]:
        """Level of a metric before and in the window: ratio of sums, or mean by day. NaN when there is none."""
        series, before = self.groups[group], np.arange(self.days) < self.half
        if metric in RATIOS or metric == "share":
            parts = [series[name] for name in RATIOS[metric]] if metric in RATIOS else self._share()
            sums = [np.nansum(part[w]) for part in parts for w in (before, ~before)]
            return tuple(float(sums[w] / sums[w + 2]) if sums[w + 2] > 0 else np.nan for w in (0, 1))
        known = np.isfinite(series[metric])
        return tuple(
            float(per_day(np.nan_to_num(series[metric]), w, known)) if (w & known).any() else np.nan
            for w in (before, ~before)
        )

    def _share(self) -> list[np.ndarray]:
        return [self.groups[group]["impressions"] for group in ("slice", "campaign")]

    def change(self, group: str, metric: str) -> float:
        """Relative change of `level`; NaN when there is none."""
        before, after = self.level(group, metric)
        return after / before - 1 if before > 0 else np.nan

    def breakdown(self, metric: str, attribute: str) -> Breakdown:
        """Mix and rate parts of the change of a ratio by the values of an attribute."""
        batch, i = self.record.batch, self.record.position
        code = np.asarray(batch.segment_values[i, :, ATTRIBUTE_NAMES.index(attribute)])
        values = ATTRIBUTES[attribute]
        belongs = (code[:, None] == np.arange(len(values))) & np.asarray(batch.segment_mask[i])[:, None]
        sums = [
            (daily[: self.half].sum(0), daily[self.half :].sum(0))
            for daily in (np.asarray(getattr(batch, c)[i], np.float64) @ belongs for c in RATIOS[metric])
        ]
        return Breakdown(attribute, values, sums[1], sums[0], decompose(*sums))

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attributes to break the change down by: those of the slice, else all in which something can be localised."""
        return tuple(a for a, _ in self.record.driver) or DRIVER_ATTRIBUTES


def facts(record: EpisodeRecord, oracle: OracleParams | None = None) -> Facts:
    """Collect them."""
    batch, verdict, i = record.batch, record.verdict, record.position
    oracle = oracle or OracleParams()
    present = np.asarray(batch.day_mask[i])
    margins = _margins(record, oracle)
    segment, wanted = LEVELS[record.cause] == "segment", CAUSES[CAUSE_INDEX[record.cause]].signature
    return Facts(
        record=record,
        present=present,
        groups=_groups(record, present),
        margins=margins,
        failing=_failing(record, margins, oracle),
        confounders=_confounders(batch.confounders[i]),
        evidence=tuple(
            (
                name,
                float(np.expm1(np.float64(verdict.evidence_change[i, m]))),
                float(verdict.evidence_z[i, m]),
                wanted.get(name) or (wanted.get("share" if segment else "volume", "") if name == "impressions" else ""),
            )
            for m, name in enumerate(EVIDENCE_METRICS)
        ),
        effects={
            name: float(np.exp(np.float64(batch.effects[i, h])))
            for h, name in enumerate(CHANNELS)
            if batch.effects[i, h] != 0
        },
    )


def inside_slice(record: EpisodeRecord) -> Bool[np.ndarray, " G"]:
    """Active segments of the label's slice; none if it has no slice."""
    batch, i = record.batch, record.position
    inside = np.asarray(batch.segment_mask[i]) & bool(record.driver)
    for attribute, value in record.driver:
        a = ATTRIBUTE_NAMES.index(attribute)
        inside = inside & (np.asarray(batch.segment_values[i, :, a]) == ATTRIBUTES[attribute].index(value))
    return inside


def _groups(record: EpisodeRecord, present: np.ndarray) -> dict[str, Series]:
    batch, i = record.batch, record.position
    inside, active = inside_slice(record), np.asarray(batch.segment_mask[i])
    cells = {c: np.asarray(getattr(batch, c)[i], np.float64) for c in COUNTS}
    groups = {"campaign": {c: x[:, active].sum(1) for c, x in cells.items()}}
    groups["campaign"] |= {c: np.asarray(getattr(batch, c)[i], np.float64) for c in ("budget", "in_stock")}
    if inside.any():
        groups["slice"] = {c: x[:, inside].sum(1) for c, x in cells.items()}
        groups["rest"] = {c: x[:, active & ~inside].sum(1) for c, x in cells.items()}
        groups["slice"]["share"] = _ratio(groups["slice"]["impressions"], groups["campaign"]["impressions"])
    if len(batch.sibling_id[i]):
        sibling = {c: np.asarray(getattr(batch, f"sibling_{c}")[i], np.float64) for c in (*COUNTS, "in_stock")}
        groups["siblings"] = {c: x.mean(0) if c == "in_stock" else x.sum(0) for c, x in sibling.items()}
    for series in groups.values():
        series |= {name: _ratio(series[n], series[d]) for name, (n, d) in RATIOS.items()}
    return {name: {m: np.where(present, x, np.nan) for m, x in series.items()} for name, series in groups.items()}


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(denominator > 0, numerator / np.where(denominator > 0, denominator, 1.0), np.nan)


def _margins(record: EpisodeRecord, oracle: OracleParams) -> tuple[Margin, ...]:
    verdict, i = record.verdict, record.position
    checks = [
        Margin("check", "detectability: the label's weakest signature", float(verdict.detectability[i]), "z"),
        Margin("check", "confounder: the label over what it does not explain", float(verdict.confounder[i]), "z"),
    ]
    if LEVELS[record.cause] == "mix":
        checks.append(_mix_named(record, oracle))
    causes = [
        Margin("rival cause", name, float(verdict.cause_margins[i, c]), "z")
        for c, name in enumerate(CAUSE_NAMES)
        if name != record.cause
    ]
    behind = np.asarray(verdict.slice_margins[i], np.float64)
    label = " & ".join(f"{a}={v}" for a, v in record.driver)
    near = [k for k in np.argsort(behind, kind="stable") if abs(behind[k]) < NOT_COMPARED and slice_name(k) != label]
    slices = [Margin("rival slice", slice_name(k), float(behind[k]), "log-likelihood") for k in near[:RIVAL_SLICES]]
    weakest = [sorted(group, key=lambda m: m.slack) for group in (checks, causes, slices)]
    return tuple(m for group in weakest for m in group)


@jax.jit
def _statistics(episode: Any, min_events: float) -> Any:
    return statistics(episode, min_events)


def _mix_named(record: EpisodeRecord, oracle: OracleParams) -> Margin:
    """The one check of mix causes that no field of a verdict holds: the slice that is named gained share itself."""
    episode = jax.tree.map(lambda x: x[record.position], record.batch)
    found = _statistics(episode, oracle.min_events)
    label = " & ".join(f"{a}={v}" for a, v in record.driver)
    k = next(k for k in range(len(found.testable)) if slice_name(k) == label)
    z = float(found.slices[SLICE_FEATURES.index("share"), k]) if found.testable[k] else 0.0
    return Margin("check", f"mix: the share of {label} itself", z, "z", oracle.detect)


def _failing(record: EpisodeRecord, margins: tuple[Margin, ...], oracle: OracleParams) -> tuple[str, ...]:
    if record.verdict.accept[record.position]:
        return ()
    failed = {kind: [m for m in margins if m.kind == kind and not m.passed] for kind in KINDS}
    reasons = [f"{m.name} {m.value:+.2f} {m.unit}, more than {m.needed:g} needed" for m in failed["check"]]
    if failed["rival cause"]:
        reasons.append(f"the data look like {', '.join(m.name for m in failed['rival cause'])}, too")
    if record.verdict.rival_slice[record.position] <= -NOT_COMPARED:
        reasons.append(f"too little data inside or outside the slice (fewer than {oracle.min_events:g} clicks)")
    if failed["rival slice"]:
        first, *more = [m.name for m in failed["rival slice"]]
        behind = f"not {oracle.slice_gap:g} log-likelihood units behind the label's slice"
        reasons.append(f"{first}{f' and {len(more)} more' if more else ''} {behind}")
    return tuple(reasons) or ("a statistic is not finite",)


# Confounders whose size is no log effect at the peak.
_WORDS = {
    "missing_days": lambda size: f"{-size:.0f} day{'s' if size < -1 else ''}",
    "zero_volume": lambda size: f"{size:.0%} of the segments",
    "late_conversions": lambda size: f"the last day shows {np.exp(size):.0%} of its orders",
}


def _confounders(sizes: np.ndarray) -> tuple[Confounder, ...]:
    found = []
    for confounder, size in zip(CONFOUNDERS, np.asarray(sizes, np.float64).tolist(), strict=True):
        if size != 0:
            words = _WORDS.get(confounder.name, lambda size: f"{np.expm1(size):+.0%} at its peak")(size)
            found.append(Confounder(confounder.name, size, words, confounder.description))
    return tuple(found)
