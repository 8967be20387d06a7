"""`trace-jax diagnose` on tables and requests that are wrong: repeated files, stray dates, impossible numbers, mappings
that YAML reads otherwise, files that would be read for ever. Most of it without an investigation."""

import contextlib
import datetime
import json
import os
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest
from helpers_diagnose import FIRST, HALVES, rows, runner, text

from trace_jax.config import ConfigError
from trace_jax.diagnose import declared, findings, loading, mapping, quality, reading, series, sources, spans, windows
from trace_jax.diagnose.declared import Declared
from trace_jax.recipes import shipped

DAY = datetime.timedelta(1)


@pytest.fixture
def diagnose(tmp_path, capsys):
    return runner(tmp_path, capsys)


@contextlib.contextmanager
def opened(*paths):
    with loading.database() as connection:
        plans, left = mapping.plans(sources.open_sources(paths, connection), Declared(), connection)
        yield loading.load(plans, connection, left)


def small(days=28, **options):
    return rows(("device",), days, **options)


def as_parquet(table, path):
    path.with_suffix(".txt").write_text(text(table))
    duckdb.sql(f"COPY (FROM read_csv('{path.with_suffix('.txt')}')) TO '{path}'")
    return path


def as_csv(table, path):
    path.write_text(text(table))
    return path


# Repeated files


def _clicks(table):
    return sum(r["clicks"] for r in table)


def _again(loaded):
    with duckdb.connect() as fresh:
        fresh.execute(loaded.setup)
        return fresh.execute("SELECT count(*), sum(clicks) FROM loaded").fetchone()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_report_as_csv_and_as_parquet_counts_once(swapped, tmp_path):
    table = small()
    paths = [as_csv(table, tmp_path / "a.csv"), as_parquet(table, tmp_path / "b.parquet")]
    with opened(*(paths[::-1] if swapped else paths)) as loaded:
        assert loaded.ask("SELECT sum(clicks) FROM cells") == [(_clicks(table),)]
        (told,) = loaded.problems
        assert "repeats 28 days of" in told and told.endswith("counted once")
        assert _again(loaded) == (len(table), _clicks(table))


def test_exports_that_overlap_count_the_days_of_both_once_and_tell_of_days_that_differ(tmp_path):
    table = small()
    early, late = (
        [r for r in table if keep(r["date"] - FIRST)] for keep in (lambda d: d < 20 * DAY, lambda d: d >= 9 * DAY)
    )
    paths = as_csv(early, tmp_path / "a.csv"), as_parquet(late, tmp_path / "b.parquet")
    with opened(*paths) as loaded:
        assert loaded.ask("SELECT sum(clicks) FROM cells") == [(_clicks(table),)]
        assert loaded.problems == ["b.parquet repeats 11 days of a.csv: counted once"]
        assert _again(loaded) == (len(table), _clicks(table))
    later = [r | {"orders": r["orders"] + 1} if r["date"] == FIRST + 10 * DAY else r for r in late]
    with opened(paths[0], as_parquet(later, tmp_path / "b.parquet")) as loaded:
        assert "repeats 10 days" in loaded.problems[0] and "1 day with figures that differ" in loaded.problems[1]


def test_of_two_repeating_files_the_one_with_more_metrics_is_kept(tmp_path):
    table = small()
    poor = [{k: v for k, v in r.items() if k != "spend"} for r in table]
    with opened(as_csv(poor, tmp_path / "a.csv"), as_parquet(table, tmp_path / "b.parquet")) as loaded:
        assert loaded.problems == ["a.csv repeats 28 days of b.parquet: counted once"]
        assert loaded.ask("SELECT sum(spend) FROM cells")[0][0] == pytest.approx(sum(r["spend"] for r in table))
    other = small(seed=3)
    with opened(as_csv(table, tmp_path / "a.csv"), as_parquet(other, tmp_path / "b.parquet")) as loaded:
        (problem,) = loaded.problems  # another report of the same days
        assert "they are added up" in problem


# Windows, late days, dates


