"""Coverage-guided and property-based fuzzing of what reads a model's text: answers, turns, tool calls, SQL, values.

Nothing may raise, hang, take more than linear time or give more than the bounded output.
"""

import json
import statistics
import time

import pytest
from fuzz_coverage import fuzz
from hostile.python_corpus import PYTHON
from hostile.sql_corpus import BOUNDED, REFUSED
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import TokenizerConfig
from trace_jax.environments import python_helpers, render, tools
from trace_jax.environments.ads import answer
from trace_jax.environments.tools import PythonTool
from trace_jax.policy import chat as chat_module
from trace_jax.policy.chat import CONTROL, NanoChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.simulator.causes import CAUSE_NAMES
from trace_jax.simulator.vocabulary import ATTRIBUTES
from trace_jax.warehouse import sql_errors, sql_guard
from trace_jax.warehouse.database import QueryError, QueryResult

TABLES = {"segment_daily": {"ds": "date32[day]", "device": "string", "clicks": "int64"}, "inventory": {"ds": "date"}}
SQL = [q for family in (REFUSED, BOUNDED) for queries in family.values() for q in queries if len(q) < 400]
CODE = [code for codes in PYTHON.values() for code in codes if len(code) < 400]
ROUNDS = 1500


@pytest.fixture(scope="module")
def chat():
    texts = ["find out why", 'sql("""SELECT 1""")', '{"decision": null}', "\u00e9\U0001f600"] * 20
    return NanoChat(SentencePieceTokenizer.train(texts, TokenizerConfig(vocab_size=400), CONTROL))


class Echo:
    """A database that answers with the query, as an error if the query has an even length."""

    waited = 0.0

    def query(self, sql, *, timeout_s):
        if len(sql) % 2:
            return QueryResult(("a", "b"), ((sql, None), (1.5, sql)))
        raise QueryError(sql)

    def note(self, sql, result):
        return None


def assert_answer_is_read(text):
    for parse in (answer.parse_lenient, answer.parse_exact):
        parsed = parse(text)
        if parsed is None:
            continue
        assert parsed.root_cause in CAUSE_NAMES and list(parsed.driver_segments) == sorted(set(parsed.driver_segments))
        assert all(value in ATTRIBUTES[name] for name, value in parsed.driver_segments)
        # What was read can be written and read again.
        again = answer.parse_lenient(answer.format_answer(parsed.root_cause, parsed.driver_segments))
        assert again.root_cause == parsed.root_cause
    exact = answer.parse_exact(text)
    assert exact is None or answer.parse_lenient(text) == exact


def assert_call_is_read(text):
    match = tools._ONLY_SQL.match(text)
    if match:
        (query,) = [g for g in match.groups() if g is not None]
        assert query in text and len(query) < len(text)
        seen = PythonTool(Echo(), characters=200, header=True).run(text)  # without the interpreter
        assert len(seen.text) <= 420 and seen.status in ("ok", "error")
    python_helpers.defined_names([text])
    python_helpers.mentioned(text)
    assert len(tools._error(text).text) <= tools.MAX_ERROR_CHARACTERS + 7 and "\n" not in tools._error(text).text


def assert_sql_is_read(text):
    why = sql_guard.refusal(text, TABLES)
    assert why is None or (0 < len(why) < 120 and "\n" not in why)
    tokens = sql_guard.words(text)
    assert sum(len(t) for _, t in tokens) <= len(text) + text.count("\u0130")  # only that one grows in lower case
    assert len(sql_errors.compared_values(text, TABLES)) <= 8
    for message in (
        text,
        f'Binder Error: Referenced column "{text}" not found',
        f"Table with name {text} does not exist",
    ):
        assert sql_errors.explain(message, text, TABLES) is not None


def assert_value_is_read(text):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    for table in (False, True):
        lines, rows, more = render.render(value, table)
        assert rows <= len(lines) and more >= 0
        for limit in (80, 500):
            assert len(render.cut(lines, limit, rows, 0, more)) <= limit
            assert len(render.cut(lines, limit, 0, 5, 0)) <= limit


