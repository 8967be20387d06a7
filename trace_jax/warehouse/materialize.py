"""Episodes as Arrow tables: the four the agent sees, and the three that hold the truth.

One implementation for one episode and for thousands: the tables of a chunk are built column by column in NumPy, and an
episode is a chunk of one. Rows are sorted by ids, day and attributes, so their order says nothing about the
intervention. Money is in cents. Days that an advertiser's export lacks (`day_mask` false) are in no table.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from trace_jax.simulator.causes import CAUSE_NAMES, EPISODE_TYPES, LEVELS, NO_SIGNAL, SEGMENT_CAUSES, episode_type
from trace_jax.simulator.episode import NOT_COMPARED, EpisodeBatch, Verdict
from trace_jax.simulator.slices import SLICES, named, slice_name
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTE_SIZES, ATTRIBUTES, PROFILES, VERTICALS
from trace_jax.warehouse.schema import COLUMNS

EPOCH = datetime.date(2024, 1, 1)  # day 0 of `EpisodeBatch.start_day`
EVIDENCE_METRICS = ("impressions", "ctr", "cvr", "cpc", "in_stock")  # columns of Verdict.evidence_*
FLAT_Z = 2.0  # evidence with a smaller |z| has no direction
SUMMARY_CHECKS = ("detectability", "confounder", "rival_cause", "rival_slice")  # fields of Verdict
CHECKS = (
    *SUMMARY_CHECKS,
    *(f"rival_cause:{name}" for name in CAUSE_NAMES),
    *(f"rival_slice:{slice_name(k)}" for k in range(SLICES)),
)

_COUNTS = ("impressions", "clicks", "orders")
_AMOUNTS = ("spend", "sales")
_LEVELS = tuple(dict.fromkeys(LEVELS.values()))
_LEVEL = np.array([_LEVELS.index(LEVELS[name]) for name in CAUSE_NAMES])
_TYPE = np.array([[EPISODE_TYPES.index(episode_type(name, d)) for d in range(3)] for name in CAUSE_NAMES])
_SEGMENT_CODES = [CAUSE_NAMES.index(name) for name in SEGMENT_CAUSES]
_ARROW = {
    "VARCHAR": pa.string(),
    "DATE": pa.date32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
}
_EPOCH_DAYS = (EPOCH - datetime.date(1970, 1, 1)).days
# Place of each value among the spellings of its attribute, [attributes, most values].
_RANKS = np.zeros((len(ATTRIBUTES), max(ATTRIBUTE_SIZES)), np.int64)
for _a, _values in enumerate(ATTRIBUTES.values()):
    _RANKS[_a, : len(_values)] = np.argsort(np.argsort(np.array(_values)))


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
    return _pairs(batch.slice_attributes[i], batch.slice_values[i])


def visible_tables(batch: EpisodeBatch, i: int) -> dict[str, pa.Table]:
    """The agent-visible tables of episode `i` (host arrays), columns and types as in `schema.COLUMNS`."""
    return visible_chunk(batch, np.array([i]))


def hidden_tables(batch: EpisodeBatch, verdict: Verdict, i: int) -> dict[str, pa.Table]:
    """The truth about episode `i` and what the verifier found. Never given to an agent's database."""
    return hidden_chunk(batch, verdict, np.array([i]))


def visible_chunk(batch: EpisodeBatch, rows: np.ndarray) -> dict[str, pa.Table]:
    """The agent-visible tables of the episodes `rows`, one episode's rows after the other's."""
    campaign, segment = _campaign_columns(batch, rows), _segment_columns(batch, rows)
    return {
        "daily_campaign": _table("daily_campaign", campaign),
        "segment_daily": _table("segment_daily", segment),
        "budget_log": _table("budget_log", campaign),
        "inventory": _table("inventory", campaign),
    }


