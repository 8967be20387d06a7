"""`trace-jax diagnose`: an agent investigates the user's own tables."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from trace_jax.config import ConfigError, RunConfig
from trace_jax.diagnose import declared as declarations
from trace_jax.diagnose import (
    doubts,
    findings,
    limits,
    loading,
    mapping,
    quality,
    series,
    sources,
    spans,
    synonyms,
    tables,
    windows,
)
from trace_jax.diagnose import words as vocabulary
from trace_jax.diagnose.case import CaseEnvironment
from trace_jax.diagnose.findings import Investigation
from trace_jax.diagnose.user_files import digest
from trace_jax.environments.ads.prompt import question
from trace_jax.recipes import diagnose_agents
from trace_jax.recipes.diagnose_progress import reading
from trace_jax.recipes.diagnose_view import View
from trace_jax.recipes.play_after import query_of, step_in_words
from trace_jax.recipes.progress import Progress
from trace_jax.report import diagnosis
from trace_jax.report.target import check_target, put
from trace_jax.warehouse.files import disk, replace

UNREADABLE = (
    duckdb.InvalidInputException,
    duckdb.IOException,
    duckdb.OutOfMemoryException,
    duckdb.ConversionException,  # of a view of the user's, at some row of its table
    duckdb.OutOfRangeException,
)


@dataclass(frozen=True)
class Asked:
    """What the command line asked for, see `cli_diagnose`."""

    files: tuple[Path, ...]
    yes: bool = False
    mapping: Path | None = None
    write_mapping: Path | None = None
    campaign: str | None = None
    before: str | None = None
    after: str | None = None
    timezone: str | None = None
    lag: int | None = None
    agent: str | None = None
    run_dir: Path | None = None
    samples: int = 5
    keep: Path | None = None
    html: Path | None = None
    send: bool = False


def command(config: RunConfig, asked: Asked) -> dict[str, Any]:
    """From files to a diagnosis, shown while it is made; returns what `--json` prints.

    Raises:
        ConfigError: one line, for all that the user can mend.
    """
    agent = diagnose_agents.named(asked.agent, asked.run_dir)
    _check(config, asked, agent)
    for path in asked.files:
        sources.check_file(path)
    view = View()
    progress = Progress()
    with reading(progress, asked.files) as show:
        digests = {path: digest(path, show) for path in asked.files}
    try:
        with loading.database() as connection:
            result, page = _diagnose(config, asked, agent, (connection, progress), view)
    except duckdb.Error as error:
        if (
            not isinstance(error, UNREADABLE) and type(error) is not duckdb.Error
        ):  # a fault of the query, not of the file
            raise
        reason = " ".join(str(error).split(chr(10))[0].split())[:200]
        raise ConfigError(f"cannot read {', '.join(map(str, asked.files))}: {reason}; export it again") from None
    with reading(progress, asked.files) as show:
        changed = [path for path, before in digests.items() if digest(path, show) != before]
    for path in changed:
        for made in (asked.write_mapping, asked.keep):  # of rows that are no longer those of the file
            if made is not None:
                made.unlink(missing_ok=True)
        raise ConfigError(f"{path} was changed by another program while it was read: run the command again")
    if page is not None:
        said = diagnosis.build(page, {str(path): found for path, found in digests.items()})
        view.say()
        view.say(f"page: {put(asked.html, said, flag='--html')}")
    return result | {"files": {str(path): {"sha256": found} for path, found in digests.items()}}


def _check(config: RunConfig, asked: Asked, agent: str) -> None:
    if (asked.before is None) != (asked.after is None):
        missing = "--after" if asked.after is None else "--before"
        raise ConfigError(f"{missing} is missing: give both windows, or none to have them proposed")
    for flag, window in (("--before", asked.before), ("--after", asked.after)):
        if window is not None:
            windows.parse(window, flag)
    diagnose_agents.check(config, agent, asked.send)
    for flag, path in (("--write-mapping", asked.write_mapping), ("--keep", asked.keep)):
        if path is not None and path.exists():
            raise ConfigError(f"{flag} {path} exists: name a new file, nothing is overwritten")
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {flag} {path}: there is no directory {path.parent}; make it first")
    if asked.html is None:
        return
    if asked.html.resolve() in [path.resolve() for path in asked.files]:
        raise ConfigError(f"--html {asked.html} is one of the tables: name another file")
    if asked.write_mapping is not None:
        raise ConfigError("--write-mapping stops before there is an answer: leave --html out")
    if asked.keep is not None and asked.keep.resolve() == asked.html.resolve():
        raise ConfigError(f"--keep and --html both name {asked.html}: name two files")
    check_target(asked.html, flag="--html")


def _diagnose(
    config: RunConfig, asked: Asked, agent: str, where: tuple[duckdb.DuckDBPyConnection, Progress], view: View
) -> tuple[dict[str, Any], diagnosis.Told | None]:
    """What `--json` prints, and what a page is made of if one was asked for."""
    connection, progress = where
    given = _given(asked)
    declared = declarations.load(asked.mapping) if asked.mapping is not None else declarations.Declared()
    if asked.timezone is not None:
        zone = declarations.check_zone(asked.timezone, "--timezone")
        declared = dataclasses.replace(declared, timezone=zone)
    with reading(progress, asked.files, connection) as show:
        opened = sources.open_sources(asked.files, connection, show)
        plans, left_out = mapping.plans(opened, declared, connection)
    view.columns(plans)
    if asked.campaign is None and asked.write_mapping is None:
        series.glance(plans, connection)
    if asked.write_mapping is None and asked.mapping is None and not asked.yes:
        _confirm()
    with reading(progress, asked.files, connection):
        loaded = loading.load(plans, connection, left_out)
    held = {d: [r[0] for r in loaded.ask(f"SELECT DISTINCT {d} FROM cells")] for d in loaded.dimensions}
    loaded.problems.extend(declarations.absent(declared, held))
    if asked.write_mapping is not None:
        return _template(asked.write_mapping, loaded, declared, view), None
    if not loaded.dimensions and (names := limits.maybe_dimensions(loaded)) and not _declined(declared):
        raise ConfigError(
            f"no column maps onto a dimension of the agent ({', '.join(synonyms.DIMENSIONS)}), but "
            f"{', '.join(names[:6])} may be one: declare it under columns in a --mapping file, or declare a dimension "
            "null to look at totals alone"
        )
    campaign = series.choose(loaded, asked.campaign)
    series.split(loaded, campaign)
    spans.bound(loaded, given and (given[0][0], given[1][1]))
    found = series.series(loaded, campaign)
    report = quality.report(loaded, found, asked.lag, given and given[1][0])
    view.quality(report)
    compared = _windows(given, found, report)
    words = _words(loaded, declared)
    view.windows(compared, words)
    if asked.keep is not None:
        loading.keep(loaded, asked.keep)
    asks, investigations, analyst = _investigate(config, asked, agent, (loaded, words, compared, found), view)
    benign = limits.within_the_market(loaded, found, compared)
    rules = (words, report, limits.lookalikes(loaded, found), benign)
    concluded = findings.conclude(investigations, *rules)
    second = findings.conclude([analyst], *rules) if analyst is not None else None
    slices = diagnosis.groups(loaded, concluded, words, found)
    if concluded.cause is not None:
        checked = (concluded.cause, found, slices, compared)
        concluded = findings.weighed(concluded, doubts.against(*checked), doubts.at_once(*checked), second)
    else:
        moved = () if concluded.undecided else doubts.unexplained(found, compared)
        concluded = findings.weighed(concluded, moved, (), second)
    told = diagnosis.Told(
        campaign=campaign,
        agent=diagnose_agents.introduced(agent, config, asked.run_dir),
        question=asks,
        loaded=loaded,
        found=found,
        report=report,
        windows=compared,
        words=words,
        diagnosis=concluded,
        evidence=findings.evidence(loaded, concluded, words, compared, campaign),
        parts=findings.parts(found, compared),
        opens=limits.open_questions(loaded, concluded, words, found, compared),
        investigations=investigations,
        slices=slices,
        in_words=lambda code: step_in_words(query_of(code)),
    )
    view.answer(concluded, told.evidence, told.parts, told.opens)
    view.setup(loaded.setup)
    return _as_json(told, agent), told if asked.html is not None else None


def _as_json(told: diagnosis.Told, agent: str) -> dict[str, Any]:
    return {
        "campaign": told.campaign,
        "agent": agent,
        "columns": {plan.source.name: dict(plan.fields) for plan in told.loaded.plans},
        "quality": [dataclasses.asdict(f) for f in told.report.findings],
        "windows": {
            "before": [str(d) for d in told.windows.before],
            "after": [str(d) for d in told.windows.after],
            "how": told.windows.how,
        },
        "words": {w.dimension: dict(w.of) for w in told.words},
        **findings.as_json(told.loaded, told.diagnosis, told.evidence, told.opens),
        "decomposition": [part.text for part in told.parts],
        "investigations": [{"steps": [list(s) for s in i.steps], "answer": i.answer} for i in told.investigations],
    }


def _investigate(
    config: RunConfig,
    asked: Asked,
    agent: str,
    case: tuple[loading.Loaded, Sequence[vocabulary.Words], windows.Windows, series.Series],
    view: View,
) -> tuple[str, list[Investigation], Investigation | None]:
    """What the agent is asked, what its investigations came to, and what the analyst's does where it is another."""
    loaded, words, compared, own = case
    if agent == diagnose_agents.ENDPOINT:
        diagnose_agents.agree(config, asked.send, view)
    config = diagnose_agents.configured(config, agent)
    asks = question(
        tables.observed(own, compared),
        config.environment.prompt,
        tables.CAMPAIGN,
        tables.ADVERTISER,
        tables.shown_days(compared),
    )
    view.question(asks, diagnose_agents.introduced(agent, config, asked.run_dir))
    environment = CaseEnvironment(tables.agent_tables(loaded, words, compared), asks, config.environment)
    try:
        found = diagnose_agents.investigate(environment, config, agent, asked.run_dir, asked.samples, view)
        return asks, found, None if agent == diagnose_agents.ANALYST else diagnose_agents.second(environment, config)
    finally:
        environment.close()


