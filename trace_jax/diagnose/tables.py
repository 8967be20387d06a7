"""The loaded campaign as the tables that the agent sees (`warehouse.schema`).

The agent splits the window in the middle of its first and last day. So that the middle falls between the user's two
windows whatever their lengths, the earlier one is moved into the past by whole weeks; days in between are missing, as
they may be in the agent's tables. What the user's files lack is NULL (metrics) or an empty text (dimensions), never
made up.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from trace_jax.diagnose import synonyms
from trace_jax.diagnose.loading import Loaded
from trace_jax.diagnose.series import Series
from trace_jax.diagnose.windows import Span, Windows
from trace_jax.diagnose.words import Words
from trace_jax.environments.ads.prompt import ASKED
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES
from trace_jax.warehouse.schema import COLUMNS

CAMPAIGN = "C1"  # the campaign in question; siblings are C2, C3, ...
ADVERTISER = "A1"


def shift_days(before: Span, after: Span) -> int:
    """Days by which the earlier window moves into the past, a multiple of 7, so that the middle parts the two."""
    a, b, c, d = (day.toordinal() for day in (*before, *after))
    shift = 0
    while not (a - shift + d >= 2 * (b - shift) and a - shift + d < 2 * c):
        shift += 7
    return shift


def agent_tables(loaded: Loaded, words: Sequence[Words], windows: Windows) -> dict[str, pa.Table]:
    """The four visible tables. `split` has been called for the campaign."""
    connection = loaded.connection
    shift = shift_days(windows.before, windows.after)
    for table, source in (("shown_cells", "mine"), ("shown_daily", "daily"), ("shown_others", "others")):
        connection.execute(
            f"CREATE OR REPLACE TEMP TABLE {table} AS SELECT * REPLACE"
            " (CASE WHEN ds <= $b THEN ds - $shift::INTEGER ELSE ds END AS ds)"
            f" FROM {source} WHERE ds BETWEEN $a AND $b OR ds BETWEEN $c AND $d",
            {
                "a": windows.before[0],
                "b": windows.before[1],
                "c": windows.after[0],
                "d": windows.after[1],
                "shift": shift,
            },
        )
    campaigns = _campaigns(loaded)
    return {
        "daily_campaign": _select(loaded, "daily_campaign", campaigns),
        "segment_daily": _segments(loaded, words),
        "budget_log": _select(loaded, "budget_log", campaigns),
        "inventory": _select(loaded, "inventory", campaigns),
    }


def _column(name: str, kind: str, have: Sequence[str]) -> str:
    if name == "advertiser_id":
        return f"'{ADVERTISER}' AS advertiser_id"
    if name in ("campaign_id", "ds"):
        return name
    if name == "category":
        return "'' AS category"
    if name not in have:
        return f"NULL::{kind} AS {name}"
    value = f"greatest({name}, 0)" if name in synonyms.METRICS else name
    return f"{f'round({value})' if kind == 'BIGINT' else value}::{kind} AS {name}"


def _campaigns(loaded: Loaded) -> str:
    """SQL of all campaigns' days, under the agent's names."""
    metrics = [m for m in synonyms.METRICS if m in loaded.total_metrics]
    sums = ", ".join(f"{'avg' if m == 'in_stock' else 'sum'}({m}) AS {m}" for m in metrics)
    own = f"SELECT '{CAMPAIGN}' AS campaign_id, ds, {sums} FROM shown_daily GROUP BY ds"
    name = "'C' || (dense_rank() OVER (ORDER BY campaign) + 1) AS campaign_id"
    return f"({own} UNION ALL SELECT {name}, ds, {', '.join(metrics)} FROM shown_others)"


def _select(loaded: Loaded, table: str, relation: str) -> pa.Table:
    columns = ", ".join(_column(n, k, loaded.total_metrics) for n, k in COLUMNS[table].items())
    query = f"SELECT {columns} FROM {relation} ORDER BY campaign_id, ds"
    return loaded.connection.sql(query).to_arrow_table()


def _segments(loaded: Loaded, words: Sequence[Words]) -> pa.Table:
    """A row a day and combination of words, zeros where the export left a row out."""
    connection, joins, keys = loaded.connection, "", []
    for w in words:
        pairs = pa.table({"value": list(w.of), "word": [w.of[v] for v in w.of]})
        connection.register(f"words_{w.dimension}", pairs)
        joins += f" JOIN words_{w.dimension} ON words_{w.dimension}.value = shown_cells.{w.dimension}"
        keys.append(f"words_{w.dimension}.word AS {w.dimension}")
    have = [w.dimension for w in words]
    metrics = [m for m in (*synonyms.COUNTS, *synonyms.AMOUNTS) if m in loaded.metrics]
    sums = ", ".join(f"sum({m}) AS {m}" for m in metrics)
    grid = f"(SELECT DISTINCT {', '.join(have)} FROM summed) CROSS JOIN" if have else ""
    zero = ", ".join(f"coalesce({m}, 0) AS {m}" for m in metrics)
    using = ", ".join(["ds", *have])
    columns = []
    for name, kind in COLUMNS["segment_daily"].items():
        if name in ATTRIBUTE_NAMES:
            columns.append(name if name in have else f"'' AS {name}")
        else:
            columns.append(_column(name, kind, metrics))
    query = (
        f"WITH summed AS (SELECT {', '.join(['ds', *keys, sums])} FROM shown_cells{joins} GROUP BY ALL),"
        f" filled AS (SELECT '{CAMPAIGN}' AS campaign_id, {using}, {zero} FROM {grid} (SELECT DISTINCT ds FROM summed)"
        f" LEFT JOIN summed USING ({using}))"
        f" SELECT {', '.join(columns)} FROM filled ORDER BY {using}"
    )
    try:
        return connection.sql(query).to_arrow_table()
    finally:
        for w in words:
            connection.unregister(f"words_{w.dimension}")


def observed(found: Series, windows: Windows) -> dict[str, tuple[float, float]]:
    """Mean a day of the metrics that the question tells, in either window; zeros for what is not known."""
    out = {}
    for metric in ASKED:
        values = found.totals.get(metric)
        out[metric] = (0.0, 0.0)
        if values is not None:
            out[metric] = tuple(float(values[m].sum() / max(m.sum(), 1)) for m in masks(found, windows))
    return out


def masks(found: Series, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Days with rows of either window."""
    t = np.arange(found.days)

    def within(span: Span) -> np.ndarray:
        low, high = ((day - found.first).days for day in span)
        return (t >= low) & (t <= high) & found.present

    return within(windows.before), within(windows.after)


def shown_days(windows: Windows) -> tuple[datetime.date, datetime.date, datetime.date]:
    """First day, first day of the later window and last day, as the agent's tables have them."""
    moved = datetime.timedelta(days=shift_days(windows.before, windows.after))
    return windows.before[0] - moved, windows.after[0], windows.after[1]


def missing(loaded: Loaded) -> Mapping[str, tuple[str, ...]]:
    """What the agent's tables have and the user's files do not: dimensions, metrics."""
    held = {*loaded.metrics, *loaded.total_metrics}
    return {
        "dimensions": tuple(d for d in synonyms.DIMENSIONS if d not in loaded.dimensions),
        "metrics": tuple(m for m in synonyms.METRICS if m not in held),
    }
