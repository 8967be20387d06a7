"""One campaign of the loaded tables, by day: what the quality report and the proposal of windows look at.

Axes: T days from the first to the last, K values of all dimensions.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
from jaxtyping import Bool, Float

from trace_jax.config import ConfigError
from trace_jax.config_io import nearest
from trace_jax.diagnose import reading, synonyms
from trace_jax.diagnose.loading import Loaded, campaigns, main_tables
from trace_jax.diagnose.mapping import Plan

ALL = "all"  # --campaign all: every campaign together
LARGE = 64 << 20  # bytes of a file that is glanced at before it is read to its end
GLANCE = 200_000  # its first rows
ADDITIVE = (*synonyms.COUNTS, *synonyms.AMOUNTS)

Sums = Mapping[str, Float[np.ndarray, " T"]]  # of each metric by day


@dataclass(frozen=True)
class Series:
    """Sums by day; zeros on days without rows.

    Attributes:
        totals: metric -> sums of the campaign; a metric that no file has is absent.
        values: (dimension, value as spelled) -> metric -> sums.
        present: days that have rows.
        siblings: metric -> sums of all other campaigns; empty without any.
        names: of the siblings.
    """

    campaign: str
    first: datetime.date
    present: Bool[np.ndarray, " T"]
    totals: Mapping[str, Float[np.ndarray, " T"]]
    values: Mapping[tuple[str, str], Mapping[str, Float[np.ndarray, " T"]]]
    siblings: Mapping[str, Float[np.ndarray, " T"]] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def days(self) -> int:
        return len(self.present)

    def date(self, t: int) -> datetime.date:
        """Date of day `t`."""
        return self.first + datetime.timedelta(days=int(t))

    @property
    def last(self) -> datetime.date:
        return self.date(self.days - 1)


def choose(loaded: Loaded, asked: str | None) -> str:
    """The campaign to diagnose.

    Raises:
        ConfigError: there are several and none was named, or none of that name.
    """
    found = campaigns(loaded)
    if asked is None:
        if len(found) == 1:
            return next(iter(found))
        raise _several("the tables hold", found)
    if asked in found or asked == ALL:
        return asked
    same = [name for name in found if synonyms.spelling(name) == synonyms.spelling(asked)]
    if len(same) == 1:
        return same[0]
    meant = nearest(asked, found)
    mend = f"did you mean {meant!r}?" if meant else f"the campaigns are {', '.join(list(found)[:8])}"
    raise ConfigError(f"--campaign {asked}: no such campaign: {mend}")


def glance(plans: Sequence[Plan], connection: duckdb.DuckDBPyConnection) -> None:
    """Refuses several campaigns of which none was named by the first rows of large files: reading gigabytes to their
    end for that takes minutes.

    Raises:
        ConfigError: rows with a date at a file's beginning are of several campaigns.
    """
    for plan in main_tables(plans):
        large = plan.source.path.is_file() and plan.source.path.stat().st_size > LARGE
        if not large or not {"campaign", "impressions"} <= plan.fields.keys():
            continue
        name = reading.text_of(plan.fields["campaign"])
        columns = f"coalesce({name}, '(none)') c, {plan.number('impressions')} n, {plan.date.expression} ds"
        rows = connection.execute(
            f"SELECT c, coalesce(sum(n), 0) total FROM (SELECT {columns} FROM {plan.source.relation} LIMIT {GLANCE})"
            " WHERE ds IS NOT NULL GROUP BY c ORDER BY total DESC, c"
        ).fetchall()
        if len(rows) > 1:
            raise _several(f"the first {GLANCE:,} rows of {plan.source.name} hold", dict(rows))


def _several(where: str, found: Mapping[str, float]) -> ConfigError:
    listed = ", ".join(f"{name!r} ({count:,.0f} impressions)" for name, count in list(found.items())[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return ConfigError(
        f"{where} {len(found)} campaigns: {listed}{more}; name one with --campaign, or --campaign all for all of them "
        "together"
    )


def split(loaded: Loaded, campaign: str) -> None:
    """Creates the tables `mine` (cells), `daily` (totals) and `others` (totals of siblings) of a campaign; negative
    numbers (corrections) are 0 in them."""
    for name, source, own in (("mine", "cells", True), ("daily", "totals", True), ("others", "totals", False)):
        keep = "true" if campaign == ALL else "campaign = $name" if own else "campaign <> $name"
        keep = "false" if campaign == ALL and not own else keep
        values = {"name": campaign} if "$name" in keep else {}
        metrics = loaded.metrics if source == "cells" else loaded.total_metrics
        floors = ", ".join(f"CASE WHEN {m} < 0 THEN 0 ELSE {m} END AS {m}" for m in metrics)
        rows = f"SELECT * REPLACE ({floors}) FROM {source} WHERE {keep}"
        loaded.connection.execute(f"CREATE OR REPLACE TABLE {name} AS {rows}", values)


def series(loaded: Loaded, campaign: str) -> Series:
    """The series of a campaign that `split` has been called for.

    Raises:
        ConfigError: rows of a single day.
    """
    first, last = loaded.ask("SELECT min(ds), max(ds) FROM mine")[0]
    days = (last - first).days + 1
    present = np.zeros(days, bool)
    for (day,) in loaded.ask("SELECT DISTINCT ds FROM mine"):
        present[(day - first).days] = True

    def sums(table: str, metrics: tuple[str, ...], keys: str = "") -> dict[tuple, dict[str, np.ndarray]]:
        return _sums(loaded, table, metrics, keys, (first, days))

    totals = sums("daily", loaded.total_metrics).get((), {})
    values: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for dimension in loaded.dimensions:
        metrics = tuple(m for m in loaded.metrics if m in ADDITIVE)
        for (value,), found in sums("mine", metrics, dimension).items():
            values[dimension, value] = found
    names = tuple(r[0] for r in loaded.ask("SELECT DISTINCT campaign FROM others ORDER BY 1"))
    others = sums("others", loaded.total_metrics).get((), {}) if names else {}
    return Series(campaign, first, present, totals, values, others, names)


def _sums(
    loaded: Loaded,
    table: str,
    metrics: Sequence[str],
    keys: str,
    span: tuple[datetime.date, int],
    values: Sequence[object] = (),
) -> dict[tuple, dict[str, np.ndarray]]:
    """Sums (means of levels) by day of a span, for each value of the SQL `keys`; `values`: of its parameters."""
    first, days = span
    chosen = ", ".join(f"sum({m})" if m in ADDITIVE else f"avg({m})" for m in metrics)
    out: dict[tuple, dict[str, np.ndarray]] = {}
    columns = f"{keys}, " if keys else ""
    for row in loaded.ask(f"SELECT {columns}ds, {chosen} FROM {table} GROUP BY ALL", *values) if metrics else ():
        cut = len(row) - len(metrics) - 1
        entry = out.setdefault(tuple(row[:cut]), {m: np.zeros(days) for m in metrics})
        t = (row[cut] - first).days
        if 0 <= t < days:
            for m, value in zip(metrics, row[cut + 1 :], strict=True):
                entry[m][t] = 0.0 if value is None else value
    return out


def parted(loaded: Loaded, found: Series, inside: Mapping[str, Sequence[str]]) -> dict[str, Sums]:
    """Sums by day of "slice", the rows whose values are all among those of `inside`, and of "rest", all others."""
    test = " AND ".join(f"list_contains(?, {dimension})" for dimension in inside)
    metrics = tuple(m for m in loaded.metrics if m in ADDITIVE)
    key = f"CASE WHEN {test} THEN 'slice' ELSE 'rest' END"
    sums = _sums(loaded, "mine", metrics, key, (found.first, found.days), [list(v) for v in inside.values()])
    empty = {m: np.zeros(found.days) for m in metrics}
    return {name: sums.get((name,), empty) for name in ("slice", "rest")}
