"""`trace-jax diagnose`: several files that do not quite fit together, values that look alike, amounts in many ways."""

import duckdb
import pytest
from helpers_diagnose import HALVES, MIDDLE, rows, runner, text

from trace_jax.diagnose import reading, synonyms, words


@pytest.fixture
def diagnose(tmp_path, capsys):
    return runner(tmp_path, capsys)


@pytest.fixture(scope="module")
def halves():
    table = rows(("device",))
    return [r for r in table if r["date"] < MIDDLE], [r for r in table if r["date"] >= MIDDLE]


def serious(found):
    return [f["text"] for f in found["quality"] if f["serious"]]


def test_orders_that_fall_to_nothing_are_no_calm(halves, diagnose):
    """From 10 % to 0: neither quiet nor sure."""
    before, after = halves
    status, found, _, err = diagnose(text([*before, *(r | {"orders": 0} for r in after)]), argv=HALVES)
    assert status == 0, err
    assert any("orders are 0 on all 14 days after" in line for line in serious(found))
    assert found["confidence"]["level"] != "high"
    assert found["cause"] != "NO_SIGNAL" or any("CVR went -100%" in d for d in found["doubts"])


def test_a_file_without_a_metric_of_the_other_takes_it_out(halves, diagnose):
    before, after = halves
    files = text(before), text([{k: v for k, v in r.items() if k != "orders"} for r in after])
    status, found, _, err = diagnose(*files, argv=HALVES)
    assert status == 0, err
    assert any("has no orders, which another file has: not looked at" in line for line in serious(found))
    assert not any("CVR" in part for part in found["decomposition"])


def test_totals_under_another_spelling_are_the_same_campaign(diagnose):
    table = rows(("device",), campaign="Brand US", effect=lambda t, c: {"impressions": 0.5} if t >= 14 else {})
    sums = {}
    for r in table:
        own = sums.setdefault(r["date"], {"date": r["date"], "campaign": "Brand-US"})
        for metric in ("impressions", "clicks", "orders", "spend"):
            own[metric] = round(own.get(metric, 0) + r[metric], 2)
    status, found, _, err = diagnose(text(table), text(list(sums.values())), argv=HALVES)
    assert status == 0, err
    assert any("'Brand-US' of the totals is taken for 'Brand US'" in f["text"] for f in found["quality"])
    assert not any("other campaigns" in d for d in found["doubts"])
    other = text([r | {"campaign": "4711"} for r in sums.values()])
    status, found, _, err = diagnose(text(table), other, argv=HALVES)
    assert status == 0 and any("is not among those of the totals ('4711')" in line for line in serious(found))


def test_totals_of_a_campaign_that_differs_in_parentheses_are_of_another(diagnose):
    table = [r | {"campaign": "Brand (US)"} for r in rows(("device",))]
    totals = [r | {"campaign": "Brand (DE)"} for r in rows(())]
    status, found, _, err = diagnose(text(table), text(totals), argv=HALVES)
    assert status == 0, err
    assert any("'Brand (US)' of the slices is not among those of the totals" in line for line in serious(found))


def test_sales_are_missed_only_where_there_were_orders(diagnose):
    """Some days at the beginning without an order, as small campaigns have them, and then orders without sales."""
    table = [r | {"sales": 9.0 * r["orders"]} for r in rows(("device",))]
    first, last = min(r["date"] for r in table), max(r["date"] for r in table)
    few = [r | {"orders": 0, "sales": 0.0, "clicks": 3} if (r["date"] - first).days < 3 else r for r in table]
    status, found, _, err = diagnose(text(few), argv=HALVES)
    assert status == 0 and not any("sales are 0" in line for line in serious(found)), err
    lost = [r | {"sales": 0.0} if (last - r["date"]).days < 3 else r for r in table]
    status, found, _, err = diagnose(text(lost), argv=HALVES)
    assert status == 0 and any("sales are 0 on all 3 days" in line for line in serious(found)), err


