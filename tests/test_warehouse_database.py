"""The agent's database: right answers, nothing else within reach, no write, no endless query."""

import threading
import time

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from helpers_episodes import fake_batch, fake_set

from trace_jax.environments.ads import queries
from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES, ATTRIBUTES
from trace_jax.warehouse import database, instance
from trace_jax.warehouse.database import EpisodeDatabase, QueryError, QueryTimeout
from trace_jax.warehouse.instance import Instance
from trace_jax.warehouse.schema import COLUMNS, GRAIN, VISIBLE_TABLES
from trace_jax.warehouse.splits import EpisodeSet

FROM = "FROM segment_daily a, segment_daily b, segment_daily c, segment_daily d, segment_daily e, segment_daily f"
SLOW = f"SELECT sum(hash(a.clicks, b.clicks, c.clicks, d.clicks, e.clicks, f.clicks)) {FROM}"


@pytest.fixture(scope="module")
def episodes():
    return fake_set(5)


@pytest.fixture
def db(episodes):
    with EpisodeDatabase(episodes[0].visible()) as opened:
        yield opened


def test_only_visible_tables_of_one_episode(db, episodes):
    assert sorted(row[0] for row in db.query("SHOW TABLES").rows) == sorted(VISIBLE_TABLES)
    everything = db.query("SELECT database_name, schema_name, table_name FROM duckdb_tables()").rows
    assert sorted(everything) == sorted(("memory", "main", name) for name in VISIBLE_TABLES)
    for table in VISIBLE_TABLES:
        assert db.query(
            f"SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = '{table}'"
        ).rows == tuple(COLUMNS[table].items())
        assert not any(word in column for column in COLUMNS[table] for word in ("gt_", "cause", "onset", "strength"))
    advertiser = f"A{episodes[0].batch.advertiser_id[0]}"
    for table in VISIBLE_TABLES:
        assert db.query(f"SELECT DISTINCT advertiser_id FROM {table}").rows == ((advertiser,),)


def test_a_recycled_instance_holds_no_earlier_episode(episodes):
    """Inside one worker: the instance of a closed episode serves the next one."""
    tables = [list(one.visible().items()) for one in episodes]
    first = Instance(tables[0], 256)
    connection = first.connection
    assert first.query("SELECT count(*) FROM segment_daily", 5)[0] == "rows"
    first.close()
    second = Instance(tables[1], 256)
    assert second.connection is connection  # reused
    ids = {row[0] for row in second.query("SELECT campaign_id FROM daily_campaign", 5)[1][1]}
    assert episodes[1].campaign_id in ids and episodes[0].campaign_id not in ids
    assert len(second.query("SELECT * FROM duckdb_tables()", 5)[1][1]) == len(VISIBLE_TABLES)
    second.close()
    assert instance.close_idle() == 1
    with pytest.raises(duckdb.ConnectionException):
        connection.execute("SELECT 1")


def test_closing_idle_instances_frees_them_all(episodes):
    opened = [EpisodeDatabase(episodes[0].visible()) for _ in range(2)]
    for one in opened:
        one.close()
    assert database.close_idle() >= 2 and database.close_idle() == 0
    with EpisodeDatabase(episodes[1].visible()) as again:  # the next episode connects anew
        assert again.query("SELECT count(*) > 0 FROM segment_daily").rows == ((True,),)


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM segment_daily",
        "DROP TABLE segment_daily",
        "INSERT INTO budget_log SELECT * FROM budget_log",
        "WITH x AS (INSERT INTO budget_log SELECT * FROM budget_log RETURNING *) SELECT * FROM x",
        "WITH x AS (DELETE FROM budget_log RETURNING *) SELECT * FROM x",
        "CREATE TABLE z AS SELECT 1",
        "CREATE TEMP VIEW z AS SELECT 1",
        "CREATE MACRO f(a) AS a",
        "SET threads = 8",
        "SET VARIABLE a = 1",
        "RESET memory_limit",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "BEGIN",
        "ROLLBACK",
        "PREPARE a AS SELECT 1",
        "USE memory",
        "ATTACH ':memory:' AS other",
        "ATTACH '/tmp/other.db'",
        "COPY segment_daily TO '/tmp/trace_jax_leak.csv'",
        "EXPORT DATABASE '/tmp/trace_jax_leak'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "VACUUM",
        "EXPLAIN ANALYZE SELECT 1",
        "SELECT 1; SELECT 2",
        "SELECT 1; DROP TABLE segment_daily",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_parquet('*.parquet')",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM enable_profiling()",
        "SELECT * FROM enable_logging()",
        'SELECT * FROM "enable_profiling" ()',
        "SELECT * FROM query('SELECT * FROM enable' || '_profiling()')",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
        "SELECT * FROM pandas_scan(140000)",
        "SELECT * FROM force_checkpoint()",
        "SELECT random()",
        "SELECT setseed(0.5)",
        "SELECT uuid()",
        "SELECT now()",
        "SELECT * FROM segment_daily USING SAMPLE 1",
        "SELECT length(repeat('x', 3000000000))",
        "SELECT len(range(1000000000))",
        "SELECT lpad('x', 1000000000, 'y')",
        "SELECT * FROM episodes",
        "SELECT * FROM secret",
        "",
        "-- nothing",
        "SELEC 1",
        "SELECT '\ud800'",
        "SELECT 1\0; DROP TABLE segment_daily",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT 1 " * 5000,
    ],
)
def test_refused(db, sql):
    secret = pa.table({"gt": [1]})  # a variable that a Python replacement scan would find
    before = db.query("SELECT (SELECT count(*) FROM segment_daily), (SELECT count(*) FROM budget_log)").rows
    with pytest.raises(QueryError) as caught:
        db.query(sql)
    assert "\n" not in str(caught.value) and 0 < len(str(caught.value)) < 500
    assert db.query("SELECT (SELECT count(*) FROM segment_daily) , (SELECT count(*) FROM budget_log)").rows == before
    assert len(db.query("SELECT * FROM duckdb_tables()").rows) == len(VISIBLE_TABLES)
    assert len(secret) == 1


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1",
        "select 1;",
        "FROM budget_log LIMIT 1",
        "WITH a AS (SELECT 1 AS x) SELECT * FROM a",
        "DESCRIBE segment_daily",
        "SHOW TABLES",
        "SUMMARIZE inventory",
        "VALUES (1), (2)",
        "SELECT sum(clicks) OVER (ORDER BY ds RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) FROM segment_daily",
        "SELECT * FROM range(3)",
        "SELECT ds + 1, date_trunc('week', ds), dayofweek(ds) FROM inventory",
    ],
)
def test_allowed(db, sql):
    assert db.query(sql).rows