def test_lag_and_given_windows(diagnose, tmp_path, monkeypatch):
    status, _, _, err = diagnose(text(small()), argv=(*HALVES, "--lag", "14"))
    assert status == 2 and "--lag 14 leaves out all days of --after" in err and err.count("\n") == 1
    status, _, _, err = diagnose(text(small()), argv=("--lag", "40"))
    assert status == 2 and "hold 0 days of campaign 'Brand' without the last 28 (--lag)" in err
    with opened(as_csv(small(), tmp_path / "a.csv")) as loaded:
        series.split(loaded, "Brand")
        found = series.series(loaded, "Brand")
        monkeypatch.setattr(quality, "incomplete_days", lambda found: (5, "the last 5 days look incomplete"))
        last = FIRST + 27 * DAY
        for begins, incomplete, part in (
            (last - 4 * DAY, 0, "kept, as --after begins"),
            (last - 5 * DAY, 5, "left out"),
        ):
            report = quality.report(loaded, found, None, begins)
            late = next(f for f in report.findings if f.name == "late")
            assert report.incomplete == incomplete and part in late.text and late.serious
        with pytest.raises(ConfigError, match="leaves out all days"):
            quality.report(loaded, found, 5, last - 4 * DAY)
        assert quality.report(loaded, found, 4, last - 4 * DAY).incomplete == 4


@pytest.mark.parametrize("argv", [("--before", "0001-01-01:2026-10-18"), ("--after", "2026-10-19:9999-12-31")])
def test_windows_lie_in_the_years_of_reports(argv, diagnose):
    status, _, _, err = diagnose(text(small()), argv=(*HALVES, *argv))
    assert status == 2 and "between 1990-01-01 and 2100-01-01" in err and err.count("\n") == 1


def test_rows_whose_date_is_lost_are_a_remark_and_a_footer_is_not(tmp_path):
    table = small()
    half = [{"date": r["date"].strftime("%d/%m/%Y") if n % 2 else r["date"]} | {k: r[k] for k in r if k != "date"}
            for n, r in enumerate(table)]  # fmt: skip
    with opened(as_csv(half, tmp_path / "a.csv")) as loaded:
        assert any("42 of 84 rows without a date left out (misspelt dates? e.g. '" in p for p in loaded.problems)
    (tmp_path / "b.csv").write_text(text(table, below=[["Total", "", "", "9", "9", "9", "9"]] * 3))
    with opened(tmp_path / "b.csv") as loaded:
        assert (
            loaded.problems == [] and "b.csv: 3 of 87 rows without a date left out (totals, footers?" in loaded.notes[0]
        )


def test_a_stray_date_is_left_out_with_a_remark(tmp_path):
    table = small()
    table += [r | {"date": datetime.date(2099, 12, 31)} for r in table[:1]]
    with opened(as_csv(table, tmp_path / "a.csv")) as loaded:
        series.split(loaded, "Brand")
        spans.bound(loaded, None)
        assert loaded.problems == ["1 row of 2099-12-31 left out: no other row is within a year (misspelt dates?)"]
        assert series.series(loaded, "Brand").days == 28
        series.split(loaded, "Brand")
        spans.bound(loaded, (FIRST, datetime.date(2099, 12, 31)))  # asked for by name
        assert series.series(loaded, "Brand").days > 20_000


def test_more_values_by_day_than_memory_holds_are_cut_or_refused(tmp_path, monkeypatch):
    with opened(as_csv(small(100), tmp_path / "a.csv")) as loaded:  # 3 values of 4 metrics
        for most, asked, days in ((12 * 60, None, 60), (12 * 30, (FIRST + DAY, FIRST + 20 * DAY), 20)):
            monkeypatch.setattr(spans, "MOST", most)
            series.split(loaded, "Brand")
            spans.bound(loaded, asked)
            assert series.series(loaded, "Brand").days == days and "is looked at" in loaded.problems.pop()
        for most, asked in ((12 * 40, None), (12 * 30, (FIRST, FIRST + 50 * DAY))):
            monkeypatch.setattr(spans, "MOST", most)
            series.split(loaded, "Brand")
            with pytest.raises(ConfigError, match="3 values of device on 100 days are too many"):
                spans.bound(loaded, asked)


@pytest.mark.parametrize("kept", [(0, *range(200, 228)), (0, 1, 2, 40, 41, 42), range(6), (*range(10), 300)])
def test_proposed_windows_hold_the_days_that_windows_need(kept):
    present = np.zeros(max(kept) + 1, bool)
    present[list(kept)] = True
    rng = np.random.default_rng(0)
    totals = {m: np.where(present, rng.integers(900, 1100, len(present)), 0.0) for m in ("impressions", "clicks")}
    found = series.Series("x", FIRST, present, totals, {})
    before, after = (mask.sum() for mask in _masks(found, windows.propose(found)))
    assert before >= windows.MIN_BEFORE and after >= windows.MIN_AFTER


