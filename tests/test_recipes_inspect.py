"""`trace-jax inspect`: the view in the terminal, the page's curves against the episode's arrays, proposals, errors."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers_episodes import fake_set
from recipes_helpers import CONFIG, compile_cache

from trace_jax import cli, config_io
from trace_jax.recipes import inspect, inspect_text, programs
from trace_jax.report import episode
from trace_jax.report.episode_chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, series_chart
from trace_jax.report.episode_facts import facts, inside_slice
from trace_jax.simulator.accepted import CHUNK, Chunk
from trace_jax.simulator.causes import CAUSE_NAMES
from trace_jax.simulator.confounders import CONFOUNDER_NAMES, CONFOUNDERS
from trace_jax.simulator.episode import NOT_COMPARED
from trace_jax.simulator.slices import SLICES, slice_name
from trace_jax.warehouse import splits

__all__ = ["compile_cache"]  # a fixture


def with_sizes(episodes, **sizes):
    """The set with these confounders in every episode."""
    batch = episodes.batch
    values = np.zeros((len(episodes), len(CONFOUNDER_NAMES)), np.float32)
    for name, size in sizes.items():
        values[:, CONFOUNDER_NAMES.index(name)] = size
    return splits.EpisodeSet(batch.replace(confounders=values), episodes.verdict, episodes.split)


def drawn(page):
    """Every chart of a page, parsed."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.S)]


def points(chart, style):
    """Places of the days of a curve, gaps left out: of its polylines and of days that stand alone."""
    found = []
    for line in chart.iter("polyline"):
        if style in line.get("class").split():
            found += [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    found += [(float(c.get("cx")), float(c.get("cy"))) for c in chart.iter("circle") if style in c.get("class").split()]
    return sorted(found)


def test_levels_are_ratios_of_sums_and_means_by_present_day():
    """Cases 2 and 5 of data: a rate is a ratio of sums; a missing day is no day of zero."""
    record = next(r for r in fake_set(40, missing=True) if inside_slice(r).any())
    found, batch, i = facts(record), record.batch, record.position
    there, inside = batch.day_mask[i], inside_slice(record)
    assert not there.all() and found.half == 4
    clicks, impressions = batch.clicks[i].sum(1), batch.impressions[i].sum(1)
    before = np.arange(8) < 4
    for w, window in enumerate((before, ~before)):
        kept = window & there
        assert found.level("campaign", "ctr")[w] == pytest.approx(clicks[kept].sum() / impressions[kept].sum())
        assert found.level("campaign", "impressions")[w] == pytest.approx(impressions[kept].mean())
        share = batch.impressions[i][kept][:, inside].sum() / impressions[kept].sum()
        assert found.level("slice", "share")[w] == pytest.approx(share)
        pooled = batch.sibling_clicks[i][:, kept].sum() / batch.sibling_impressions[i][:, kept].sum()
        assert found.level("siblings", "ctr")[w] == pytest.approx(pooled)
    assert np.isnan(found.groups["campaign"]["ctr"][~there]).all()


def test_slice_and_rest_make_up_the_campaign():
    found = next(f for f in map(facts, fake_set(40)) if "slice" in f.groups)
    for metric in ("impressions", "clicks", "orders", "spend"):
        both = found.groups["slice"][metric] + found.groups["rest"][metric]
        np.testing.assert_allclose(both, found.groups["campaign"][metric], rtol=1e-12)
    for attribute in found.attributes:
        parts = found.breakdown("ctr", attribute).parts
        before, after = found.level("campaign", "ctr")
        assert parts.mix.sum() + parts.rate.sum() == pytest.approx(after - before, abs=1e-9)


def test_chart_places_values_where_they_belong():
    """Against the axis by hand: as many points as days with a value, in the box, linear in day and value."""
    record = fake_set(5, missing=True)[0]
    days = episode.days_of(facts(record))
    values = np.array([1.0, 2.0, 3.0, math.nan, 5.0, 4.0, math.nan, 2.0])
    text = series_chart("t <&>", [Curve("a", "main", values, (2.0, 11 / 3))], days, lambda v: f"{v:.6g}")
    chart = ElementTree.fromstring(text)
    assert chart.get("aria-label") == "t <&>" and len(list(chart.iter("polyline"))) == 2
    found = points(chart, "main")
    known = np.flatnonzero(np.isfinite(values))
    xs = LEFT + (known + 0.5) / 8 * (WIDTH - LEFT - RIGHT)
    np.testing.assert_allclose([x for x, _ in found], xs, atol=0.06)
    # y is linear in the value: fitted by two labelled grid lines.
    ticks = [(float(t.text), float(t.get("y")) - 4) for t in chart.iter("text") if t.get("text-anchor") == "end"]
    (v0, y0), (v1, y1) = ticks[0], ticks[-1]
    np.testing.assert_allclose([y for _, y in found], y0 + (values[known] - v0) * (y1 - y0) / (v1 - v0), atol=0.3)
    window = next(r for r in chart.iter("rect") if r.get("class") == "window")
    assert float(window.get("x")) == pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) / 2, abs=0.06)
    onset = next(r for r in chart.iter("line") if r.get("class") == "onset")
    assert float(onset.get("x1")) == pytest.approx(LEFT + record.onset / 8 * (WIDTH - LEFT - RIGHT), abs=0.06)
    missing = [float(r.get("x")) for r in chart.iter("rect") if r.get("class") == "missing"]
    gone = np.flatnonzero(~record.batch.day_mask[0])
    np.testing.assert_allclose(missing, LEFT + gone / 8 * (WIDTH - LEFT - RIGHT), atol=0.06)
    assert series_chart("t", [Curve("a", "main", np.full(8, math.nan))], days, str) == ""