def test_values_and_campaigns_that_differ_in_parentheses_or_marks_are_apart(diagnose):
    sums = {"Broad (US)": 3.0, "Broad (DE)": 2.0, "25": 1.5, "25+": 1.0}
    found = words.assign("geo", sums, {})
    assert len(set(found.of.values())) == 4
    declared = {"Broad (US)": "LOYAL", "Broad (DE)": "PROSPECTING"}
    assert dict(words.assign("audience", {k: 1.0 for k in declared}, declared).of) == declared
    assert len(set(words.assign("device", {"a b": 2.0, "A  B ": 1.0, "c": 1.0}, {}).of.values())) == 2
    assert synonyms.word_of("placement", "Top of search (first page)") == "TOP_OF_SEARCH"
    table = text([r | {"campaign": "Brand (US)"} for r in rows(("device",))])
    status, _, _, err = diagnose(table, argv=(*HALVES, "--campaign", "Brand (DE)"))
    assert status == 2 and "did you mean 'Brand (US)'?" in err


def test_a_view_that_fails_on_a_row_is_one_line(halves, diagnose, tmp_path):
    (tmp_path / "t.csv").write_text(text([*halves[0], *halves[1]]) + "Total,,,9,9,9,9\n")
    with duckdb.connect(str(tmp_path / "cast.duckdb")) as connection:
        connection.execute(f"CREATE TABLE raw AS FROM read_csv('{tmp_path / 't.csv'}', all_varchar=true)")
        connection.execute(
            'CREATE VIEW daily AS SELECT CAST(date AS DATE) "Day", device, CAST(impressions AS BIGINT) Impressions,'
            " CAST(clicks AS BIGINT) Clicks FROM raw; ALTER TABLE raw RENAME COLUMN date TO x"
        )
        connection.execute(
            'CREATE OR REPLACE VIEW daily AS SELECT CAST(x AS DATE) "Day", device, '
            "CAST(impressions AS BIGINT) Impressions, CAST(clicks AS BIGINT) Clicks FROM raw"
        )
    status, _, _, err = diagnose(tmp_path / "cast.duckdb")
    assert status == 2 and "cannot read" in err and err.count("\n") == 1


def test_the_evidence_of_exports_that_were_appended_gives_its_rows_again(diagnose, tmp_path):
    """Two header lines in the middle, and two days twice: what is shown is what the query gives."""
    lines = text(rows(("device",))).splitlines()
    head, body = lines[0], lines[1:]
    whole = "\n".join([head, *body[:45], head, *body[39:], head]) + "\n"
    status, found, _, err = diagnose(whole, argv=HALVES)
    assert status == 0, err
    own = duckdb.connect()
    own.execute(found["evidence_setup"])
    for evidence in found["evidence"]:
        again = [list(row) for row in own.execute(evidence["sql"]).fetchall()]
        assert [[str(v) for v in row] for row in again] == [[str(v) for v in row] for row in evidence["rows"]]
    assert found["evidence"]


@pytest.mark.parametrize("change", ["names", "decimals"])
def test_a_mapping_written_for_files_that_differ_reads_them_as_before(change, halves, diagnose, tmp_path):
    before, after = halves
    if change == "names":
        second = text(after, names={"date": "Tag", "clicks": "Klicks"})
    else:
        second = text(after, delimiter=";", number=lambda v: str(v).replace(".", ","))
    mapping = tmp_path / "m.yaml"
    assert diagnose(text(before), second, argv=(*HALVES, "--write-mapping", str(mapping)))[0] == 0
    guessed, read = (
        diagnose(text(before), second, argv=(*HALVES, *more)) for more in ((), ("--mapping", str(mapping)))
    )
    assert guessed[0] == read[0] == 0, read[3]
    assert [e["rows"] for e in read[1]["evidence"]] == [e["rows"] for e in guessed[1]["evidence"]]


def test_days_without_slices_and_files_that_overlap_are_told(halves, diagnose):
    before, after = halves
    sums = [{k: v for k, v in r.items() if k != "device"} for r in after]
    status, found, _, err = diagnose(text(before), text(sums))
    assert status == 0, err
    assert any("days are in the totals only, without slices" in line for line in serious(found))
    assert not any("agree" in f["text"] for f in found["quality"])
    newer = [r | {"orders": r["orders"] + 1} for r in after]
    status, found, _, err = diagnose(text([*before, *after]), text(newer), argv=HALVES)
    assert status == 0, err
    assert any("both have rows of 14 days and the same slices" in line for line in serious(found))