def _masks(found, proposed):
    for first, last in (proposed.before, proposed.after):
        yield found.present[(first - found.first).days : (last - found.first).days + 1]


@pytest.mark.parametrize(("form", "good", "bad"), [
    ("excel", "46000.5", "99999999999999"), ("epoch", "1764547200", "99999999999999999"),
    ("epoch_ms", "1764547200000", "99999999999999999999"),
])  # fmt: skip
@pytest.mark.parametrize("count", [10, 3000])
def test_a_number_that_is_no_date_is_one_cell_without_a_date(form, good, bad, count):
    with loading.database() as connection:
        connection.execute(
            f"CREATE TABLE t AS SELECT (x + {good} + i / 1e4)::VARCHAR d FROM (SELECT 0 x), range({count}) r(i)"
        )
        connection.execute("INSERT INTO t VALUES (?)", [bad])
        found = reading.date_format(connection, "t", "d", "VARCHAR")
        assert found.form == form
        rows = connection.execute(f"SELECT count({found.expression}), count(*) FROM t").fetchone()
        assert rows == (count, count + 1)


# Numbers


@pytest.mark.parametrize(("metric", "value", "part"), [
    ("impressions", "1e19", "'impressions' adds up to more than 1e+15, its largest cell is '1e19'"),
    ("orders", "1e300", "'orders' adds up to more than"),
    ("spend", "1e308", "'spend' adds up to more than"),
])  # fmt: skip
def test_one_impossible_cell_is_refused(metric, value, part, diagnose):
    table = small()
    table[5][metric] = value
    status, _, _, err = diagnose(text(table))
    assert status == 2 and part in err and err.count("\n") == 1


def test_turned_signs_are_refused_and_corrections_are_not(diagnose, tmp_path):
    for metric, mend in (("impressions", "correct its sign"), ("spend", "columns: {spend: null}")):
        status, _, _, err = diagnose(text([r | {metric: -r[metric]} for r in small()]))
        assert status == 2 and f"'{metric}' is negative in 84 of 84 sums" in err and mend in err
    table = small()
    table[3]["clicks"] *= -1
    with opened(as_csv(table, tmp_path / "a.csv")) as loaded:
        series.split(loaded, "Brand")
        found = series.series(loaded, "Brand")
        assert any("1 rows have negative clicks" in f.text for f in quality.report(loaded, found, None).findings)
        assert min(own["clicks"].min() for own in found.values.values()) == 0


def test_figures_so_small_that_they_overflow_a_ratio_are_none(tmp_path):
    with opened(as_csv([r | {"impressions": "1e-320"} for r in small()], tmp_path / "a.csv")) as loaded:
        assert loaded.ask("SELECT max(impressions) FROM cells") == [(0.0,)]


def test_json_has_null_for_what_is_not_finite():
    evidence = findings.Evidence("t", "q", ("a", "b"), ((1.5, float("inf")), ("x", float("nan"))))
    diagnosis = findings.Diagnosis(None, (), (), 0, 1, (), "low", ())
    made = findings.as_json(SimpleNamespace(setup=""), diagnosis, [evidence], [])
    assert json.loads(json.dumps(made, allow_nan=False))["evidence"][0]["rows"] == [[1.5, None], ["x", None]]


# Wide and long


def test_unknown_columns_are_looked_at_in_one_pass(tmp_path):
    """A thousand columns took a minute and a half, with a query for each of them."""
    names = [f"c{n}" for n in range(1000)]
    lines = [f"2026-10-{d:02d},100,5,{p}," + ",".join(["Mobile", "x"][n == 7] for n in range(1000))
             for d in range(1, 29) for p in ("a", "b")]  # fmt: skip
    lines[3] = lines[3].replace("Mobile", "Tablet", 1)
    (tmp_path / "a.csv").write_text("\n".join(["Day,Impressions,Clicks,Site," + ",".join(names), *lines]))
    with loading.database() as connection:
        (source,) = sources.open_sources([tmp_path / "a.csv"], connection)
        (plan,), _ = mapping.plans([source], Declared(), connection)
        assert plan.fields["device"] == "c0" and plan.by_values == ("device",)
        few = reading.few_values(connection, source.relation, ["Site", "Day", "c7"], first=100, most=5)
        assert few == {"Site": {"a", "b"}, "c7": {"x"}}


