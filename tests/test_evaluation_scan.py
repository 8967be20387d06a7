"""The quasi-likelihood scan and the shared rules: reading, calibration of z, planted effects, fitting, bad files."""

import json

import duckdb
import numpy as np
import pytest
from helpers_episodes import fake_set

from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation.finders import agents, campaign, contribution, quasi, rules
from trace_jax.evaluation.finders.campaign import INDEX, PAIRS, Campaign
from trace_jax.recipes import fit_rules
from trace_jax.simulator import slices
from trace_jax.simulator.causes import NO_SIGNAL
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, DRIVER_ATTRIBUTES


def query_of(record):
    connection = duckdb.connect()
    for name, table in record.visible().items():
        connection.register(name, table)
    return lambda sql: connection.execute(sql).fetchall()


def made(rng, *, days=28, change=None, size=40.0, spread=0.0):
    """A campaign of 36 segments with Poisson clicks (CTR 10 %), binomial orders and two siblings' totals; `change(c)`
    changes the expected clicks [T, S] in place, given the campaign without counts."""
    values = np.stack([x.reshape(-1) for x in np.meshgrid(*[np.arange(3)] * 3, [0, 2], indexing="ij")], 1)
    after = np.arange(days) >= days // 2
    day = rng.normal(1, 0.1, days).clip(0.5)[:, None] * rng.gamma(4, 0.25, len(values))
    impressions = rng.poisson(size * 10 * day).astype(float)
    expected = impressions * 0.1 * (rng.normal(1, spread, impressions.shape).clip(0.1) if spread else 1.0)
    blank = np.zeros_like(impressions)
    rest = rng.poisson(1000, (days, 4)).astype(float) + 1
    empty = Campaign(values, after, impressions, blank, blank, blank, rest, np.full(days, 0.9), np.ones(days))
    if change is not None:
        change(empty, expected)
    clicks = rng.poisson(expected).astype(float)
    orders = rng.binomial(clicks.astype(int), 0.1).astype(float)
    spend = clicks * rng.normal(1.2, 0.05, clicks.shape)
    return Campaign(values, after, impressions, clicks, orders, spend, rest, np.full(days, 0.9), np.ones(days))


