"""Rows that are there twice: in two files of any kind, or twice in one.

Two files are compared by what their rows mean (day, campaign, slice, counts), for the hash of a row as it is written
differs between CSV and Parquet. What is left out here is left out by the SQL of the evidence, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from trace_jax.diagnose import synonyms
from trace_jax.diagnose.mapping import Plan

ALIKE = 0.5  # share of the days and campaigns in two files that must be the same for one to repeat the other
# every row twice or more: a log of single events has equal rows, too, and others beside them
DOUBLED = (
    "SELECT ds FROM (SELECT ds, row_key, count(*) n FROM {} WHERE ds IS NOT NULL GROUP BY ALL)"
    " GROUP BY ds HAVING min(n) >= 2"
)


def _held(plan: Plan) -> set[str]:
    return {m for m in synonyms.METRICS if m in plan.fields}


def richest_first(plans: Sequence[Plan]) -> list[Plan]:
    """Files with more metrics before those with fewer: of two that repeat each other the first is kept."""
    return sorted(plans, key=lambda plan: -len(_held(plan)))


def _sums(relation: str, dimensions: Sequence[str], compared: Sequence[str]) -> str:
    """SQL of one row a file, day and campaign: equal where the rows are. Numbers as FLOAT, as which files may hold
    them."""
    key = ", ".join([*dimensions, *(f"TRY_CAST({m} AS FLOAT)" for m in compared)])
    return (
        f"SELECT part, ds, campaign, count(*) n, sum(hash({key})::HUGEINT) total, sum({compared[0]}) size"
        f" FROM {relation} GROUP BY part, ds, campaign"
    )


def twice_in_files(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    plans: Sequence[Plan],
    dimensions: Sequence[str],
    problems: list[str],
) -> str:
    """Deletes from `table`, whose `part` numbers the plans, the rows of a later file that an earlier one has, too.

    Returns:
        Common table expressions that do the same from `every` to `single`; empty if there was nothing to do.
    """
    common = set.intersection(*map(_held, plans))
    compared = [m for m in synonyms.COUNTS if m in common] or [m for m in synonyms.METRICS if m in common]
    if len(plans) < 2 or not compared:
        return ""
    connection.execute(f"CREATE OR REPLACE TEMP TABLE sums AS {_sums(table, dimensions, compared)}")
    same = "e.n = l.n AND e.total = l.total"
    shared = connection.execute(
        f"SELECT e.part, l.part, count(*), count(*) FILTER ({same}), count(DISTINCT ds) FILTER ({same}),"
        f" count(DISTINCT ds) FILTER (NOT ({same})) FROM sums e JOIN sums l USING (ds, campaign)"
        " WHERE e.part < l.part AND e.size > 0 AND l.size > 0 GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    pairs = []
    for earlier, later, both, alike, days, other in shared:
        if not alike or alike < ALIKE * both or not _held(plans[later]) <= _held(plans[earlier]):
            _overlapping(connection, table, dimensions, plans, (earlier, later), problems)
            continue
        pairs.append(f"({earlier}, {later})")
        first, second = plans[earlier].source.name, plans[later].source.name
        problems.append(f"{second} repeats {days} day{'s' * (days > 1)} of {first}: counted once")
        if other:
            problems.append(
                f"{first} and {second} both have {other} day{'s' * (other > 1)} with figures that differ (exported at "
                "different times?): both are counted; give each day once"
            )
    if not pairs:
        connection.execute("DROP TABLE sums")
        return ""
    again = (
        "SELECT DISTINCT l.part, ds, campaign FROM {0} e JOIN {0} l USING (ds, campaign, n, total)"
        f" WHERE (e.part, l.part) IN ({', '.join(pairs)})"
    )
    connection.execute(f"DELETE FROM {table} WHERE (part, ds, campaign) IN ({again.format('sums')}); DROP TABLE sums")
    return (
        f"sums AS (\n  {_sums('every', dimensions, compared)}\n), again AS (\n  {again.format('sums')}\n),"
        " single AS (\n  SELECT * FROM every ANTI JOIN again USING (part, ds, campaign)\n)"
    )


def _overlapping(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    dimensions: Sequence[str],
    plans: Sequence[Plan],
    pair: tuple[int, int],
    problems: list[str],
) -> None:
    """Says that two files have rows of the same days and slices, which are added up."""
    keys = ", ".join(("ds", "campaign", *dimensions))
    days, slices = connection.execute(
        f"SELECT count(DISTINCT ds), count(*) FROM (SELECT DISTINCT {keys} FROM {table} WHERE part = ?)"
        f" SEMI JOIN (SELECT DISTINCT {keys} FROM {table} WHERE part = ?) USING ({keys})",
        list(pair),
    ).fetchone()
    if slices:
        first, second = (plans[part].source.name for part in pair)
        problems.append(
            f"{first} and {second} both have rows of {days} day{'s' * (days > 1)} and the same slices, with other "
            "figures: they are added up; if one is a newer or coarser export of the other, give each day once"
        )


def twice_in_a_file(
    connection: duckdb.DuckDBPyConnection, table: str, metrics: Sequence[str], problems: list[str]
) -> int:
    """Leaves the rows once of days on which every row is there more than once; returns how many such days there are."""
    doubled = DOUBLED.format(table)
    days = connection.execute(f"SELECT count(*) FROM ({doubled})").fetchone()[0]
    if days:
        problems.append(
            f"every row of {days} day{'s' * (days > 1)} is there more than once (exports that overlap?): counted once"
        )
        connection.execute(
            f"CREATE TABLE once AS SELECT * EXCLUDE part, min(part) AS part FROM {table} WHERE ds IN ({doubled})"
            " GROUP BY ALL;"
            f"DELETE FROM {table} WHERE ds IN (SELECT ds FROM once);"
            f"INSERT INTO {table} BY NAME FROM once; DROP TABLE once"
        )
    again = f"SELECT count(*) n FROM {table} WHERE impressions > 0 GROUP BY row_key HAVING n > 1"
    repeated = connection.execute(
        f"SELECT coalesce(sum(n - 1), 0) FROM ({again})" if "impressions" in metrics else "SELECT 0"
    ).fetchone()[0]
    if repeated:
        problems.append(
            f"{int(repeated):,} row{'s' * (repeated > 1)} repeat another one word for word: kept, look at the export"
        )
    return days


def kept(parts: Sequence[str], single: str, days: int) -> str:
    """SQL of the rows that are left.

    Args:
        parts: SQL of the rows of each file. single: of `twice_in_files`. days: of `twice_in_a_file`.
    """
    union, rows = "\n  UNION ALL ".join(parts), "single" if single else "every"
    tail = "WHERE ds IS NOT NULL"
    if not days and not single:
        return f"SELECT * EXCLUDE (row_key, part) FROM (\n  {union}\n) {tail}"
    tables = f"WITH every AS (\n  {union}\n)" + (f", {single}" if single else "")
    if not days:
        return f"{tables}\nSELECT * EXCLUDE (row_key, part) FROM {rows} {tail}"
    return (
        f"{tables}, doubled AS (\n  {DOUBLED.format(rows)}\n), once AS (\n"
        f"  SELECT DISTINCT * EXCLUDE part FROM {rows} WHERE ds IN (FROM doubled)\n"
        f"  UNION ALL SELECT * EXCLUDE part FROM {rows} WHERE ds NOT IN (FROM doubled)\n)\n"
        f"SELECT * EXCLUDE row_key FROM once {tail}"
    )
