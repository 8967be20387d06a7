"""Which of the user's columns means what: declared (`declared.py`), or guessed from names and values and shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import yaml

from trace_jax.config import ConfigError
from trace_jax.config_io import nearest
from trace_jax.diagnose import reading, synonyms
from trace_jax.diagnose.declared import Declared
from trace_jax.diagnose.reading import DateFormat
from trace_jax.diagnose.sources import Source

FEW_VALUES = 60  # a column with more distinct values is no dimension that can be told by its values


@dataclass(frozen=True)
class Plan:
    """How one table is read.

    Attributes:
        fields: field -> column.
        currency: column of the currency of a row.
        derived: ratios, computed anew. unused: what nothing is known of.
        by_values: dimensions told by the column's values, not by its name.
    """

    source: Source
    fields: Mapping[str, str]
    date: DateFormat
    decimal: str
    currency: str | None
    derived: tuple[str, ...]
    unused: tuple[str, ...]
    by_values: tuple[str, ...] = ()

    @property
    def dimensions(self) -> tuple[str, ...]:
        return tuple(d for d in synonyms.DIMENSIONS if d in self.fields)

    def kind(self, name: str) -> str:
        """DuckDB type of a column."""
        return self.source.types[self.source.columns.index(name)]

    def number(self, metric: str) -> str:
        """SQL of a metric as DOUBLE."""
        column = self.fields[metric]
        factor = synonyms.FACTORS.get(synonyms.squash(column), 1.0)
        return reading.number(column, self.kind(column), self.decimal, factor)


def plans(
    sources: Sequence[Source], declared: Declared, connection: duckdb.DuckDBPyConnection
) -> tuple[list[Plan], list[tuple[str, bool]]]:
    """How each table is read, and in words which are left out because they have no dates; of each whether it is a file
    that the user named.

    Raises:
        ConfigError: a declared column is in no file, or no file has a column of dates.
    """
    columns = {c for s in sources for c in s.columns}
    for name, column in declared.columns.items():
        if column is not None and column not in columns:
            meant = nearest(column, columns)
            mend = f"did you mean {meant!r}?" if meant else f"the columns are {_some(sorted(columns))}"
            raise ConfigError(f"columns.{name}: no column {column!r}: {mend}")
    found = [(s, _plan(s, declared, connection)) for s in sources]
    made = [plan for _, plan in found if plan is not None]
    if not made:
        for source in sources:
            named = [c for c in source.columns if (synonyms.field_of(c) or ("",))[0] == "date"]
            column = next((c for c in (declared.columns.get("date"), *named) if c in source.columns), None)
            if column is not None and (example := reading.example(connection, source.relation, column)):
                raise ConfigError(
                    f"{source.path}: {column!r} holds no dates that can be read, e.g. {example!r}: say how they are "
                    "written with date_format in a --mapping file, such as '%d/%m/%Y', or name another column"
                )
        all_columns = _some([c for s in sources for c in s.columns])
        raise ConfigError(
            f"{sources[0].path} has no column of dates among {all_columns}: name it as columns.date in a --mapping file"
        )
    left = [(f"{s.name} has no column of dates and is left out", not s.attach) for s, plan in found if plan is None]
    return made, left


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _plan(source: Source, declared: Declared, connection: duckdb.DuckDBPyConnection) -> Plan | None:
    ranked: dict[str, list[tuple[int, str]]] = {}
    said = {column for column in declared.columns.values() if column is not None}
    # What the mapping names in another file's words is guessed here: files may call one thing by two names.
    here = {name for name, column in declared.columns.items() if column is None or column in source.columns}
    for column in source.columns:
        known = synonyms.field_of(column)
        if known is not None and known[0] not in here and column not in said:
            ranked.setdefault(known[0], []).append((known[1], column))
    fields = {name: column for name, column in declared.columns.items() if column in source.columns}
    dates = [fields["date"]] if "date" in fields else [c for _, c in sorted(ranked.get("date", []))]
    if "date" not in here:  # a column of dates under a name of its own
        dates += [
            c for c, t in zip(source.columns, source.types, strict=True) if t == "DATE" or t.startswith("TIMESTAMP")
        ]
    date = None
    for column in dict.fromkeys(dates):
        kind = source.types[source.columns.index(column)]
        date = reading.date_format(
            connection, source.relation, column, kind, form=declared.date_format, zone=declared.timezone
        )
        if date is not None:
            fields["date"] = column
            break
    if date is None:
        return None
    fields |= {name: min(found)[1] for name, found in ranked.items() if name != "date" and name not in fields}
    rest = [c for c in source.columns if c not in fields.values()]
    derived = tuple(c for c in rest if synonyms.is_derived(c))
    currency = next((c for c in rest if synonyms.is_currency(c)), None)
    rest = [c for c in rest if c not in derived and c != currency and synonyms.field_of(c) is None]
    by_values = _by_values(source, rest, [d for d in synonyms.DIMENSIONS if d not in {*fields, *here}], connection)
    fields |= by_values
    numbers = [fields[m] for m in synonyms.METRICS if m in fields]
    text = [c for c in numbers if source.types[source.columns.index(c)] == "VARCHAR"]
    decimal = declared.decimal or reading.decimal_mark(connection, source.relation, text)
    used = {*fields.values(), *derived, currency}
    plan = Plan(
        source,
        fields,
        date,
        decimal,
        currency,
        derived,
        tuple(c for c in source.columns if c not in used),
        tuple(by_values),
    )
    return _readable(_without_numbers(plan, declared, connection), declared, connection)


def _without_numbers(plan: Plan, declared: Declared, connection: duckdb.DuckDBPyConnection) -> Plan:
    """The plan without guessed placements and devices that are numbers, as the average position of a search report."""
    fields = dict(plan.fields)
    for dimension in ("placement", "device"):
        if dimension in fields and dimension not in declared.columns:
            value = reading.number(fields[dimension], plan.kind(fields[dimension]), plan.decimal)
            if reading.readable_share(connection, plan.source.relation, fields[dimension], value) >= reading.READABLE:
                del fields[dimension]
    dropped = tuple(c for f, c in plan.fields.items() if f not in fields)
    return dataclasses.replace(plan, fields=fields, unused=plan.unused + dropped)


def _by_values(
    source: Source, columns: Sequence[str], dimensions: Sequence[str], connection: duckdb.DuckDBPyConnection
) -> dict[str, str]:
    """Dimensions among columns of unknown names: those whose values mostly are known ones of the dimension."""
    found: dict[str, str] = {}
    texts = [c for c in columns if source.types[source.columns.index(c)] == "VARCHAR"] if dimensions else []
    few = reading.few_values(connection, source.relation, texts, first=50_000, most=FEW_VALUES)
    for column, values in few.items():
        for dimension in dimensions if len(values) >= 2 else ():
            known = {w for v in values if (w := synonyms.word_of(dimension, v)) is not None}
            if dimension not in found and len(known) >= 2 and 2 * len(known) >= len(values):
                found[dimension] = column
                break
    return found


def _readable(plan: Plan, declared: Declared, connection: duckdb.DuckDBPyConnection) -> Plan:
    """The plan without guessed columns of numbers that hold none. ConfigError if the user declared such a one."""
    fields = dict(plan.fields)
    for metric in synonyms.METRICS:
        if metric not in fields:
            continue
        share = reading.readable_share(connection, plan.source.relation, fields[metric], plan.number(metric))
        if share < reading.READABLE:
            if metric in declared.columns:
                raise ConfigError(f"columns.{metric}: {fields[metric]!r} of {plan.source.name} holds no numbers")
            del fields[metric]
    dropped = tuple(c for f, c in plan.fields.items() if f not in fields)
    return dataclasses.replace(plan, fields=fields, unused=plan.unused + dropped)


def rows(plan: Plan) -> list[tuple[str, str, str]]:
    """What people confirm: (field, column, how it is read), and what is left out."""
    shown = []
    for name in synonyms.FIELDS:
        if name not in plan.fields:
            continue
        how = "told by its values" if name in plan.by_values else ""
        if name == "date":
            how = reading.NUMBERED.get(plan.date.form, plan.date.form)
        elif name in synonyms.METRICS and plan.decimal == "," and plan.kind(plan.fields[name]) == "VARCHAR":
            how = "decimal comma"
        shown.append((name, plan.fields[name], how))
    if plan.currency is not None:
        shown.append(("currency", plan.currency, ""))
    if plan.derived:
        shown.append(("(computed anew)", ", ".join(plan.derived), "ratios"))
    if plan.unused:
        shown.append(("(not used)", ", ".join(plan.unused), ""))
    return shown


def template(made: Sequence[Plan], values: Mapping[str, Mapping[str, str]], declared: Declared) -> str:
    """A mapping file with what was guessed, to be corrected."""
    columns: dict[str, str] = {}
    for plan in made:
        columns |= {k: v for k, v in plan.fields.items() if k not in columns}
    body: dict[str, Any] = {"columns": {f: columns[f] for f in synonyms.FIELDS if f in columns}}
    body["values"] = {d: dict(words) for d, words in values.items() if words}
    forms = {p.date.form for p in made if p.date.form and p.date.form not in reading.NUMBERED}
    marks = {p.decimal for p in made}
    form, mark = (found.pop() if len(found) == 1 else "" for found in (forms, marks))
    body |= {"date_format": form, "timezone": declared.timezone, "decimal": mark}
    note = "# What trace-jax diagnose guessed. Correct it and pass it with --mapping; see docs/diagnose.md.\n"
    if unused := list(dict.fromkeys(c for plan in made for c in plan.unused)):
        free = ", ".join(d for d in synonyms.DIMENSIONS if d not in columns) or "none"
        note += f"# Not used: {', '.join(' '.join(c.split()) for c in unused)}.\n"
        note += f"# A column becomes a dimension where it is named under columns; free are: {free}.\n"
    return note + yaml.safe_dump(body, sort_keys=False, allow_unicode=True)
