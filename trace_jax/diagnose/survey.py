"""What one pass over a table tells before its rows are read: currencies, unreadable cells, impossible numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import duckdb

from trace_jax.config import ConfigError
from trace_jax.diagnose import reading, synonyms
from trace_jax.diagnose.mapping import Plan
from trace_jax.diagnose.sources import literal

MANY_UNDATED, FOOTERS = 0.01, 3  # share of the rows without a date that casts doubt; so many may always be footers
TURNED = {"impressions": 0.1, "clicks": 0.1}  # share of negative sums that is no longer corrections; 0.5 of others
LARGEST = 1e15  # what a column may add up to: above, whole numbers are no longer told apart
_CODES = ("USD", "EUR", "GBP", "JPY", "CAD", "AUD", "INR")


@dataclass(frozen=True)
class Survey:
    """Of one table.

    Attributes:
        currencies: of its amounts, by codes, signs and names of columns.
        unreadable: metric -> number of cells of rows with a date that are no numbers, and one of them.
        rows: all. undated: without a date that can be read, `example` is one of their cells. misread: of these, those
            whose cell has digits.
    """

    currencies: frozenset[str] = frozenset()
    unreadable: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    rows: int = 0
    undated: int = 0
    misread: int = 0
    example: str = ""

    @property
    def many_undated(self) -> bool:
        """Whether so many rows are lost that the answer is doubtful."""
        few = MANY_UNDATED * self.rows
        return self.misread > few or self.undated > max(few, FOOTERS)

    def undated_in_words(self, name: str) -> str:
        """How many rows of a table are lost; "" for none."""
        if not self.undated:
            return ""
        kind = "misspelt dates?" if self.misread else "totals, footers?"
        why = f"{kind} e.g. {_short(self.example)!r}" if self.example else "the cell is empty"
        return f"{name}: {self.undated:,} of {self.rows:,} rows without a date left out ({why})"


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def look(plan: Plan, connection: duckdb.DuckDBPyConnection) -> Survey:
    """Surveys a table. ConfigError if a column of numbers adds up to more than there can be."""
    metrics = [m for m in synonyms.METRICS if m in plan.fields]
    amounts = [m for m in synonyms.AMOUNTS if m in plan.fields]
    day, cell = f"cell_day({plan.date.expression})", reading.text_of(plan.fields["date"])
    undated = f"FILTER ({day} IS NULL)"
    misread = f"FILTER ({day} IS NULL AND regexp_matches({cell}, '[0-9]'))"
    example = f"coalesce(any_value({cell}) {misread}, any_value({cell}) {undated})"
    asked = ["count(*)", f"count(*) {undated}", f"count(*) {misread}", example]
    start = len(asked)
    for metric in metrics:
        cell, value = reading.text_of(plan.fields[metric]), plan.number(metric)
        lost, dated = f"FILTER ({day} IS NOT NULL AND {value} IS NULL AND {cell} IS NOT NULL)", f"{day} IS NOT NULL"
        asked += [f"count(*) {lost}", f"any_value({cell}) {lost}"]
        asked += [f"sum(abs({value})) FILTER ({dated})", f"max_by({cell}, abs({value})) FILTER ({dated})"]
    cut = len(asked)
    found = set()
    if amounts and plan.currency is not None:
        asked.append(f"list(DISTINCT upper({reading.text_of(plan.currency)}))")
    elif amounts:
        for metric in amounts:
            column = plan.fields[metric].upper()
            named = {c for c in _CODES if f"({c})" in column}
            found |= named
            if not named and plan.kind(plan.fields[metric]) == "VARCHAR":
                cell = reading.text_of(plan.fields[metric])
                sign = f"trim(regexp_extract({cell}, '([^0-9.,()%+\\s-]+)', 1))"
                known = ", ".join(literal(s) for s in synonyms.CURRENCY_SIGNS)
                asked.append(f"list(DISTINCT {sign}) FILTER ({sign} IN ({known}) OR {sign} SIMILAR TO '[A-Z]{{3}}')")
    row = connection.execute(f"SELECT {', '.join(asked)} FROM {plan.source.relation}").fetchone()
    for signs in row[cut:]:
        found |= {synonyms.CURRENCY_SIGNS.get(s, s) for s in signs or () if s is not None}
    unreadable = {}
    for number, metric in enumerate(metrics):
        count, example, total, largest = row[start + 4 * number : start + 4 * number + 4]
        if total is not None and total > LARGEST:
            raise ConfigError(
                f"{plan.source.path}: {plan.fields[metric]!r} adds up to more than {LARGEST:.0e}, its largest cell is "
                f"{_short(largest)!r}: correct it, or name another column in a --mapping file"
            )
        if count and plan.kind(plan.fields[metric]) == "VARCHAR":
            unreadable[metric] = count, example
    return Survey(frozenset(found), unreadable, *row[: start - 1], row[start - 1] or "")


def check_signs(
    connection: duckdb.DuckDBPyConnection, table: str, metrics: Sequence[str], plans: Sequence[Plan]
) -> None:
    """Refuses columns whose sign is turned; some negative rows among others are corrections.

    Raises:
        ConfigError: of the rows of `table` that are not 0, more than `TURNED` are negative.
    """
    for metric in metrics:
        negative, there = connection.execute(
            f"SELECT count(*) FILTER ({metric} < 0), count(*) FILTER ({metric} <> 0) FROM {table}"
        ).fetchone()
        if negative > TURNED.get(metric, 0.5) * there:
            plan = next(p for p in plans if metric in p.fields)
            mend = (
                "" if metric in TURNED else f", or leave it out with `columns: {{{metric}: null}}` in a --mapping file"
            )
            raise ConfigError(
                f"{plan.source.path}: {plan.fields[metric]!r} is negative in {negative:,} of {there:,} sums by day and "
                f"slice: correct its sign in the export{mend}"
            )