def test_an_average_position_is_no_placement(diagnose):
    table = text([r | {"Position": f"{7 + n % 9}.{n % 7}"} for n, r in enumerate(rows(("device",)))])
    status, found, _, err = diagnose(table, argv=HALVES)
    assert status == 0, err
    assert "placement" not in next(iter(found["columns"].values()))


def test_moments_of_a_whole_year_are_read_in_the_right_order():
    """Day and month: the first values in the order of letters are those of the first days of all months."""
    connection = duckdb.connect()
    connection.execute(reading.MACROS)
    hours = "SELECT TIMESTAMP '2025-01-01' + INTERVAL (i) HOUR t FROM range(365 * 24) r(i)"
    connection.execute(f"CREATE TABLE moments AS SELECT strftime(t, '%d/%m/%Y %H:%M') d FROM ({hours})")
    assert reading.date_format(connection, "moments", "d", "VARCHAR").form == "%d/%m/%Y %H:%M"


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("Rs. 500", 500.0), ("kr. 20.5", 20.5), ("−5.00", -5.0), ("$(5.00)", -5.0), ("(5.00)", -5.0), ("-$5.00", -5.0),
        ("1.2K", 1200.0), ("3 M", 3e6), ("1,234.50", 1234.5), ("5.00 (USD)", 5.0), ("(12%)", -0.12), ("12 %", 0.12),
        ("USD 7", 7.0), ("1e3", 1000.0), ("--", None),
    ],
)  # fmt: skip
def test_amounts_in_many_spellings(cell, value):
    connection = duckdb.connect()
    connection.execute(reading.MACROS)
    assert connection.execute("SELECT cell_number($1)", [cell]).fetchone()[0] == pytest.approx(value)


def test_midnights_are_days_whatever_the_zone():
    connection = duckdb.connect()
    connection.execute(reading.MACROS)
    for hour, want in ((0, "2026-03-02"), (5, "2026-03-01")):
        connection.execute(
            f"CREATE OR REPLACE TABLE t AS SELECT TIMESTAMP '2026-03-02 0{hour}:00:00' m, '2026-03-02 0{hour}:00:00' v"
        )
        for column, kind in (("m", "TIMESTAMP"), ("v", "VARCHAR")):
            found = reading.date_format(connection, "t", column, kind, zone="America/Los_Angeles")
            assert str(connection.execute(f"SELECT {found.expression} FROM t").fetchone()[0]) == want


def test_dates_that_cannot_be_read_are_shown(diagnose, tmp_path):
    table = "Fecha,Clicks,Impressions\n" + "".join(f"{d} lunes,5,100\n" for d in range(1, 9))
    status, _, _, err = diagnose(table)
    assert status == 2 and "'Fecha' holds no dates that can be read, e.g. '" in err and "date_format" in err


def test_equal_events_are_no_repeated_export(diagnose):
    """A row an impression: most are equal, some are not, and none is left out."""
    lines = ["date,device,impressions,clicks"]
    for day in range(1, 29):
        lines += [f"2026-10-{day:02d},mobile,1,0"] * 60 + [f"2026-10-{day:02d},mobile,1,1"]
        lines += [f"2026-10-{day:02d},desktop,1,0"] * 40
    status, found, _, err = diagnose("\n".join(lines) + "\n")
    assert status == 0, err
    assert not any("more than once" in f["text"] for f in found["quality"])


def test_a_quiet_weekday_at_the_end_is_whole(diagnose):
    table = [r | {"impressions": r["impressions"] // 6} if r["date"].weekday() == 6 else r for r in rows(("device",))]
    assert max(r["date"] for r in table).weekday() == 6
    status, found, _, err = diagnose(text(table))
    assert status == 0, err
    assert not any("of the usual impressions" in f["text"] for f in found["quality"])


def test_dollars_of_a_column_in_canadian_dollars_are_these(diagnose):
    table = text(rows(("device",)), number=lambda v: f"${v:.2f}" if isinstance(v, float) else str(v))
    status, found, _, err = diagnose(table.replace("spend", "Cost (CAD)", 1), argv=HALVES)
    assert status == 0, err
    assert not any("several currencies" in f["text"] for f in found["quality"])
