"""Materialised tables: exact figures, order and shape that give nothing away; cached splits."""

import datetime

import jax
import numpy as np
import pytest
from helpers_episodes import LABELS, fake_batch, fake_set

from trace_jax.config import ConfigError, DataConfig, RunConfig
from trace_jax.simulator.causes import CAUSE_NAMES, EPISODE_TYPES, SEGMENT_CAUSES
from trace_jax.simulator.episode import NOT_COMPARED
from trace_jax.simulator.slices import SLICES, slice_name
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES
from trace_jax.warehouse import materialize, splits
from trace_jax.warehouse.schema import COLUMNS, GRAIN, HIDDEN_TABLES, VISIBLE_TABLES


@pytest.fixture(scope="module")
def episodes():
    return fake_set(5)


def same(a, b):
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_columns_and_row_counts(episodes):
    for i, record in enumerate(episodes):
        tables = record.visible()
        assert tuple(tables) == VISIBLE_TABLES and tuple(record.hidden()) == HIDDEN_TABLES
        for name, table in (tables | record.hidden()).items():
            assert table.column_names == list(COLUMNS[name])
        days, active = 8, int(episodes.batch.segment_mask[i].sum())
        assert [tables[name].num_rows for name in VISIBLE_TABLES] == [3 * days, active * days, 3 * days, 3 * days]


def test_figures_are_the_simulated_ones(episodes):
    """Every cell against the arrays, found by its keys and not by its position. Segments without impressions stay."""
    batch, i = episodes.batch, 2
    rows = episodes[i].visible()["segment_daily"].to_pylist()
    found = {(row["ds"], *(row[name] for name in ATTRIBUTE_NAMES)): row for row in rows}
    assert len(found) == len(rows)
    first = datetime.date(2024, 1, 1) + datetime.timedelta(days=int(batch.start_day[i]))
    for g in np.flatnonzero(batch.segment_mask[i]):
        values = [ATTRIBUTES[n][int(v)] for n, v in zip(ATTRIBUTE_NAMES, batch.segment_values[i, g], strict=True)]
        for t in range(8):
            row = found.pop((first + datetime.timedelta(days=t), *values))
            assert [row[k] for k in ("impressions", "clicks", "orders")] == [
                int(batch.impressions[i, t, g]), int(batch.clicks[i, t, g]), int(batch.orders[i, t, g])
            ]  # fmt: skip
            assert row["spend"] == round(float(batch.spend[i, t, g]), 2)
    assert not found


def test_a_missing_day_is_missing_from_every_visible_table(episodes):
    """All campaigns of the advertiser lose the day; the rows of the other days stay as they are."""
    keep = np.ones((5, 8), bool)
    keep[2, [3, 6]] = False
    keep[4, 1] = False
    holed = splits.EpisodeSet(episodes.batch.replace(day_mask=keep), episodes.verdict)
    for i, record in enumerate(holed):
        start = datetime.date(2024, 1, 1) + datetime.timedelta(days=int(episodes.batch.start_day[i]))
        gone = {start + datetime.timedelta(days=int(t)) for t in np.flatnonzero(~keep[i])}
        whole = episodes[i].visible()
        for name, table in record.visible().items():
            expected = [row for row in whole[name].to_pylist() if row["ds"] not in gone]
            assert table.to_pylist() == expected and table.schema == whole[name].schema
            days = len(set(whole[name]["ds"].to_pylist()))
            assert len(expected) * days == whole[name].num_rows * (days - len(gone))
    assert [len(set(r.visible()["inventory"]["ds"].to_pylist())) for r in holed] == [8, 8, 6, 8, 7]


def test_campaign_totals_are_sums_of_segments(episodes):
    for record in episodes:
        tables = record.visible()
        campaign = [r for r in tables["daily_campaign"].to_pylist() if r["campaign_id"] == record.campaign_id]
        for metric in ("impressions", "clicks", "orders", "spend", "sales"):
            by_day = {}
            for row in tables["segment_daily"].select(["ds", metric]).to_pylist():
                by_day[row["ds"]] = by_day.get(row["ds"], 0) + row[metric]
            assert [r[metric] for r in campaign] == pytest.approx(list(by_day.values()), abs=1e-6)


def test_counts_beyond_float32_stay_exact():
    """Case 23 of data, warehouse side."""
    batch, verdict = fake_batch(1)
    impressions = batch.impressions.copy()
    impressions[0, 3, 1] = 20_000_001
    big = splits.EpisodeSet(batch.replace(impressions=impressions), verdict)
    rows = big[0].visible()["segment_daily"].to_pylist()
    assert max(r["impressions"] for r in rows) == 20_000_001


def test_rows_are_sorted_by_key_whatever_the_order_of_segments(episodes):
    batch, verdict = fake_batch(5)
    shuffle = np.random.default_rng(1).permutation(6)
    fields = ("segment_values", "impressions", "clicks", "orders", "spend", "sales", "segment_mask")
    mixed = batch.replace(
        **{f: np.take(getattr(batch, f), shuffle, axis=-2 if f == "segment_values" else -1) for f in fields}
    )
    for record, other in zip(episodes, splits.EpisodeSet(mixed, verdict), strict=True):
        for name, table in record.visible().items():
            rows = [tuple(row[k] for k in GRAIN[name]) for row in table.to_pylist()]
            assert rows == sorted(rows)
            assert table.equals(other.visible()[name])