def _campaign_columns(batch: EpisodeBatch, rows: np.ndarray) -> dict[str, Any]:
    """Daily series of each campaign in question (summed over segments) and of its siblings. Axes: episode, campaign in
    the order of the names, day; then flat, without the missing days."""
    names, code = _names("C", np.concatenate([batch.campaign_id[rows, None], batch.sibling_id[rows]], 1))
    order = np.argsort(code, axis=1)  # codes are in the order of the names
    shape = (*code.shape, batch.impressions.shape[1])
    there = np.broadcast_to(batch.day_mask[rows][:, None], shape).reshape(-1)
    every = bool(there.all())

    def flat(values: np.ndarray) -> np.ndarray:
        values = np.broadcast_to(values, shape).reshape(-1)
        return values if every else values[there]

    def series(key: str) -> np.ndarray:
        own = getattr(batch, key)[rows]
        if key in _COUNTS:
            own = np.where(batch.segment_mask[rows][:, None], own, 0).sum(-1, dtype=np.int64)
        elif key in _AMOUNTS:  # totals agree with the rounded rows of the segments, to the cent
            own = np.where(batch.segment_mask[rows][:, None], np.rint(np.float64(own) * 100), 0).sum(-1) / 100
        both = np.concatenate([own[:, None], getattr(batch, f"sibling_{key}")[rows]], 1)
        return flat(np.take_along_axis(both, order[:, :, None], 1))

    advertisers, advertiser = _names("A", batch.advertiser_id[rows])
    return {
        "advertiser_id": _named(flat(advertiser[:, None, None]), advertisers),
        "campaign_id": _named(flat(np.take_along_axis(code, order, 1)[:, :, None]), names),
        "ds": _dates(flat((batch.start_day[rows][:, None] + np.arange(shape[2]))[:, None])),
        "category": _coded(flat(batch.vertical[rows][:, None, None]), VERTICALS),
        "budget": _money(series("budget")),
        **{key: series(key) for key in (*_COUNTS, "page_views", "brand_searches")},
        **{key: _money(series(key)) for key in _AMOUNTS},
        "in_stock": np.round(np.float64(series("in_stock")), 4),
    }


def _segment_columns(batch: EpisodeBatch, rows: np.ndarray) -> dict[str, Any]:
    """Axes: episode, day, segment in the order of its values' spelling; then flat, without missing days and padding."""
    episodes, days, segments = len(rows), *batch.impressions.shape[1:]
    values, active = batch.segment_values[rows], batch.segment_mask[rows]
    place = np.zeros(active.shape, np.int64)
    for a, size in enumerate(ATTRIBUTE_SIZES):  # first attribute first
        place = place * size + _RANKS[a][values[:, :, a]]
    order = np.argsort(np.where(active, place, np.iinfo(np.int64).max), axis=1, kind="stable")
    active = np.take_along_axis(active, order, 1)
    there = np.flatnonzero(batch.day_mask[rows][:, :, None] & active[:, None])
    day_of, segment = np.divmod(there, segments)
    episode, t = np.divmod(day_of, days)
    column = order.reshape(-1)[episode * segments + segment]
    cell = (np.asarray(rows)[episode] * days + t) * segments + column
    owner = episode * segments + column
    names, code = _names("C", batch.campaign_id[rows])
    advertisers, advertiser = _names("A", batch.advertiser_id[rows])
    values = values.astype(np.int8)
    return {
        "advertiser_id": _named(advertiser[episode], advertisers),
        "campaign_id": _named(code[episode], names),
        "ds": _dates((batch.start_day[rows][:, None] + np.arange(days)).reshape(episodes * days)[day_of]),
        "category": _coded(np.asarray(batch.vertical)[rows][episode], VERTICALS),
        **{
            name: _coded(np.ascontiguousarray(values[:, :, a]).reshape(-1)[owner], ATTRIBUTES[name])
            for a, name in enumerate(ATTRIBUTE_NAMES)
        },
        **{key: getattr(batch, key).reshape(-1)[cell] for key in _COUNTS},
        **{key: _money(getattr(batch, key).reshape(-1)[cell]) for key in _AMOUNTS},
    }


