"""From investigations to a diagnosis in the user's terms: what most of them say, the rows behind it, what is open."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trace_jax.diagnose import tables
from trace_jax.diagnose.loading import NO_CAMPAIGN, Loaded
from trace_jax.diagnose.quality import Report
from trace_jax.diagnose.series import ALL, Series
from trace_jax.diagnose.sources import literal
from trace_jax.diagnose.windows import RATES, Windows
from trace_jax.diagnose.words import Words
from trace_jax.environments.ads.answer import Pair, parse_lenient
from trace_jax.environments.ads.decompose import decompose
from trace_jax.simulator.causes import CAUSES, LEVELS, NO_SIGNAL

HIGH, MEDIUM = 0.8, 0.6  # agreement


@dataclass(frozen=True)
class Investigation:
    """One attempt: (code, observation) of each call, and the answer's text, None if there was none."""

    steps: tuple[tuple[str, str], ...]
    answer: str | None


@dataclass(frozen=True)
class Evidence:
    """Rows and the SQL that gives them again after `Loaded.setup`, in any DuckDB, from the user's own files."""

    title: str
    sql: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Diagnosis:
    """The answer.

    Attributes:
        cause: one of the twelve; None if no investigation came to a readable answer, or if it is
        undecided: no answer has more than half of the investigations, or the tables lack what would tell two apart.
        slice: (dimension, the user's value or values) of a segment cause.
        pairs: the same in the agent's words.
        votes: of the investigations for this answer, `of` in all. others: what the rest said.
        level: "high" | "medium" | "low"; `why` it is not high.
        doubts: what the figures say against the answer (`doubts.against`).
        second: what the scripted analyst says, where another agent investigated.
    """

    cause: str | None
    slice: tuple[Pair, ...]
    pairs: tuple[Pair, ...]
    votes: int
    of: int
    others: tuple[tuple[str, int], ...]
    level: str
    why: tuple[str, ...]
    undecided: str = ""
    doubts: tuple[str, ...] = ()
    second: str = ""

    @property
    def text(self) -> str:
        """Cause and slice in one line."""
        return f"undecided: {self.undecided}" if self.undecided else _said(self.cause, self.slice)


def _said(cause: str | None, pairs: Sequence[Pair]) -> str:
    if cause is None:
        return "no readable answer"
    return cause + (" in " + " & ".join(f"{d} = {v}" for d, v in pairs) if pairs else "")


def conclude(
    investigations: Sequence[Investigation],
    words: Sequence[Words],
    report: Report,
    alike: Mapping[str, str],
    market: Mapping[str, str],
) -> Diagnosis:
    """The answer that most investigations give; of equally many, the one that was given first.

    Args:
        alike: what these tables cannot tell from a cause, by cause; see `lookalikes`.
        market: why a cause is no more than the market may be; see `within_the_market`. Votes for it are for NO_SIGNAL.
    """
    told_apart = {w.dimension: set(w.of.values()) for w in words}
    held = {(dimension, word) for dimension, of in told_apart.items() if len(of) > 1 for word in of}
    names = {w.dimension: w for w in words}
    votes: Counter[tuple[str | None, tuple[Pair, ...]]] = Counter()
    small: Counter[str] = Counter()
    for one in investigations:
        parsed = parse_lenient(one.answer or "")
        if parsed is None:
            votes[None, ()] += 1
            continue
        # A word that stands for none of the user's values, or for all of them, says nothing about the user's tables.
        pairs = tuple(p for p in parsed.driver_segments if p in held) if LEVELS[parsed.root_cause] == "segment" else ()
        if LEVELS[parsed.root_cause] == "segment" and not pairs:
            votes[None, ()] += 1
            continue
        if parsed.root_cause in market:
            small[parsed.root_cause] += 1
            votes[NO_SIGNAL, ()] += 1
            continue
        votes[parsed.root_cause, pairs] += 1
    readable = [(key, n) for key, n in votes.most_common() if key[0] is not None]
    (cause, pairs), count = readable[0] if readable else ((None, ()), votes[None, ()])
    told = {key: _said(key[0], [(d, names[d].name(v)) for d, v in key[1]]) for key in votes}
    others = tuple((told[key], n) for key, n in votes.most_common() if key != (cause, pairs))
    why = [f"{sum(votes.values()) - count} of {sum(votes.values())} investigations say otherwise"] if others else []
    if cause == NO_SIGNAL:
        why += [f"{n} of {sum(votes.values())} say {name}, but {market[name]}" for name, n in small.most_common()]
    why += [f.text for f in report.findings if f.serious]
    agreement = count / max(sum(votes.values()), 1) if cause is not None else 0.0
    level = "high" if agreement >= HIGH else "medium" if agreement >= MEDIUM else "low"
    if level == "high" and (any(f.serious for f in report.findings) or (cause == NO_SIGNAL and small)):
        level = "medium"
    named, undecided = tuple((d, names[d].name(v)) for d, v in pairs), ""
    if cause in alike:
        cause, undecided, level = None, f"{cause}, or {alike[cause]}", "low"
    elif cause is not None and 2 * count <= sum(votes.values()):
        said = ", ".join(f"{n} say {told[key]}" for key, n in votes.most_common())
        cause, named, pairs, undecided, level = None, (), (), f"the investigations disagree: {said}", "low"
    return Diagnosis(cause, named, pairs, count, sum(votes.values()), others, level, tuple(why), undecided)