@pytest.mark.parametrize("missing", [False, True])
def test_the_tables_come_back_as_arrays(missing):
    """Read through SQL: the batch's own numbers, by driver attributes, without days that the export lacks."""
    episodes = fake_set(3, missing=missing)
    batch = episodes.batch
    for i, record in enumerate(episodes):
        seen = campaign.read(query_of(record))
        there = batch.day_mask[i]
        place = {tuple(v): s for s, v in enumerate(seen.values.tolist())}
        columns = [ATTRIBUTE_NAMES.index(a) for a in DRIVER_ATTRIBUTES]
        for name in ("impressions", "clicks", "orders"):
            wanted = np.zeros((there.sum(), len(place)))
            for s in np.flatnonzero(batch.segment_mask[i]):
                wanted[:, place[tuple(batch.segment_values[i, s, columns].tolist())]] += getattr(batch, name)[i][
                    there, s
                ]
            assert np.array_equal(getattr(seen, name), wanted)
        assert np.array_equal(seen.siblings[:, 1], batch.sibling_clicks[i].sum(0)[there])
        assert seen.in_stock == pytest.approx(batch.in_stock[i][there], abs=1e-4)
        days = np.flatnonzero(there)
        assert np.array_equal(seen.after, days > (days[0] + days[-1]) // 2)
        inside = np.array(slices.members(batch.segment_values[i], batch.segment_mask[i]))
        by_slice = batch.clicks[i][there].sum(0) @ inside
        assert seen.clicks.sum(0) @ seen.members == pytest.approx(by_slice)


def test_the_sql_of_contribution_analysis():
    """Excess of every slice as NumPy has it, lowest first."""
    record = fake_set(1)[0]
    query = query_of(record)
    seen, rows = campaign.read(query), query(contribution.SQL)
    assert [r[-1] for r in rows] == sorted(r[-1] for r in rows)
    i, c = (np.stack([x[h].sum(0) for h in (~seen.after, seen.after)]) for x in (seen.impressions, seen.clicks))
    whole = c.sum(1) / i.sum(1)
    for row in rows:
        pairs = frozenset((a, v) for a, v in zip(DRIVER_ATTRIBUTES, row[:4], strict=True) if v is not None)
        inside = seen.members[:, INDEX[pairs]]
        rate, share = (c @ inside) / (i @ inside), (i @ inside) / i.sum(1)
        assert row[-1] == pytest.approx(share.mean() * (np.diff(rate) - np.diff(whole))[0])
    assert len(rows) > 10


def test_regression_is_least_squares():
    rng = np.random.default_rng(0)
    y, other, shape = rng.normal(size=20), rng.normal(size=20), (np.arange(20) >= 12) * 1.0
    design = np.stack([np.ones(20), other, shape], 1)
    beta, rss, *_ = np.linalg.lstsq(design, y, rcond=None)
    t = beta[2] / np.sqrt(rss[0] / 17 * np.linalg.inv(design.T @ design)[2, 2])
    assert quasi.regressed(y, [other], shape[None]) == pytest.approx([t])
    assert quasi.regressed(np.full(20, 0.7), [np.ones(20)], shape[None]) == pytest.approx([0])


@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_z_is_standard_normal_when_nothing_happens(spread):
    """Over many campaigns of plain and of overdispersed counts: mean 0, spread about 1, for CTR and share."""
    rng = np.random.default_rng(1)
    seen = [quasi.scan(made(rng, spread=spread)) for _ in range(60)]
    z = np.stack([s.slices[[0, 3]][:, 0][:, s.testable] for s in seen])  # sudden onset at once
    assert np.abs(z.mean((0, 2))).max() < 0.15
    assert np.all((z.std((0, 2)) > 0.8) & (z.std((0, 2)) < 1.2)), z.std((0, 2))


@pytest.mark.parametrize("pairs", [(("device", "DESKTOP"),), (("placement", "TOP_OF_SEARCH"), ("geo", "US"))])
@pytest.mark.parametrize("gradual", [False, True])
def test_a_planted_fall_is_the_loudest(pairs, gradual):
    """CTR falls by 40 % in a slice: that slice has the lowest z, at an onset of the right kind."""

    def fall(c, expected):
        ramp = np.clip(np.cumsum(c.after) / c.after.sum(), 0, 1) if gradual else c.after * 1.0
        expected *= 1 - 0.4 * ramp[:, None] * c.members[:, INDEX[frozenset(pairs)]]

    seen = quasi.scan(made(np.random.default_rng(2), change=fall, spread=0.2))
    shape, where = np.unravel_index(seen.slices[0].argmin(), seen.slices[0].shape)
    assert frozenset(PAIRS[where]) == frozenset(pairs) and quasi.GRADUAL[shape] == gradual
    assert seen.slices[0].min() < -6


def test_a_day_that_everyone_shares_is_no_signal():
    """All segments halve their CTR in the second half: no slice differs from the rest."""

    def all_fall(c, expected):
        expected *= np.where(c.after, 0.5, 1.0)[:, None]

    seen = quasi.scan(made(np.random.default_rng(3), change=all_fall))
    assert np.abs(seen.slices[0]).max() < 4
    assert seen.totals[1, 0] < -6  # the campaign's own CTR


def example(cause, score, driver=()):
    """An episode in which one cause gains `score` at the slice, others nothing."""
    gains = np.full((len(rules.NAMES), slices.SLICES), -np.inf)
    gains[:, 0] = 0.0
    at = INDEX[frozenset(driver)] if driver else 0
    gains[rules.NAMES.index(cause), at] = score
    return gains


def test_fitting_places_the_threshold_between():
    """Noise scores up to 4, true cases from 9: everything is right on a threshold in the middle of that gap."""
    rng = np.random.default_rng(0)
    cases = [rules.Example(example("BUDGET_CAP", s), None, NO_SIGNAL, ()) for s in rng.uniform(0, 4, 60)]
    cases += [rules.Example(example("BUDGET_CAP", s), None, "BUDGET_CAP", ()) for s in rng.uniform(9, 30, 60)]
    thresholds, share = rules.fit(cases)
    assert share == 1.0 and 5 < thresholds["BUDGET_CAP"] < 8
    assert rules.decide(example("BUDGET_CAP", 20.0), thresholds).cause == "BUDGET_CAP"
    assert rules.decide(example("BUDGET_CAP", 3.0), thresholds).cause == NO_SIGNAL


def test_a_found_slice_is_the_only_one_considered():
    thresholds = dict.fromkeys(rules.THRESHOLDS, 5.0)
    driver = (("geo", "US"),)
    gains = example("COMPETITIVE_PRESSURE", 30.0, driver)
    free, told = rules.decide(gains, thresholds), rules.decide(gains, thresholds, driver)
    assert free == told and free.driver == driver and free.margin == pytest.approx(25.0)
    assert rules.decide(gains, thresholds, (("geo", "JP"),)).cause == NO_SIGNAL
    assert rules.decide(gains, thresholds, ()).cause == NO_SIGNAL


def test_stories_follow_the_registry():
    """A signature's features all have a place in the scan; campaign causes have no slice, segment causes do."""
    for name, story in rules._STORIES.items():
        assert set(story.totals) <= set(quasi.TOTALS) and set(story.slice) <= set(quasi.RATES), name
        assert story.totals or story.slice


def test_bad_rules_are_refused_in_one_line(tmp_path):
    path = tmp_path / "rules.json"
    with pytest.raises(ConfigError, match="fit-rules"):
        rules.thresholds(str(path), "scan")
    path.write_text(json.dumps({"agents": {"scan": {"thresholds": {"BUDGET_CAP": 3}}}}))
    with pytest.raises(ConfigError, match="no thresholds for scan"):
        rules.thresholds(str(path), "scan")


def test_the_stored_rules_serve_every_finder():
    stored = json.loads(rules.FILE.read_text())
    assert stored["fitted"]["split"] == "train" and stored["fitted"]["episodes"] >= 500
    for name in agents.FINDERS:
        assert set(rules.thresholds("", name)) >= set(rules.THRESHOLDS)


def test_fitting_from_the_command(tmp_path, monkeypatch, capsys):
    """The training split goes in, a file that every finder can use comes out; too few episodes are refused at once."""
    with pytest.raises(ConfigError, match="at least"):
        fit_rules.fit_rules(RunConfig(), tmp_path / "rules.json", episodes=10)
    asked = []

    def split(config, name, cache, on_progress):
        asked.append((name, cache))
        return fake_set(80)

    monkeypatch.setattr(fit_rules, "load_split", split)
    out = tmp_path / "made" / "rules.json"
    result = fit_rules.fit_rules(RunConfig(), out, episodes=50, run_dir=tmp_path)
    assert asked == [("train", tmp_path / "data")]
    assert json.loads(out.read_text()) == result and result["fitted"]["episodes"] == 50
    for name in agents.FINDERS:
        assert set(rules.THRESHOLDS) <= set(rules.thresholds(str(out), name))
    assert "concentration" in rules.thresholds(str(out), "contribution")
    assert "50 training episodes" in capsys.readouterr().out