def hidden_chunk(batch: EpisodeBatch, verdict: Verdict, rows: np.ndarray) -> dict[str, pa.Table]:
    """The truth about the episodes `rows` and what the verifier found: one row an episode, one a piece of evidence, one
    a check."""
    names, code = _names("C", batch.campaign_id[rows])
    cause = np.asarray(batch.cause)[rows]
    segment, nothing = np.isin(cause, _SEGMENT_CODES), cause == CAUSE_NAMES.index(NO_SIGNAL)
    slices = np.concatenate([batch.slice_attributes[rows], batch.slice_values[rows]], 1)
    labels, label = np.unique(slices, axis=0, return_inverse=True)
    label = label.reshape(-1)
    texts = [" & ".join(f"{a}={v}" for a, v in _pairs(row[:2], row[2:])) for row in labels]
    spellings = list(dict.fromkeys(["", *texts]))
    text = np.array([spellings.index(t) for t in texts])[label]
    dimensions = (slices[:, :2] >= 0).sum(1)
    episode = {
        "campaign_id": _named(code, names),
        "cause": _coded(cause, CAUSE_NAMES),
        "level": _coded(_LEVEL[cause], _LEVELS),
        "type": _coded(_TYPE[cause, dimensions], EPISODE_TYPES),
        "segments": _named(text, spellings),
        "dimensions": dimensions,
        # Where nothing happened there is nothing to describe, though the arrays hold draws.
        "strength": pa.array(np.float64(batch.strength[rows]), mask=nothing),
        "profile": _coded(batch.profile[rows], PROFILES, nothing),
        "onset": _dates(batch.start_day[rows] + batch.onset[rows], nothing),
    }
    tables = ("daily_campaign", "segment_daily", "inventory")
    stock = np.array([metric == "in_stock" for metric in EVIDENCE_METRICS])
    table = np.where(stock, 2, (dimensions > 0)[:, None])
    z = np.float64(verdict.evidence_z[rows])
    direction = np.where(np.abs(z) >= FLAT_Z, np.where(z > 0, 1, 2), 0)
    count = len(EVIDENCE_METRICS)
    evidence = {
        "campaign_id": _named(np.repeat(code, count), names),
        "table_name": _coded(table.reshape(-1), tables),
        "metric": _coded(np.tile(np.arange(count), len(rows)), EVIDENCE_METRICS),
        "segment": _named(np.where((table == 1) & segment[:, None], text[:, None], 0).reshape(-1), spellings),
        "direction": _coded(direction.reshape(-1), ("flat", "up", "down")),
        "change": np.expm1(np.float64(verdict.evidence_change[rows])).reshape(-1),
        "z": z.reshape(-1),
    }
    summary = np.stack([getattr(verdict, check)[rows] for check in SUMMARY_CHECKS], 1)
    margin = np.concatenate([summary, verdict.cause_margins[rows], verdict.slice_margins[rows]], 1)
    own_slice = named(np.asarray(batch.slice_attributes[rows]), np.asarray(batch.slice_values[rows]))
    rivals = [
        segment[:, None] | (np.array(SUMMARY_CHECKS) != "rival_slice"),  # other causes have no slice to rival
        np.arange(len(CAUSE_NAMES)) != cause[:, None],
        segment[:, None] & ~own_slice & (verdict.slice_margins[rows] < NOT_COMPARED),
    ]
    which, check = np.nonzero(np.concatenate(rivals, 1))
    validation = {
        "campaign_id": _named(code[which], names),
        "check_name": _coded(check, CHECKS),
        "margin": margin[which, check],
        "passed": margin[which, check] > 0,
    }
    return {
        name: _table(name, columns)
        for name, columns in (("gt_episode", episode), ("gt_evidence", evidence), ("gt_validation", validation))
    }


def _table(name: str, columns: Mapping[str, Any]) -> pa.Table:
    arrays = []
    for column, kind in COLUMNS[name].items():
        values = columns[column]
        if not isinstance(values, pa.Array):
            if kind in ("BIGINT", "DOUBLE"):
                # exact: counts pass 2^24, where float32 ends
                values = np.asarray(values, np.int64 if kind == "BIGINT" else np.float64)
            values = pa.array(values, _ARROW[kind])
        arrays.append(values)
    return pa.Table.from_arrays(arrays, names=list(COLUMNS[name]))


def _pairs(attributes: np.ndarray, values: np.ndarray) -> tuple[tuple[str, str], ...]:
    named = [(ATTRIBUTE_NAMES[int(a)], int(v)) for a, v in zip(attributes, values, strict=True) if a >= 0]
    return tuple(sorted((name, ATTRIBUTES[name][value]) for name, value in named))


def _names(prefix: str, ids: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The distinct names in alphabetical order, and each id's place among them."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    names = np.array([f"{prefix}{i}" for i in distinct.tolist()])
    order = np.argsort(names)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return names[order].tolist(), rank[inverse.reshape(np.shape(ids))]


def _money(values: Any) -> np.ndarray:
    return np.round(np.asarray(values, np.float64), 2)


def _dates(days: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Dates from days since EPOCH; NULL where `missing`."""
    return pa.array((_EPOCH_DAYS + days).astype(np.int32), pa.int32(), mask=missing).cast(pa.date32())


def _coded(codes: np.ndarray, values: tuple[str, ...], missing: np.ndarray | None = None) -> pa.Array:
    """Codes of a fixed vocabulary; NULL where `missing`."""
    kind = np.int8 if len(values) <= 127 else np.int16
    return pa.DictionaryArray.from_arrays(pa.array(np.asarray(codes).astype(kind), mask=missing), pa.array(values))


def _named(codes: np.ndarray, values: list[str]) -> pa.Array:
    """Codes of the names that occur. Few or thousands, the type is the same: parts of a set are read together."""
    return pa.DictionaryArray.from_arrays(pa.array(np.asarray(codes, np.int32)), pa.array(values, pa.string()))