def test_the_label_changes_nothing_visible(episodes):
    """Swapping every hidden field leaves the visible tables as they are."""
    batch, verdict = fake_batch(5)
    other = {
        f: getattr(batch, f)[::-1]
        for f in ("cause", "slice_attributes", "slice_values", "strength", "profile", "onset")
    }
    for a, b in zip(episodes, splits.EpisodeSet(batch.replace(**other), verdict), strict=True):
        assert all(a.visible()[name].equals(b.visible()[name]) for name in VISIBLE_TABLES)


def test_records_name_the_label(episodes):
    for record, (cause, driver) in zip(episodes, LABELS, strict=True):
        assert (record.cause, set(record.driver)) == (cause, set(driver))
        assert record.type in EPISODE_TYPES
        truth = record.hidden()["gt_episode"].to_pylist()[0]
        assert truth["cause"] == cause and truth["dimensions"] == len(driver) and truth["type"] == record.type
        described = [truth[name] for name in ("strength", "profile", "onset")]
        if cause == "NO_SIGNAL":  # nothing happened
            assert described == [record.strength, record.profile, record.onset] == [None] * 3
            continue
        first = datetime.date(2024, 1, 1) + datetime.timedelta(days=int(episodes.batch.start_day[record.position]))
        assert record.onset >= 4
        assert described == [record.strength, record.profile, first + datetime.timedelta(days=record.onset)]
    assert episodes[0].type == "segment_2d" and episodes[3].type == "mix"
    with pytest.raises(IndexError):
        episodes[5]


@pytest.mark.parametrize("missing", [False, True])
def test_a_chunk_has_the_rows_of_its_episodes(missing):
    """Tables built for many episodes at once, with other dictionaries, hold the same rows in the same order."""
    batch, verdict = fake_batch(130, missing=missing)
    rows = np.random.default_rng(0).permutation(130)
    one = [materialize.visible_tables(batch, i) | materialize.hidden_tables(batch, verdict, i) for i in rows]
    many = materialize.visible_chunk(batch, rows) | materialize.hidden_chunk(batch, verdict, rows)
    for name, table in many.items():
        assert table.to_pylist() == [row for tables in one for row in tables[name].to_pylist()]
        assert table.schema == one[0][name].schema  # parts of a set are read together


def test_checks_of_the_verifier(episodes):
    """One row a check that applies: summaries, every rival cause, for segment causes every other comparable slice."""
    margins = np.array(episodes.verdict.slice_margins)
    margins[0, 5] = NOT_COMPARED
    margins[4, 7] = -0.5
    changed = splits.EpisodeSet(episodes.batch, episodes.verdict.replace(slice_margins=margins))
    for i, record in enumerate(changed):
        rows = record.hidden()["gt_validation"].to_pylist()
        found = {row["check_name"]: row for row in rows}
        assert len(found) == len(rows)
        causes = {f"rival_cause:{c}" for c in CAUSE_NAMES if c != record.cause}
        driver = " & ".join(f"{a}={v}" for a, v in record.driver)
        names = [slice_name(k) for k in range(SLICES) if (i, k) != (0, 5)]
        slices = {f"rival_slice:{name}" for name in names if name != driver and record.cause in SEGMENT_CAUSES}
        summaries = {"detectability", "confounder", "rival_cause"}
        summaries |= {"rival_slice"} if record.cause in SEGMENT_CAUSES else set()
        assert set(found) == summaries | causes | slices
        assert all(row["passed"] == (row["margin"] > 0) for row in rows)
        for k, name in enumerate(CAUSE_NAMES):
            if name != record.cause:
                assert found[f"rival_cause:{name}"]["margin"] == episodes.verdict.cause_margins[i, k]
    assert not found[f"rival_slice:{slice_name(7)}"]["passed"]


def test_take_renumbers(episodes):
    part = episodes.take([3, 1])
    assert [r.cause for r in part] == ["PLACEMENT_SHIFT", "NO_SIGNAL"] and [r.index for r in part] == [0, 1]
    assert len(episodes.slice(1, 4)) == 3


def test_cache_is_reused_keyed_by_settings_and_mended(tmp_path, episodes, monkeypatch):
    calls = []

    def simulate(config, seed, split, composition, on_progress=None):
        calls.append((seed, split, sum(composition.values())))
        return episodes.batch, episodes.verdict

    monkeypatch.setattr(splits, "accepted_episodes", simulate)
    config = RunConfig(data=DataConfig(seed=3, test=5))
    made = splits.load_split(config, "test", tmp_path)
    again = splits.load_split(config, "test", tmp_path)
    assert calls == [(3, "test", 5)] and same((made.batch, made.verdict), (again.batch, again.verdict))
    assert again.split == "test"
    splits.load_split(RunConfig(data=DataConfig(seed=4, test=5)), "test", tmp_path)
    assert len(calls) == 2
    for path in tmp_path.iterdir():
        path.write_bytes(b"PK not a zip")
    with pytest.warns(UserWarning, match="damaged"):
        splits.load_split(config, "test", tmp_path)
    assert len(calls) == 3 and not list(tmp_path.glob("*.partial"))
    with pytest.raises(ConfigError, match="split"):
        splits.load_split(config, "holdout")