@pytest.mark.parametrize("position", range(5))
def test_page_shows_every_day_and_stays_in_its_box(position):
    episodes = with_sizes(fake_set(5, missing=True), promotion=0.4, missing_days=-2.0)
    record = episodes[position]
    found = facts(record)
    page = episode.build(found, "test <1>", "why & how?")
    charts = drawn(page)
    assert len(charts) == (12 if "slice" in found.groups else 6)
    there = int(record.batch.day_mask[position].sum())
    for chart in charts[:6]:
        assert len(points(chart, "main")) == there
        assert len([r for r in chart.iter("rect") if r.get("class") == "missing"]) == 8 - there
        assert len([r for r in chart.iter("line") if r.get("class") == "onset"]) == (record.cause != "NO_SIGNAL")
    for chart in charts:
        places = [p for style in ("main", "slice", "rest", "limit") for p in points(chart, style)]
        assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in places)
    assert "test &lt;1&gt;" in page and "why &amp; how?" in page
    assert "<script" not in page and "http" not in page and "nan" not in re.sub(r"<[^>]*>", "", page).lower()
    for word in ("+49% at its peak", "2 days", CONFOUNDERS[CONFOUNDER_NAMES.index("promotion")].description):
        assert word in page
    for name in (*record.visible(), *record.hidden(), *(c for c in CAUSE_NAMES if c != record.cause)):
        assert name in page


def test_margins_are_the_verdicts():
    """Ten nearest slices in order, every other cause, and the reasons of a rejection."""
    episodes = fake_set(5)
    record, verdict = episodes[0], episodes.verdict
    behind = np.linspace(50, -1, SLICES).astype(np.float32)
    behind[7] = NOT_COMPARED
    verdict.slice_margins[0], verdict.cause_margins[0, 2] = behind, -1.5
    verdict.detectability[0], verdict.accept[0] = -0.5, False
    found = facts(record)
    slices = [m for m in found.margins if m.kind == "rival slice"]
    label = " & ".join(f"{a}={v}" for a, v in record.driver)
    nearest = [slice_name(k) for k in range(SLICES - 1, -1, -1) if k != 7 and slice_name(k) != label][:10]
    assert [m.name for m in slices] == nearest and not slices[0].passed and slices[-1].passed
    causes = [m for m in found.margins if m.kind == "rival cause"]
    assert sorted(m.name for m in causes) == sorted(set(CAUSE_NAMES) - {record.cause})
    assert causes[0].name == CAUSE_NAMES[2] and causes[0].value == -1.5
    assert len(found.failing) == 3 and not found.accepted
    assert "detectability" in found.failing[0] and CAUSE_NAMES[2] in found.failing[1]
    assert nearest[0] in found.failing[2]
    verdict.accept[0] = True
    assert facts(record).failing == ()


