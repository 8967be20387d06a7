"""Episodes as Arrow tables: the four the agent sees, and the three that hold the truth.

Rows are sorted by ids, day and attributes, so their order says nothing about the intervention. Money is in cents.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from trace_jax.simulator.episode import EpisodeBatch, Verdict
from trace_jax.simulator.vocabulary import (
    ATTRIBUTE_NAMES,
    ATTRIBUTES,
    CAUSE_NAMES,
    LEVELS,
    PROFILES,
    SEGMENT_CAUSES,
    VERTICALS,
    episode_type,
)
from trace_jax.warehouse.schema import COLUMNS

EPOCH = datetime.date(2024, 1, 1)  # day 0 of `EpisodeBatch.start_day`
EVIDENCE_METRICS = ("impressions", "ctr", "cvr", "cpc", "in_stock")  # columns of Verdict.evidence_*
FLAT_Z = 2.0  # evidence with a smaller |z| has no direction

_ARROW = {
    "VARCHAR": pa.string(),
    "DATE": pa.date32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
}
_EPOCH_DAYS = (EPOCH - datetime.date(1970, 1, 1)).days


def campaign_name(code: int) -> str:
    """Campaign id as the tables show it."""
    return f"C{int(code)}"


def advertiser_name(code: int) -> str:
    """Advertiser id as the tables show it."""
    return f"A{int(code)}"


def day(batch: EpisodeBatch, i: int, t: int) -> datetime.date:
    """Calendar date of day `t` of episode `i`."""
    return EPOCH + datetime.timedelta(days=int(batch.start_day[i]) + t)


def driver_pairs(batch: EpisodeBatch, i: int) -> tuple[tuple[str, str], ...]:
    """(attribute, value) pairs of the hidden driver slice, in attribute order; empty if the cause has none."""
    pairs = []
    for attribute, value in zip(batch.slice_attributes[i], batch.slice_values[i], strict=True):
        if attribute >= 0:
            name = ATTRIBUTE_NAMES[int(attribute)]
            pairs.append((name, ATTRIBUTES[name][int(value)]))
    return tuple(sorted(pairs))


def visible_tables(batch: EpisodeBatch, i: int) -> dict[str, pa.Table]:
    """The agent-visible tables of episode `i` (host arrays), columns and types as in `schema.COLUMNS`."""
    campaigns = _campaigns(batch, i)
    names = np.array([c["name"] for c in campaigns])
    order = np.argsort(names)
    days = batch.impressions.shape[1]

    def column(key: str) -> np.ndarray:
        return np.concatenate([np.asarray(campaigns[k][key]) for k in order])

    ids = _constant(advertiser_name(batch.advertiser_id[i]), len(names) * days)
    keys = {
        "advertiser_id": ids,
        "campaign_id": _coded(np.repeat(np.arange(len(names)), days), names[order].tolist()),
        "ds": _dates(batch, i, np.tile(np.arange(days), len(names))),
    }
    category = _constant(VERTICALS[int(batch.vertical[i])], len(names) * days)
    return {
        "daily_campaign": _table(
            "daily_campaign",
            {
                **keys,
                "category": category,
                "budget": _money(column("budget")),
                "spend": _money(column("spend")),
                **{k: column(k) for k in ("impressions", "clicks", "orders")},
                "sales": _money(column("sales")),
                **{k: column(k) for k in ("page_views", "brand_searches")},
            },
        ),
        "segment_daily": _segment_daily(batch, i),
        "budget_log": _table(
            "budget_log", {**keys, "budget": _money(column("budget")), "spend": _money(column("spend"))}
        ),
        "inventory": _table(
            "inventory", {**keys, "category": category, "in_stock": np.round(np.float64(column("in_stock")), 4)}
        ),
    }


def _campaigns(batch: EpisodeBatch, i: int) -> list[dict[str, Any]]:
    """Daily series of the campaign in question (summed over segments) and of its siblings."""
    mask = batch.segment_mask[i]
    focal: dict[str, Any] = {"name": campaign_name(batch.campaign_id[i])}
    for key in ("impressions", "clicks", "orders"):
        focal[key] = np.asarray(getattr(batch, key)[i][:, mask], np.int64).sum(1)
    for key in ("spend", "sales"):
        focal[key] = _money(getattr(batch, key)[i][:, mask]).sum(1)  # totals agree with the rounded segment rows
    for key in ("budget", "in_stock", "page_views", "brand_searches"):
        focal[key] = getattr(batch, key)[i]
    siblings = [
        {
            "name": campaign_name(batch.sibling_id[i, s]),
            **{key: getattr(batch, f"sibling_{key}")[i, s] for key in focal if key != "name"},
        }
        for s in range(batch.sibling_id.shape[1])
    ]
    return [focal, *siblings]


def _segment_daily(batch: EpisodeBatch, i: int) -> pa.Table:
    active = np.flatnonzero(batch.segment_mask[i])
    codes = np.asarray(batch.segment_values[i])[active]
    ranks = np.stack([_RANKS[name][codes[:, a]] for a, name in enumerate(ATTRIBUTE_NAMES)])
    order = np.lexsort(ranks[::-1])  # by the spelling of the values, first attribute first
    active, codes = active[order], codes[order]
    days, count = batch.impressions.shape[1], len(active)

    def cells(key: str) -> np.ndarray:
        return np.asarray(getattr(batch, key)[i])[:, active].reshape(-1)

    total = days * count
    columns: dict[str, Any] = {
        "advertiser_id": _constant(advertiser_name(batch.advertiser_id[i]), total),
        "campaign_id": _constant(campaign_name(batch.campaign_id[i]), total),
        "ds": _dates(batch, i, np.repeat(np.arange(days), count)),
        "category": _constant(VERTICALS[int(batch.vertical[i])], total),
    }
    for a, name in enumerate(ATTRIBUTE_NAMES):
        columns[name] = _coded(np.tile(codes[:, a], days), list(ATTRIBUTES[name]))
    columns |= {key: cells(key) for key in ("impressions", "clicks", "orders")}
    columns |= {key: _money(cells(key)) for key in ("spend", "sales")}
    return _table("segment_daily", columns)


def hidden_tables(batch: EpisodeBatch, verdict: Verdict, i: int) -> dict[str, pa.Table]:
    """The truth about episode `i` and what the verifier found. Never given to an agent's database."""
    cause = CAUSE_NAMES[int(batch.cause[i])]
    driver = driver_pairs(batch, i)
    name = campaign_name(batch.campaign_id[i])
    segment = " & ".join(f"{a}={v}" for a, v in driver)
    episode = {
        "campaign_id": name,
        "cause": cause,
        "level": LEVELS[cause],
        "type": episode_type(cause, len(driver)),
        "segments": segment,
        "dimensions": len(driver),
        "strength": float(batch.strength[i]),
        "profile": PROFILES[int(batch.profile[i])],
        "onset": day(batch, i, int(batch.onset[i])),
    }
    evidence = []
    for metric, z, change in zip(EVIDENCE_METRICS, verdict.evidence_z[i], verdict.evidence_change[i], strict=True):
        table = "inventory" if metric == "in_stock" else "segment_daily" if driver else "daily_campaign"
        direction = "flat" if not abs(z) >= FLAT_Z else "up" if z > 0 else "down"
        evidence.append(
            {
                "campaign_id": name,
                "table_name": table,
                "metric": metric,
                "segment": segment if table == "segment_daily" and cause in SEGMENT_CAUSES else "",
                "direction": direction,
                "change": float(np.expm1(change)),
                "z": float(z),
            }
        )
    validation = [
        {"campaign_id": name, "check_name": check, "margin": float(margin), "passed": bool(margin > 0)}
        for check in ("detectability", "confounder", "rival_cause", "rival_slice")
        for margin in [getattr(verdict, check)[i]]
    ]
    rows = {"gt_episode": [episode], "gt_evidence": evidence, "gt_validation": validation}
    return {
        table: _table(table, {column: [row[column] for row in content] for column in COLUMNS[table]})
        for table, content in rows.items()
    }


_RANKS = {name: np.argsort(np.argsort(np.array(values))) for name, values in ATTRIBUTES.items()}


def _table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    arrays = []
    for column, kind in COLUMNS[name].items():
        values = columns[column]
        if not isinstance(values, pa.Array):
            if kind == "BIGINT":
                values = np.asarray(values, np.int64)  # exact: counts pass 2^24, where float32 ends
            values = pa.array(values, _ARROW[kind])
        arrays.append(values)
    return pa.Table.from_arrays(arrays, names=list(COLUMNS[name]))


def _money(values: Any) -> np.ndarray:
    return np.round(np.asarray(values, np.float64), 2)


def _dates(batch: EpisodeBatch, i: int, offsets: np.ndarray) -> pa.Array:
    days = _EPOCH_DAYS + int(batch.start_day[i]) + offsets
    return pa.array(days.astype(np.int32), pa.int32()).cast(pa.date32())


def _coded(codes: np.ndarray, values: list[str]) -> pa.Array:
    # int32: the tables of a data set hold the ids of thousands of episodes in one dictionary.
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(values))


def _constant(value: str, count: int) -> pa.Array:
    return _coded(np.zeros(count, np.int32), [value])
