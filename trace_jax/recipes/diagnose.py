"""`trace-jax diagnose`: an agent investigates the user's own tables."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from trace_jax.config import ConfigError, RunConfig
from trace_jax.diagnose import findings, loading, mapping, quality, series, sources, synonyms, tables, windows
from trace_jax.diagnose import words as vocabulary
from trace_jax.diagnose.case import CaseEnvironment
from trace_jax.diagnose.findings import Investigation
from trace_jax.environments.ads import analyst
from trace_jax.environments.ads.prompt import question
from trace_jax.environments.base import Observation
from trace_jax.evaluation.evaluate import evaluate_policy
from trace_jax.recipes import inspect
from trace_jax.recipes.diagnose_view import View
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import Trajectory
from trace_jax.warehouse.files import disk, replace

UNREADABLE = (duckdb.InvalidInputException, duckdb.IOException, duckdb.OutOfMemoryException)
LARGE = 50_000_000  # bytes of a file that is worth a line of its own


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


def command(config: RunConfig, asked: Asked) -> dict[str, Any]:
    """From files to a diagnosis, shown while it is made; returns what `--json` prints.

    Raises:
        ConfigError: one line, for all that the user can mend.
    """
    _check(asked)
    view = View()
    large = [p for p in asked.files if p.is_file() and p.stat().st_size > LARGE]
    for path in large:
        Progress().note(f"reading {path}, {path.stat().st_size / 1e6:,.0f} MB: about a minute of one core for 350 MB")
    digests = {path: sources.digest(path) for path in asked.files if path.is_file()}
    try:
        with loading.database() as connection:
            result = _diagnose(config, asked, connection, view)
    except duckdb.Error as error:
        if (
            not isinstance(error, UNREADABLE) and type(error) is not duckdb.Error
        ):  # a fault of the query, not of the file
            raise
        reason = " ".join(str(error).split(chr(10))[0].split())[:200]
        raise ConfigError(f"cannot read {', '.join(map(str, asked.files))}: {reason}; export it again") from None
    for path, before in digests.items():
        if sources.digest(path) != before:
            raise ConfigError(f"{path} was changed by another program while it was read: run the command again")
    return result | {"files": {str(path): {"sha256": digest} for path, digest in digests.items()}}


def _check(asked: Asked) -> None:
    if (asked.before is None) != (asked.after is None):
        missing = "--after" if asked.after is None else "--before"
        raise ConfigError(f"{missing} is missing: give both windows, or none to have them proposed")
    if asked.run_dir is None and asked.agent not in (None, "analyst"):
        raise ConfigError(f"--agent {asked.agent} is a policy of a run: name the run with --run-dir")
    for flag, path in (("--write-mapping", asked.write_mapping), ("--keep", asked.keep)):
        if path is not None and path.exists():
            raise ConfigError(f"{flag} {path} exists: name a new file, nothing is overwritten")


def _diagnose(config: RunConfig, asked: Asked, connection: Any, view: View) -> dict[str, Any]:
    declared = mapping.load(asked.mapping) if asked.mapping is not None else mapping.Declared()
    if asked.timezone is not None:
        zone = mapping.check_zone(asked.timezone, "--timezone")
        declared = dataclasses.replace(declared, timezone=zone)
    plans, left_out = mapping.plans(sources.open_sources(asked.files, connection), declared, connection)
    view.columns(plans)
    if asked.write_mapping is None and asked.mapping is None and not asked.yes:
        _confirm()
    loaded = loading.load(plans, connection, left_out)
    if asked.write_mapping is not None:
        return _template(asked.write_mapping, loaded, declared, view)
    if not loaded.dimensions and (names := findings.unmapped(loaded)) and not _declined(declared):
        raise ConfigError(
            f"no column maps onto a dimension of the agent ({', '.join(synonyms.DIMENSIONS)}), but "
            f"{', '.join(names[:6])} may be one: declare it under columns in a --mapping file, or declare a dimension "
            "null to look at totals alone"
        )
    campaign = series.choose(loaded, asked.campaign)
    series.split(loaded, campaign)
    found = series.series(loaded, campaign)
    report = quality.report(loaded, found, asked.lag)
    view.quality(report)
    compared = _windows(asked, found, report)
    words = _words(loaded, declared)
    view.windows(compared, words)
    if asked.keep is not None:
        with disk(asked.keep):
            loading.keep(loaded, str(asked.keep))
    agent = asked.agent or ("analyst" if asked.run_dir is None else "latest")
    investigations = _investigate(config, asked, agent, (loaded, words, compared, found), view)
    diagnosis = findings.conclude(investigations, words, report, findings.lookalikes(loaded, found))
    rows = findings.evidence(loaded, diagnosis, words, compared, campaign)
    opens = findings.open_questions(loaded, diagnosis, words, found, compared)
    split = findings.parts(found, compared)
    view.answer(diagnosis, rows, split, opens)
    view.setup(loaded.setup)
    return {
        "campaign": campaign,
        "agent": agent,
        "columns": {plan.source.name: dict(plan.fields) for plan in plans},
        "quality": [dataclasses.asdict(f) for f in report.findings],
        "windows": {
            "before": [str(d) for d in compared.before],
            "after": [str(d) for d in compared.after],
            "how": compared.how,
        },
        "words": {w.dimension: dict(w.of) for w in words},
        **findings.as_json(loaded, diagnosis, rows, opens),
        "decomposition": split,
        "investigations": [{"steps": [list(s) for s in i.steps], "answer": i.answer} for i in investigations],
    }


def _declined(declared: mapping.Declared) -> bool:
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


def _template(path: Path, loaded: loading.Loaded, declared: mapping.Declared, view: View) -> dict[str, Any]:
    words = {w.dimension: w.of for w in _all_words(loaded, declared)}
    with disk(path):
        replace(path, mapping.template(loaded.plans, words, declared).encode())
    view.say(f"wrote {path}: correct it and run again with --mapping {path}")
    return {"mapping": str(path)}


def _all_words(loaded: loading.Loaded, declared: mapping.Declared, table: str = "cells") -> list[vocabulary.Words]:
    out = []
    for dimension in loaded.dimensions:
        sums = dict(loaded.ask(f"SELECT {dimension}, coalesce(sum(impressions), 0) FROM {table} GROUP BY 1"))
        out.append(vocabulary.assign(dimension, sums, declared.values.get(dimension, {})))
    return out


def _words(loaded: loading.Loaded, declared: mapping.Declared) -> list[vocabulary.Words]:
    return _all_words(loaded, declared, "mine")


def _windows(asked: Asked, found: series.Series, report: quality.Report) -> windows.Windows:
    days = found.days - report.incomplete
    if asked.before is None or asked.after is None:
        return windows.propose(found, days)
    before, after = windows.parse(asked.before, "--before"), windows.parse(asked.after, "--after")
    last = found.date(days - 1)
    if report.incomplete and after[0] <= last < after[1]:
        after = after[0], last
    return windows.given(before, after, found)


# Who investigates


def _investigate(
    config: RunConfig,
    asked: Asked,
    agent: str,
    case: tuple[loading.Loaded, Sequence[vocabulary.Words], windows.Windows, series.Series],
    view: View,
) -> list[Investigation]:
    loaded, words, compared, found = case
    if agent == "analyst":  # it reads the compact style, whatever a person or a policy reads
        config = dataclasses.replace(config, environment=dataclasses.replace(config.environment, prompt="compact"))
    asks = question(
        tables.observed(found, compared),
        config.environment.prompt,
        tables.CAMPAIGN,
        tables.ADVERTISER,
        tables.shown_days(compared),
    )
    environment = CaseEnvironment(tables.agent_tables(loaded, words, compared), asks, config.environment)
    view.question(asks, "the scripted analyst" if agent == "analyst" else f"policy of {asked.run_dir}, {agent}")
    try:
        if agent == "analyst":
            return list(_analyst(environment, config, asked.samples, view))
        return _policy(environment, config, asked, agent, view)
    finally:
        environment.close()


class _Watched:
    """An episode whose steps are shown as they come."""

    def __init__(self, episode: Any, view: View):
        self._episode, self._view = episode, view

    def step(self, action: str, *, final_turn: bool = False) -> Observation:
        """Run the code of a tool call."""
        self._view.call(action)
        seen = self._episode.step(action, final_turn=final_turn)
        self._view.seen(seen.text)
        return seen


def _analyst(environment: CaseEnvironment, config: RunConfig, samples: int, view: View) -> Iterator[Investigation]:
    task = environment.task(0)
    for sample in range(samples):
        episode = environment.open(task)
        try:
            shown = _Watched(episode, view) if sample == 0 else episode
            rng = np.random.default_rng([config.seed, sample])
            transcript = analyst.investigate(shown, task, rng, config.environment.prompt)
        finally:
            episode.close()
        view.answered(sample, len(transcript.steps), transcript.answer)
        yield Investigation(tuple(transcript.steps), transcript.answer)


def _policy(
    environment: CaseEnvironment, config: RunConfig, asked: Asked, stage: str, view: View
) -> list[Investigation]:
    samples = asked.samples
    inspect._keep_programs()
    rollout = dataclasses.replace(config.rollout, slots=min(config.rollout.slots, samples))
    evaluation = dataclasses.replace(config.evaluation, samples=samples)
    with RunDirectory.open(asked.run_dir, lock=False) as run, Interrupt() as interrupt:
        run.config = dataclasses.replace(config, rollout=rollout)
        work = Workspace(run, Progress(), interrupt)
        stage = work.latest_stage() if stage == "latest" else stage
        work.engine.set_params(work.trained_params(stage), 0)
        with work.progress.bar(f"{stage} policy investigates", samples) as bar:

            def report(done: int, _: int) -> None:
                bar.update(done * samples)
                interrupt.check()

            found = evaluate_policy(
                work.engine, work.chat, environment, [0], evaluation, rollout, seed=config.seed, on_progress=report
            )
        result = [Investigation(_steps(t, work), t.answer) for t in found]
    for number, one in enumerate(result):
        if number == 0:
            for code, text in one.steps:
                view.call(code)
                view.seen(text)
        view.answered(number, len(one.steps), one.answer)
    return result


def _steps(t: Trajectory, work: Workspace) -> tuple[tuple[str, str], ...]:
    """Calls and what they showed, from the sampled ids."""
    out = []
    for turn in range(int(t.turn_index.max(initial=-1)) + 1):
        mine = t.turn_index == turn
        sampled, read = t.ids[mine & t.loss_mask], t.ids[mine & ~t.loss_mask]
        if len(read):
            text = "".join(text for _, text in work.chat.given(read.tolist()))
            out.append((work.chat.parse_turn(sampled.tolist()).text, text))
    return tuple(out)
