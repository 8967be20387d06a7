"""A diagnosis of a user's campaign as one self-contained page: the answer, what it rests on, what it leaves open."""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jinja2

from trace_jax.diagnose import findings, mapping, series
from trace_jax.diagnose.findings import Diagnosis, Evidence, Investigation, Parts
from trace_jax.diagnose.loading import Loaded
from trace_jax.diagnose.quality import Report
from trace_jax.diagnose.series import Series, Sums
from trace_jax.diagnose.windows import Windows
from trace_jax.diagnose.words import Words
from trace_jax.report.diagnosis_charts import charts, in_figures, moved
from trace_jax.report.diagnosis_template import PAGE, SCRIPT

SHOWN_STEPS = 1  # investigations that are open at first; the others say what they came to
LONGEST = 200  # characters of a cell or a name
NO_CAUSE = {"undecided": "Undecided", "none": "No readable answer"}


@dataclass(frozen=True)
class Told:
    """Everything that a diagnosis came to.

    Attributes:
        campaign: as the user's files call it; `series.ALL` for all of them together.
        agent: who investigated, in words. question: what it was asked.
        slices: sums by day of the answer's slice and of the rest, or of each value where the mix moved; see `groups`.
        in_words: a tool call's code -> what it asks.
    """

    campaign: str
    agent: str
    question: str
    loaded: Loaded
    found: Series
    report: Report
    windows: Windows
    words: Sequence[Words]
    diagnosis: Diagnosis
    evidence: Sequence[Evidence]
    parts: Sequence[Parts]
    opens: Sequence[str]
    investigations: Sequence[Investigation]
    slices: Mapping[str, Sums]
    in_words: Callable[[str], str]


def build(told: Told, files: Mapping[str, str]) -> str:
    """The page as text.

    Args:
        files: SHA-256 of each file that was read.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["line"] = _line
    diagnosis, found = told.diagnosis, told.found
    figures = moved(found, told.slices, told.windows, diagnosis)
    page = environment.from_string(PAGE).render(
        policy=_policy_of(SCRIPT),
        script=SCRIPT,
        campaign="all campaigns together" if told.campaign == series.ALL else f"campaign {_line(told.campaign)}",
        first=str(found.first),
        last=str(found.last),
        headline=headline(diagnosis, told.loaded),
        meaning=findings.meaning(diagnosis),
        diagnosis=diagnosis,
        agreement=findings.agreed(diagnosis),
        windows=told.windows,
        moved=figures,
        in_figures=in_figures(figures, diagnosis),
        charts=charts(told.found, told.slices, told.windows, diagnosis),
        parts=[_part(part) for part in told.parts],
        evidence=[_evidence(found) for found in told.evidence],
        setup=told.loaded.setup.rstrip(),
        quality=told.report.findings,
        opens=told.opens,
        columns=[(plan.source.name, mapping.rows(plan)) for plan in told.loaded.plans],
        words=[(w.dimension, w.lines()) for w in told.words],
        agent=told.agent,
        question=told.question,
        investigations=[_investigation(one, told) for one in told.investigations],
        shown=SHOWN_STEPS,
        files=[(name, digest) for name, digest in files.items()],
        made=f"trace-jax {metadata.version('trace-jax')}, {datetime.date.today()}",
    )
    # A path may hold bytes that are no text; what cannot be shown must not keep the page from being written.
    return page.encode("utf-8", "replace").decode()


def headline(diagnosis: Diagnosis, loaded: Loaded) -> str:
    """The answer as a heading, with the user's names of columns."""
    if diagnosis.undecided:
        return NO_CAUSE["undecided"]
    if diagnosis.cause is None:
        return NO_CAUSE["none"]
    named = diagnosis.cause.replace("_", " ").capitalize()
    where = " and ".join(f"{_line(column(loaded, d))} = {_line(v)}" for d, v in diagnosis.slice)
    return f"{named} in {where}" if where else named


def column(loaded: Loaded, dimension: str) -> str:
    """What the user's files call a dimension."""
    return next((p.fields[dimension] for p in loaded.plans if dimension in p.fields), dimension)


def groups(loaded: Loaded, diagnosis: Diagnosis, words: Sequence[Words], found: Series) -> Mapping[str, Sums]:
    """What charts compare: "slice" and "rest" for a cause in a slice; each value, the largest first, for one of the
    mix; nothing for others."""
    if diagnosis.pairs:
        names = {w.dimension: w for w in words}
        inside = {d: names[d].values(word) for d, word in diagnosis.pairs}
        return series.parted(loaded, found, inside)
    dimension = findings.mixed(diagnosis)
    if dimension is None or dimension not in loaded.dimensions:
        return {}
    own = next(w for w in words if w.dimension == dimension)
    sums: dict[str, Sums] = {}
    for word in dict.fromkeys(own.of[value] for value in own.order):
        parts = [found.values[dimension, value] for value in own.values(word)]
        sums[own.name(word)] = {metric: sum(part[metric] for part in parts) for metric in parts[0]}
    return sums


def _line(value: Any) -> str:
    """A value on one line, without characters that are not to be seen, and not endless."""
    text = "" if value is None else f"{value:,.6g}" if isinstance(value, float) else str(value)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _policy_of(script: str) -> str:
    """Content security policy: the page's own script and styles, and nothing else from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _part(part: Parts) -> tuple[str, ...]:
    scale, unit = (1.0, "") if part.metric == "cpc" else (100.0, " pp")
    level = (lambda v: f"{v:,.3f}") if part.metric == "cpc" else (lambda v: f"{v:.3%}")
    change = [f"{scale * v:+.3f}{unit}" for v in (part.after - part.before, part.mix, part.rate)]
    return part.metric.upper(), level(part.before), level(part.after), *change, part.dimension, part.warning


def _evidence(found: Evidence) -> dict[str, Any]:
    rows = [[("n" if isinstance(v, int | float) else "t", _line(v)) for v in row] for row in found.rows]
    kinds = [row[0] for row in zip(*rows, strict=True)] if rows else [("t", "")] * len(found.columns)
    names = [(kind, name) for (kind, _), name in zip(kinds, found.columns, strict=True)]
    return {"title": found.title, "columns": names, "rows": rows, "sql": found.sql}


def _investigation(one: Investigation, told: Told) -> dict[str, Any]:
    names = {w.dimension: w for w in told.words}
    steps = [(_line(told.in_words(code)), code, text.rstrip("\n")) for code, text in one.steps]
    return {"said": findings.answered(one, names), "steps": steps, "answer": one.answer or ""}
