"""`trace-jax play`: driven through pipes and a terminal; grades against `reward.grade`, results against the tool's."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers_episodes import LABELS, fake_set
from recipes_helpers import CONFIG

from trace_jax import cli, config_io
from trace_jax.config import EnvironmentConfig, RunConfig
from trace_jax.environments.ads import analyst, queries
from trace_jax.environments.ads.answer import Answer, format_answer, parse_exact
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.ads.reward import grade
from trace_jax.recipes import inspect, play_after
from trace_jax.recipes.play_answer import Unclear, answer_text, cause_of
from trace_jax.recipes.play_input import begins_another, code_of, is_open, is_sql, is_unfinished
from trace_jax.recipes.play_terminal import Stops
from trace_jax.rollout.trajectory import Trajectory, write_parquet
from trace_jax.simulator.causes import CAUSE_NAMES
from trace_jax.simulator.vocabulary import ATTRIBUTES
from trace_jax.warehouse import splits

ENDLESS = "select sum(a.clicks) from " + ", ".join(f"segment_daily {c}" for c in "abcdefgh")  # 40 rows each


def episode(config, split, index):
    return fake_set(5)[index]


@pytest.fixture
def typed(monkeypatch, capsys):
    """Runs `play` on a hand-made episode with these lines on stdin: exit status, stdout lines, stderr."""

    def run(*lines, index=0, argv=()):
        monkeypatch.setattr(inspect, "episode_of", episode)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = cli.main(["play", "--index", str(index), "--json", *map(str, argv)])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


# What is typed


@pytest.mark.parametrize(
    "text",
    ["select 1", "SELECT(1)", "with a as (from t) from a", "from segment_daily", "(select 1) union (select 2)"]
    + ["show tables", "describe segment_daily", "DESCRIBE", "summarize inventory", "-- why\nselect 1"]
    + ["insert into x values (1)", "drop table x", "copy 'x'", "values (1)", "with recursive t(i) as (", "select"],
)  # fmt: skip
def test_sql(text):
    assert is_sql(text)


@pytest.mark.parametrize(
    "text",
    ["from math import sqrt", "select = 3", "select.x", "values in x", "show(x)", "with open(1) as f:", "table is None"]
    + ["fromage", "selected = 2", 'sql("select 1")', "x = [1", "set(x)", "values", "1 + 1"],
)
def test_python(text):
    assert not is_sql(text)


@pytest.mark.parametrize(
    ("lines", "goes_on"),
    [
        (["select 1"], True),
        (["select 1;"], False),
        (["select 1; -- done"], False),
        (["select 1 -- done;"], True),
        (["select 'it;"], False),  # the database will say what is wrong
        (["select a", "from t"], True),
        (["select a", "from t;"], False),
        (["show tables"], True),
        (["x = [1"], True),
        (["x = [1", "]"], False),
        (["for i in x:"], True),
        (["for i in x:", "  y"], True),
        (["def f():", "  y", "f()"], True),
        (["x = 1 + \\"], True),
        (["x = foo)"], False),
        (['q = """select'], True),
        (["("], True),
        (["(" * 5000], False),
    ],
)
def test_entries_of_several_lines(lines, goes_on):
    assert is_open(lines) == goes_on


@pytest.mark.parametrize(
    ("text", "line", "another"),
    [
        ("select a from t", "select 2", True),
        ("select 1", "SELECT 2", True),
        ("select 1", "from t", False),
        ("select a from t", "from u", True),
        ("select a from t", "where x", False),
        ("select a from t", "show tables", True),
        ("describe t", "select 1", True),
        ("explain", "select 1", False),
        ("with a as (select x from t)", "select x", False),
        ("with a as (select x from t)", "from a", False),
        ("with a as (select x from t) select x from a", "with b as (select 1)", True),
        ("select a from t union all", "select b from u", False),
        ("select a from t group by all", "select b from u", True),
        ("select a from t where x in (", "select b from u", False),
        ("select a from t where x = '", "select b from u", False),
        ("select a from t -- (", "select b from u", True),
        ("from t", "select a", False),
        ("-- why", "select a", False),
        ("select (", ".answer 1", True),
        ("select 1", "quit", True),
        ("select 1", "# note", True),
        ("select 1", '{"decision": {}}', True),
        ("select 1", ".5 + 1", False),
        ("select 'a'", ".upper()", False),
        ("x = [", "select 1", False),
    ],
)
def test_where_sql_ends_without_a_semicolon(text, line, another):
    assert begins_another([text], line) == another


