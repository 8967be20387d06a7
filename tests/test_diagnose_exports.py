"""Exports shaped like platforms' reports: the figures of the episode's tables, read back through their habits."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers_episodes import fake_set

from trace_jax import cli
from trace_jax.diagnose import loading, mapping, sources
from trace_jax.diagnose.declared import Declared
from trace_jax.recipes import exports as recipe
from trace_jax.warehouse import exports


@pytest.mark.parametrize("platform", exports.PLATFORMS)
def test_what_is_read_is_what_the_tables_hold(platform, tmp_path):
    """Sums by day of every metric; a platform that drops rows or leaves blanks for zeros changes none of them."""
    record = fake_set(1, days=8, missing=True)[0]
    paths = exports.write(record, platform, tmp_path, "a")
    segment = record.visible()["segment_daily"].to_pylist()
    with loading.database() as connection:
        plans, left = mapping.plans(sources.open_sources(paths, connection), Declared(), connection)
        loaded = loading.load(plans, connection, left)
        assert set(loaded.dimensions) == set(exports.PLATFORMS[platform].dimensions)
        for metric in ("impressions", "clicks", "orders", "spend", "sales"):
            found = dict(loaded.ask(f"SELECT ds, sum({metric}) FROM cells GROUP BY 1"))
            want = {}
            for row in segment:
                want[row["ds"]] = want.get(row["ds"], 0) + row[metric]
            assert found.keys() == want.keys()
            np.testing.assert_allclose([found[d] for d in want], list(want.values()), atol=1e-6)
        if loaded.own_totals:
            campaign = record.visible()["daily_campaign"].to_pylist()
            budgets = {(r["ds"], r["campaign_id"]): r["budget"] for r in campaign}
            assert budgets == {(d, c): b for d, c, b in loaded.ask("SELECT ds, campaign, budget FROM totals")}
            stock = loaded.ask("SELECT min(in_stock), max(in_stock) FROM totals")[0]
            assert 0.85 < stock[0] <= stock[1] <= 1.0


def test_the_command_writes_files_and_the_truth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipe, "draw", lambda config, platform, size: fake_set(size))
    argv = ["simulate", "--export", "amazon", "--episodes", "2", "--out", str(tmp_path / "x")]
    assert cli.main(argv) == 0
    truth = json.loads((tmp_path / "x" / "truth.json").read_text())
    assert [t["files"] for t in truth] == [[f"amazon-00{n}-slices.csv", f"amazon-00{n}-campaigns.csv"] for n in (0, 1)]
    assert truth[1]["cause"] == "NO_SIGNAL" and truth[1]["onset"] is None
    assert truth[0]["slice"] == {"geo": "United States", "device": "MOBILE"}
    assert cli.main(argv) == 0  # over its own
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mine.txt").write_text("mine")
    assert cli.main([*argv[:-1], str(tmp_path / "y")]) == 2
    assert cli.main([*argv, "--split", "test"]) == 2
    assert "something else" in capsys.readouterr().err


def test_the_example_of_the_readme_is_answered(tmp_path, capsys):
    """By the scripted analyst here, which needs no compiling; what happened is in the file beside it."""
    folder = Path(__file__).parent.parent / "examples"
    (truth,) = json.loads((folder / "truth.json").read_text())
    argv = ["diagnose", str(folder / truth["files"][0]), "--yes", "--agent", "analyst", "--json"]
    assert cli.main([*argv, "--html", str(tmp_path / "answer.html")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cause"] == truth["cause"] and found["campaign"] == truth["campaign"]
    assert {s["dimension"]: s["value"] for s in found["slice"]} == truth["slice"]
    assert (
        "<h1>Ad quality drop in Impression device = Android smartphone</h1>" in (tmp_path / "answer.html").read_text()
    )
