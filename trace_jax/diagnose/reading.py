"""How the text of a column becomes dates and numbers: formats told from the values, as DuckDB expressions.

An expression is NULL where a value cannot be read, so what is lost can be counted. Nothing is decided from one value:
day and month are told apart by values that only one order can read, or by the order in which the days leave no gaps.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import pyarrow.compute as pc

from trace_jax.config import ConfigError
from trace_jax.diagnose.sources import literal, quoted

READABLE = 0.8  # share of a column of numbers that must be numbers
DATED = 0.5  # share of a column's distinct values that a format of dates must read: the rest are totals and footers
EARLIEST, LATEST = datetime.date(1990, 1, 1), datetime.date(2100, 1, 1)  # other years are misread or misspelt dates
_NOTHING = ("", "-", "--", "—", "–", "null", "n/a", "nan", "none", "#n/a")  # what stands for an empty cell
# What the expressions here are made of; runs once in a connection before any of them.
MACROS = rf"""CREATE OR REPLACE TEMP MACRO cell_text(x) AS CASE
  WHEN lower(trim(x::VARCHAR, chr(32) || chr(9) || chr(160)))
    IN ({", ".join(map(literal, _NOTHING))})
  THEN NULL ELSE trim(x::VARCHAR, chr(32) || chr(9) || chr(160)) END;
CREATE OR REPLACE TEMP MACRO cell_day(d) AS
  CASE WHEN d BETWEEN DATE '{EARLIEST}' AND DATE '{LATEST}' THEN d END;
CREATE OR REPLACE TEMP MACRO cell_between(x, most) AS CASE WHEN x BETWEEN 0 AND most THEN x END;
CREATE OR REPLACE TEMP MACRO cell_finite(x) AS CASE WHEN isfinite(x) THEN x END;
CREATE OR REPLACE TEMP MACRO cell_signed(t, x) AS
  cell_finite(x * CASE WHEN regexp_matches(t, '^[^0-9]*\([^()]*[0-9][^()]*\)[^0-9]*$') THEN -1 ELSE 1 END
  * CASE WHEN regexp_matches(t, '[0-9] ?[kK]$') THEN 1e3 WHEN regexp_matches(t, '[0-9] ?[mM]$') THEN 1e6 ELSE 1 END
  / CASE WHEN regexp_matches(t, '%\)?$') THEN 100 ELSE 1 END);
CREATE OR REPLACE TEMP MACRO cell_amount(x) AS
  regexp_replace(replace(cell_text(x), chr(8722), '-'), '[[:alpha:]]+\.', '', 'g');
CREATE OR REPLACE TEMP MACRO cell_number(x) AS cell_signed(cell_text(x), coalesce(TRY_CAST(cell_text(x) AS DOUBLE),
  TRY_CAST(regexp_replace(cell_amount(x), '[^0-9.-]', '', 'g') AS DOUBLE)));
CREATE OR REPLACE TEMP MACRO cell_comma_number(x) AS cell_signed(cell_text(x),
  TRY_CAST(replace(regexp_replace(cell_amount(x), '[^0-9,-]', '', 'g'), ',', '.') AS DOUBLE));