@pytest.mark.parametrize(("days", "missing"), [(8, True), (28, False), (90, False)])
def test_terminal_view_fits_and_starts_with_the_weakest(days, missing):
    episodes = with_sizes(fake_set(5, days=days, missing=missing), weekday=0.1, late_conversions=-0.7)
    for record in episodes:
        found = facts(record)
        lines = inspect_text.lines(found, "test 1: campaign C1", "long question " * 12)
        assert len(lines) <= 50 and max(map(len, lines)) <= 80
        text = "\n".join(lines)
        assert record.cause in text and "weekday +11% at its peak" in text and "shows 50% of its orders" in text
        shown = [float(m[1]) for line in lines if (m := re.search(r"([+-]\d+\.\d\d) (?:z|ll) ", line))]
        every = sorted(m.slack for m in found.margins)
        np.testing.assert_allclose(shown, every[: len(shown)], atol=0.006)
        if record.cause != "NO_SIGNAL":
            mark = next(line for line in lines if line.startswith("onset")).index("^")
            drawn_curve = next(line for line in lines if line.startswith("ctr"))
            size = max(1, math.ceil((days - days // 2) / 14))
            first = drawn_curve.index("|") + 1
            assert mark == first + (record.onset - days // 2) // size


def test_curve_of_gaps_and_flat_values():
    assert inspect_text.curve(np.array([1.0, np.nan, 1.0, 1.0]), 2, 1) == "█·|██"
    assert inspect_text.curve(np.full(4, np.nan), 2, 1) == "··|··"
    assert inspect_text.curve(np.array([0.0, 0.0, 10.0, 10.0]), 2, 2) == "▁|█"


def test_only_chunks_up_to_the_episode_are_simulated(monkeypatch):
    """The episode that `load_split` has at that place, without what comes after it."""
    made = []

    def chunks(config, seed, split, composition, **_):
        assert (seed, split, sum(composition.values())) == (2609, "train", 4472)
        for number in range(5):
            made.append(number)
            episodes = fake_set(CHUNK, days=4, segments=2, siblings=0, seed=number)
            yield Chunk(number, episodes.batch, episodes.verdict, None, 0)

    monkeypatch.setattr(inspect, "accepted_chunks", chunks)
    record = inspect.episode_of(config_io.load(None), "train", CHUNK + 5)
    expected = fake_set(CHUNK, days=4, segments=2, siblings=0, seed=1)
    assert made == [0, 1] and record.index == CHUNK + 5
    assert int(record.batch.campaign_id[record.position]) == int(expected.batch.campaign_id[5])


def test_programs_are_kept_where_the_user_has_not_said_otherwise(monkeypatch, tmp_path):
    told = []
    for chosen, base in (("", tmp_path / "cache"), ("/elsewhere", tmp_path / "unused"), ("", tmp_path / "file" / "x")):
        (tmp_path / "file").write_text("")
        config = SimpleNamespace(jax_compilation_cache_dir=chosen, update=lambda *pair: told.append(pair))
        monkeypatch.setattr(programs, "jax", SimpleNamespace(config=config))
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        programs.keep()
    ((name, folder),) = told
    assert name == "jax_compilation_cache_dir" and Path(folder).is_dir()
    assert Path(folder).is_relative_to(tmp_path / "cache") and not (tmp_path / "unused").exists()


def test_views_without_siblings_and_of_an_odd_window():
    for record in fake_set(5, days=9, siblings=0):
        found = facts(record)
        assert "siblings" not in found.groups and len(drawn(episode.build(found, "t", "q"))) >= 6
        assert all(len(line) <= 80 for line in inspect_text.lines(found, "t", "q"))


def run(capsys, *argv):
    """Exit status, stdout lines and stderr of `inspect` at smoke size."""
    status = cli.main(["inspect", "--config", str(CONFIG), *map(str, argv)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def test_inspect_an_episode_and_its_page(capsys, tmp_path, compile_cache):
    page = tmp_path / "new" / "e.html"
    status, lines, _ = run(capsys, "--index", 3, "--out", page, "--json")
    found = json.loads(lines[-1])
    record = splits.load_split(config_io.load(CONFIG), "test")[3]
    assert status == 0 and len(lines) <= 52
    assert (found["campaign_id"], found["cause"], found["onset"]) == (record.campaign_id, record.cause, record.onset)
    assert set(found["verdict"]) == {"detectability", "confounder", "rival_cause", "rival_slice"}
    assert found["tables"]["daily_campaign"] > 0 and found["prompt"].endswith("Why?")
    sizes = dict(zip(CONFOUNDER_NAMES, record.batch.confounders[3].tolist(), strict=True))
    assert found["confounders"] == pytest.approx({k: v for k, v in sizes.items() if v}, abs=1e-3)
    assert len(found["margins"]) >= len(CAUSE_NAMES) and found["accept"] and found["failing"] == []
    assert found["page"] == str(page) and record.campaign_id in page.read_text()
    assert [p.name for p in page.parent.iterdir()] == ["e.html"]
    # The same episode as a proposal of its stratum, in a batch of its own; this time with the tables.
    stratum = ["--cause", record.cause.lower(), "--dimensions", len(record.driver)]
    status, lines, _ = run(capsys, *stratum, "--proposal", int(record.batch.index[3]), "--tables", "--json")
    again = json.loads(lines[-1])
    assert status == 0 and again["page"] is None
    assert {k: v for k, v in again.items() if k not in ("index", "page")} == {
        k: v for k, v in found.items() if k not in ("index", "page")
    }
    assert any("segment_daily:" in line for line in lines) and any("gt_episode (hidden)" in line for line in lines)


def test_a_rejected_proposal_says_why(capsys, compile_cache):
    """The first rejected one of a stratum; its reasons are the checks that fail."""
    config, cause = config_io.load(CONFIG), "AUDIENCE_SATURATION"
    batch, verdict = inspect.propose(config.simulator, config.data.seed, "test", cause, 2, np.arange(64))
    first = int(np.flatnonzero(~verdict.accept)[0])
    argv = ("--cause", cause, "--dimensions", 2, "--proposal", first, "--json")
    status, lines, _ = run(capsys, *argv)
    found = json.loads(lines[-1])
    assert status == 0 and not found["accept"] and found["failing"]
    assert any("rejects it" in line for line in lines)
    assert found["campaign_id"] == f"C{int(batch.campaign_id[first])}"
    for margin in (m for m in found["margins"] if m["kind"] == "check"):
        failed = margin["value"] <= margin["needed"]
        assert failed == any(margin["name"] in reason for reason in found["failing"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--index", "12"], "--index 12: test has episodes 0 to 11"),
        (["--index", "-1"], "episodes 0 to 11"),
        (["--cause", "CREATIVE_FATIGE"], "did you mean CREATIVE_FATIGUE?"),
        (["--cause", "x"], "one of BID_INCREASE"),
        (["--cause", "CREATIVE_FATIGUE", "--dimensions", "3"], "slices of CREATIVE_FATIGUE have 1 or 2 attributes"),
        (["--cause", "BUDGET_CAP", "--dimensions", "1"], "slices of BUDGET_CAP have 0 attributes"),
        (["--cause", "BUDGET_CAP", "--proposal", "-1"], "--proposal -1: use 0 to"),
        (["--cause", "BUDGET_CAP", "--index", "1"], "leave one out"),
        (["--proposal", "3"], "--proposal belongs to a proposal: name its --cause"),
        (["--out", "{tmp}"], "is a directory: name a file"),
        (["--out", "{tmp}/file/page.html"], "cannot write"),
        (["--out", "/proc/none/page.html"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_before_any_work(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.setattr(inspect, "episode_of", None)
    monkeypatch.setattr(inspect, "proposal_of", None)
    (tmp_path / "file").write_text("")
    status, lines, err = run(capsys, *(word.replace("{tmp}", str(tmp_path)) for word in argv))
    assert status == 2 and lines == [] and said in err and err.count("\n") == 1
