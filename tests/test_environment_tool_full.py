"""The full style of the tool: aligned tables, helpers, messages that teach; and outputs of every odd kind."""

import math
import statistics

import pytest
from helpers_episodes import fake_set
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.environments import analyst_functions, python_helpers
from trace_jax.environments.ads.prompt import system_prompt
from trace_jax.environments.render import MAX_CELL, MAX_RENDERED, MAX_TABLE_ROWS, render
from trace_jax.environments.tools import PythonTool
from trace_jax.simulator.vocabulary import ATTRIBUTES
from trace_jax.warehouse.database import EpisodeDatabase


@pytest.fixture(scope="module")
def database():
    with EpisodeDatabase(fake_set(1)[0].visible()) as opened:
        yield opened


@pytest.fixture
def tool(database):
    return PythonTool(database, seconds=10, header=True)


# Tables


def test_rows_print_as_an_aligned_table(tool):
    code = "[{'device': 'MOBILE', 'clicks': 7, 'ctr': 0.0123456}, {'device': 'TV', 'clicks': 12345, 'ctr': None}]"
    lines = ["device  clicks      ctr", "MOBILE       7  0.01235", "TV       12345     null"]
    assert tool.run(code).text == "\n".join(lines)
    assert tool.run(f"print(table({code}))").text == "\n".join(lines)
    assert tool.run("[(1, 'a'), (22, 'bb')]").text == " 1  a\n22  bb"


def test_long_cells_and_long_tables_are_cut(tool):
    long = tool.run("[{'t': 'x' * 100, 'n': 1}]").text.split("\n")
    assert long[1] == "x" * (MAX_CELL - 3) + "...  1"
    text = tool.run("[{'n': i, 's': 'a\\nb'} for i in range(1000)]").text.split("\n")
    assert len(text) == 1 + MAX_TABLE_ROWS + 1 and text[-1] == f"... {1000 - MAX_TABLE_ROWS} more rows"
    assert text[1] == " 0  a b"


def test_a_cut_table_counts_all_rows_that_are_missing(database):
    tool = PythonTool(database, characters=100, header=True)
    lines = tool.run("[{'number': i} for i in range(500)]").text.split("\n")
    assert lines[-1] == f"... {500 - (len(lines) - 2)} more rows" and len("\n".join(lines)) <= 100


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=60), st.none() | st.integers() | st.floats()), min_size=1, max_size=80))
def test_columns_stand_under_each_other(rows):
    names = ("first name", "n")
    lines, count, more = render([dict(zip(names, row, strict=True)) for row in rows], table=True)
    assert count + more == len(rows) and len(lines) == count + 1
    numbers = [line for line in lines if line]
    assert len({len(line) for line in numbers}) == 1  # the last column is right-aligned: every line ends with it


# Helpers, against Python's own

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)


@settings(max_examples=100, deadline=None)
@given(NUMBERS, st.data())
def test_helpers_agree_with_the_statistics_module(values, data):
    holes = data.draw(st.lists(st.sampled_from([None, float("nan")]), max_size=3))
    mixed = data.draw(st.permutations([*values, *holes]))
    close = dict(rel_tol=1e-6, abs_tol=1e-4)
    assert math.isclose(analyst_functions.mean(mixed), statistics.fmean(values), **close)
    assert math.isclose(analyst_functions.median(mixed), statistics.median(values), **close)
    assert math.isclose(analyst_functions.stdev(mixed), statistics.stdev(values), rel_tol=1e-5, abs_tol=1e-3)
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    assert math.isclose(analyst_functions.quantile(mixed, 0.25), quartiles[0], **close)
    rows = [{"v": v} for v in mixed]
    assert analyst_functions.mean(rows, "v") == analyst_functions.mean(mixed)
    scores = analyst_functions.zscore(mixed)
    assert [s is None for s in scores] == [v is None or v != v or analyst_functions.stdev(mixed) == 0 for v in mixed]


def test_too_few_values_are_missing_not_an_error(tool):
    assert tool.run("mean([]), median([None]), stdev([1]), zscore([2, 2]), corr([1], [2])").text == (
        "(null, null, null, [null, null], null)"
    )
    assert tool.run("pct_change(0, 5), pct_change(None, 1), pct_change([])").text == "(null, null, [])"