"""
_DATES = (
    "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d", "%b %d, %Y", "%B %d, %Y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y",
    "%d-%b-%y", "%a, %b %d, %Y", "%A, %B %d, %Y", "%d.%m.%Y", "%d.%m.%y", "%m/%d/%Y", "%d/%m/%Y", "%m/%d/%y",
    "%d/%m/%y", "%m-%d-%Y", "%d-%m-%Y",
)  # fmt: skip
_TIMES = (
    " %H:%M:%S",
    " %H:%M",
    "T%H:%M:%S",
    "T%H:%M:%SZ",
    "T%H:%M:%S.%fZ",
    "T%H:%M:%S.%f",
    " %I:%M:%S %p",
    " %H:%M:%S.%f",
)
_ZONED = ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d %H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z")
# Both orders of day and month, where a value such as 03/04/2026 fits either.
_SWAPPED = {
    a + t: b + t
    for t in ("", *_TIMES)
    for a, b in (("%m/%d/%Y", "%d/%m/%Y"), ("%m/%d/%y", "%d/%m/%y"), ("%m-%d-%Y", "%d-%m-%Y"))
}
_LAST_SERIAL, _LAST_EPOCH = 80_000, 4_200_000_000  # of 2119 and 2103: later ones are no dates of a report
NUMBERED = {"excel": "days since 1899-12-30", "epoch": "seconds since 1970", "epoch_ms": "milliseconds since 1970"}


@dataclass(frozen=True)
class DateFormat:
    """How a column's dates are written.

    Attributes:
        form: a strptime format, a key of NUMBERED, or "" for a column that holds dates already.
        instant: whether values are moments that a time zone turns into days.
        expression: DATE, NULL where not readable.
    """

    form: str
    instant: bool
    expression: str


def text_of(column: str) -> str:
    """A column as text without outer blanks, NULL for what stands for nothing."""
    return f"cell_text({quoted(column)})"


def date_format(
    connection: duckdb.DuckDBPyConnection,
    relation: str,
    column: str,
    kind: str,
    *,
    form: str = "",
    zone: str = "",
) -> DateFormat | None:
    """How a column is to be read as dates; None if it holds none.

    Args:
        kind: DuckDB type of the column.
        form: the format, if the user said it. zone: of the account, for columns of moments.

    Raises:
        ConfigError: both orders of day and month are possible, or the user's format reads hardly anything.
    """
    if kind == "DATE":
        return DateFormat("", False, quoted(column))
    if kind.startswith("TIMESTAMP"):
        moment = quoted(column) if kind.endswith("ZONE") else f"{quoted(column)} AT TIME ZONE 'UTC'"
        if kind.endswith("ZONE") or (zone and not _midnights(connection, relation, quoted(column))):
            return DateFormat("", True, f"({moment} AT TIME ZONE {literal(zone or 'UTC')})::DATE")
        return DateFormat("", True, f"{quoted(column)}::DATE")
    values = _sample(connection, relation, column)
    if not values:
        return None
    if form:
        if _share(connection, values, form) < DATED:
            raise ConfigError(f"date_format {form!r} does not read {column!r}, e.g. {values[0]!r}: correct the mapping")
        return _format(connection, relation, column, form, zone)
    candidates = [*_DATES, *(d + t for d in _DATES for t in _TIMES), *_ZONED, *NUMBERED]
    shares = {f: _share(connection, values, f) for f in _plausible(candidates, values)}
    found = max(shares, key=shares.get, default=None)
    if found is None or shares[found] < DATED:
        return None
    other = _SWAPPED.get(found) or next((a for a, b in _SWAPPED.items() if b == found), None)
    if other is not None and shares.get(other, 0.0) >= shares[found] - 1e-9:
        found = _in_order(connection, values, column, found, other)
    return _format(connection, relation, column, found, zone)


def _format(connection: duckdb.DuckDBPyConnection, relation: str, column: str, form: str, zone: str) -> DateFormat:
    instant = _is_instant(form)
    if zone and instant and form not in NUMBERED and "%z" not in form:
        instant = not _midnights(connection, relation, f"try_strptime({text_of(column)}, {literal(form)})")
    return DateFormat(form, instant, _expression(text_of(column), form, zone if instant or "%z" in form else ""))


def _midnights(connection: duckdb.DuckDBPyConnection, relation: str, moment: str) -> bool:
    """Whether all moments of a column are midnights: these are days, which no time zone moves."""
    query = f"SELECT bool_and(m::TIME = TIME '00:00:00') FROM (SELECT {moment} m FROM {relation} LIMIT 200000)"
    return bool(connection.execute(query).fetchone()[0])


def _sample(connection: duckdb.DuckDBPyConnection, relation: str, column: str, most: int = 2000) -> list[str]:
    """Distinct texts of a column, from all over it: the first in order would be the first days of every month."""
    query = f"SELECT DISTINCT v FROM (SELECT {text_of(column)} v FROM {relation} LIMIT 200000) WHERE v IS NOT NULL"
    return sorted(row[0] for row in connection.execute(f"{query} ORDER BY hash(v), v LIMIT {most}").fetchall())


def example(connection: duckdb.DuckDBPyConnection, relation: str, column: str) -> str:
    """A text of a column, "" if it is empty."""
    return next(iter(_sample(connection, relation, column, 1)), "")


def _plausible(forms: Sequence[str], values: Sequence[str]) -> list[str]:
    """Formats worth trying: numbered ones for numbers only, those with a time or a zone only where values have one."""
    numbers = sum(bool(re.fullmatch(r"\d+(\.\d+)?", v)) for v in values) >= DATED * len(values)
    timed = sum(bool(re.search(r"\d:\d", v)) for v in values) >= DATED * len(values)
    return [f for f in forms if (f in NUMBERED or f == "%Y%m%d") == numbers and (f in NUMBERED or (":" in f) == timed)]


def _is_instant(form: str) -> bool:
    return "%H" in form or "%I" in form or form.startswith("epoch")


def _expression(text: str, form: str, zone: str) -> str:
    """DATE of a text. Moments with an offset count in `zone`, or in the offset's own zone if none is given."""
    if form == "excel":  # a number out of range would end the query instead of being no date
        return f"(DATE '1899-12-30' + floor(cell_between(TRY_CAST({text} AS DOUBLE), {_LAST_SERIAL}))::INTEGER)"
    if form.startswith("epoch"):
        seconds = f"TRY_CAST({text} AS DOUBLE){' / 1000' if form.endswith('ms') else ''}"
        moment = f"to_timestamp(cell_between({seconds}, {_LAST_EPOCH}))"
        return f"({moment} AT TIME ZONE {literal(zone or 'UTC')})::DATE"
    parsed = f"try_strptime({text}, {literal(form)})"
    if "%z" in form:
        if zone:
            return f"({parsed} AT TIME ZONE {literal(zone)})::DATE"
        return f"TRY_CAST(left({text}, 10) AS DATE)"
    if zone and _is_instant(form):
        return f"(({parsed} AT TIME ZONE 'UTC') AT TIME ZONE {literal(zone)})::DATE"
    return f"{parsed}::DATE"


