"""What the user's tables cannot tell: causes that look alike in them, what the market may do, and what is open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_jax.diagnose import reading, tables
from trace_jax.diagnose.findings import Diagnosis
from trace_jax.diagnose.loading import Loaded
from trace_jax.diagnose.series import Series
from trace_jax.diagnose.windows import RATES, Windows
from trace_jax.diagnose.words import Words, shared
from trace_jax.simulator.causes import CAUSES

# Changes (logarithms) of the whole campaign that season, promotions, trend and market bring about by themselves: what
# the simulator's shared confounders may add up to over half of a window. Other campaigns would show them, too.
MARKET_VOLUME, MARKET_RATE = 0.4, 0.15
# The metric that a campaign-wide cause is told by, where only other campaigns could tell it from the market.
_TOLD_BY = {"BUDGET_CAP": "impressions", "BID_INCREASE": "cpc", "PAGE_DEGRADATION": "cvr"}


def lookalikes(loaded: Loaded, found: Series) -> dict[str, str]:
    """What looks the same as a cause in these tables, because what would tell is not in them."""
    lacks, out = tables.missing(loaded)["metrics"], {}
    if "budget" in lacks and not found.names:
        out["BUDGET_CAP"] = "a move of the whole market: without a budget or other campaigns both are a fall of volume"
    if "in_stock" in lacks:
        out["OUT_OF_STOCK"] = "PAGE_DEGRADATION: without stock both are a fall of CVR"
    return out


def within_the_market(loaded: Loaded, found: Series, windows: Windows) -> dict[str, str]:
    """Campaign-wide causes whose change is no larger than what markets do by themselves, and why they are not told from
    that: there is no other campaign to compare with. By cause; empty where there is one."""
    if found.names:
        return {}
    held, out = {*loaded.metrics, *loaded.total_metrics}, {}
    masks = tables.masks(found, windows)
    for cause, metric in _TOLD_BY.items():
        if cause == "BUDGET_CAP" and "budget" in held:  # which is met or not, whatever the market does
            continue
        n, d = RATES.get(metric, (metric, None))
        if n not in found.totals or (d is not None and d not in found.totals):
            continue
        below = [m.sum() if d is None else found.totals[d][m].sum() for m in masks]
        levels = [found.totals[n][m].sum() / max(b, 1e-9) for m, b in zip(masks, below, strict=True)]
        if min(levels) <= 0:
            continue
        change = float(np.log(levels[1] / levels[0]))
        if abs(change) <= (MARKET_VOLUME if d is None else MARKET_RATE):
            name = metric.upper() if d is not None else metric
            moved = f"{name} {np.expm1(change):+.0%} is no more than season and market do by themselves"
            out[cause] = f"{moved}, and there is no other campaign to compare with"
    return out


def open_questions(
    loaded: Loaded, diagnosis: Diagnosis, words: Sequence[Words], found: Series, windows: Windows
) -> list[str]:
    """What the tables cannot tell, in the order of what matters most for this answer."""
    lacks, out = tables.missing(loaded), []
    for dimension in lacks["dimensions"]:
        hidden = [c.name for c in CAUSES if dimension in c.drivers and set(c.drivers) <= set(lacks["dimensions"])]
        tail = (
            f"{', '.join(hidden)} cannot be seen" if hidden else "a change inside one of its values is not seen as such"
        )
        out.append(f"no {dimension} in the tables: {tail}")
    for w in words:
        if len({word for word in w.of.values()}) < 2:
            out.append(f"{w.dimension} has a single value: nothing to compare it with")
    if "in_stock" in lacks["metrics"]:
        either = " (a fall of CVR may be either)" if diagnosis.cause == "PAGE_DEGRADATION" else ""
        out.append(f"no stock in the tables: OUT_OF_STOCK and PAGE_DEGRADATION cannot be told apart{either}")
    if "budget" in lacks["metrics"]:
        out.append("no budget in the tables: BUDGET_CAP is only a fall of volume at unchanged rates")
    if "orders" in lacks["metrics"]:
        out.append("no orders in the tables: conversion causes cannot be seen")
    if "spend" in lacks["metrics"] or "spend" not in loaded.metrics:
        out.append("no spend by slice: causes that raise the CPC cannot be told from those that do not")
    if not found.names:
        out.append("no other campaign in the tables: what moved the whole market looks like this campaign's own change")
    out += shared(words)
    unused = [c for p in loaded.plans for c in p.unused]
    if loaded.dimensions and (names := maybe_dimensions(loaded)):
        free = ", ".join(lacks["dimensions"]) or "one that is taken"
        out.append(
            f"{', '.join(names[:6])} may be a dimension and is not looked at: declare it under columns of a --mapping "
            f"file in the place of one that the tables lack ({free})"
        )
    if unused:
        out.append(f"columns not used: {', '.join(dict.fromkeys(unused))}")
    short = [n for n, m in zip(("before", "after"), tables.masks(found, windows), strict=True) if m.sum() < 7]
    if short:
        out.append(f"less than a week {' and '.join(short)}: weekdays cannot be told from a change")
    out.append("the answer is one of twelve causes; what one campaign's history shows together need not be its cause")
    return out


def maybe_dimensions(loaded: Loaded) -> list[str]:
    """Unused columns of words, with as many values as a dimension may have."""
    out = []
    for plan in loaded.plans:
        texts = [column for column in plan.unused if plan.kind(column) == "VARCHAR"]
        found = reading.few_values(loaded.connection, plan.source.relation, texts, first=200_000, most=200)
        out += [c for c in texts if sum(not _is_number(v) for v in found.get(c, ())) >= 2]
    return list(dict.fromkeys(out))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
