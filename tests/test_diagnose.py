"""`trace-jax diagnose` through the command: files in many dresses, bad files, columns and words, quality of the
data, evidence that can be run again. What it concludes: `test_diagnose_judgement.py`."""

import datetime
import os
import signal
import subprocess
import tempfile
import threading
import time
import zipfile
from types import SimpleNamespace

import duckdb
import numpy as np
import pytest
from helpers_diagnose import (
    FIRST,
    HALVES,
    MIDDLE,
    MOBILE,
    NUMBERS,
    VALUES,
    falls,
    rows,
    runner,
    said,
    text,
)

from trace_jax.diagnose import loading, series
from trace_jax.recipes import diagnose_progress


@pytest.fixture
def diagnose(tmp_path, capsys):
    return runner(tmp_path, capsys)


# Files


@pytest.fixture(scope="module")
def fatigue():
    """CTR falls on mobile phones."""
    return rows(effect=MOBILE)


def _dresses(table, folder):
    german = {"date": "Datum", "campaign": "Kampagne", "device": "Gerät", "geo": "Land"}
    german |= {"impressions": "Impressionen", "clicks": "Klicks", "orders": "Konversionen", "spend": "Kosten"}
    google = {"date": "Day", "campaign": "Campaign", "device": "Device", "geo": "Country/Territory"}
    google |= {"impressions": "Impr.", "clicks": "Clicks", "orders": "Conversions", "spend": "Cost"}
    totals = [["Total: Account", " --", " --", " --", "9,999,999", "9,999", "99", "9,999.00"]]
    above = [["Segment report"], ["October 5, 2026 - November 1, 2026"]]
    thousands = lambda v: f"{v:,.2f}" if isinstance(v, float) else f"{v:,}"  # noqa: E731
    comma = lambda v: thousands(v).translate(str.maketrans(",.", ".,"))  # noqa: E731
    plain = text(table)
    (folder / "plain.csv").write_text(plain)
    duckdb.sql(f"COPY (FROM '{folder / 'plain.csv'}') TO '{folder / 'a.parquet'}'")
    with duckdb.connect(str(folder / "a.duckdb")) as connection:
        connection.execute(f"CREATE TABLE ads AS FROM '{folder / 'plain.csv'}'")
    crlf = plain.replace("\n", "\r\n")
    yield "title with other line ends", ("Report\nOctober\n" + crlf).encode()
    yield "names with other line ends", crlf.replace("\r\n", "\n", 1).encode()
    yield "footer with other line ends", (crlf + "Total,,,,9,9,9,9\n").encode()
    yield "carriage returns", plain.replace("\n", "\r").encode()
    yield (
        "google",
        text(table, delimiter="\t", number=thousands, names=google, above=above, below=totals).encode("utf-16"),
    )
    yield "german", text(table, delimiter=";", date="%d.%m.%Y", number=comma, names=german).encode("latin-1")
    yield "american", text(table, date="%m/%d/%Y", number=lambda v: f"${v:,}").encode("utf-8-sig")
    yield "words", text(table, date="%b %d, %Y", delimiter="|").encode()
    yield "parquet", folder / "a.parquet"
    yield "duckdb", folder / "a.duckdb"


def test_the_same_table_in_any_dress_gives_the_same_answer(fatigue, diagnose, tmp_path):
    status, plain, _, _ = diagnose(text(fatigue), argv=HALVES)
    assert status == 0 and said(plain) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})
    assert {k: plain["confidence"][k] for k in ("level", "votes", "of")} == {"level": "medium", "votes": 3, "of": 3}
    assert "comes gradually" in plain["confidence"]["why"][0] and plain["doubts"] == []
    for name, content in _dresses(fatigue, tmp_path):
        status, found, _, err = diagnose(content, argv=(*HALVES, "--samples", "1"))
        assert status == 0, (name, err)
        assert said(found) == said(plain), name
        assert found["evidence"][0]["rows"] == plain["evidence"][0]["rows"], name


