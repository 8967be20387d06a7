"""Case 14 of data: the same events in days of UTC and of Los Angeles. Tables keep dates; the diagnosis stays."""

import datetime

import numpy as np
import pytest

from trace_jax.config import EnvironmentConfig, SimulatorConfig
from trace_jax.environments.ads import analyst
from trace_jax.environments.ads.answer import parse_lenient
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.warehouse.database import EpisodeDatabase
from trace_jax.warehouse.schema import VISIBLE_TABLES
from trace_jax.warehouse.splits import EpisodeSet

COUNTS = ("impressions", "clicks", "orders")
MONEY = {"spend": "clicks", "sales": "orders"}  # money follows these counts
STRATA = [
    ("BID_INCREASE", 0), ("BUDGET_CAP", 0), ("PAGE_DEGRADATION", 0), ("OUT_OF_STOCK", 0), ("PLACEMENT_SHIFT", 1),
    ("TARGETING_NARROWING", 1), ("CREATIVE_FATIGUE", 1), ("COMPETITIVE_PRESSURE", 1), ("AD_QUALITY_DROP", 1),
    ("NO_SIGNAL", 0),
]  # fmt: skip
EACH = 4  # accepted episodes a stratum, of which the clearest is taken
UTC, LOS_ANGELES = 0, 8  # hours behind UTC, in winter


def first_hours(totals, hours, rng):
    """Events of each cell in the first `hours` hours of its day; clicks go with impressions, orders with clicks."""
    early = {"impressions": rng.binomial(totals["impressions"], hours / 24)}
    for above, below in zip(COUNTS, COUNTS[1:], strict=False):
        early[below] = rng.hypergeometric(early[above], totals[above] - early[above], totals[below])
    for money, count in MONEY.items():
        early[money] = totals[money] * early[count] / np.maximum(totals[count], 1)
    return early


def local_days(early, totals, axis):
    """What is left of each UTC day, and the first hours of the next one; without the two days at the ends, which the
    other zone sees in part only."""
    days = totals.shape[axis]
    return np.take(totals - early, range(1, days - 1), axis) + np.take(early, range(2, days), axis)


def bucketed(batch, hours):
    """The events of `batch` in the days of a zone `hours` behind UTC."""
    rng, fields = np.random.default_rng(0), {}
    for prefix, axis in (("", 1), ("sibling_", 2)):
        series = {k: np.asarray(getattr(batch, prefix + k)) for k in (*COUNTS, *MONEY)}
        early = first_hours(series, hours, rng)
        for name in ("page_views", "brand_searches"):
            series[name] = np.asarray(getattr(batch, prefix + name))
            early[name] = rng.binomial(series[name], hours / 24)
        for name in ("in_stock", "budget"):  # averages of a day, not events
            series[name] = np.asarray(getattr(batch, prefix + name))
            early[name] = series[name] * (hours / 24)
        fields |= {prefix + name: local_days(early[name], series[name], axis) for name in series}
    return batch.replace(
        **fields,
        day_mask=batch.day_mask[:, 1:-1],
        start_day=batch.start_day + 1,
        onset=batch.onset - 1 - (hours > 0),  # midnight in UTC is 16:00 of the day before in Los Angeles
    )


@pytest.fixture(scope="module")
def zones():
    """The clearest accepted episode of each stratum, in days of either zone."""
    batch, verdict = accepted_episodes(SimulatorConfig(batch=64), 1, "zones", {stratum: EACH for stratum in STRATA})
    complete = np.flatnonzero(batch.day_mask.all(1))
    clearest = {}
    for i in complete[np.argsort(verdict.detectability[complete])]:
        clearest[int(batch.cause[i])] = i
    episodes = EpisodeSet(batch, verdict).take(sorted(clearest.values()))
    assert len(episodes) == len(STRATA)
    return {hours: EpisodeSet(bucketed(episodes.batch, hours), episodes.verdict) for hours in (UTC, LOS_ANGELES)}


def diagnose(episodes):
    """The analyst's answer about each episode, with the same habits whatever the zone."""
    environment, answers = AdsEnvironment(episodes, EnvironmentConfig()), []
    for i in range(len(episodes)):
        task = environment.task(i)
        with environment.open(task) as episode:
            found = analyst.investigate(episode, task, np.random.default_rng(i), "compact")
        answers.append(parse_lenient(found.answer))
    return answers


def test_daily_tables_keep_dates(zones):
    for episodes in zones.values():
        with EpisodeDatabase(episodes[0].visible()) as database:
            for table in VISIBLE_TABLES:
                assert database.query(f"SELECT DISTINCT typeof(ds) FROM {table}").rows == (("DATE",),)
                moments = f"table_name = '{table}' AND data_type LIKE 'TIME%'"
                assert database.query(f"SELECT count(*) FROM duckdb_columns() WHERE {moments}").rows == ((0,),)
        assert type(episodes[0].hidden()["gt_episode"].to_pylist()[0]["onset"]) is datetime.date


def test_both_zones_hold_the_same_events(zones):
    """But for those at either end of the window; most days differ, and still are funnels."""
    utc, local = (zones[hours].batch for hours in (UTC, LOS_ANGELES))
    assert utc.impressions.shape == local.impressions.shape
    for name in (*COUNTS, "sibling_impressions"):
        a, b = (getattr(batch, name).sum((1, 2)) for batch in (utc, local))
        assert (np.abs(a - b) < 0.1 * a).all()
    assert (local.impressions != utc.impressions).any((1, 2)).all()
    assert (local.clicks <= local.impressions).all() and (local.orders <= local.clicks).all()


def test_the_onset_moves_by_a_day_and_the_diagnosis_does_not(zones):
    """Immediate onsets fall into the last baseline day of the other zone."""
    onsets = [[r.hidden()["gt_episode"].to_pylist()[0]["onset"] for r in zones[h]] for h in (UTC, LOS_ANGELES)]
    pairs = list(zip(*onsets, strict=True))
    assert [a is None for a, _ in pairs] == [r.cause == "NO_SIGNAL" for r in zones[UTC]]  # which has no onset
    assert {a and a - b for a, b in pairs} == {None, datetime.timedelta(days=1)}
    half = zones[UTC].batch.impressions.shape[1] // 2
    assert (zones[UTC].batch.onset == half).any() and (zones[LOS_ANGELES].batch.onset == half - 1).any()
    answers = {hours: diagnose(episodes) for hours, episodes in zones.items()}
    for record, a, b in zip(zones[UTC], answers[UTC], answers[LOS_ANGELES], strict=True):
        assert a.root_cause == b.root_cause == record.cause
        if record.type.startswith("segment"):  # a neighbour of the slice may win by a hair, another slice may not
            assert set(record.driver) <= set(a.driver_segments) and set(record.driver) <= set(b.driver_segments)
