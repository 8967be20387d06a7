"""`trace-jax diagnose`: files that are nearly tables, databases that are nearly whole, and what is written besides."""

import os
from types import SimpleNamespace

import duckdb
import pytest
from helpers_diagnose import HALVES, MOBILE, rows, runner, said, text

from trace_jax.diagnose import loading
from trace_jax.recipes import diagnose as command


@pytest.fixture
def diagnose(tmp_path, capsys):
    return runner(tmp_path, capsys)


@pytest.fixture(scope="module")
def table():
    return text(rows(("device",), effect=MOBILE))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('[\n  {"date": "2026-01-01", "impressions": 5}]', "is JSON: save it as CSV or Parquet"),
        ('{"date": "2026-01-01", "impressions": 5}\n{"date": "2026-01-02", "impressions": 5}\n', "is JSON"),
        (("Date,Clicks\n" + "2026-01-01,3\n" * 40).encode("utf-16")[:-1], "breaks off in the middle of a character"),
    ],
    ids=["json", "json lines", "half a character"],
)
def test_what_is_nearly_a_table_is_named(content, part, diagnose):
    status, _, _, err = diagnose(content)
    assert status == 2 and part in err and err.count("\n") == 1


def test_names_that_are_taken_and_a_plain_file_named_like_a_packed_one(table, diagnose, tmp_path):
    head, *lines = table.splitlines()
    plain = tmp_path / "plain.csv.gz"
    plain.write_text("\n".join([f"{head},x,x,x #2,x"] + [f"{line},1,2,3,4" for line in lines]) + "\n")
    status, found, _, err = diagnose(plain, argv=HALVES)
    assert status == 0, err
    assert said(found) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})


def test_a_view_of_what_is_gone_is_left_out(table, diagnose, tmp_path):
    (tmp_path / "t.csv").write_text(table)
    base = tmp_path / "base.duckdb"
    with duckdb.connect(str(base)) as connection:
        connection.execute("CREATE TABLE gone (a INT); CREATE VIEW broken AS FROM gone; DROP TABLE gone")
    status, _, _, err = diagnose(base)
    assert status == 2 and "cannot read" in err and err.count("\n") == 1
    with duckdb.connect(str(base)) as connection:
        connection.execute(f"CREATE TABLE ads AS FROM '{tmp_path / 't.csv'}'")
    status, found, out, err = diagnose(base, argv=HALVES)
    assert status == 0, err
    assert said(found) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})
    assert "broken cannot be read and is left out" in out + err


def test_kept_rows_are_whole_or_absent(table, diagnose, tmp_path):
    kept = tmp_path / "kept.duckdb"
    status, _, _, err = diagnose(table, argv=(*HALVES, "--keep", str(tmp_path / "none" / "kept.duckdb")))
    assert status == 2 and "there is no directory" in err

    with pytest.raises(duckdb.CatalogException, match="totals"), loading.database() as connection:
        connection.execute("CREATE TABLE cells (a INT)")  # and no other table: half a file
        loading.keep(SimpleNamespace(connection=connection), kept)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("kept")]

    status, _, _, err = diagnose(table, argv=(*HALVES, "--keep", str(kept)))
    assert status == 0, err
    with duckdb.connect(str(kept), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM cells").fetchone()[0] > 0
    assert [name for name in os.listdir(tmp_path) if name.startswith("kept")] == ["kept.duckdb"]


@pytest.mark.parametrize("flag", ["--write-mapping", "--keep"])
def test_nothing_stays_of_a_file_that_changed_while_it_was_read(flag, table, diagnose, tmp_path, monkeypatch):
    digests = iter(["before", "after"])
    monkeypatch.setattr(command, "digest", lambda path, show: next(digests))
    made = tmp_path / "made"
    status, _, _, err = diagnose(table, argv=(*HALVES, flag, str(made)))
    assert status == 2 and "was changed by another program" in err and not made.exists()


def test_windows_are_looked_at_before_the_files_are_read(table, diagnose, monkeypatch):
    monkeypatch.setattr(command, "digest", lambda *_: pytest.fail("read"))
    status, _, _, err = diagnose(table, argv=("--before", "x:y", "--after", "2026-01-01:2026-01-02"))
    assert status == 2 and "--before x:y" in err


def test_a_figure_that_cannot_be_is_explained(table, diagnose):
    constant = [f"{line},100%" if number else f"{line},In-stock rate" for number, line in enumerate(table.splitlines())]
    status, _, out, err = diagnose("\n".join(constant) + "\n", argv=HALVES)
    assert status == 0, err
    assert "stock null" in out and "(null: nothing to compare" in out