@pytest.mark.parametrize(
    ("encoding", "mark", "iconv"),
    [
        ("cp1252", b"", "iconv -f WINDOWS-1252"),
        ("utf-16-be", b"\xfe\xff", "iconv -f UTF-16BE"),
        ("utf-16-be", b"", "iconv -f UTF-16BE"),
        ("utf-16-le", b"", None),
    ],
)
def test_encodings_that_duckdb_does_not_read_are_read_from_a_copy(
    encoding, mark, iconv, diagnose, tmp_path, monkeypatch
):
    """The copy is gone afterwards; what the evidence needs first is a command that makes one, and does."""
    values = VALUES | {"device": ("Téléphone – “5G”", "Computers", "Tablets")}
    table = rows(effect=falls({"device": values["device"][0]}, ctr=0.6), values=values)
    content = mark + text(table, number=lambda v: f"{v} €" if isinstance(v, float) else str(v)).encode(encoding)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    status, found, _, err = diagnose(content, argv=HALVES)
    assert status == 0, err
    assert said(found) == ("CREATIVE_FATIGUE", {"device": values["device"][0]})
    assert not list(temporary.iterdir())
    setup = found["evidence_setup"]
    if iconv is not None:
        command = setup.splitlines()[0].removeprefix("-- first, in a shell: ")
        assert command.startswith(iconv) and any("temporary copy" in q["text"] for q in found["quality"])
        subprocess.run(command, shell=True, check=True)
    with duckdb.connect() as fresh:
        fresh.execute(setup)
        assert [list(r) for r in fresh.execute(found["evidence"][0]["sql"]).fetchall()] == found["evidence"][0]["rows"]


def test_evidence_runs_again_from_the_users_file_and_is_what_numpy_says(fatigue, diagnose):
    _, found, _, _ = diagnose(text(fatigue, number=lambda v: f"{v:,}"), argv=HALVES)
    evidence = found["evidence"][0]
    with duckdb.connect() as fresh:
        fresh.execute(found["evidence_setup"])
        again = fresh.execute(evidence["sql"]).fetchall()
    assert [list(r) for r in again] == evidence["rows"]
    for period, part, days, shown, ctr, cvr, cpc in again:
        own = [
            r
            for r in fatigue
            if (r["date"] < MIDDLE) == (period == "1 before") and (r["device"] == "Mobile phones") == (part == "slice")
        ]
        sums = {m: sum(r[m] for r in own) for m in NUMBERS}
        assert days == 14 and shown == round(sums["impressions"] / 14)
        want = (100 * sums["clicks"] / sums["impressions"], 100 * sums["orders"] / sums["clicks"])
        np.testing.assert_allclose((ctr, cvr, cpc), (*want, sums["spend"] / sums["clicks"]), atol=6e-3)