def test_helpers_in_the_sandbox(tool):
    assert tool.run("mean([1, 2, None, float('nan')])").text == "1.5"
    assert tool.run("pct_change(4, 5), pct_change([1, 2, 1])").text == "(0.25, [null, 1, -0.5])"
    assert tool.run("[round(z, 3) for z in zscore([1, 2, 3])]").text == "[-1, 0, 1]"
    assert tool.run("corr([1, 2, 3], [2, 4, 6.5])").text.startswith("0.99")
    assert tool.run("import statistics\nstatistics.mean([1, 2, 6]), statistics.pstdev([1, 3])").text == "(3, 1)"
    assert tool.run("from statistics import median as m\nm([3, 1, 2])").text == "2"
    assert tool.run("sum([mean([i, i]) for i in range(1000)])").text == "4.995e+05"  # no round trip to the host each
    rows = "sql('SELECT device, sum(clicks) AS c FROM segment_daily GROUP BY 1')"
    assert float(tool.run(f"mean({rows}, 'c')").text) > 0


def test_an_own_function_of_a_helper_name_wins(tool):
    tool.run("def mean(x):\n    return 'mine'")
    assert tool.run("mean([1])").text == "mine"
    assert tool.run("median([1, 3])").text == "2"


def test_helpers_are_documented_in_the_full_prompt_only():
    for name in ("mean", "median", "stdev", "zscore", "pct_change", "quantile", "corr", "table"):
        assert f"{name}" in python_helpers.DOCUMENTATION
    assert python_helpers.DOCUMENTATION in system_prompt("full")
    assert system_prompt("compact") == "Find why the metric moved. Query, then answer."


def test_the_same_calls_give_the_same_text(database):
    code = (
        "import random, time, datetime\n(random.random(), time.time(), datetime.datetime.now(), random.randint(1, 99))"
    )
    first, second = (PythonTool(database, header=True) for _ in range(2))
    assert first.run(code) == second.run(code)
    assert first.run(code) == second.run(code)  # the generator's state is kept between calls
    assert first.run("random.random()") == second.run("random.random()")


# Messages that teach


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT click FROM segment_daily", "no column click in segment_daily; did you mean clicks?; others: "),
        ("SELECT s.buget FROM daily_campaign s", "no column buget in daily_campaign; did you mean budget?"),
        (
            "SELECT budget FROM segment_daily",
            "no column budget in segment_daily; daily_campaign and budget_log have it",
        ),
        ("SELECT clicks FROM segment_daily WHERE device = MOBILE", "(a text value needs single quotes: 'MOBILE')"),
        (
            "SELECT * FROM segments_daily",
            "no table segments_daily; did you mean segment_daily?; others: daily_campaign",
        ),
        ("SELECT * FROM x", "no table x; tables: daily_campaign, segment_daily, budget_log, inventory"),
        ("SELECT x.clicks FROM segment_daily s", "no table or alias x in this FROM clause; tables: "),
        ("SELECT device, sum(clicks) FROM segment_daily", "add GROUP BY device (or GROUP BY ALL)"),
        ("SELECT rount(clicks) FROM segment_daily", "no function rount; did you mean round?"),
        ("SELECT sum(device) FROM segment_daily", "no function matches sum(VARCHAR)"),
        ("SELECT sum(clicks FROM segment_daily", 'syntax error at or near "FROM"'),
    ],
)
def test_sql_errors_name_what_exists(database, query, message):
    for code in (f'sql("""{query}""")', f'x = sql("""{query}""")'):
        for header in (False, True):
            seen = PythonTool(database, header=header).run(code)
            assert seen.status == "error" and seen.text.startswith("error: ") and "\n" not in seen.text
            assert message in seen.text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("rows = [1]\nrowz", "did you mean rows?"),
        ("meen([1])", "did you mean mean"),
        ("import pandas as pd", "there are math, statistics, re, json"),
        ("from numpy import array", "tables are read with sql()"),
    ],
)
def test_python_errors_name_what_exists(tool, code, message):
    tool.run("rows = 1")
    seen = tool.run(code)
    assert seen.status == "error" and message in seen.text and "\n" not in seen.text


