"""The scripted analyst, the SFT teacher: investigates through the agent's own tool and sees what an agent sees.

It reads z-scores from its queries' results and decides by them: a change counts when it is `STRONG` standard errors
from nothing (about a hundred slices are looked at, so the bar lies well above two), a companion change when it is
`COMPANION`. It drills from the campaign to one attribute to two, rules causes out, and abstains when nothing stands
out. Order, depth and phrasing vary with `rng`, so its transcripts are not one template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trace_jax.environments.ads import queries
from trace_jax.environments.ads.answer import format_answer
from trace_jax.environments.base import Episode, Task, Transcript
from trace_jax.simulator.causes import CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES, DRIVER_ATTRIBUTES

# Standard errors as the queries print them, rounded: what reads 4 is at least 3.5, two-sided 5e-4.
STRONG = 4
CLEAR = 7  # beyond which nothing else needs to be looked at
COMPANION = 3  # for a change that only has to agree with a strong one
GO_ON = 0.75  # chance of one more call of a teacher that lacks the stop rule

SEARCHES = {"scan": 0.5, "drill": 0.3, "shallow": 0.2}  # ways to search slices, and how often each is taken

_ATTRIBUTE_OF = {value: a for a in DRIVER_ATTRIBUTES for value in ATTRIBUTES[a]}
_DRIVERS = {c.name: c.drivers for c in CAUSES}


@dataclass(frozen=True)
class Habits:
    """How one investigation goes about it; drawn anew for every episode."""

    slices_first: bool  # look at slices before campaign totals
    search: str  # "scan" (one and two attributes at once) | "drill" (one, then two inside it) | "shallow" (one only)
    thorough: bool  # look at the mix even when totals already explain the change
    double_check: bool  # one more query that a careful person would add
    limit: int  # rows asked for

    @staticmethod
    def draw(rng: np.random.Generator, searches: Sequence[str] = tuple(SEARCHES)) -> Habits:
        """New habits; of `searches` alone, as often as they are taken among all of them."""
        chances = np.array([SEARCHES[name] for name in searches])
        return Habits(
            slices_first=bool(rng.random() < 0.25),
            search=str(rng.choice(list(searches), p=chances / chances.sum())),
            thorough=bool(rng.random() < 0.2),
            double_check=bool(rng.random() < 0.1),
            limit=int(rng.choice([2, 3])),
        )


@dataclass(frozen=True)
class Slice:
    """One row of a slice query: z of the slice against the rest of the campaign."""

    values: tuple[str, ...]
    ctr: float
    cvr: float
    cpc: float
    share: float

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(_ATTRIBUTE_OF[v], v) for v in self.values]

    @property
    def attributes(self) -> set[str]:
        return {_ATTRIBUTE_OF[v] for v in self.values}


def _number(text: str) -> float:
    return 0.0 if text == "null" else float(text)


def _slices(text: str) -> list[Slice]:
    rows = [line.split() for line in text.splitlines() if line and not line.startswith(("error", "..."))]
    rows = [row for row in rows if row[:2] != ["k", "ctr"]]  # the header that the full style puts on a table
    return [Slice(tuple(r[:-4]), *map(_number, r[-4:])) for r in rows if len(r) >= 5]


@dataclass
class _Case:
    """The state of one investigation."""

    episode: Episode
    habits: Habits
    steps: list[tuple[str, str]] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    worst: Slice | None = None  # slice with the deepest fall of CTR, None before it was looked for
    shares: list[Slice] | None = None  # largest changes of share, None before they were looked for

    def ask(self, query: str) -> str:
        code = f'sql("""{query}""")'
        seen = self.episode.step(code)
        self.steps.append((code, seen.text))
        return seen.text

    def look_at_totals(self) -> None:
        rows = [line.split() for line in self.ask(queries.overview()).splitlines()]
        self.totals = {row[0]: _number(row[1]) for row in rows if len(row) == 2 and row[0] != "m"}

    def look_at_slices(self) -> None:
        limit = self.habits.limit
        if self.habits.search == "scan":
            found = _slices(self.ask(queries.scan(limit)))
        else:
            found = _slices(self.ask(queries.single(limit)))
            if found and self.habits.search == "drill" and found[0].ctr <= -COMPANION:
                value = found[0].values[0]
                found = _slices(self.ask(queries.pairs(_ATTRIBUTE_OF[value], value, limit))) or found
        self.worst = found[0] if found else Slice((), 0.0, 0.0, 0.0, 0.0)

    def look_at_mix(self) -> None:
        if self.shares is None:
            self.shares = _slices(self.ask(queries.mix()))

    def z(self, metric: str) -> float:
        return self.totals.get(metric, 0.0)


def _segment_cause(worst: Slice) -> str:
    """Cause of a fall of CTR in a slice, by what else moved there and by what the slice is made of."""
    candidates = []
    if worst.cpc >= COMPANION:
        candidates = ["AD_QUALITY_DROP"] if worst.share <= -COMPANION else ["COMPETITIVE_PRESSURE"]
    elif worst.cvr <= -COMPANION:
        candidates = ["AUDIENCE_SATURATION"]
    candidates += ["CREATIVE_FATIGUE", "AUDIENCE_SATURATION", "COMPETITIVE_PRESSURE", "AD_QUALITY_DROP"]
    return next(c for c in candidates if worst.attributes & set(_DRIVERS[c]))


def _decide(case: _Case) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Cause, driver slice and evidence, from the most specific explanation to the least."""
    habits = case.habits
    if habits.slices_first:
        case.look_at_slices()
        if case.worst.ctr <= -CLEAR:
            return _from_slice(case.worst)
    case.look_at_totals()
    if case.z("stock") <= -STRONG and case.z("cvr") <= -COMPANION:
        return "OUT_OF_STOCK", [], [f"stock {case.z('stock'):g} cvr {case.z('cvr'):g}"]
    only_cvr = case.z("cvr") <= -STRONG and abs(case.z("ctr")) < COMPANION and abs(case.z("volume")) < COMPANION
    if only_cvr and not habits.thorough:
        return "PAGE_DEGRADATION", [], [f"cvr {case.z('cvr'):g} ctr {case.z('ctr'):g}"]
    volume_and_rates = min(abs(case.z(m)) for m in ("volume", "ctr", "cvr")) >= COMPANION
    if volume_and_rates and case.z("ctr") * case.z("cvr") > 0 > case.z("volume") * case.z("ctr"):
        case.look_at_mix()  # both targeting changes look like this
        if (found := _from_mix(case)) is not None:
            return found
    if case.worst is None and case.z("ctr") < COMPANION:
        case.look_at_slices()
    if case.worst is not None and case.worst.ctr <= -STRONG:
        if case.worst.ctr > -CLEAR and case.worst.cpc < COMPANION:
            # A shift of the mix leaks a little into rates; the louder of the two is the cause.
            case.look_at_mix()
            if (found := _from_mix(case, louder_than=2 * abs(case.worst.ctr))) is not None:
                return found
        return _from_slice(case.worst)
    loud_bid = case.z("cpc") >= STRONG and case.z("ctr") <= -COMPANION
    if not loud_bid or habits.thorough:
        case.look_at_mix()
        if (found := _from_mix(case)) is not None:
            return found
    if loud_bid:
        return "BID_INCREASE", [], [f"cpc {case.z('cpc'):g} ctr {case.z('ctr'):g}"]
    if case.z("volume") <= -STRONG:
        if habits.double_check:
            case.ask(queries.budget())
        return "BUDGET_CAP", [], [f"volume {case.z('volume'):g} ctr {case.z('ctr'):g}"]
    if case.z("cvr") <= -STRONG:
        return "PAGE_DEGRADATION", [], [f"cvr {case.z('cvr'):g} ctr {case.z('ctr'):g}"]
    return "NO_SIGNAL", [], []