HEAD = "Date,Device,Impressions,Clicks\n"
BAD = {
    "empty": (b"", "is empty"),
    "blanks": (b"\n \n\n", "nothing but blanks"),
    "binary": (bytes(range(256)) * 20, "is binary"),
    "utf-32": ("Date,Clicks\n".encode("utf-32"), "UTF-32"),
    "windows": (b"Date,Device,Cost \x80 \x81\n", "no UTF-8, Latin-1 or Windows-1252 text"),
    "no rows": (HEAD.encode(), "no rows"),
    "one day": (f"{HEAD}2026-11-01,mobile,100,2\n2026-11-01,desktop,100,2\n".encode(), "one day"),
    "no numbers": (b"Date,Device,Note\n2026-11-01,mobile,hello\n2026-11-02,mobile,bye\n", "no numbers of impressions"),
    "words for numbers": (f"{HEAD}2026-11-01,mobile,many,few\n".encode(), "no numbers of impressions"),
    "no dates": (b"Device,Impressions,Clicks\nmobile,1,1\ndesktop,2,1\n", "no column of dates"),
    "prose": (b"Just a letter.\nIt is no table.\n", "no line of column names"),
    "gzip": (b"\x1f\x8b" + bytes(30), "gzip archive"),
    "old excel": (b"\xd0\xcf\x11\xe0" + bytes(600), "Excel"),
    "broken parquet": (b"PAR1" + bytes(100), "cannot read"),
    "broken duckdb": (bytes(8) + b"DUCK" + bytes(100), "cannot open"),
    "open quotes": (HEAD.encode() + b'2026-11-01,"mob\nile,1,2\n"x,""y,3\n' * 9, ""),
    "either order": (
        (HEAD + "".join(f"0{a}/0{b}/2026,mobile,100,3\n" for a in range(1, 6) for b in range(1, 6))).encode(),
        "date_format",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_clear_line(name, diagnose):
    content, part = BAD[name]
    status, _, _, err = diagnose(content)
    assert status == 2 and part in err and err.startswith("trace-jax: ") and err.count("\n") == 1


def test_archives_directories_and_missing_files(diagnose, tmp_path):
    plain, locked = tmp_path / "a.zip", tmp_path / "b.zip"
    with zipfile.ZipFile(plain, "w") as archive:
        archive.writestr("a.csv", HEAD)
    content = bytearray(plain.read_bytes())
    content[6] |= 1  # the flag of an encrypted entry
    locked.write_bytes(bytes(content))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.csv").write_text(HEAD)
    os.mkfifo(tmp_path / "pipe")
    odd = tmp_path / os.fsdecode(b"name-\xff.csv")
    odd.write_text(HEAD)
    for path, part in (
        (plain, "a zip archive"),
        (locked, "password-protected"),
        (tmp_path / "folder", "folder/x.csv"),
        (tmp_path / "none.csv", "no such file"),
        (tmp_path / "pipe", "no regular file"),
        (odd, "rename the file"),
    ):
        status, _, _, err = diagnose(path)
        assert status == 2 and part in err and err.count("\n") == 1


def test_broken_lines_are_left_out_and_counted(fatigue, diagnose):
    content = text(fatigue) + "2026-11-02,Brand,Mobile phones\n2026-11-02,Brand,Tablets,Japan,1,1,1,1,more,cells\n"
    _, found, _, _ = diagnose(content, argv=HALVES)
    assert any("2 lines have more or fewer cells" in q["text"] for q in found["quality"])
    assert said(found)[1] == {"device": "Mobile phones"}


# Columns


def test_guessed_columns_are_shown_and_need_a_yes(fatigue, diagnose, tmp_path):
    status, _, out, err = diagnose(text(fatigue), yes=False)
    assert status == 2 and "--yes" in err and "Investigation" not in out
    assert "impressions" in out and "device" in out
    template = tmp_path / "mapping.yaml"
    status, found, _, _ = diagnose(text(fatigue), argv=("--write-mapping", str(template)), yes=False)
    assert status == 0 and found["mapping"] == str(template)
    status, found, _, _ = diagnose(text(fatigue), argv=("--mapping", str(template), *HALVES), yes=False)
    assert status == 0 and said(found) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})