def weighed(diagnosis: Diagnosis, doubts: Sequence[str], remarks: Sequence[str], second: Diagnosis | None) -> Diagnosis:
    """The answer with what the figures say against it, and what the scripted analyst says. Confidence is low where the
    figures do, and not high where there are remarks or the analyst differs."""
    level, why, said = diagnosis.level, (*diagnosis.why, *remarks), second.text if second else ""
    if second is not None and (second.cause, second.pairs) != (diagnosis.cause, diagnosis.pairs):
        why = (*why, f"the scripted analyst says {said}")
    if len(why) > len(diagnosis.why) and level == "high":
        level = "medium"
    level = "low" if doubts else level
    return dataclasses.replace(diagnosis, doubts=tuple(doubts), second=said, level=level, why=why)


def describe(cause: str | None) -> str:
    """The cause's signature in words."""
    if cause == NO_SIGNAL:
        return "none of the twelve causes stands out; what moved is season, market, trend or noise as far as this shows"
    return next((c.description for c in CAUSES if c.name == cause), "")


def meaning(diagnosis: Diagnosis) -> str:
    """What happened, in plain words."""
    if diagnosis.undecided:
        return diagnosis.undecided[:1].upper() + diagnosis.undecided[1:] + "."
    if diagnosis.doubts:
        return "The figures do not bear this answer out:" if diagnosis.cause else "What moved, and has no answer:"
    return next((c.meaning for c in CAUSES if c.name == diagnosis.cause), "")


def agreed(diagnosis: Diagnosis) -> str:
    """How many investigations agree."""
    if diagnosis.cause is None and not diagnosis.undecided:
        return f"none of {diagnosis.of} investigations came to a readable answer; another agent may: --agent analyst"
    most = " on the most frequent answer" if diagnosis.undecided else ""
    analyst = ", and so does the scripted analyst" if diagnosis.second == diagnosis.text else ""
    return f"{diagnosis.votes} of {diagnosis.of} investigations agree{most}{analyst}"


def mixed(diagnosis: Diagnosis) -> str | None:
    """The dimension whose mix moved, for causes of the mix."""
    if LEVELS.get(diagnosis.cause or NO_SIGNAL) != "mix":
        return None
    return {"PLACEMENT_SHIFT": "placement"}.get(diagnosis.cause or "", "audience")


def answered(one: Investigation, words: Mapping[str, Words]) -> str:
    """What an investigation came to, in the user's values."""
    parsed = parse_lenient(one.answer or "")
    if parsed is None:
        return _said(None, ())
    named = [(d, words[d].name(v) if d in words else v) for d, v in parsed.driver_segments]
    return _said(parsed.root_cause, named if LEVELS[parsed.root_cause] == "segment" else ())


# Evidence


def evidence(
    loaded: Loaded, diagnosis: Diagnosis, words: Sequence[Words], windows: Windows, campaign: str
) -> list[Evidence]:
    """Both windows side by side: the slice and the rest, or the campaign; and the shares for causes of the mix."""
    names = {w.dimension: w for w in words}
    spans = [f"ds BETWEEN {_date(first)} AND {_date(last)}" for first, last in (windows.before, windows.after)]
    where = f"({' OR '.join(spans)})"
    if campaign != ALL:  # rows of a file without campaigns are the only campaign's
        where += f"\n  AND campaign IN ({literal(campaign)}, {literal(NO_CAMPAIGN)})"
    period = f"CASE WHEN ds <= {_date(windows.before[1])} THEN '1 before' ELSE '2 after' END AS period"
    figures = _figures(loaded.metrics)
    out = []
    if diagnosis.pairs:
        inside = " AND ".join(
            f"{d} IN ({', '.join(literal(v) for v in names[d].values(word))})" for d, word in diagnosis.pairs
        )
        part = f"CASE WHEN {inside} THEN 'slice' ELSE 'rest' END AS part"
        out.append(_evidence(loaded, "the slice and the rest, before and after", [period, part], figures, where))
    else:
        out.append(_evidence(loaded, "the campaign, before and after", [period], figures, where))
    moved = mixed(diagnosis)
    if moved in loaded.dimensions:
        which = period.removesuffix(" AS period")
        share = f"round(100 * sum(impressions) / sum(sum(impressions)) OVER (PARTITION BY {which}), 1) AS share_percent"
        out.append(
            _evidence(loaded, f"shares of impressions by {moved}", [period, moved], [share, *figures[1:]], where)
        )
    levels = {"budget": "round(avg(budget), 2) AS budget_a_day", "in_stock": "round(avg(in_stock), 4) AS in_stock"}
    shown = [sql for metric, sql in levels.items() if metric in loaded.own_totals]
    if shown and not diagnosis.pairs:
        spend = ["round(sum(spend) / count(DISTINCT ds), 2) AS spend_a_day"] if "spend" in loaded.own_totals else []
        columns = ["count(DISTINCT ds) AS days", *spend, *shown]
        out.append(_evidence(loaded, "budget and stock", [period], columns, where, "loaded_totals"))
    return out


