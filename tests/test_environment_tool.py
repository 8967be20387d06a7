"""The Python tool: state, one rendering on both paths, limits, and failures that end as observations."""

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pydantic_monty
import pytest
from helpers_episodes import fake_set
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.environments import tools
from trace_jax.environments.base import STATUSES
from trace_jax.environments.render import cut, render
from trace_jax.environments.tools import PythonTool
from trace_jax.warehouse.database import EpisodeDatabase


@pytest.fixture(scope="module")
def database():
    with EpisodeDatabase(fake_set(1)[0].visible()) as opened:
        yield opened


@pytest.fixture
def tool(database):
    return PythonTool(database, seconds=10)


QUERIES = [
    "SELECT device, sum(clicks) AS c, sum(clicks) / sum(impressions) AS r FROM segment_daily GROUP BY 1 ORDER BY 1",
    "SELECT * FROM segment_daily",
    "SELECT 1 / 0 AS a, NULL AS b, 0.000012345 AS c, 123456.789 AS d, true AS e, DATE '2024-03-05' AS f",
    "SELECT 1 AS a, 2 AS a",
    "SELECT [1.23456, NULL] AS l, {'k': 2.0} AS s, 'a b' AS t, INTERVAL 1 DAY AS i, 2::HUGEINT ** 70 AS h",
    "SELECT 1 AS a WHERE false",
    "SELECT nope FROM segment_daily",
    "SELEC",
    "DROP TABLE segment_daily",
    "",
    "SHOW TABLES",
    "DESCRIBE inventory",
]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("characters", [8000, 300])
def test_the_fast_path_says_what_the_interpreter_says(database, query, header, characters):
    code = f'sql("""{query}""")'
    options = {"seconds": 10, "header": header, "characters": characters}
    fast = PythonTool(database, **options)
    assert tools._ONLY_SQL.match(code)
    direct = fast.run(code)
    assert fast._state is None  # the interpreter was not started
    assert PythonTool(database, **options).run(f"rows = {code}\nrows") == direct
    assert PythonTool(database, **options).run(f"({code})") == direct


@pytest.mark.parametrize(
    ("code", "query"),
    [
        ("sql('select 1')", "select 1"),
        ('  sql( "select 1" )\n', "select 1"),
        ('sql("""select\n"x" """)', 'select\n"x" '),
        ("sql('''a 'b' c''')", "a 'b' c"),
        ("sql('a\\n')", None),
        ("sql('a' 'b')", None),
        ("sql('a') + sql('b')", None),
        ("sql('a', 1)", None),
        ("sql('a\nb')", None),
        ("sql(f'a')", None),
        ("sql(q)", None),
        ("x = sql('a')", None),
        ("sql('a');x", None),
        ("sql('a')#", None),
        ('sql("""a""""")', None),
        ("", None),
    ],
)
def test_only_plain_sql_calls_skip_the_interpreter(code, query):
    match = tools._ONLY_SQL.match(code)
    assert (next(g for g in match.groups() if g is not None) if match else None) == query


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="sql(')\"\\ \nab;#", max_size=24).map(lambda t: f"sql({t})") | st.text(max_size=20))
def test_what_skips_the_interpreter_means_the_same_to_python(code):
    match = tools._ONLY_SQL.match(code)
    if match:
        found = eval(code.strip(), {"sql": lambda q: q})
        assert found == next(g for g in match.groups() if g is not None)


def test_state_is_kept_across_calls_and_per_tool(database, tool):
    assert tool.run("x = 20\ndef double(a):\n    return 2 * a").text == "(no output)"
    assert tool.run("double(x) + 2").text == "42"
    tool.run("rows = sql('SELECT sum(clicks) AS c FROM segment_daily')")
    total = database.query("SELECT sum(clicks) FROM segment_daily").rows[0][0]
    assert tool.run("rows[0]['c']").text == str(total)
    other = PythonTool(database)
    assert other.run("x").text.startswith("error: NameError")
    assert other.run("x").status == "error"


def test_a_rebound_sql_is_respected(tool):
    query = "sql('SELECT 1')"
    assert tool.run(query).text == "1"
    for code in ("y = 1", "f = sql\nf('SELECT 2')"):
        tool.run(code)
        assert tool.run(query).text == "1"
    tool.run("exec('sq' + 'l = lambda q: 99')")
    assert tool.run(query).text == "99"
    assert tool.run("sql = 3\nsql").text == "3"
    assert tool.run(query).text.startswith("error: TypeError")


def test_rows_are_compact(tool):
    text = tool.run("[(1, 2.55555, 'x', None), (30000, 1e-7, 'y z', True)]").text
    assert text == "1 2.556 x null\n30000 1e-07 y z true"
    assert tool.run("[{'a': 1.0, 'b': 'u'}, {'a': 12345.6, 'b': None}]").text == "1 u\n1.235e+04 null"
    assert tool.run("{'a': [1.23456, None]}").text == "{'a': [1.235, null]}"
    assert tool.run("'text'").text == "text"
    assert tool.run("print('a')\nprint(1.23456)\n7").text == "a\n1.23456\n7"
    assert tool.run("import datetime\ndatetime.date(2024, 3, 5)").text == "2024-03-05"
    assert tool.run("10 ** 5000").text == "(integer of 16610 bits)"