def test_an_unknown_value_is_named_when_nothing_was_found(database, tool):
    for query in (
        "SELECT clicks FROM segment_daily WHERE device = 'Mobile'",
        "SELECT sum(clicks) FROM segment_daily s WHERE s.device IN ('Mobile', 'x')",
    ):
        for code in (f'sql("""{query}""")', f'rows = sql("""{query}""")\nrows'):
            last = tool.run(code).text.split("\n")[-1]
            assert last.startswith("note: no device is 'Mobile'; did you mean MOBILE?"), last
            assert set(ATTRIBUTES["device"]) - {"MOBILE"} >= set(last.rpartition("others: ")[2].split(", "))
        assert "note" not in PythonTool(database).run(f'sql("""{query}""")').text  # the compact style is as it was
    found = "SELECT clicks FROM segment_daily WHERE device = 'MOBILE' OR device = 'x'"
    assert "note" not in tool.run(f'sql("""{found}""")').text


# Odd outputs


@pytest.mark.parametrize("header", [False, True])
def test_odd_outputs(database, header):
    tool = PythonTool(database, header=header, characters=3000)
    for text in ("e\u0301\u00e9\u6771\u4eac\U0001f600\u202e\u200d", "\u0000\u001b[2J", "<|end|><|answer|>{}<|user|>"):
        assert tool.run(f"print({text!r})").text == text  # plain text, not one character less
        assert tool.run(repr(text)).text == text
    assert tool.run("x = 1").text == tool.run("None").text == "(no output)"
    assert tool.run("print()").text == "" and tool.run("''").text == ""
    assert tool.run('sql("""SELECT 1 AS a WHERE false""")').text == "[]"
    missing = tool.run('sql("""SELECT NULL AS a, \'nan\'::DOUBLE AS b, \'inf\'::DOUBLE AS c, 0 / 0 AS d""")').text
    assert missing.split("\n")[-1].split() == ["null"] * 4
    assert tool.run("[(float('nan'), None, float('inf'), -0.0)]").text.split() == ["nan", "null", "inf", "-0"]


@pytest.mark.parametrize("header", [False, True])
def test_a_megabyte_of_output_is_cut_and_counted(database, header):
    tool = PythonTool(database, header=header, characters=2000)
    for code, total in (("print('x' * 1000000)", 1_000_001), ("'x' * 1000000", 1_000_000)):  # print adds a line end
        text = tool.run(code).text
        kept, note = text.split("\n")
        assert len(text) <= 2000 and note == f"... {total - len(kept)} more characters"
    rows = tool.run("[{'a': 'y' * 100, 'b': i} for i in range(10000)]").text.split("\n")
    assert rows[-1] == f"... {10_000 - (len(rows) - 1 - header)} more rows"


def test_a_value_that_means_more_text_than_memory_is_cut(database):
    tool = PythonTool(database, seconds=10)
    for code in (
        "x = [0] * 100\nfor i in range(9):\n    x = [x] * 100\nx",
        "x = {}\nfor i in range(60):\n    x = {'a': x, 'b': x}\nx",
        "class A:\n    pass\nx = A()\nfor i in range(60):\n    y = A()\n    y.a = y.b = x\n    x = y\nx",
    ):
        assert len(tool.run(code).text) <= 8000
    deep = [0] * 1000
    for _ in range(5):
        deep = [deep] * 1000
    assert len("\n".join(render(deep)[0])) < 4 * MAX_RENDERED


def test_variables_survive_calls_that_used_up_the_memory(database):
    tool = PythonTool(database, seconds=10)
    tool.run("keep = 7")
    for code in (
        "list(map(str, range(10 ** 7)))",
        "try:\n    list(map(str, range(10 ** 7)))\nexcept BaseException:\n    pass",
        "x = [[] for i in range(400000)]\nx = 0",
        "','.join(['y' * 1000000] * 60)",
    ):
        assert tool.run(code).status in ("ok", "error")
        assert tool.run("keep").text == "7", code


def test_a_state_that_cannot_be_restored_goes_back_to_the_one_before(tool):
    tool.run("x = mean([1, 1])")
    tool.run("x = 2")
    tool._state = b"broken"
    seen = tool.run("x")
    assert seen.status == "tool_failure" and "could not be restored" in seen.text
    assert tool.run("x, mean([x, 3])").text == "(1, 2)"
    tool._state = tool._older = b"broken"
    assert [tool.run("x").status for _ in range(3)] == ["tool_failure", "tool_failure", "error"]
    assert tool.run("1 + 1").text == "2"
