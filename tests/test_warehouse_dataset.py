"""Data sets on disk: parts, manifest and card; back into memory; interrupted, continued, damaged, refused."""

import hashlib
import json
import re

import duckdb
import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from helpers_dataset import SETTINGS, contents, write_parts
from helpers_episodes import fake_set

from trace_jax.config import ConfigError
from trace_jax.simulator.causes import CAUSE_NAMES
from trace_jax.warehouse import dataset
from trace_jax.warehouse.dataset import read, write
from trace_jax.warehouse.schema import COLUMNS, GRAIN, HIDDEN_TABLES, VISIBLE_TABLES


@pytest.fixture(scope="module")
def episodes():
    return fake_set(12, missing=True)


def same(a, b):
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_files_and_manifest(tmp_path, episodes):
    manifest = write_parts(tmp_path / "d", episodes)
    assert json.loads((tmp_path / "d/manifest.json").read_text()) == manifest
    files = contents(tmp_path / "d")
    parts = [f"test/visible/{t}/part-{i:05d}.parquet" for t in VISIBLE_TABLES for i in range(3)]
    parts += [f"test/hidden/{t}/part-{i:05d}.parquet" for t in (*HIDDEN_TABLES, "episodes") for i in range(3)]
    assert set(files) == {*parts, "README.md", "manifest.json"}
    assert manifest["sha256"] == {n: hashlib.sha256(c).hexdigest() for n, c in files.items() if n != "manifest.json"}
    assert manifest["settings"] == SETTINGS
    entry = manifest["splits"]["test"]
    assert (entry["episodes"], entry["parts"]) == (12, 3) and entry["composition"] == episodes.composition()
    assert entry["acceptance"]["BUDGET_CAP"] == {"accepted": 2, "proposed": 5, "share": 0.4}


def test_tables_read_by_duckdb(tmp_path, episodes):
    """One query over all parts: keys unique (case 16 of data), every row of every episode there."""
    write_parts(tmp_path / "d", episodes)
    for name in (*VISIBLE_TABLES, *HIDDEN_TABLES):
        source = f"'{tmp_path}/d/test/{'visible' if name in VISIBLE_TABLES else 'hidden'}/{name}/*.parquet'"
        found = duckdb.sql(f"select * from {source}")
        assert dict(zip(found.columns, map(str, found.types), strict=True)) == COLUMNS[name]
        tables = [(r.visible() | r.hidden())[name] for r in episodes]
        want = sorted(tuple(row.values()) for t in tables for row in t.to_pylist())
        assert sorted(found.fetchall()) == want
        if name in GRAIN:
            keys = duckdb.sql(f"select count(*), count(distinct ({', '.join(GRAIN[name])})) from {source}").fetchall()
            assert keys == [(len(want), len(want))]


def test_rows_of_a_part_are_in_the_order_of_ids(tmp_path, episodes):
    write_parts(tmp_path / "d", episodes, upto=1, size=12)
    truth = pq.read_table(tmp_path / "d/test/hidden/gt_episode/part-00000.parquet")["campaign_id"].to_pylist()
    assert truth == sorted(record.campaign_id for record in episodes)
    rows = pq.read_table(tmp_path / "d/test/visible/segment_daily/part-00000.parquet").to_pylist()
    keys = [tuple(row[k] for k in GRAIN["segment_daily"]) for row in rows]
    assert keys == sorted(keys)


def test_into_memory_and_back(tmp_path, episodes):
    write_parts(tmp_path / "d", episodes)
    restored = read(tmp_path / "d")["test"]
    assert same((episodes.batch, episodes.verdict), (restored.batch, restored.verdict)) and restored.split == "test"
    with pytest.raises(ConfigError, match="no split 'train'; it has test"):
        read(tmp_path / "d", ["train"])
    # Sets in memory: the same files but for the acceptance, which nobody knows.
    manifest = write(tmp_path / "e", {"train": episodes.slice(0, 5), "test": episodes.slice(5, 12)})
    assert {n: e["episodes"] for n, e in manifest["splits"].items()} == {"train": 5, "test": 7}
    assert "acceptance" not in manifest["splits"]["test"]
    assert same(read(tmp_path / "e", ["test"])["test"].batch, episodes.slice(5, 12).batch)