def test_sql_that_something_must_follow():
    for text in ("select sum(", "select 'it", "select a,", "from t \\", "select a from", "select 1 union all"):
        assert is_unfinished(text)
    for text in ("select 'it''s'", "select * from t -- ((", "select a from t group by all", "select 1"):
        assert not is_unfinished(text)


def test_sql_becomes_the_agents_call():
    """Every way of quoting evaluates to the query itself."""
    for query in ("select 1", 'select "a"', """select '"'""", "select '\\d' as \"x\"", "select '''' as \"\"\"\""):
        assert eval(code_of(query), {"sql": lambda text: text}).strip() == query
    assert code_of("from t;") == 'sql("""from t""")' and code_of("x = 1") == "x = 1"
    assert eval(code_of("select 1, \\\n 2"), {"sql": str.split}) == ["select", "1,", "2"]


@pytest.mark.parametrize(
    ("text", "cause", "driver"),
    [
        ("BUDGET_CAP", "BUDGET_CAP", ()),
        ("budget cap", "BUDGET_CAP", ()),
        ("2", "BUDGET_CAP", ()),
        ("creative fatigue device = mobile, geo:usa", "CREATIVE_FATIGUE", (("device", "MOBILE"), ("geo", "US"))),
        ("ad_q MOBILE and top-of-search", "AD_QUALITY_DROP", (("device", "MOBILE"), ("placement", "TOP_OF_SEARCH"))),
        ("AD_QUALITY_DROP in device=DESKTOP", "AD_QUALITY_DROP", (("device", "DESKTOP"),)),
        ("ad quality desktop", "AD_QUALITY_DROP", (("device", "DESKTOP"),)),
        ("creative fatigue in device=MOBILE & geo=US", "CREATIVE_FATIGUE", (("device", "MOBILE"), ("geo", "US"))),
        ("COMPETITIVE_PRESSURE geo=JP", "COMPETITIVE_PRESSURE", (("geo", "JP"),)),
    ],
)
def test_answers_are_in_the_agents_form(text, cause, driver):
    assert parse_exact(answer_text(text)) == Answer(cause, driver)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("CREATIVE_FATIGE", "did you mean CREATIVE_FATIGUE?"),
        ("xyz", ".causes lists them"),
        ("targeting", "TARGETING_BROADENING or TARGETING_NARROWING?"),
        ("13", "no cause 13"),
        ("device=MOBILE", "the cause comes first"),
        ("CREATIVE_FATIGUE devic=MOBILE", "did you mean device?"),
        ("CREATIVE_FATIGUE device=MOBIL", "did you mean MOBILE?"),
        ("ad foo", "I read the cause as AD_QUALITY_DROP; 'foo' is no value of a segment"),
        ("CREATIVE_FATIGUE geo=XX", "one of US, UK, DE, JP"),
        ("CREATIVE_FATIGUE dsktop", "did you mean DESKTOP?"),
        ("CREATIVE_FATIGUE US UK", "two different ones"),
        ("CREATIVE_FATIGUE US MOBILE LOYAL", "two different ones"),
        ("BUDGET_CAP geo=US", "names no slice"),
        ('{"cause": "BUDGET_CAP"}', "no cause in this JSON"),
        ("{", "no cause in this JSON"),
    ],
)
def test_unclear_answers_say_what_was_meant(text, said):
    with pytest.raises(Unclear, match=".") as found:
        answer_text(text)
    assert said in str(found.value) and "\n" not in str(found.value)


