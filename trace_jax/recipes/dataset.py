"""One episode looked at from every side."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from trace_jax.config import ConfigError, RunConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Bar, Progress
from trace_jax.warehouse import splits

BARS = "▁▂▃▄▅▆▇█"
SHOWN_ROWS = 6  # of each table


def _reporter(bar: Bar, interrupt: Interrupt) -> Callable[[int, int], None]:
    """A progress callback that moves the bar and lets Ctrl-C through."""

    def report(done: int, _: int) -> None:
        bar.update(done)
        interrupt.check()

    return report


def inspect(config: RunConfig, split: str, index: int) -> dict[str, Any]:
    """Prints an episode as the agent and the oracle see it.

    Raises:
        ConfigError: the split has no such episode.
    """
    size = getattr(config.data, split)
    if not 0 <= index < size:
        raise ConfigError(f"--index {index}: {split} has episodes 0 to {size - 1}")
    console = Console(file=sys.stdout)
    with Interrupt() as interrupt, Progress().bar(split, size) as bar:
        episodes = splits.load_split(config, split, None, on_progress=_reporter(bar, interrupt))
    record = episodes[index]
    task = AdsEnvironment(episodes, config.environment).task(index)
    truth = {
        "cause": record.cause,
        "driver": " & ".join(f"{a}={v}" for a, v in record.driver) or "-",
        "type": record.type,
        "profile": record.profile,
        "strength": f"{record.strength:.2f}",
        "onset": f"day {record.onset}",
    }
    console.rule(f"{split} {index}: campaign {record.campaign_id}")
    console.print(f"[bold]asked[/bold]  {task.user}", highlight=False)
    console.print("[bold]hidden[/bold] " + "  ".join(f"{k}: {v}" for k, v in truth.items()), highlight=False)
    console.print(_curves(record.visible()["daily_campaign"], record.campaign_id))
    for name, table in record.visible().items():
        console.print(_table(name, table))
    for name, table in record.hidden().items():
        console.print(_table(f"{name} (hidden)", table))
    verdict = {
        name: round(float(getattr(record.verdict, name)[record.position]), 3)
        for name in ("detectability", "confounder", "rival_cause", "rival_slice")
    }
    console.print("[bold]oracle margins[/bold] " + "  ".join(f"{k} {v:+.2f}" for k, v in verdict.items()))
    tables = {name: table.num_rows for name, table in record.visible().items()}
    return {
        "split": split,
        "index": index,
        "campaign_id": record.campaign_id,
        **truth,
        "driver": [{"dimension": a, "value": v} for a, v in record.driver],
        "strength": record.strength,
        "onset": record.onset,
        "prompt": task.user,
        "tables": tables,
        "verdict": verdict,
    }


def _curves(daily: pa.Table, campaign: str) -> Table:
    """Daily totals of the focal campaign as small bar curves, baseline | intervention window."""
    rows = daily.filter(pc.equal(daily["campaign_id"], campaign)).sort_by("ds")
    out = Table(title="daily totals, first half | second half", box=None)
    for heading in ("metric", "curve", "first half", "second half", "change"):
        out.add_column(heading, justify="left" if heading in ("metric", "curve") else "right")
    for metric in ("impressions", "clicks", "orders", "spend", "sales", "page_views", "brand_searches"):
        values = np.asarray(rows[metric].to_pylist(), float)
        half = len(values) // 2
        before, after = values[:half].sum(), values[half:].sum()
        change = f"{after / before - 1:+.1%}" if before > 0 else "-"
        curve = f"{_bars(values, 0, half)}|{_bars(values, half, len(values))}"
        out.add_row(metric, curve, f"{before:,.0f}", f"{after:,.0f}", change)
    return out


def _bars(values: np.ndarray, start: int, stop: int) -> str:
    top = max(values.max(), 1e-9)
    return "".join(BARS[int(v / top * (len(BARS) - 1))] for v in values[start:stop])


def _table(title: str, table: pa.Table) -> Table:
    out = Table(title=f"{title}: {table.num_rows} rows", title_justify="left", caption_justify="left")
    for name in table.column_names:
        out.add_column(name, overflow="fold")
    for row in table.slice(0, SHOWN_ROWS).to_pylist():
        out.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    if table.num_rows > SHOWN_ROWS:
        out.caption = f"... {table.num_rows - SHOWN_ROWS} more"
    return out