def _declined(declared: declarations.Declared) -> bool:
    """Whether the user said that there is no such dimension."""
    return any(declared.columns.get(d, "") is None for d in synonyms.DIMENSIONS)


def _confirm() -> None:
    if not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError(
            "the columns above were guessed: pass --yes to take them, or --mapping FILE to say otherwise "
            "(--write-mapping FILE writes what was guessed)"
        )
    try:
        reply = input("Are these columns right? [Y/n] ").strip().lower()
    except EOFError:
        reply = "n"
    if reply not in ("", "y", "yes"):
        raise ConfigError(
            "say which columns are meant: --write-mapping FILE writes what was guessed, for --mapping FILE"
        )


def _template(path: Path, loaded: loading.Loaded, declared: declarations.Declared, view: View) -> dict[str, Any]:
    words = {w.dimension: w.of for w in _all_words(loaded, declared)}
    with disk(path):
        replace(path, mapping.template(loaded.plans, words, declared).encode())
    view.say(f"wrote {path}: correct it and run again with --mapping {path}")
    return {"mapping": str(path)}


def _all_words(loaded: loading.Loaded, declared: declarations.Declared, table: str = "cells") -> list[vocabulary.Words]:
    out = []
    for dimension in loaded.dimensions:
        sums = dict(loaded.ask(f"SELECT {dimension}, coalesce(sum(impressions), 0) FROM {table} GROUP BY 1"))
        out.append(vocabulary.assign(dimension, sums, declared.values.get(dimension, {})))
    return out


def _words(loaded: loading.Loaded, declared: declarations.Declared) -> list[vocabulary.Words]:
    return _all_words(loaded, declared, "mine")


def _given(asked: Asked) -> tuple[windows.Span, windows.Span] | None:
    """The windows that the user gave, if any."""
    if asked.before is None or asked.after is None:
        return None
    return windows.parse(asked.before, "--before"), windows.parse(asked.after, "--after")


def _windows(
    given: tuple[windows.Span, windows.Span] | None, found: series.Series, report: quality.Report
) -> windows.Windows:
    days = found.days - report.incomplete
    if given is None:
        return windows.propose(found, days)
    before, after = given
    last = found.date(days - 1)
    if report.incomplete and after[0] <= last < after[1]:
        after = after[0], last
    return windows.given(before, after, found)