def test_names_that_stand_alone_are_unique():
    every = [v for values in ATTRIBUTES.values() for v in values]
    assert len(set(every)) == len(every)
    assert [cause_of(str(n + 1)) for n in range(len(CAUSE_NAMES))] == list(CAUSE_NAMES)


# A session


@pytest.mark.parametrize(
    ("index", "line", "reward"),
    [
        (0, ".answer CREATIVE_FATIGUE geo=US device=MOBILE", 1.0),
        (0, ".answer CREATIVE_FATIGUE geo=US", 0.65 * 0.75 + 0.05),
        (0, ".answer CREATIVE_FATIGUE", 0.65 * 0.5 + 0.05),
        (0, ".answer BUDGET_CAP", 0.05),
        (1, ".answer no signal", 1.0),
        (3, ".answer 5", 1.0),  # PLACEMENT_SHIFT: its answer needs no slice
        (4, '.answer {"root_cause": "competitive pressure", "driver_segments": "geo=JP"}', 1.0),
        (4, '{"decision": {"root_cause": "COMPETITIVE_PRESSURE"}}', 0.65 * 0.5 + 0.05),
    ],
)
def test_graded_as_the_agent_is(typed, index, line, reward):
    status, lines, _ = typed("select count(*) from segment_daily", line, index=index)
    found, (cause, driver) = json.loads(lines[-1]), LABELS[index]
    expected = grade(found["answer"], cause, driver, EnvironmentConfig())
    assert status == 0 and found["graded"] and found["reward"] == pytest.approx(reward) == expected.total
    assert found["parts"] == expected.parts and found["info"] == expected.info
    assert found["right_cause"] == cause
    assert {(s["dimension"], s["value"]) for s in found["right_slice"]} == set(driver)
    assert (found["calls"], found["turns"], found["hints"]) == (1, 2, 0)
    text = "\n".join(lines)
    assert f"reward      {reward:.3f} = " in text and "hidden      " + cause in text and "analyst     1. " in text
    assert found["episode"]["campaign_id"] in text  # of the full question, the default
    assert "answers " in text.split("analyst  ")[1]


def test_calls_are_the_tools_own(typed, tmp_path):
    """Every entry gives what the same code gives an agent; Python's variables are kept."""
    entries = [
        "select geo, sum(clicks) from segment_daily group by geo order by geo;",
        "rows = sql('select clicks from segment_daily')",
        "sum([r['clicks'] for r in rows])",
        "select nothing from segment_daily;",
        "1 / 0",
    ]
    several = ["total = 0", "for r in rows:", "    total += r['clicks']", "print(total)", ""]
    several += ["select", "  count(*)", "from segment_daily;", 'sql("""', "", "select 1", '""")', "x = [1,", " 2]"]
    out = tmp_path / "t.json"
    status, lines, _ = typed(
        *entries, "# a note", "", *several, ".quit", argv=["--out", out, "--environment.prompt", "compact"]
    )
    steps = json.loads(out.read_text())["steps"]
    assert status == 0 and [s["entry"] for s in steps[:5]] == entries and len(steps) == 10
    assert steps[6]["code"] == "for r in rows:\n    total += r['clicks']\nprint(total)"
    environment = AdsEnvironment(fake_set(5), EnvironmentConfig(prompt="compact"))
    with environment.open(environment.task(0)) as attempt:
        for step in steps:
            seen = attempt.step(step["code"])
            assert (seen.text, seen.status) == (step["text"], step["status"])
            assert seen.text.split("\n")[0] in lines
    clicks = str(int(fake_set(5).batch.clicks[0].sum()))
    assert steps[2]["text"] == steps[6]["text"] == clicks and steps[7]["text"] == "40"
    assert [s["status"] for s in steps[3:5]] == ["error", "error"]