def test_totals_match_an_independent_sum(db, episodes):
    batch = episodes.batch
    rows = db.query("SELECT sum(impressions), sum(clicks), sum(orders) FROM segment_daily").rows
    assert rows == ((int(batch.impressions[0].sum()), int(batch.clicks[0].sum()), int(batch.orders[0].sum())),)


def test_division_by_zero_is_null(db):
    """Case 11 of data: no inf, no NaN, and a reference ranking never picks an empty segment."""
    assert db.query("SELECT 1 / 0 AS a, 0 / 0 AS b, -1 / 0 AS c, 5 // 0 AS d").rows == ((None,) * 4,)
    empty = "HAVING sum(impressions) = 0"
    ratio = "sum(clicks) / nullif(sum(impressions), 0)"
    group = "GROUP BY ad_product, targeting_type, match_type, placement, price_band, audience, device, geo"
    assert db.query(f"SELECT {ratio} FROM segment_daily {group} {empty}").rows == ((None,),)
    for rate in (ratio, "sum(clicks) / sum(impressions)", "avg(clicks / impressions)"):
        best = db.query(f"SELECT {rate} AS ctr FROM segment_daily {group} ORDER BY ctr DESC LIMIT 1").rows[0][0]
        assert best is not None and 0 < best < 1


def test_reference_queries_rank_no_empty_slice():
    """Case 11 of data: a slice with no impression at all, and one with no click, in the analyst's own rankings."""
    batch, verdict = fake_batch(3, days=14, segments=30)
    device = batch.segment_values[:, :, ATTRIBUTE_NAMES.index("device")]
    empty, barren = (ATTRIBUTES["device"].index(name) for name in ("TABLET", "DESKTOP"))
    seen = np.where((device == empty)[:, None], 0, batch.impressions)
    clicks = np.where((device == barren)[:, None], 0, np.minimum(batch.clicks, seen))
    quiet = batch.replace(impressions=seen, clicks=clicks, orders=np.minimum(batch.orders, clicks), spend=clicks * 1.5)
    for record in EpisodeSet(quiet, verdict):
        with EpisodeDatabase(record.visible()) as opened:
            tablet = "FROM segment_daily WHERE device = 'TABLET'"
            assert opened.query(f"SELECT sum(impressions), sum(clicks) {tablet}").rows == ((0, 0),)
            for query, column in ((queries.single(99), 1), (queries.scan(99), 1), (queries.mix(99), 4)):
                rows = opened.query(query).rows
                assert len(rows) >= 3 and rows[0][column] is not None
                assert not any("TABLET" in row[0] or "DESKTOP" in row[0] for row in rows)


