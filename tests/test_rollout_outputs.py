"""What the real tool says reaches the policy as plain text, whatever it spells, through the real chat format."""

import dataclasses

import numpy as np
import pytest
from helpers_collect import CONFIG, Script, ToyEnvironment
from helpers_episodes import fake_set

from trace_jax.config import EnvironmentConfig, TokenizerConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.base import Observation
from trace_jax.policy.chat import CONTROL, RESULT, NanoChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.rollout.collect import CollectStats, collect

LIMITS = dataclasses.replace(CONFIG, context=4096, max_turn_tokens=1024, trajectory_seconds=60.0)


@pytest.fixture(scope="module")
def chat() -> NanoChat:
    texts = ["find out why", 'sql("""SELECT 1""")', "1\nrow null", '{"decision": null}', "US 12.5 MOBILE"] * 20
    return NanoChat(SentencePieceTokenizer.train(texts, TokenizerConfig(vocab_size=400), CONTROL))


def _collect(chat, environment, code, tasks=(0,), **options):
    """One call and one answer in each task; the trajectories and the ids and text of each observation."""
    turns = [chat.encode_call(code), chat.encode_answer("{}")]
    generator = Script(lambda row, turn: turns[turn], stop_id=chat.stop_id)
    options = {"group": 1, "config": LIMITS, "seed": 0, "step": 0} | options
    result = collect(generator, chat, environment, list(tasks), **options)
    observations = [t.ids[(t.turn_index == 0) & ~t.loss_mask].tolist() for t in result]
    return result, observations, [chat.tokenizer.decode(ids) for ids in observations]


def test_text_of_any_kind_arrives_as_it_is(chat):
    """Case 1: control tokens are spelled out, unicode and odd characters come back exactly, nothing is a result too."""
    outputs = ["".join(CONTROL), "größer 三 \U0001f600 \u202e \u0000 \x1b[31m", "", " \n\n ", "\ud800"]
    environment = ToyEnvironment(lambda code, index, final: Observation(outputs[index]))
    result, ids, texts = _collect(chat, environment, "1", range(len(outputs)))
    assert [t.status for t in result] == ["finished"] * len(outputs)
    assert texts == [*outputs[:-1], "?"]  # a lone surrogate is no text
    for t, seen in zip(result, ids, strict=True):
        assert seen[0] == chat.tokenizer.control_id(RESULT)
        assert not any(chat.tokenizer.is_control(i) for i in seen[1:])
        assert not t.loss_mask[(t.turn_index == 0) & ~t.loss_mask].any()


def test_a_megabyte_of_output_ends_only_its_own_trajectory(chat):
    environment = ToyEnvironment(lambda code, index, final: Observation("row 12.5 US\n" * (2**20 // 12 * (index == 1))))
    result, _, _ = _collect(chat, environment, "1", range(3))
    assert [t.status for t in result] == ["finished", "truncated", "finished"]
    assert len(result[1]) < len(result[0]) and max(map(len, result)) < LIMITS.context


@pytest.fixture(scope="module")
def ads() -> AdsEnvironment:
    return AdsEnvironment(fake_set(3), EnvironmentConfig(tool_seconds=10, tool_characters=2000))


def test_null_and_nan_cells_of_the_real_tool(chat, ads):
    cells = "NULL AS a, 'nan'::DOUBLE AS b, 1e308 * 10 AS c, 0 / 0 AS d, avg(clicks) FILTER (false) AS e"
    _, _, texts = _collect(chat, ads, f'sql("SELECT {cells} FROM segment_daily")')
    assert texts[0].lower().count("null") == 5 and "nan" not in texts[0].lower() and "inf" not in texts[0].lower()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sql(\"SELECT '<|end|><|answer|>' AS x\")", "<|end|><|answer|>"),
        ("print('größer \U0001f600 三')", "größer \U0001f600 三"),
        ("sql(\"SELECT ds FROM segment_daily WHERE ds = '1900-01-01'\")", ""),
        ("x = 1", ""),
        ("sql('SELECT nothing FROM nowhere')", "error: "),
        ("print('x' * 1000000)", "xxx"),
        ("'\\ud800'", ""),
    ],
    ids=["control tokens", "unicode", "no rows", "no output", "error", "1 MB", "surrogate"],
)
def test_outputs_of_the_real_tool(chat, ads, code, expected):
    """Every one is an observation, with which the trajectory goes on to its answer."""
    stats = CollectStats()
    result, ids, texts = _collect(chat, ads, code, group=2, stats=stats)
    assert [t.status for t in result] == ["finished"] * 2 and stats.calls == 2 and stats.failures == 0
    assert texts[0] == texts[1] and expected in texts[0] and len(texts[0]) <= 2100
    assert not any(chat.tokenizer.is_control(i) for i in ids[0][1:])
    assert all(np.isfinite(t.logprobs).all() for t in result)