def test_sql_of_several_lines_in_a_pipe(typed, tmp_path):
    """An empty line, a semicolon, another query, a command and the end of the input end it."""
    out = tmp_path / "t.json"
    first = ["select geo, sum(clicks) from segment_daily", "where geo = 'US'", "group by geo"]
    others = [["select 1"], ["with a as (", "select 2", "", "from segment_daily", "select count(*);"]]
    rest = [*first, "", *first, *others[0], "x = 1", ".history", *first]
    status, _, _ = typed(*rest, argv=["--out", out])
    entries = [s["entry"] for s in json.loads(out.read_text())["steps"]]
    whole = "\n".join(first)
    assert status == 0 and entries == [whole, whole, "select 1\nx = 1", whole]
    typed(*others[1], *first, ".tables", argv=["--out", out])
    steps = json.loads(out.read_text())["steps"]
    assert [s["entry"] for s in steps] == ["with a as (\nselect 2", "from segment_daily\nselect count(*);", whole]
    assert [s["status"] for s in steps] == ["error", "ok", "ok"] and steps[1]["text"].endswith("40")


def test_commands(typed):
    status, lines, _ = typed(
        ".help", ".tables", ".schema inventory", ".schema inventry", ".causes", ".slices", ".histry", ".history", "quit"
    )
    text = "\n".join(lines)
    assert status == 0 and "segment_daily   40" in text and "in_stock" in text and "SPONSORED_BRANDS" in text
    assert "did you mean inventory?" in text and "did you mean .history?" in text
    assert lines[-2] == "not graded" and json.loads(lines[-1])["calls"] == 0
    assert all(f"{n}" in text for n in CAUSE_NAMES)


def test_without_an_answer_nothing_is_told(typed, tmp_path):
    for ends in ([".quit"], [], [".answer"], [".answer", "9"], [".answer", ""]):
        out = tmp_path / "t.json"
        status, lines, _ = typed("select 1", *ends, argv=["--out", out])
        found, kept = json.loads(lines[-1]), json.loads(out.read_text())
        assert status == 0 and lines[-3] == "not graded" and not found["graded"] and found["turns"] == 1
        for summary in (found, kept):
            assert all(summary[k] is None for k in ("answer", "reward", "right_cause", "right_slice"))
        assert "hidden" not in "\n".join(lines)


def test_guided_answer(typed):
    asked = [".answer", "creative", "", ".answer", "nonsense", "CREATIVE_FATIGE", "8", "geo=UX", "geo=US MOBILE"]
    status, lines, _ = typed(*asked[3:])
    assert status == 0 and json.loads(lines[-1])["reward"] == pytest.approx(1.0)
    assert sum("did you mean CREATIVE_FATIGUE?" in line for line in lines) == 1
    status, lines, _ = typed(*asked[:3])  # an empty slice: not known
    assert json.loads(lines[-1])["reward"] == pytest.approx(0.65 * 0.5 + 0.05)


def test_hints_are_the_analysts_queries(typed):
    """Of the investigation that `eval --agent analyst` makes of this episode."""
    environment = AdsEnvironment(fake_set(5), EnvironmentConfig(prompt="compact"))
    task = environment.task(2)
    with environment.open(task) as attempt:
        expected = analyst.investigate(attempt, task, np.random.default_rng([0, 2, 0]), "compact")
    count = len(expected.steps)
    status, lines, _ = typed(*[".hint"] * (count + 1), ".answer BUDGET_CAP", index=2, argv=["--rollout.max_turns", "2"])
    text = "\n".join(lines)
    assert status == 0
    for code, seen in expected.steps:
        assert play_after.query_of(code) in text  # the hint
        assert "\n".join(f"               {line}" for line in seen.splitlines()) in text  # what the analyst read
    assert "it answers now" in text and text.count("the agent would have to answer now") == 1
    found = json.loads(lines[-1])
    assert (found["calls"], found["hints"]) == (count, count)
    cause = json.loads(expected.answer)["decision"]["root_cause"]
    assert f"            answers {cause}" in text


def test_the_analysts_queries_in_words():
    for query in (queries.overview(), queries.budget(), queries.mix(), queries.pairs("geo", "JP", 2)):
        assert len(play_after.step_in_words(query)) < 120
    for limit in (2, 3):
        assert "one attribute," in play_after.step_in_words(queries.single(limit))
        assert "two attributes" in play_after.step_in_words(queries.scan(limit))
    where = "device = 'MOBILE' and geo = 'US'"
    assert play_after.step_in_words(queries.weekly("ctr", where)) == f"week by week, where {where}"
    assert play_after.step_in_words("select  1") == "select 1"


