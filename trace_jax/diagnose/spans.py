"""Which days of a campaign are looked at: no stray dates, and no more than memory holds by day and value."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from trace_jax.config import ConfigError
from trace_jax.diagnose.loading import Loaded
from trace_jax.diagnose.series import ADDITIVE

APART = 366  # days without rows that part a stray date from the others: a season may be compared with the last one
FEW_DAYS, FEW_ROWS = 4, 0.01  # what is apart and holds fewer days, or a smaller share of the rows, is stray
MOST = 25_000_000  # numbers by day, value and metric: 200 MB
SHORTEST = 56  # days that are looked at at least

Span = tuple[datetime.date, datetime.date]
_TABLES = ("mine", "daily", "others")


def bound(loaded: Loaded, asked: Span | None) -> None:
    """Leaves stray and too early days out of the tables of `series.split`, and says so in the notes of `loaded`.

    Args:
        asked: first and last day of the windows, where the user gave them.

    Raises:
        ConfigError: there are too many values by day, even so.
    """
    _leave_out_strays(loaded, asked)
    ((first, last),) = loaded.ask("SELECT min(ds), max(ds) FROM mine")
    counts = {d: loaded.ask(f"SELECT count(DISTINCT {d}) FROM mine")[0][0] for d in loaded.dimensions}
    values, days = sum(counts.values()), (last - first).days + 1
    row = values * sum(m in ADDITIVE for m in loaded.metrics)
    if row * days <= MOST:
        return
    begin, end = max(first, last - datetime.timedelta(max(MOST // row, 1) - 1)), last
    if asked is not None:
        begin, end = max(first, asked[0]), min(last, asked[1])
    shown = (end - begin).days + 1
    if row * shown > MOST or (asked is None and shown < SHORTEST):
        widest = max(counts, key=counts.__getitem__)
        raise ConfigError(
            f"{counts[widest]:,} values of {widest} on {days:,} days are too many to be looked at by day: give shorter "
            f"--before and --after, or declare another column, or null, as {widest} under columns of a --mapping file"
        )
    _delete(loaded, f"ds NOT BETWEEN DATE '{begin}' AND DATE '{end}'")
    loaded.problems.append(
        f"only {begin} to {end} is looked at: {values:,} values on all {days:,} days would be too much at once"
    )


def _leave_out_strays(loaded: Loaded, asked: Span | None) -> None:
    groups: list[list[tuple[datetime.date, int]]] = []
    for day, rows in loaded.ask("SELECT ds, count(*) FROM mine GROUP BY ds ORDER BY ds"):
        if not groups or (day - groups[-1][-1][0]).days > APART:
            groups.append([])
        groups[-1].append((day, rows))
    sizes = [sum(rows for _, rows in group) for group in groups]
    for group, size in zip(groups, sizes, strict=True):
        first, last = group[0][0], group[-1][0]
        wanted = asked is not None and asked[0] <= last and first <= asked[1]
        if size == max(sizes) or wanted or (len(group) >= FEW_DAYS and size > FEW_ROWS * sum(sizes)):
            continue
        _delete(loaded, f"ds BETWEEN DATE '{first}' AND DATE '{last}'")
        rows = f"{size:,} row{'s' * (size > 1)} of {_days(group)} left out"
        loaded.problems.append(f"{rows}: no other row is within a year (misspelt dates?)")


def _days(group: Sequence[tuple[datetime.date, int]]) -> str:
    first, last = group[0][0], group[-1][0]
    return f"{first}" if first == last else f"{first} to {last}"


def _delete(loaded: Loaded, where: str) -> None:
    for table in _TABLES:
        loaded.connection.execute(f"DELETE FROM {table} WHERE {where}")