def test_truncation_says_how_much_is_missing(database):
    """Case 17 of data: the output says that it was cut and how many rows remain."""
    tool = PythonTool(database, characters=200)
    query = "SELECT 'keyword ' || rowid AS k, clicks FROM segment_daily ORDER BY rowid"
    for code in (f"sql('''{query}''')", f"rows = sql('''{query}''')\nrows"):
        lines = tool.run(code).text.split("\n")
        assert lines[-1] == f"... {40 - (len(lines) - 1)} more rows" and len(lines) > 5
        assert lines[0].startswith("keyword 0 ") and len("\n".join(lines)) <= 200
    whole = "x" * 5000
    text = tool.run("'x' * 5000").text
    kept, note = text.split("\n")
    assert whole.startswith(kept) and note == f"... {5000 - len(kept)} more characters" and len(text) <= 200
    printed = tool.run("for i in range(100000):\n    print('line', i)").text
    assert len(printed) <= 200 and printed.endswith("more characters")


def test_a_remainder_row_keeps_totals_exact(tool):
    """Case 17 of data: top-k plus OTHER sums to the whole, whatever the number of keys."""
    keyed = "SELECT rowid % 23 AS k, sum(clicks) AS c FROM segment_daily GROUP BY 1"
    ranked = f"SELECT *, row_number() OVER (ORDER BY c DESC, k) AS r FROM ({keyed})"
    tool.run(f"top = sql('''SELECT CASE WHEN r <= 5 THEN k::VARCHAR ELSE 'OTHER' END AS k, sum(c) AS c FROM ({ranked}) "
             "GROUP BY 1''')")  # fmt: skip
    assert tool.run("len(top)").text == "6"
    total = tool.run("sql('SELECT sum(clicks) FROM segment_daily')").text
    assert tool.run("sum([row['c'] for row in top])").text == total


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=30).filter(lambda t: "\n" not in t), max_size=40), st.integers(60, 400), st.data())
def test_cut_never_exceeds_the_limit(lines, limit, data):
    rows = data.draw(st.integers(0, len(lines)))
    text = cut(lines, limit, rows)
    assert len(text) <= limit
    if len("\n".join(lines)) <= limit:
        assert text == "\n".join(lines)
    else:
        assert text.split("\n")[-1].startswith("... ")


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner)
        ),
        max_leaves=10,
    )
)
def test_any_value_can_be_rendered(value):
    for header in (False, True):
        lines, rows, more = render(value, header)
        assert all("\n" not in line or isinstance(value, list) for line in lines) and rows <= len(lines) and more == 0


@pytest.mark.parametrize(
    ("code", "start"),
    [
        ("1 / 0", "error: ZeroDivisionError"),
        ("def f(:", "error: SyntaxError"),
        ("", "error: empty call"),
        ("   \n", "error: empty call"),
        ("open('/etc/passwd').read()", "error: PermissionError"),
        ("import subprocess", "error: ModuleNotFoundError"),
        ("import os\nos.environ", "error: "),
        ("import os\nos.listdir('/')", "error: "),
        ("sql(1)", "error: TypeError"),
        ("sql()", "error: "),
        ("x = [0] * 10 ** 9", "error: MemoryError"),
        ("def g(n):\n    return g(n + 1)\ng(0)", "error: RecursionError"),
        ("for i in range(10000):\n    sql('SELECT 1')", "error: "),
        ("'\ud800'", "error: "),
        ("\ud800", "error: "),
        ("sql('SELECT 1\0')", "error: "),
        ("raise SystemExit", "error: "),
        ("exit()", "error: "),
        ("quit()", "error: "),
        ("raise KeyboardInterrupt", "error: "),
        ("(" * 10000 + "1" + ")" * 10000, "error: "),
        ("x = " + "-" * 20000 + "1", "error: "),
    ],
)
def test_mistakes_are_one_line_observations(database, code, start):
    tool = PythonTool(database, seconds=5)
    seen = tool.run(code)
    assert seen.error and seen.status == "error", seen
    assert seen.text.startswith(start) and "\n" not in seen.text and len(seen.text) < 500
    assert tool.run("1 + 1").text == "2"  # the tool lives on


def test_printed_text_survives_an_error(tool):
    seen = tool.run("print('half way')\n1 / 0")
    assert seen.error and seen.text == "half way\nerror: ZeroDivisionError: division by zero"