def _date(day: object) -> str:
    return f"DATE '{day}'"


def _figures(metrics: Sequence[str]) -> list[str]:
    out = ["count(DISTINCT ds) AS days", "round(sum(impressions) / count(DISTINCT ds)) AS impressions_a_day"]
    out.append("round(100 * sum(clicks) / nullif(sum(impressions), 0), 3) AS ctr_percent")
    if "orders" in metrics:
        out.append("round(100 * sum(orders) / nullif(sum(clicks), 0), 2) AS cvr_percent")
    if "spend" in metrics:
        out.append("round(sum(spend) / nullif(sum(clicks), 0), 3) AS cpc")
    return out


def _evidence(
    loaded: Loaded, title: str, keys: Sequence[str], figures: Sequence[str], where: str, view: str = "loaded"
) -> Evidence:
    columns, numbers = ",\n       ".join([*keys, *figures]), ", ".join(str(n + 1) for n in range(len(keys)))
    sql = f"SELECT {columns}\nFROM {view}\nWHERE {where}\nGROUP BY {numbers} ORDER BY {numbers}"
    cursor = loaded.connection.execute(sql)
    names = tuple(d[0] for d in cursor.description)
    return Evidence(title, sql, names, tuple(cursor.fetchall()))


@dataclass(frozen=True)
class Parts:
    """The change of a rate, split exactly: `mix` as traffic went elsewhere, `rate` inside the values of `dimension`.

    Attributes:
        metric: of `RATES`. before, after, mix, rate: in its own unit, a share for CTR and CVR.
        warning: why the split says little, or "".
    """

    metric: str
    dimension: str
    before: float
    after: float
    mix: float
    rate: float
    warning: str = ""

    @property
    def text(self) -> str:
        """In one line."""
        scale, unit, points = (100, " %", " pp") if self.metric != "cpc" else (1, "", "")
        text = f"{self.metric.upper()} {scale * self.before:.4g}{unit} to {scale * self.after:.4g}{unit}"
        mix, rate = (f"{scale * part:+.3g}{points}" for part in (self.mix, self.rate))
        text += f": mix of {self.dimension} {mix}, rates inside {rate}"
        return text + (f" ({self.warning})" if self.warning else "")


def parts(found: Series, windows: Windows) -> list[Parts]:
    """How much of each rate's change is mix and how much is rate, by the dimension whose mix explains the most."""
    before, after = tables.masks(found, windows)
    out = []
    for name, (n, d) in RATES.items():
        if n not in found.totals or d not in found.totals:
            continue
        best = None
        for dimension in dict.fromkeys(key for key, _ in found.values):
            rows = [v for (key, _), v in found.values.items() if key == dimension]
            if any(n not in r or d not in r for r in rows):
                continue
            sums = [
                np.maximum(np.array([[r[m][mask].sum() for r in rows] for mask in (before, after)]), 0) for m in (n, d)
            ]
            split = decompose(tuple(sums[0]), tuple(sums[1]))
            if split.before is None or split.after is None:
                continue
            if best is None or abs(split.mix.sum()) > abs(best[1].mix.sum()):
                best = dimension, split
        if best is not None:
            dimension, split = best
            levels = float(split.before), float(split.after)
            sums = float(split.mix.sum()), float(split.rate.sum())
            out.append(Parts(name, dimension, *levels, *sums, split.warning or ""))
    return out


def _finite(value: Any) -> Any:
    """A value that JSON has: it has no infinity and no NaN."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def as_json(loaded: Loaded, diagnosis: Diagnosis, found: Sequence[Evidence], opens: Sequence[str]) -> Mapping[str, Any]:
    """For `--json`; null stands for numbers that are not finite."""
    return {
        "evidence_setup": loaded.setup,
        "cause": diagnosis.cause,
        "undecided": diagnosis.undecided or None,
        "slice": [{"dimension": d, "value": v} for d, v in diagnosis.slice],
        "confidence": {
            "level": diagnosis.level,
            "votes": diagnosis.votes,
            "of": diagnosis.of,
            "why": list(diagnosis.why),
        },
        "doubts": list(diagnosis.doubts),
        "second_opinion": diagnosis.second or None,
        "others": [{"answer": text, "votes": n} for text, n in diagnosis.others],
        "evidence": [
            {
                "title": e.title,
                "sql": e.sql,
                "columns": list(e.columns),
                "rows": [list(map(_finite, r)) for r in e.rows],
            }
            for e in found
        ],
        "not_checked": list(opens),
    }