def _share(connection: duckdb.DuckDBPyConnection, values: Sequence[str], form: str) -> float:
    """Share of the values that a format reads as a day between 1990 and 2100."""
    day = _expression("v", form, "")
    try:
        row = connection.execute(
            f"SELECT avg((coalesce({day} BETWEEN DATE '{EARLIEST}' AND DATE '{LATEST}', false))::INT)"
            " FROM (SELECT unnest($1) v)",
            [list(values)],
        ).fetchone()
    except duckdb.Error:  # a number that is no date at all, or a format that the user made up
        return 0.0
    return float(row[0] or 0.0)


def _in_order(connection: duckdb.DuckDBPyConnection, values: Sequence[str], column: str, a: str, b: str) -> str:
    """The one of two orders of day and month that leaves fewer gaps between the days.

    Raises:
        ConfigError: both leave as many.
    """

    def filled(form: str) -> float:
        day = _expression("v", form, "")
        row = connection.execute(
            f"SELECT count(DISTINCT {day}) / (max({day}) - min({day}) + 1) FROM (SELECT unnest($1) v)", [list(values)]
        ).fetchone()
        return float(row[0] or 0.0)

    shares = filled(a), filled(b)
    if max(shares) >= 1.5 * min(shares):
        return a if shares[0] > shares[1] else b
    raise ConfigError(
        f"dates of {column!r} such as {values[0]!r} fit {a} and {b}: say which with date_format in a --mapping file"
    )


def few_values(
    connection: duckdb.DuckDBPyConnection, relation: str, columns: Sequence[str], *, first: int, most: int
) -> dict[str, set[str]]:
    """Distinct texts of the columns that have at most `most` in the `first` rows: one pass, however many columns."""
    found: dict[str, set[str]] = {column: set() for column in columns}
    if not columns:
        return found
    # Cells are cleaned here: DuckDB takes minutes to plan `cell_text` of a thousand columns.
    chosen = ", ".join(f"{quoted(column)} AS c{n}" for n, column in enumerate(columns))
    query = f"SELECT {chosen} FROM (SELECT * FROM {relation} LIMIT {first})"
    with connection.cursor() as apart:  # which may be left before its end
        for batch in apart.sql(query).to_arrow_reader(2048):
            for n, column in enumerate(columns):
                if column in found:
                    found[column].update(pc.unique(batch.column(n)).to_pylist())
                    if len(found[column]) > 2 * most:
                        del found[column]
            if not found:
                break
    cleaned = {column: {text for v in values if (text := _cleaned(v)) is not None} for column, values in found.items()}
    return {column: values for column, values in cleaned.items() if len(values) <= most}


def _cleaned(value: str | None) -> str | None:
    """What the macro `cell_text` makes of a value."""
    text = (value or "").strip(" \t\xa0")
    return None if text.lower() in _NOTHING else text


# Numbers


def decimal_mark(connection: duckdb.DuckDBPyConnection, relation: str, columns: Sequence[str]) -> str:
    """ "." or ",": what stands before the fraction in the numbers of a file, told from all its columns of numbers."""
    votes = {".": 0, ",": 0}
    for column in columns:
        for text in _sample(connection, relation, column, 500):
            digits = re.sub(r"[^0-9.,]", "", text)
            marks = re.findall(r"[.,]", digits)
            if not marks:
                continue
            last, tail = marks[-1], re.split(r"[.,]", digits)[-1]
            if len(set(marks)) == 2:
                votes[last] += 3
            elif len(marks) > 1:  # 1.234.567: repeated, so it parts thousands
                votes["," if last == "." else "."] += 3
            elif len(tail) != 3:
                votes[last] += 2
    return "," if votes[","] > votes["."] else "."


def number(column: str, kind: str, decimal: str, factor: float = 1.0) -> str:
    """DOUBLE of a column, NULL where not readable. Percent signs divide by 100; accounting parentheses are minus."""
    if kind != "VARCHAR":
        value = f"cell_finite(TRY_CAST({quoted(column)} AS DOUBLE))"
    else:
        value = f"{'cell_comma_number' if decimal == ',' else 'cell_number'}({quoted(column)})"
    return value if factor == 1.0 else f"{value} * {factor!r}"


def readable_share(connection: duckdb.DuckDBPyConnection, relation: str, column: str, expression: str) -> float:
    """Share of a column's values that an expression reads, of those that are not empty; 1 if all are."""
    row = connection.execute(
        f"SELECT count({expression}), count({text_of(column)}) FROM (SELECT * FROM {relation} LIMIT 200000)"
    ).fetchone()
    return row[0] / row[1] if row[1] else 1.0