def test_more_ids_than_a_small_index_counts(tmp_path):
    many = fake_set(150)
    write(tmp_path / "d", {"test": many})
    assert same(read(tmp_path / "d")["test"].batch, many.batch)
    campaigns = pq.read_table(tmp_path / "d/test/visible/daily_campaign/part-00000.parquet")["campaign_id"]
    assert len(set(campaigns.to_pylist())) == 450


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_full_disk_is_one_line_and_leaves_no_half_set(tmp_path, episodes, monkeypatch, broken):
    """Whichever part fails; later ones that are written at the same time do not count."""
    root, real = tmp_path / "d", dataset.files.replace

    def full(path, content):
        if path.name == f"part-{broken:05d}.parquet" and path.parent.name == "inventory":
            raise OSError(28, "No space left on device")
        return real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(dataset.files, "replace", full)
        with pytest.raises(ConfigError, match="no space left on device; free space and continue with --resume"):
            write_parts(root, episodes)
    assert not (root / "manifest.json").exists() and not list(root.rglob("*.partial"))
    assert len((root / "unfinished.jsonl").read_text().splitlines()) == 1 + broken
    write_parts(root, episodes, resume=True)
    write_parts(tmp_path / "whole", episodes)
    assert contents(root) == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["alter", "remove", "card", "manifest", "absent", "format"])
def test_damaged_data_sets_are_one_clear_error(tmp_path, episodes, damage):
    root = tmp_path / "d"
    write_parts(root, episodes, upto=1)
    target = root / "test/hidden/episodes/part-00000.parquet"
    if damage == "alter":
        target.write_bytes(target.read_bytes()[:-9])
    elif damage == "remove":
        target.unlink()
    elif damage == "card":
        (root / "README.md").write_text("")
    elif damage == "manifest":
        (root / "manifest.json").write_text("{")
    elif damage == "absent":
        root = tmp_path / "nothing"
    else:
        (root / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError) as caught:
        read(root)
    assert "\n" not in str(caught.value)


def test_shared_campaigns_are_refused(tmp_path, episodes):
    with pytest.raises(ConfigError, match="is in train and in test"):
        write(tmp_path / "d", {"train": episodes.slice(0, 3), "test": episodes.slice(2, 5)})


def test_campaigns_without_siblings(tmp_path):
    alone = fake_set(5, siblings=0)
    write(tmp_path / "d", {"test": alone})
    restored = read(tmp_path / "d")["test"]
    assert same((alone.batch, alone.verdict), (restored.batch, restored.verdict))
    assert restored.batch.sibling_clicks.shape == (5, 0, 8)
    names = pq.read_table(tmp_path / "d/test/visible/daily_campaign/part-00000.parquet")["campaign_id"].to_pylist()
    assert set(names) == {record.campaign_id for record in alone}


def test_faults_of_a_library_are_no_faults_of_the_disk(tmp_path, episodes, monkeypatch):
    def fail(*args, **options):
        raise OSError("Invalid FIXED_LEN_BYTE_ARRAY length: 0")  # as Arrow raises it: without a number

    monkeypatch.setattr(dataset.pq, "write_table", fail)
    with pytest.raises(OSError, match="FIXED_LEN"):
        write_parts(tmp_path / "d", episodes)


def test_bytes_do_not_depend_on_how_many_parts_are_written_at_once(tmp_path, episodes, monkeypatch):
    write_parts(tmp_path / "a", episodes)
    monkeypatch.setattr(dataset, "_WORKERS", 1)
    write_parts(tmp_path / "b", episodes)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_card(tmp_path, episodes, monkeypatch):
    """The README names every table, column, cause and setting, and its query runs as it stands."""
    write_parts(tmp_path / "d", episodes)
    text = (tmp_path / "d/README.md").read_text()
    for name in (*VISIBLE_TABLES, *HIDDEN_TABLES):
        section = text.split(f"/{name}\n")[1].split("###")[0]
        assert all(f"| {c} | {kind} | " in section for c, kind in COLUMNS[name].items())
    assert all(f"| {cause} |" in text for cause in CAUSE_NAMES)
    assert "| test | BUDGET_CAP | 2 (0) | 5 | 40.0% |" in text
    assert "| params.noise | `0.5` |" in text and "`params.table`" in text and "Apache-2.0" in text
    assert "hidden/` holds the truth" in text
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "apache-2.0" and len(header["configs"]) == 7
    for entry in header["configs"]:
        assert len(list((tmp_path / "d").glob(entry["data_files"][0]["path"]))) == 3
    monkeypatch.chdir(tmp_path / "d")
    rows = duckdb.sql(re.search(r"```sql\n(.*?)```", text, re.S)[1]).fetchall()
    assert {row[1] for row in rows} == {record.campaign_id for record in episodes}
    first, count = next(iter(episodes)), 0
    table = first.visible()["segment_daily"].to_pylist()
    begin, end = (f(row["ds"] for row in table) for f in (min, max))
    for second in (False, True):
        half = [r for r in table if ((r["ds"] - begin).days >= ((end - begin).days + 1) // 2) == second]
        ctr = sum(r["clicks"] for r in half) / sum(r["impressions"] for r in half)
        count += (first.cause, first.campaign_id, second, ctr) in rows
    assert count == 2
