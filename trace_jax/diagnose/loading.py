"""The user's tables as two: `cells` (a row a day, campaign and slice) and `totals` (a row a day and campaign).

Everything happens in one DuckDB instance of this process, so a file of gigabytes streams through; what is kept is the
sum by day, campaign and slice. What was dropped or could not be read is counted and said.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from trace_jax.config import ConfigError
from trace_jax.diagnose import reading, repeats, survey, synonyms
from trace_jax.diagnose.mapping import Plan
from trace_jax.diagnose.sources import literal, quoted
from trace_jax.warehouse.files import unfinished

MEMORY_MB = 1024
THREADS = 2
NO_CAMPAIGN = "(all)"
_TABLES = ("cells", "raw_totals")
TOLERANCE = 1.5  # an in-stock share above is in percent


@dataclass
class Loaded:
    """The tables `cells` and `totals` of a connection, and what is to be said of them.

    Attributes:
        setup: statements that make views in any DuckDB from the user's own files, `loaded` of the rows of `cells` and
            `loaded_totals` of those of `totals` if they have files of their own: evidence can be run again after them.
        metrics: of `cells`. total_metrics: of `totals`.
        own_totals: metrics of the files that `totals` comes from; empty if it is the sum of `cells`.
        notes: what was dropped or not read. problems: what makes results doubtful.
        currency: of amounts, empty if it is not known.
    """

    connection: duckdb.DuckDBPyConnection
    plans: Sequence[Plan]
    setup: str
    dimensions: tuple[str, ...]
    metrics: tuple[str, ...]
    total_metrics: tuple[str, ...]
    own_totals: tuple[str, ...]
    currency: str = ""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def ask(self, sql: str, *values: object) -> list[tuple]:
        """Rows of a query on the loaded tables."""
        return self.connection.execute(sql, list(values)).fetchall()


@contextlib.contextmanager
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """An instance that reads files and writes none but its own temporary ones."""
    with tempfile.TemporaryDirectory(prefix="trace-jax-") as folder:
        config = {"threads": THREADS, "memory_limit": f"{MEMORY_MB}MB", "temp_directory": folder}
        # A view of the user's database may name a file of the web: what would fetch it is not loaded.
        config |= {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
        connection = duckdb.connect(":memory:", config=config)
        try:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(reading.MACROS)
            connection.execute("SET enable_progress_bar = false")
            yield connection
        except RuntimeError as error:
            if str(error) == "Query interrupted":  # what DuckDB makes of a SIGINT that comes while it works
                raise KeyboardInterrupt from None
            raise
        finally:
            connection.close()


def load(
    plans: Sequence[Plan], connection: duckdb.DuckDBPyConnection, left_out: Sequence[tuple[str, bool]] = ()
) -> Loaded:
    """Reads all rows.

    Args:
        left_out: of `mapping.plans`.

    Raises:
        ConfigError: no impressions or clicks, no row with a date, or a file that breaks off in the middle.
    """
    notes, problems = [], []
    for text, named in left_out:  # a table of a database may well be of something else
        (problems if named else notes).append(text)
    for plan in plans:
        notes += [f"{plan.source.name}: {note}" for note in plan.source.notes]
    main = main_tables(plans)
    others = [p for p in plans if p not in main]
    totals = [p for p in others if not p.dimensions and {"impressions", "budget", "in_stock"} & p.fields.keys()]
    for plan in others:
        if plan not in totals:
            what = (
                f"breaks down by {' and '.join(plan.dimensions)}" if plan.dimensions else "has no metric of a campaign"
            )
            notes.append(f"{plan.source.name} {what} and cannot be crossed with the other file: diagnose it by itself")
    dimensions = main[0].dimensions
    surveys = {id(plan): survey.look(plan, connection) for plan in [*main, *totals]}
    currencies = sorted({c for found in surveys.values() for c in found.currencies})
    currency, mixed = (currencies[0], "") if len(currencies) == 1 else ("", ", ".join(currencies))
    metrics = tuple(m for m in synonyms.METRICS if any(m in p.fields for p in main))
    if mixed:
        problems.append(f"amounts are in several currencies ({mixed}): spend and sales are not looked at")
        metrics = tuple(m for m in metrics if m not in (*synonyms.AMOUNTS, "budget"))
    for plan in [*main, *totals]:
        if lost := surveys[id(plan)].undated_in_words(plan.source.name):
            (problems if surveys[id(plan)].many_undated else notes).append(lost)
        for metric, (count, example) in surveys[id(plan)].unreadable.items():
            if not mixed or metric not in (*synonyms.AMOUNTS, "budget"):
                column = f"{count:,} of {plan.fields[metric]!r}"
                notes.append(f"{plan.source.name}: {column} are no numbers, e.g. {example!r}: taken as 0")
    views, held = {"loaded": _read(connection, "raw_cells", main, dimensions, metrics, problems)}, ()
    lacking = _lacking(connection, main, metrics, problems)
    metrics = tuple(m for m in metrics if m not in lacking)
    _aggregate(connection, "cells", "raw_cells", dimensions, metrics)
    if not connection.execute("SELECT count(*) FROM cells").fetchone()[0]:
        raise ConfigError(f"{main[0].source.path} has no rows with a date: export it again, or name its date column")
    survey.check_signs(connection, "cells", metrics, main)
    total_metrics = metrics
    if totals:
        total_metrics = tuple(m for m in synonyms.METRICS if any(m in p.fields for p in totals))
        total_metrics = tuple(m for m in total_metrics if not mixed or m not in (*synonyms.AMOUNTS, "budget"))
        views["loaded_totals"] = _read(connection, "raw_totals", totals, (), total_metrics, problems)
        held = total_metrics
        _same_names(connection, notes, problems)
        _aggregate(connection, "own_totals", "raw_totals", (), total_metrics)
        survey.check_signs(connection, "own_totals", total_metrics, totals)
        total_metrics = _merge_totals(connection, metrics, total_metrics)
    else:
        _aggregate(connection, "totals", "cells", (), metrics)
    made = "".join(f"CREATE OR REPLACE TEMP VIEW {name} AS\n{sql};\n" for name, sql in views.items())
    for name in views:  # here of the rows as they were read: a large file is not read again for each query
        rows = {"loaded": "raw_cells", "loaded_totals": "raw_totals"}[name]
        connection.execute(f"CREATE TEMP VIEW {name} AS SELECT * EXCLUDE (row_key, part) FROM {rows}")
    used = [p.source for p in [*main, *totals]]
    before = [*(s.prepare for s in used), *(f"{s.attach};\n" for s in used if s.attach)]
    setup = "".join(dict.fromkeys(before)) + reading.MACROS + made
    return Loaded(connection, plans, setup, dimensions, metrics, total_metrics, tuple(held), currency, notes, problems)


def main_tables(plans: Sequence[Plan]) -> list[Plan]:
    """The tables that break down the most: all of them that have the same dimensions."""
    able = [p for p in plans if {"impressions", "clicks"} <= p.fields.keys()]
    if not able:
        first = max(plans, key=lambda p: len(p.fields))
        missing = " and ".join(m for m in ("impressions", "clicks") if m not in first.fields)
        held = [c for c in first.source.columns if c != first.fields["date"]]
        raise ConfigError(
            f"{first.source.path} has no numbers of {missing} among {', '.join(held[:12]) or 'its columns'}: "
            "name the column in a --mapping file; a diagnosis needs impressions and clicks by day"
        )
    shape = max((p.dimensions for p in able), key=len)
    return [p for p in able if p.dimensions == shape]


def _select(plan: Plan, dimensions: Sequence[str], metrics: Sequence[str], source: tuple[str, int]) -> str:
    """SQL of a table's rows; `source`: what reads them, and the number of the table."""
    relation, part = source
    campaign = reading.text_of(plan.fields["campaign"]) if "campaign" in plan.fields else literal(NO_CAMPAIGN)
    columns = [f"cell_day({plan.date.expression}) AS ds", f"coalesce({campaign}, '(none)') AS campaign"]
    columns += [f"coalesce({reading.text_of(plan.fields[d])}, '(none)') AS {d}" for d in dimensions]
    for metric in metrics:
        value = plan.number(metric) if metric in plan.fields else "NULL::DOUBLE"
        if metric in (*synonyms.COUNTS, *synonyms.AMOUNTS) and metric in plan.fields:
            value = f"coalesce(round({value}, 6), 0)"  # platforms leave a zero out; 1e-320 clicks are none
        columns.append(f"{value} AS {metric}")
    return f"SELECT {', '.join(columns)}, {part} AS part, hash(whole_row) AS row_key\n  FROM {relation} whole_row"


