"""What trajectories are about, by environment: the series that a page draws beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax import config_io
from trace_jax.config import RunConfig
from trace_jax.report.episode_facts import COUNTS, inside_slice
from trace_jax.rollout.trajectory import stored
from trace_jax.warehouse.materialize import day
from trace_jax.warehouse.splits import EpisodeRecord, EpisodeSet, kept_splits

Series = dict[str, Any]

NOT_KEPT = "data/ of the run directory does not hold them"


def ads_series(record: EpisodeRecord) -> Series:
    """Daily figures of an episode, small enough for a page to hold hundreds.

    Returns:
        `start` (ISO date of day 0), `days`, `half` (first day of the intervention window), `onset` (first affected day,
        None: nothing happened) and `groups`: by "campaign", "siblings" (all together) and, where the label has one,
        "slice", the series of counts, spend, budget and share in stock; None on days that the export lacks.
    """
    batch, i = record.batch, record.position
    present, inside = np.asarray(batch.day_mask[i]), inside_slice(record)
    active = np.asarray(batch.segment_mask[i])
    cells = {name: np.asarray(getattr(batch, name)[i], np.float64) for name in COUNTS}
    groups = {"campaign": {name: x[:, active].sum(1) for name, x in cells.items()}}
    groups["campaign"] |= {name: np.asarray(getattr(batch, name)[i], np.float64) for name in ("budget", "in_stock")}
    if inside.any():
        groups["slice"] = {name: x[:, inside].sum(1) for name, x in cells.items()}
    if len(batch.sibling_id[i]):
        names = (*COUNTS, "in_stock")
        sums = {name: np.asarray(getattr(batch, f"sibling_{name}")[i], np.float64) for name in names}
        groups["siblings"] = {name: x.mean(0) if name == "in_stock" else x.sum(0) for name, x in sums.items()}
    return {
        "start": day(batch, i, 0).isoformat(),
        "days": len(present),
        "half": len(present) // 2,
        "onset": record.onset,
        "groups": {
            group: {name: _numbers(x, present, 3 if name == "in_stock" else 2) for name, x in named.items()}
            for group, named in groups.items()
        },
    }


def _numbers(values: np.ndarray, present: np.ndarray, decimals: int) -> list[float | int | None]:
    rounded = [round(float(v), decimals) if there else None for v, there in zip(values, present, strict=True)]
    return [int(v) if v is not None and v == int(v) else v for v in rounded]


def _ads(
    config: RunConfig, split: str, wanted: Mapping[int, Mapping[str, Any]], data: Path
) -> tuple[dict[int, Series], str]:
    if config.environment.worlds:
        return {}, "those of targeted worlds are not drawn"
    for episodes in kept_splits(config, split, data):
        if all(_is(episodes, index, labels) for index, labels in wanted.items()):
            return {index: ads_series(episodes[index]) for index in wanted}, ""
    return {}, NOT_KEPT


def _is(episodes: EpisodeSet, index: int, labels: Mapping[str, Any]) -> bool:
    """Whether an episode has the labels of a trajectory. One alone may have them by luck, all of a page may not."""
    if not 0 <= index < len(episodes):
        return False
    record = episodes[index]
    return stored({"cause": record.cause, "type": record.type, "driver": record.driver}) == dict(labels)


_SUBJECTS: dict[str, Callable[..., tuple[dict[int, Series], str]]] = {"ads": _ads}


def series(
    config: RunConfig, split: str, wanted: Mapping[int, Mapping[str, Any]], data: Path
) -> tuple[dict[int, Series], str]:
    """Series of some tasks of a run, from the episodes that the run keeps: making them again would take the time of
    simulating the whole split, and code that changed since then would make others.

    Args:
        wanted: labels by task, as the trajectories have them: they must be those of the episodes.
        data: where the run keeps its episodes.

    Returns:
        By task (see `ads_series`; empty for environments without series), and why there are none (empty: there are, or
        the environment has none).
    """
    subject = _SUBJECTS.get(config.environment.name)
    return subject(config, split, wanted, data) if subject and wanted else ({}, "")


def source(config: RunConfig, split: str) -> str:
    """What the tasks of a split are a function of, as text: runs that agree in it have the same tasks."""
    kept = (
        "data.seed",
        f"data.{split}",
        "data.curriculum",
        "simulator.",
        "search.",
        "environment.name",
        "environment.worlds",
    )
    fields = config_io.flatten(config)
    return repr(sorted((k, repr(v)) for k, v in fields if k.startswith(kept) and k != "simulator.batch"))