def _from_mix(case: _Case, louder_than: float = STRONG) -> tuple[str, list[tuple[str, str]], list[str]] | None:
    """The mix cause, if a placement's or audience's share of impressions moved by at least `louder_than`."""
    if not case.shares or abs(case.shares[0].share) < louder_than:
        return None
    top = case.shares[0]
    evidence = [f"{top.values[0]} share {top.share:g} volume {case.z('volume'):g}"]
    if top.attributes == {"placement"}:
        return "PLACEMENT_SHIFT", [], evidence
    return ("TARGETING_BROADENING" if case.z("volume") > 0 else "TARGETING_NARROWING"), [], evidence


def _from_slice(worst: Slice) -> tuple[str, list[tuple[str, str]], list[str]]:
    evidence = [f"ctr {worst.ctr:g} cvr {worst.cvr:g} cpc {worst.cpc:g} share {worst.share:g}"]
    return _segment_cause(worst), worst.pairs, evidence


_EXPLANATIONS = {
    "compact": ("",),
    "full": (
        "The change stands out from the baseline's own day-to-day variation; other causes were ruled out.",
        "Other causes would show elsewhere and do not.",
        "The evidence fits this cause and no other of the list.",
    ),
}


def investigate(
    episode: Episode, task: Task, rng: np.random.Generator, style: str, searches: Sequence[str] = tuple(SEARCHES)
) -> Transcript:
    """Investigate one episode through its tool.

    Args:
        episode: an open attempt; only its `step` is used.
        task: the question (its labels and gold answer are not read).
        rng: decides order, depth and phrasing.
        style: prompt style, "compact" or "full".
        searches: ways to search slices, of `SEARCHES`.
    """
    del task  # everything that decides comes from the tables
    case = _Case(episode, Habits.draw(rng, searches))
    cause, driver, evidence = _decide(case)
    if case.habits.double_check and driver:
        where = " and ".join(f"{attribute} = '{value}'" for attribute, value in driver)
        case.ask(queries.weekly("ctr", where))
    explanation = str(rng.choice(_EXPLANATIONS[style]))
    return Transcript(case.steps, format_answer(cause, driver, evidence, explanation))


def keep_asking(episode: Episode, found: Transcript, rng: np.random.Generator, most: int) -> Transcript:
    """An investigation without a stop rule: after its decision it asks on at random, `GO_ON` of the time once more.

    Args:
        most: calls in all.
    """
    steps = list(found.steps)
    while len(steps) < most and rng.random() < GO_ON:
        attribute = str(rng.choice(DRIVER_ATTRIBUTES))
        value, limit = str(rng.choice(ATTRIBUTES[attribute])), int(rng.choice([2, 3]))
        asked = (
            queries.overview(),
            queries.scan(limit),
            queries.single(limit),
            queries.mix(),
            queries.pairs(attribute, value, limit),
            queries.weekly("ctr", f"{attribute} = '{value}'"),
        )
        code = f'sql("""{asked[rng.integers(len(asked))]}""")'
        steps.append((code, episode.step(code).text))
    return Transcript(steps, found.answer)