def _read(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    plans: Sequence[Plan],
    dimensions: Sequence[str],
    metrics: Sequence[str],
    problems: list[str],
) -> str:
    """Creates `table` of the rows with a date, once each; returns the SQL that reads them from the files."""
    parts, plans = [], repeats.richest_first(plans)
    for number, plan in enumerate(plans):
        select = _select(plan, dimensions, metrics, (plan.source.relation, number))
        parts.append(_select(plan, dimensions, metrics, (plan.source.again or plan.source.relation, number)))
        verb = f"CREATE TABLE {table} AS" if number == 0 else f"INSERT INTO {table}"
        try:
            connection.execute(f"{verb} {select}")
        except duckdb.Error as error:
            reason = " ".join(str(error).split("\n")[0].split())[:160]
            raise ConfigError(f"cannot read {plan.source.path} to its end: {reason}") from None
    connection.execute(f"DELETE FROM {table} WHERE ds IS NULL")  # which `survey` has counted
    single = repeats.twice_in_files(connection, table, plans, dimensions, problems)
    return repeats.kept(parts, single, repeats.twice_in_a_file(connection, table, metrics, problems))


def _lacking(
    connection: duckdb.DuckDBPyConnection, plans: Sequence[Plan], metrics: Sequence[str], problems: list[str]
) -> set[str]:
    """Metrics that one of the files with rows of their own has no column of: there they would read as 0."""
    plans = repeats.richest_first(plans)
    there = [part for (part,) in connection.execute("SELECT DISTINCT part FROM raw_cells ORDER BY 1").fetchall()]
    lacking: set[str] = set()
    for part in there:
        names = [m for m in metrics if m not in plans[part].fields]
        if new := [m for m in names if m not in lacking]:
            lacking.update(new)
            problems.append(
                f"{plans[part].source.name} has no {' and no '.join(new)}, which another file has: not looked at"
            )
    return lacking