def test_the_runs_policy(typed, tmp_path):
    run, config = tmp_path / "run", RunConfig()
    run.mkdir()
    (run / "config.yaml").write_text(config_io.dump(config))

    def trajectory(index, answer, reward):
        empty = np.zeros(0, np.int32)
        streams = {"ids": empty, "loss_mask": empty.astype(bool), "logprobs": empty.astype(np.float32)}
        cause, driver = LABELS[0]
        labels = {"cause": cause, "driver": driver}
        return Trajectory(
            **streams, turn_index=empty, versions=(), status="finished", task_index=index, reward=reward,
            tool_calls=3, answer=answer, labels=labels,
        )  # fmt: skip

    right = format_answer(*LABELS[0])
    write_parquet(
        run / "trajectories" / "grpo.parquet",
        [trajectory(0, right, 1.0), trajectory(0, right, 1.0), trajectory(0, "?", 0.0), trajectory(1, right, 1.0)],
    )
    _, lines, _ = typed(".answer 1", argv=["--run-dir", run])
    assert "grpo        2 of 3: CREATIVE_FATIGUE in device=MOBILE & geo=US, reward 1.00" in lines
    assert "            1 of 3: no answer (finished), reward 0.00" in [line.replace("grpo", "    ") for line in lines]
    _, lines, _ = typed(".answer 1", index=1, argv=["--run-dir", run])  # another episode than the one of that number
    assert "policy      the run has not been evaluated on this episode" in lines
    _, lines, _ = typed(".answer 1", argv=["--run-dir", run, "--data.seed", "1"])
    assert any(line.startswith("policy      not shown") for line in lines)