def test_a_person_at_a_terminal_is_asked(fatigue, diagnose, monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    status, _, _, err = diagnose(text(fatigue), argv=HALVES, yes=False)
    assert status == 2 and "--write-mapping" in err
    monkeypatch.setattr("builtins.input", lambda prompt: "")
    status, found, _, _ = diagnose(text(fatigue), argv=HALVES, yes=False)
    assert status == 0 and said(found)[1] == {"device": "Mobile phones"}


def test_cells_do_not_steer_the_terminal(diagnose):
    values = VALUES | {"geo": ("\x1b[2JUnited States", "Germany")}
    status, _, out, _ = diagnose(text(rows(values=values), names={"device": "De\x1bvice"}), argv=HALVES)
    assert status == 0 and "\x1b" not in out


@pytest.mark.parametrize(
    ("mapping", "part"),
    [
        ("colums: {}", "columns"),
        ("columns: {clicks: Clics}", "no column 'Clics'"),
        ("columns: {click: clicks}", "did you mean clicks"),
        ("values: {geo: {Japan: JAPAN}}", "use one of US"),
        ("timezone: Mars/Base", "no time zone"),
        ("date_format: '%H'", "date_format"),
        ("columns: {spend: campaign}", "holds no numbers"),
    ],
)
def test_a_wrong_mapping_is_refused_with_a_mend(mapping, part, fatigue, diagnose, tmp_path):
    (tmp_path / "m.yaml").write_text(mapping)
    status, _, _, err = diagnose(text(fatigue), argv=("--mapping", str(tmp_path / "m.yaml")))
    assert status == 2 and part in err and err.count("\n") == 1


def test_nothing_that_maps_is_refused_and_null_means_totals_alone(fatigue, diagnose, tmp_path):
    names = {"device": "Shelf", "geo": "Colour"}
    values = {"Mobile phones": "A1", "Computers": "B2", "Tablets": "C3"}
    values |= dict(zip(VALUES["geo"], ("red", "green", "blue", "grey"), strict=True))
    table = [{k: values.get(v, v) for k, v in row.items()} for row in fatigue]
    status, _, _, err = diagnose(text(table, names=names))
    assert status == 2 and "Shelf, Colour" in err and "null" in err
    (tmp_path / "m.yaml").write_text("columns: {device: null}")
    status, found, _, _ = diagnose(text(table, names=names), argv=("--mapping", str(tmp_path / "m.yaml"), *HALVES))
    assert status == 0 and found["slice"] == []
    assert sum("cannot be seen" in line for line in found["not_checked"]) == 4
    (tmp_path / "m.yaml").write_text("columns: {device: Shelf}\nvalues: {device: {A1: TABLET}}")
    status, found, _, _ = diagnose(text(table, names=names), argv=("--mapping", str(tmp_path / "m.yaml"), *HALVES))
    assert said(found) == ("CREATIVE_FATIGUE", {"device": "A1"}) and found["words"]["device"]["A1"] == "TABLET"


def test_a_dimension_beside_known_ones_that_is_not_looked_at_is_told(fatigue, diagnose, tmp_path):
    table = [row | {"sales_team": ("North", "South")[n % 2], "note": "same"} for n, row in enumerate(fatigue)]
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    told = next(line for line in found["not_checked"] if "may be a dimension" in line)
    assert told.startswith("sales_team may be") and "(placement, audience)" in told
    target = tmp_path / "map.yaml"
    diagnose(text(table), argv=(*HALVES, "--write-mapping", str(target)))
    written = target.read_text()
    assert "# Not used: sales_team, note." in written and "free are: placement, audience." in written
    target.write_text(written.replace("columns:\n", "columns:\n  audience: sales_team\n"))
    _, found, _, _ = diagnose(text(table), argv=(*HALVES, "--mapping", str(target)))
    assert found["words"]["audience"].keys() == {"North", "South"}


def test_values_without_a_word_of_their_own_are_told_and_answered_for(diagnose):
    """Six countries and four words: the largest stand alone, the rest together; none is lost."""
    values = VALUES | {"geo": ("France", "Spain", "Italy", "Poland", "Peru", "Chile")}
    shrink = {"Italy": 0.3, "Poland": 0.3, "Peru": 0.3, "Chile": 0.3}

    def effect(t, cell):
        return {"impressions": shrink.get(cell["geo"], 1.0)} | (
            {"ctr": 0.6} if t >= 14 and cell["geo"] == "Spain" else {}
        )

    table = rows(effect=effect, values=values)
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    assert said(found) == ("CREATIVE_FATIGUE", {"geo": "Spain"})
    words = found["words"]["geo"]
    assert len(words) == 6 and len(set(words.values())) == 4
    assert sum(w == words["Chile"] for w in words.values()) == 3
    assert any("together only" in line for line in found["not_checked"])


# Quality


def test_the_report_finds_what_was_done_to_the_data(diagnose):
    table = rows()
    gone = {FIRST + datetime.timedelta(5), FIRST + datetime.timedelta(20)}
    kept = [r for r in table if r["date"] not in gone]
    kept[3] |= {"impressions": 0, "clicks": 0, "orders": 0, "spend": 0.0}
    kept[7] |= {"clicks": kept[7]["impressions"] + 5}
    day = [r for r in kept if r["date"] == FIRST + datetime.timedelta(9)]
    totals = {}
    for row in kept:
        entry = totals.setdefault(row["date"], {"date": row["date"], "campaign": "Brand"} | dict.fromkeys(NUMBERS, 0))
        for m in NUMBERS:
            entry[m] += row[m]
    totals[FIRST + datetime.timedelta(11)]["impressions"] *= 2
    anonymous = [{k: v for k, v in row.items() if k != "campaign"} for row in totals.values()]  # it belongs to Brand
    status, found, _, _ = diagnose(text(kept + day), text(anonymous), argv=HALVES)
    assert status == 0
    report = "\n".join(q["text"] for q in found["quality"])
    assert "2 days have no rows: 2026-10-10, 2026-10-25" in report
    assert "every row of 1 day is there more than once" in report
    with duckdb.connect() as fresh:  # and the evidence counts them once
        fresh.execute(found["evidence_setup"])
        assert [list(r) for r in fresh.execute(found["evidence"][0]["sql"]).fetchall()] == found["evidence"][0]["rows"]
        assert fresh.execute("SELECT count(*), sum(clicks) FROM loaded").fetchone() == (
            len(kept),
            sum(r["clicks"] for r in kept),
        )
    assert "1 of 312 rows have no impressions" in report
    assert "1 rows have more clicks than impressions" in report
    assert "impressions of the totals and of the slices differ on 1 days, most on 2026-10-16" in report


def test_currencies_are_not_added_up(diagnose):
    table = [{"currency": "USD" if r["geo"] != "Japan" else "JPY"} | r for r in rows()]
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    assert any("several currencies (JPY, USD)" in q["text"] for q in found["quality"])
    assert "cpc" not in found["evidence"][0]["columns"]


def test_campaigns_must_be_named_and_siblings_are_used(diagnose):
    table = rows(effect=MOBILE) + rows(seed=5, campaign="Other")
    status, _, _, err = diagnose(text(table), argv=HALVES)
    assert status == 2 and "'Brand'" in err and "--campaign" in err
    _, found, _, _ = diagnose(text(table), argv=(*HALVES, "--campaign", "brand"))
    assert found["campaign"] == "Brand" and said(found)[1] == {"device": "Mobile phones"}
    assert not any("no other campaign" in line for line in found["not_checked"])


def test_a_large_file_of_several_campaigns_is_refused_before_it_is_read_to_its_end(diagnose, monkeypatch):
    table = text(rows(effect=MOBILE) + rows(seed=5, campaign="Other"))
    monkeypatch.setattr(series, "LARGE", 0)
    status, _, _, err = diagnose(table, argv=HALVES)
    assert status == 2 and "the first 200,000 rows of" in err and "'Brand' (" in err and "--campaign" in err
    monkeypatch.setattr(series, "GLANCE", 1)  # a row is of one campaign: on to the whole file
    status, _, _, err = diagnose(table, argv=HALVES)
    assert status == 2 and "the tables hold 2 campaigns" in err and "'Brand' (" in err


def test_a_mapping_is_written_beside_a_file_named_like_a_partial_one(fatigue, diagnose, tmp_path):
    source = tmp_path / "map.yaml.partial"
    source.write_text(text(fatigue))
    status, _, _, _ = diagnose(source, argv=(*HALVES, "--write-mapping", str(tmp_path / "map.yaml")))
    assert status == 0 and source.read_text() == text(fatigue)


def test_ctrl_c_while_duckdb_works_is_an_interruption():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt), loading.database() as connection:
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            connection.execute("SELECT sum(hash(a.i + b.i)) FROM range(40000) a(i), range(40000) b(i)")
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(RuntimeError, match="another"), loading.database():
        raise RuntimeError("another")


def test_a_bar_shows_how_far_each_pass_over_a_large_file_is(tmp_path, monkeypatch):
    shown = []
    bar = SimpleNamespace(update=lambda step, **figures: shown.append((step, figures["pass"])))
    with duckdb.connect() as connection:
        passes, left = diagnose_progress.Passes(bar), iter([10.0, 60.0, -1.0, 100.0, 5.0])
        watched = SimpleNamespace(execute=connection.execute, query_progress=lambda: next(left, -1.0))
        passes.show(1, 2)
        monkeypatch.setattr(diagnose_progress, "EVERY", 0.001)
        with passes.watching(watched):
            while len(shown) < 5:
                time.sleep(0.001)
        assert connection.execute("SELECT current_setting('enable_progress_bar')").fetchone() == (True,)
    assert shown == [(50, 1), (10, 2), (60, 2), (99, 2), (5, 3)]
    small = tmp_path / "small.csv"
    small.write_text("x")
    with diagnose_progress.reading(None, [small, tmp_path / "none"]) as show:  # no bar at all
        show(1, 2)