def _aggregate(
    connection: duckdb.DuckDBPyConnection, table: str, source: str, dimensions: Sequence[str], metrics: Sequence[str]
) -> None:
    keys = ["ds", "campaign", *dimensions]
    sums = []
    for metric in metrics:
        how = {"budget": "max", "in_stock": "avg"}.get(metric, "sum")
        value = f"{how}({metric})"
        if metric == "in_stock":
            value = f"(CASE WHEN {value} > {TOLERANCE} THEN {value} / 100 ELSE {value} END)"
        sums.append(f"{value} AS {metric}")
    connection.execute(
        f"CREATE TABLE {table} AS SELECT {', '.join([*keys, *sums])} FROM {source}"
        f" GROUP BY {', '.join(keys)} ORDER BY ALL"
    )


def _same_names(connection: duckdb.DuckDBPyConnection, notes: list[str], problems: list[str]) -> None:
    """A table without campaigns belongs to the only campaign of the other; said where there are several, and where the
    names of one are not those of the other."""
    names = {t: [r[0] for r in connection.execute(f"SELECT DISTINCT campaign FROM {t}").fetchall()] for t in _TABLES}
    for table, other in (_TABLES, _TABLES[::-1]):
        if names[table] == [NO_CAMPAIGN] != names[other]:
            if len(names[other]) > 1:
                notes.append("one of the files has no column of campaigns and cannot be told apart by the other's")
            else:
                connection.execute(f"UPDATE {table} SET campaign = ?", names[other])
            return
    cells, totals = names[_TABLES[0]], names[_TABLES[1]]
    for name in set(cells) - set(totals) - {NO_CAMPAIGN}:
        alike = [t for t in totals if t not in cells and synonyms.letters(t) == synonyms.letters(name)]
        if len(alike) == 1:
            connection.execute(f"UPDATE {_TABLES[1]} SET campaign = ? WHERE campaign = ?", [name, alike[0]])
            notes.append(f"campaign {alike[0]!r} of the totals is taken for {name!r} of the slices")
        elif NO_CAMPAIGN not in totals:
            problems.append(
                f"campaign {name!r} of the slices is not among those of the totals ({', '.join(map(repr, totals[:4]))}"
                f"{', ...' * (len(totals) > 4)}), which are taken for other campaigns: spell the names alike"
            )


def _merge_totals(
    connection: duckdb.DuckDBPyConnection, metrics: Sequence[str], total_metrics: Sequence[str]
) -> tuple[str, ...]:
    """`totals` from the files' own totals, filled up from the sums of `cells` where they lack a metric."""
    _aggregate(connection, "summed", "cells", (), metrics)
    both = tuple(m for m in synonyms.METRICS if m in metrics or m in total_metrics)
    columns = []
    for m in both:
        sides = [f"t.{m}"] * (m in total_metrics) + [f"s.{m}"] * (m in metrics)
        columns.append(f"coalesce({', '.join(sides)}) AS {m}" if len(sides) > 1 else f"{sides[0]} AS {m}")
    connection.execute(
        f"CREATE TABLE totals AS SELECT ds, campaign, {', '.join(columns)} FROM own_totals t"
        " FULL JOIN summed s USING (ds, campaign) ORDER BY ALL"
    )
    return both


def keep(loaded: Loaded, path: Path) -> None:
    """Writes `cells` and `totals` into a DuckDB file of their own, which is whole or absent.

    Raises:
        ConfigError: it cannot be written.
    """
    run = loaded.connection.execute
    try:
        with unfinished(path, ".wal") as partial:
            run(f"ATTACH {literal(str(partial))} AS kept")
            try:
                for table in ("cells", "totals"):
                    run(f"CREATE TABLE kept.{quoted(table)} AS FROM {table}")
            finally:
                run("DETACH kept")
            partial.replace(path)
    except (duckdb.IOException, duckdb.OutOfMemoryException, OSError) as error:
        reason = " ".join(str(error).split("\n")[0].split())[:200]
        raise ConfigError(f"cannot write --keep {path}: {reason}; free space or name another file") from None


def campaigns(loaded: Loaded) -> Mapping[str, float]:
    """Impressions of each campaign of `cells`, most first."""
    return dict(loaded.ask("SELECT campaign, sum(impressions) FROM cells GROUP BY 1 ORDER BY 2 DESC, 1"))