ANSWERS = [
    answer.format_answer("CREATIVE_FATIGUE", [("geo", "US"), ("device", "MOBILE")], ["ctr fell"], "because"),
    answer.format_answer("NO_SIGNAL"),
    '{"root_cause": "budget cap", "driver_segments": "geo=US & device=MOBILE"}',
    'so: {"decision": {"root_cause": "PLACEMENT_SHIFT", "driver_segments": {"placement": "top"}}} done',
    '{"decision": {"root_cause": "x", "driver_segments": [[{"dimension": 1}]]}}',
    "[" * 200 + "{" * 200,
]
VALUES = [
    '[{"a": 1, "b": null}, {"a": 2.5, "b": "x"}]',
    '[[1, [2, {"k": [true]}]], "text"]',
    "[1e400, -0.0, 12345678901234567890123456789012345678901234567890]",
    '[{"a": "' + "x" * 100 + '"}, {"a": "\\n\\t"}]',
    '[{"": {}}, {"": []}]',
]
WORDS = [
    *'{}[]":,\'\\', "null", '"decision"', '"root_cause"', '"driver_segments"', '"dimension"', '"value"', "BUDGET_CAP",
    "geo", "US", "&", "=", '"""', "'''", "sql(", ")", "\n", "--", "/*", "*/", "$$", "$a$", "e'", "now(", "range(",
    "from ", "show ", "using sample", " in (", "device", "select ", "\u200b", "\ufeff", "\ud800", "\0", "\u0130",
    "\ufdfa", "9" * 50, "1e999", "def ", "mean(",
]  # fmt: skip
TARGETS = {
    "answer": (assert_answer_is_read, [answer], ANSWERS),
    "tool call": (
        assert_call_is_read,
        [tools, python_helpers],
        [*CODE, 'sql("""SELECT 1""")', "sql('a')", "mean([1])"],
    ),
    "sql guard": (assert_sql_is_read, [sql_guard, sql_errors], SQL),
    "value": (assert_value_is_read, [render], VALUES),
}


def _check(name, rounds, seed):
    target, modules, seeds = TARGETS[name]
    found = fuzz(target, modules, seeds, WORDS, rounds, seed)
    assert not found.failures, found.failures[:3]
    # Without mutation the seeds alone reach fewer edges: the guidance works.
    assert found.tried == rounds + len(seeds) and len(found.edges) > 15 and len(found.corpus) > 5


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_reads_text_fails(name):
    _check(name, ROUNDS, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_reads_text_fails_at_length(name, seed):
    _check(name, 10 * ROUNDS, seed)


def test_turns_of_any_ids_parse(chat):
    """The tool-call parser on token ids: the mutated text is a list of ids."""
    size = chat.tokenizer.vocab_size

    def assert_turn_is_read(text):
        ids = [ord(c) % size for c in text]
        turn = chat.parse_turn(ids)
        assert turn.kind in ("call", "answer", "malformed")
        if turn.kind != "malformed":
            assert ids[-1] == chat.stop_id and not any(chat.tokenizer.is_control(i) for i in ids[1:-1])
        assert len(turn.text) <= 64 * max(len(ids), 1)

    seeds = ["".join(map(chr, ids)) for ids in (chat.encode_call("sql('a')"), chat.encode_answer("{}"), [])]
    control = [chr(chat.tokenizer.control_id(name)) for name in CONTROL]
    found = fuzz(assert_turn_is_read, [chat_module], seeds, control, ROUNDS, seed=1)
    assert not found.failures, found.failures[:3]
    assert len(found.edges) > 5


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80))
def test_any_text_survives_the_trip_as_an_observation(chat, text):
    """A tool output that spells control tokens is plain text: no control id but the one in front."""
    for name in ("", *CONTROL):
        ids = chat.encode_observation(text + name)
        assert not any(chat.tokenizer.is_control(i) for i in ids[1:])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(CAUSE_NAMES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["decision", "root_cause", "driver_segments", "dimension", "attribute", "value", "geo"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(JSON, st.text(max_size=10), st.text(max_size=10))
def test_answers_of_any_shape_parse(body, before, after):
    assert_answer_is_read(before + json.dumps(body) + after)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=20).map("".join))
def test_sql_of_any_text_is_read(text):
    assert_sql_is_read(text)


PIECES = [
    "{", "[", '{"a":', '"', "\\", " ", "sql(", "'", '"""', "/*", "*/", "--", "$$", "e'", "&", "a=", "\n", "x = ", "-"
]  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize(
    "target", [assert_answer_is_read, assert_call_is_read, assert_sql_is_read], ids=lambda f: f.__name__
)
def test_time_grows_no_faster_than_the_text(name, target):
    """A text of one piece, repeated: eight times the length takes less than the 64 times of quadratic time."""

    def seconds(length):
        text = (name * length)[:length] + "!"
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            target(text)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    short, long = seconds(2000), seconds(16000)
    assert long < 40 * short + 0.05, (short, long)