@pytest.mark.parametrize(("line", "part"), [
    ("S" * (1 << 20) + "x", "line 4 is longer than 1 MiB"),
    ("a," * 30_000, "line 4 has 30,001 cells for 7 columns"),
])  # fmt: skip
@pytest.mark.parametrize("newline", ["\n", "\r", "\r\n"])
def test_a_line_that_is_no_row_is_refused_by_its_number(line, part, newline, tmp_path):
    lines = text(small()).splitlines()
    lines.insert(3, line)
    path = tmp_path / "a.csv"
    path.write_bytes(newline.join(lines).encode())
    with loading.database() as connection, pytest.raises(ConfigError, match=part):
        sources.open_sources([path], connection)
    path.write_bytes(newline.join([*lines[:3], *lines[4:]]).encode() + b"," * 100)
    with loading.database() as connection:
        sources.open_sources([path], connection)


def test_thousands_of_names_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a," * 300_000)
    with loading.database() as connection, pytest.raises(ConfigError, match="line 1 has more than 5,000 cells"):
        sources.open_sources([tmp_path / "a.csv"], connection)


# Mappings


@pytest.mark.parametrize(("content", "part"), [
    ("columns: {1: Day}", "columns: 1 is no text: write it in quotes"),
    ("columns: {on: Day}", "columns: true (which yes, no, on and off are to YAML, too) is no text"),
    ("columns: {null: Day}", "columns: null is no text"),
    ("columns: {geo: yes}", "columns.geo: true"),
    ("columns: {geo: [a, b]}", "name one column"),
    ("values: {geo: {NO: DE}}", "values.geo: false (which yes, no, on and off are to YAML, too)"),
    ("values: {geo: {Norway: NO}}", "values.geo.Norway: false"),
    ("values: {geo: {null: DE}}", "values.geo: null"),
    ("values: {1: {a: JP}}", "values: 1 is no text"),
    ("on: {a: b}", "a key: true"),
    ("timezone: no", "timezone: false"),
    ("timezone: localtime", "no time zone 'localtime'"),
    ("date_format: {a: b}", "date_format: give one text"),
])  # fmt: skip
def test_what_yaml_reads_as_no_text_is_refused_with_the_advice_to_quote_it(content, part, tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        declared.load(path)
    assert part in str(error.value) and str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_quoted_words_and_numbers_of_the_user_are_values(tmp_path):
    (tmp_path / "m.yaml").write_text('values: {geo: {"NO": DE}, audience: {1: LOYAL}}')
    assert declared.load(tmp_path / "m.yaml").values == {"geo": {"NO": "DE"}, "audience": {"1": "LOYAL"}}


@pytest.mark.parametrize("zone", ["localtime", "right/UTC"])
def test_zones_that_only_python_knows_are_refused(zone):
    with pytest.raises(ConfigError, match="--timezone: no time zone"):
        declared.check_zone(zone, "--timezone")


def test_declared_values_that_no_table_has_are_told():
    said = Declared(values={"geo": {"Germny": "DE", "japan": "JP"}, "audience": {"x": "LOYAL"}})
    wrong, lost = declared.absent(said, {"geo": ["Germany", "Japan"]})
    assert "no value 'Germny'; did you mean 'Germany' by 'Germny'?" in wrong and "japan" not in wrong
    assert lost == "values.audience of the mapping: the tables have no audience that is looked at"
    assert declared.absent(Declared(values={"geo": {"JAPAN": "JP"}}), {"geo": ["Japan"]}) == []


def test_a_pipe_that_nobody_writes_to_is_no_mapping_and_one_of_the_shell_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="no regular file"):
            declared.load(type(tmp_path)(path))
    end, start = os.pipe()
    with os.fdopen(start, "w") as file:
        file.write("decimal: ','")
    try:
        assert declared.load(type(tmp_path)(f"/dev/fd/{end}")).decimal == ","
    finally:
        os.close(end)


# The shipped policy


@pytest.mark.parametrize("change", [{"name": None}, {"parameters": "many"}, {"files": []}])
def test_a_manifest_that_lacks_something_is_refused(change, tmp_path):
    found = {"name": "nano", "parameters": 5, "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(found))
    assert shipped.manifest(tmp_path) == found
    (tmp_path / "manifest.json").write_text(json.dumps(found | change))
    with pytest.raises(ConfigError, match=f"does not say the policy's {next(iter(change))}: install"):
        shipped.manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match="no shipped policy"):
        shipped.manifest(tmp_path)