def test_rates_of_counts_are_not_integer_divisions(db):
    """Case 12 of data: the same CTR over BIGINT and over DOUBLE."""
    types = db.query("SELECT typeof(clicks), typeof(impressions) FROM segment_daily LIMIT 1").rows
    assert types == (("BIGINT", "BIGINT"),)
    as_is = db.query("SELECT device, sum(clicks) / sum(impressions) FROM segment_daily GROUP BY 1 ORDER BY 1").rows
    as_double = db.query(
        "SELECT device, sum(clicks::DOUBLE) / sum(impressions::DOUBLE) FROM segment_daily GROUP BY 1 ORDER BY 1"
    ).rows
    assert as_is == as_double and any(0 < rate < 1 for _, rate in as_is)
    row = db.query("SELECT clicks / impressions, clicks, impressions FROM segment_daily WHERE clicks > 0 LIMIT 1").rows[
        0
    ]
    assert row[0] == row[1] / row[2]


def test_keys_are_unique_and_joins_do_not_fan_out(db):
    """Case 16 of data."""
    for table, keys in GRAIN.items():
        columns = ", ".join(keys)
        assert db.query(f"SELECT {columns} FROM {table} GROUP BY {columns} HAVING count(*) > 1").rows == ()
    (days,) = db.query("SELECT count(*) FROM daily_campaign").rows[0]
    joined = "SELECT count(*), count(DISTINCT (campaign_id, ds)) FROM daily_campaign"
    for other in ("budget_log", "inventory"):
        assert db.query(f"{joined} JOIN {other} USING (advertiser_id, campaign_id, ds)").rows == ((days, days),)


def test_string_comparison_is_case_sensitive_as_documented(db):
    """Case 15 of data: values are upper case; ILIKE finds any spelling."""
    assert db.query("SELECT count(*) FROM segment_daily WHERE device = lower(device)").rows == ((0,),)
    assert db.query("SELECT bool_and(device ILIKE lower(device)) FROM segment_daily").rows == ((True,),)


def test_columns_with_one_name_stay_apart(db):
    result = db.query("SELECT 1 AS a, 2 AS a, 3 AS b")
    assert result.columns == ("a", "a_1", "b")
    assert result.dicts() == [{"a": 1, "a_1": 2, "b": 3}]


def test_values_are_plain(db):
    row = db.query(
        "SELECT 1::HUGEINT, 0.5::DECIMAL(9,2), DATE '2024-01-02', TIMESTAMP '2024-01-02 03:04:05', INTERVAL 1 DAY, "
        "[1.5, NULL], {'a': 'b'}, 'x'::BLOB, true, 'nan'::FLOAT"
    ).rows[0]
    kinds = ["int", "float", "date", "str", "str", "list", "dict", "str", "bool", "NoneType"]
    assert [type(v).__name__ for v in row] == kinds


def test_large_results_are_refused_not_materialised(db):
    with pytest.raises(QueryError, match="more than 20000 rows"):
        db.query("SELECT * FROM range(100000000000)")
    assert db.query("SELECT 7").rows == ((7,),)


def test_memory_limit_holds(db):
    with pytest.raises(QueryError, match="(?i)memory"):
        db.query(f"SELECT list(a.clicks) {FROM}", timeout_s=20)
    with pytest.raises(QueryError, match="too large"):
        db.query("SELECT list(a.clicks) FROM segment_daily a, segment_daily b, segment_daily c JOIN range(20) ON true")
    assert db.query("SELECT 7").rows == ((7,),)


def test_identical_queries_come_from_the_cache(db, monkeypatch):
    other = db.clone()
    first = other.query("SELECT sum(clicks) FROM segment_daily")
    other.close()
    monkeypatch.setattr(database._Shared, "_run", lambda *a: pytest.fail("executed again"))
    assert db.query("SELECT sum(clicks) FROM segment_daily") is first


def test_slow_queries_are_stopped_and_the_database_lives_on(db):
    start = time.monotonic()
    with pytest.raises(QueryTimeout):
        db.query(SLOW, timeout_s=0.2)
    assert time.monotonic() - start < 3
    assert db.query("SELECT 7", timeout_s=5).rows == ((7,),)
    with pytest.raises(QueryTimeout):  # a time-out is not remembered as the query's answer
        db.query(SLOW, timeout_s=0.05)


def test_handles_in_threads_get_the_same_answers(db, episodes):
    queries = [f"SELECT count(*) FROM segment_daily WHERE clicks > {n}" for n in range(20)]
    expected = [db.query(q).rows for q in queries]
    with EpisodeDatabase(episodes[0].visible()) as fresh:
        results = [None] * 4

        def work(k):
            with fresh.clone() as handle:
                results[k] = [handle.query(q, timeout_s=30).rows for q in queries]

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert results == [expected] * 4


def test_instances_are_fenced_in(db):
    with db._shared._loaded_worker() as worker:
        settings = worker.ask("settings", db._shared._key)[1]
    assert settings["enable_external_access"] == "false"
    assert settings["lock_configuration"] == "true"
    assert settings["threads"] == "1"
    assert settings["python_enable_replacements"] == "false"
    assert settings["temp_directory"] == ""
    assert issubclass(duckdb.InterruptException, duckdb.Error)