# Bad input


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--index", "999999"], "--index 999999: test has episodes 0 to 234"),
        (["--index", "-1"], "episodes 0 to 234"),
        (["--split", "holdout"], "--split"),
        (["--style", "long"], "--style"),
        (["--style", "full", "--environment.prompt", "compact"], "same setting"),
        (["--index", "1", "--seed", "1"], "leave one out"),
        (["--seed", "-1"], "use 0 or more"),
        (["--run-dir", "{tmp}"], "no run in"),
        (["--out", "{tmp}"], "is a directory"),
        (["--out", "{tmp}/mine.json"], "is no transcript"),
        (["--out", "{tmp}/mine.json/t.json"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_before_any_work(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.setattr(inspect, "episode_of", None)
    (tmp_path / "mine.json").write_text('{"steps": []}')
    assert cli.main(["play", *(word.replace("{tmp}", str(tmp_path)) for word in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1
    assert (tmp_path / "mine.json").read_text() == '{"steps": []}'


def test_a_transcript_replaces_an_earlier_one(typed, tmp_path):
    out = tmp_path / "new" / "t.json"
    for answer in ("BUDGET_CAP", "NO_SIGNAL"):
        assert typed(f".answer {answer}", argv=["--out", out])[0] == 0
    kept = json.loads(out.read_text())
    assert kept["info"]["cause"] == "NO_SIGNAL" and kept["question"].endswith("What caused the change?")
    assert [p.name for p in out.parent.iterdir()] == ["t.json"]


def test_which_episode(capsys, monkeypatch):
    """The seed draws it; its number in the split is not its row in the batch that it was simulated with."""
    asked = []

    def found(config, split, index):
        asked.append((split, index, config.environment.prompt, config.simulator.difficulty))
        batch, verdict = fake_set(5).batch, fake_set(5).verdict
        return splits.EpisodeRecord(index, split, batch, verdict, 4)

    texts = []
    for _ in range(2):
        monkeypatch.setattr(inspect, "episode_of", found)
        monkeypatch.setattr(sys, "stdin", io.StringIO("select sum(clicks) from segment_daily\n.answer NO_SIGNAL\n"))
        argv = ["play", "--config", str(CONFIG), "--split", "validation", "--seed", "5", "--style", "compact", "--json"]
        assert cli.main([*argv, "--simulator.difficulty", "hard"]) == 0
        texts.append(capsys.readouterr().out.splitlines())
    assert texts[0] == texts[1] and asked[0] == asked[1]
    split, index, style, difficulty = asked[0]
    assert (split, style, difficulty) == ("validation", "compact", "hard") and 0 <= index < 12
    summary = json.loads(texts[0][-1])
    assert summary["episode"]["index"] == index and summary["right_cause"] == LABELS[4][0]
    assert f" validation {index} " in texts[0][0] and str(int(fake_set(5).batch.clicks[4].sum())) in texts[0]
    assert "Find why the metric moved. Query, then answer." in texts[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for seed in range(4):
        assert cli.main(["play", "--config", str(CONFIG), "--seed", str(seed)]) == 0
    assert {a[0] for a in asked[2:]} == {"test"} and len({a[1] for a in asked[2:]}) > 1


# Ctrl-C

SCRIPT = """
import fcntl, sys, termios
sys.path.insert(0, {tests!r})
from test_recipes_play import episode
from trace_jax import cli
from trace_jax.recipes import inspect
inspect.episode_of = episode
if sys.stdin.isatty():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C of this terminal reaches the process and its children
sys.exit(cli.main(["play", "--index", "0", "--environment.tool_seconds", "40", *sys.argv[1:]]))
"""


class Started:
    """The command in a process of its own; `see` reads on until a text comes, for at most two minutes."""

    def __init__(self, *argv, terminal=False):
        command = [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parent)), *map(str, argv)]
        if terminal:
            self.read, inner = pty.openpty()
            self.write = self.read
            pipes = {"stdin": inner, "stdout": inner, "stderr": inner}
        else:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, start_new_session=True, **pipes)
        if terminal:
            os.close(inner)
        else:
            self.read, self.write = self.process.stdout.fileno(), self.process.stdin.fileno()
        self._timer = threading.Timer(120, self.process.kill)
        self._timer.start()

    def see(self, text: str) -> str:
        """What comes up to this text; what comes behind it is left for the next look."""
        while text not in self._seen:
            try:
                chunk = os.read(self.read, 65536)
            except OSError:  # how a terminal ends
                chunk = b""
            assert chunk, f"{text!r} did not come: {self._seen}"
            self._seen += chunk.decode(errors="replace")
        head, _, self._seen = self._seen.partition(text)
        return head + text

    _seen = ""

    def type(self, *lines: str) -> None:
        os.write(self.write, "".join(f"{line}\n" for line in lines).encode())

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._timer.cancel()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if self.process.stdin is None:
            os.close(self.read)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals of one thread")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_in_a_wait_that_it_did_not_end(number):
    """As it is when it comes just before the wait for a key begins: here another thread got it."""
    ended = threading.Event()
    with Stops(ended.set) as stops:
        for count in (1, 2):
            other = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), number))
            other.start()
            begun = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                time.sleep(30)
            assert time.monotonic() - begun < 10 and ended.wait(10)
            time.sleep(0.2)  # not heard a second time
            assert (stops.count, stops.signal) == (count, number)


def test_a_signal_stops_the_query_and_a_second_one_leaves(tmp_path):
    """To the process alone, in a pipe: a query and Python stop long before their 40 s, variables are kept, these calls
    are not counted; two signals in a row leave with 130 and the transcript written."""
    out = tmp_path / "t.json"
    with Started("--out", out) as play:
        play.type("x = 41", "x + 1")
        play.see("\n42\n")
        play.type(f"{ENDLESS};")
        time.sleep(0.5)
        begun = time.monotonic()
        play.process.send_signal(signal.SIGINT)
        play.see("cancelled")
        assert time.monotonic() - begun < 10
        play.type("x + 2", "select 40 + 4 as n;")
        play.see("44\n")
        play.type("while True: pass")  # the interpreter, which is waited for in native code
        time.sleep(0.5)
        begun = time.monotonic()
        play.process.send_signal(signal.SIGINT)
        play.see("cancelled")
        assert time.monotonic() - begun < 10
        play.type("x + 4")
        play.see("45\n")
        play.process.send_signal(signal.SIGINT)
        play.see("cancelled")
        play.process.send_signal(signal.SIGINT)
        assert "Traceback" not in play.see("start again with: trace-jax play")
        assert play.process.wait(30) == 130
    kept = json.loads(out.read_text())
    assert [s["text"].split("\n")[-1] for s in kept["steps"]] == ["(no output)", "42", "43", "44", "45"]
    assert not kept["graded"]


def _pastes() -> bool:
    """Whether line editing here can tell pasted text from typed text."""
    try:
        import readline
    except ImportError:
        return False
    return "libedit" not in (readline.__doc__ or "")


def test_at_a_terminal():
    """Prompts, the missing slice asked for, and Ctrl-C typed during a query, during Python and at a prompt; it reaches
    the tool's workers, too, and the next call must not find out."""
    with Started(terminal=True) as play:
        assert "\x1b[" in play.see("1> ")  # styled
        for endless in (f"{ENDLESS};", "while True: pass"):
            play.type(endless)
            play.see(endless[-10:])  # its echo
            time.sleep(0.3)
            os.write(play.write, b"\x03")
            play.see("cancelled")  # a prompt alone may be an earlier one that was drawn again
            play.see("1> ")
            play.type(".help")  # something in between: not twice in a row
            play.see(".quit")  # printed; the prompt before it may be drawn more than once
            play.see("1> ")
        os.write(play.write, b"half a line")
        play.see("half a line")  # its echo: the line is being edited
        os.write(play.write, b"\x03")
        play.see("cancelled")
        play.see("1> ")
        for number in range(4):  # at once after its prompt is drawn
            play.type("")
            play.see("1> ")
            os.write(play.write, b"\x03")
            play.see("cancelled")
            play.see("1> ")
            play.type(f"# {number}")  # an entry that is no call
            play.see(f"# {number}")
            play.see("1> ")
        play.type("6 * 7")
        assert "42" in play.see("2> ")
        play.type("select count(*) as rows from segment_daily", "where true", "")
        assert ".. where" in play.see("3> ")
        play.type("select 5 * 5", "select 6 * 6;")  # no one query: two calls
        shown = play.see("5> ")
        assert "25" in shown and shown.index("25") < shown.index("36")
        if _pastes():
            os.write(play.write, b"\x1b[200~select geo\nfrom segment_daily\ngroup by 1\x1b[201~\r")
            assert "JP" in play.see("6> ")  # one call
            pasted = b"select 7 * 7\nselect 8 * 8\nfrom segment_daily limit 1;\n.history"
            os.write(play.write, b"\x1b[200~" + pasted + b"\x1b[201~\r")
            shown = play.see("8> ")  # two calls and a command
            assert "49" in shown and "64" in shown and "status" in shown
            play.type("select 9 * 9", "")  # waits again
            assert ".. " in play.see("81")
        play.type("x = [1,")
        play.see(".. ")
        play.type("2]", "x")
        play.see("[1, 2]")
        play.type(".answer creative fatigue")
        play.see("in which slice")
        play.type("geo=US device=MOBILE")
        assert "reward      1.000" in play.see("answers ")
        assert play.process.wait(30) == 0


def test_sigterm_leaves(typed, monkeypatch):
    """At once, while it waits for an entry; what had the signals before has them again."""
    before = signal.getsignal(signal.SIGTERM)

    class Typing(io.StringIO):
        def readline(self):
            line = super().readline()
            if not line:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
            return line

    monkeypatch.setattr(io, "StringIO", Typing)
    begun = time.monotonic()
    status, lines, err = typed("1 + 1")
    assert time.monotonic() - begun < 10 and status == 143
    assert lines[-1] == "2" and "start again with: trace-jax play" in err and "Traceback" not in err
    assert signal.getsignal(signal.SIGTERM) == before