def test_endless_python_is_stopped_and_variables_stay(database):
    tool = PythonTool(database, seconds=0.3)
    tool.run("x = 5")
    start = time.monotonic()
    seen = tool.run("x = 6\nwhile True:\n    pass")
    assert (seen.error, seen.status) == (True, "timeout") and time.monotonic() - start < 5
    assert "0.3 s" in seen.text
    assert tool.run("x").text == "5"


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_endless_sql_is_stopped(database, swallow, fast):
    tool = PythonTool(database, seconds=0.3)
    tables = ", ".join(f"segment_daily {name}" for name in "abcdef")
    call = f"sql('SELECT sum(hash(a.clicks, b.clicks, c.clicks, d.clicks, e.clicks, f.clicks)) FROM {tables}')"
    code = call if fast else f"rows = {call}"
    if swallow:
        code = f"while True:\n    try:\n        {call}\n    except BaseException:\n        pass"
    start = time.monotonic()
    assert tool.run(code).status == "timeout"
    assert time.monotonic() - start < 5
    assert tool.run("1").text == "1"


def test_sleep_cannot_hold_a_worker(database):
    tool = PythonTool(database, seconds=0.3)
    start = time.monotonic()
    assert tool.run("import time\ntime.sleep(30)").error
    assert time.monotonic() - start < 5


def test_a_killed_worker_is_an_observation(database, monkeypatch):
    """The worker process dies in the middle of a call: variables are as before it, and the next call works."""
    pool = pydantic_monty.Monty(min_processes=1, max_processes=1)
    before = _children()
    with pool:
        monkeypatch.setattr(tools, "_workers", lambda: pool)
        tool = PythonTool(database, seconds=20)
        assert tool.run("x = 5").text == "(no output)"
        (worker,) = _children() - before
        killer = threading.Timer(0.2, os.kill, (worker, signal.SIGKILL))
        killer.start()
        seen = tool.run("x = 6\nwhile True:\n    pass")
        killer.join()
        assert seen.error and seen.status == "tool_failure" and "\n" not in seen.text
        assert tool.run("x").text == "5"


def test_a_broken_pool_is_an_observation(database, monkeypatch):
    def broken():
        raise OSError("cannot start a worker")

    monkeypatch.setattr(tools, "_workers", broken)
    seen = PythonTool(database).run("x = 1")
    assert (seen.error, seen.status) == (True, "tool_failure") and "cannot start a worker" in seen.text


def _children():
    """Process ids of this process's children: by the `ps` of every POSIX system, or from Linux's /proc without it."""
    if shutil.which("ps"):
        listing = subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True)
        pairs = [tuple(map(int, row.split())) for row in listing.communicate()[0].splitlines()]
        return {pid for pid, parent in pairs if parent == os.getpid() and pid != listing.pid}
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
    return {int(text.split()[0]) for text in stats if int(text.rpartition(")")[2].split()[1]) == os.getpid()}


def test_a_closed_database_is_an_observation():
    database = EpisodeDatabase(fake_set(1)[0].visible())
    tool = PythonTool(database)
    database.close()
    for code in ("sql('SELECT 1')", "x = sql('SELECT 1')"):
        assert tool.run(code).error


def test_large_variables_are_dropped_with_a_word(database, monkeypatch):
    monkeypatch.setattr(tools, "STATE_LIMIT", 100_000)
    tool = PythonTool(database)
    tool.run("y = 1")
    seen = tool.run("x = list(range(200000))\nlen(x)")
    assert seen.error and "dropped" in seen.text and "200000" in seen.text
    assert tool.run("y").text == "1"
    assert tool.run("x").text.startswith("error: NameError")


@pytest.mark.parametrize("code", ["t = 'b' * 20_000_000", "s = 'a'\ns = [s * 1_000_000 for _ in range(40)]\nlen(s)"])
def test_variables_that_cannot_even_be_copied_are_the_agents_mistake(database, code):
    """Not a failure of the tool, which would take the trajectory out of its group's baseline."""
    tool = PythonTool(database)
    tool.run("y = 1")
    seen = tool.run(code)
    assert (seen.error, seen.status) == (True, "error") and "dropped" in seen.text
    assert tool.run("y").text == "1"


def test_many_episodes_share_few_workers(database):
    """More tools in use at once than there are worker processes, from several threads."""
    kept = [PythonTool(database, seconds=30) for _ in range(24)]
    wrong = []

    def work(part):
        for turn in range(3):
            for k in part:
                text = kept[k].run(f"x = {k}" if turn == 0 else "x = x + 1\nx").text
                if text != ("(no output)" if turn == 0 else str(k + turn)):
                    wrong.append((k, turn, text))

    threads = [threading.Thread(target=work, args=(range(s, 24, 6),)) for s in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60))
def test_any_text_as_code_gives_an_observation(text):
    with EpisodeDatabase(fake_set(1)[0].visible()) as database:
        seen = PythonTool(database, seconds=5).run(text)
    assert seen.status in STATUSES and seen.status != "tool_failure"


def test_installed_interpreter_is_the_one_measured():
    assert tuple(map(int, pydantic_monty.__version__.split(".")[:2])) >= (1, 4)
